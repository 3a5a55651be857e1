"""Train a GPT: `python train.py fit --config configs/shakespeare-tiny.yaml`. See `--help`."""

from gpt.training.command import main

if __name__ == "__main__":
    raise SystemExit(main())
