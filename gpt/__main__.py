"""`python -m gpt` is the `antiphon` command, for when the script is not on the path."""

import sys

from gpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
