"""The shipped configs; a package (`gpt.configs`) so that an installed copy has them too."""
