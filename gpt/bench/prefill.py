"""`antiphon bench prefill`: how fast prompts are read. As `gpt.bench.decode`, with long prompts and
short texts."""

from __future__ import annotations

import argparse

from gpt.bench import decode


def configure(parser: argparse.ArgumentParser) -> None:
    decode.configure(parser, prompt=512, tokens=3)
    parser.set_defaults(batch=[1, 4])


def run(args: argparse.Namespace) -> int:
    return decode.run(args, by="prefill")
