"""`antiphon bench prefill`: how fast prompts are read. As `gpt.bench.decode`, with long prompts and
texts of one token, so that no text is made while prompts are read."""

from __future__ import annotations

import argparse

from gpt.bench import decode


def configure(parser: argparse.ArgumentParser) -> None:
    decode.configure(parser, prompt=512, tokens=1)
    parser.set_defaults(batch=[1, 4])


def run(args: argparse.Namespace) -> int:
    return decode.run(args, by="prefill")
