"""Generation far past the context: pages in use and time per token, thousand by thousand.

    python -m benchmarks.long [--tokens 20000 --pattern window:256+sinks:4 --threads 1]
    python -m benchmarks.long --pattern window:256 --pattern causal    (a list, over the layers)

With a window in every layer both stay as they are from the moment the window is full: pages behind
it are given back, and a step looks at no more than it reads. With a full layer among them, that
layer's pages and time grow.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from gpt.bench.output import machine_facts, machine_line
from gpt.cache import PAGE_SIZE
from gpt.cachespec import CacheSpec
from gpt.config import PRESETS, GPTConfig
from gpt.generate import Texts
from gpt.model import GPT
from gpt.pages import most_pages
from gpt.params import SamplingParams
from gpt.sequence import Sequence
from gpt.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tiny", choices=PRESETS)
    parser.add_argument("--pattern", action="append", help="of a layer (default: window:256)")
    parser.add_argument("--position", default="rotary")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens to make")
    parser.add_argument("--texts", type=int, default=1, help="texts side by side")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own)")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    torch.manual_seed(0)
    tokenizer = Tokenizer.bytes()
    patterns = args.pattern or ["window:256"]
    config = GPTConfig.preset(args.preset).replace(
        vocab_size=tokenizer.n_vocab, position=args.position, pattern=patterns
    )
    spec = CacheSpec.of(config)
    if not spec.endless:  # the context ends a text then
        config = config.replace(block_size=args.tokens + 1)
    model = GPT(config).eval().to(args.device)
    params = SamplingParams(seed=0, max_tokens=args.tokens, ignore_end_of_text=True)
    sequences = [
        Sequence.start(
            [1], params, block_size=config.block_size, n_vocab=tokenizer.n_vocab, eot=None,
            choice=choice, endless=spec.endless,
        )
        for choice in range(args.texts)
    ]  # fmt: skip
    n_pages = [1 + args.texts * most_pages(m, 1 + args.tokens, 1, PAGE_SIZE) for m in spec.memories]
    texts = Texts(model, tokenizer, n_pages, prefill_chunk=1, device=args.device)
    for sequence in sequences:
        assert texts.add(sequence)

    print(machine_line(machine_facts()))
    for group in spec.groups:
        print(f"  {group}")
    print(f"{'tokens':>8} {'pages':>7} {'ms a token':>11} {'of CPU':>8} {'slowest':>9}")
    spent: list[float] = []
    worked: list[float] = []  # what a machine with other work to do does not disturb
    for made in range(1, args.tokens + 1):
        began, work = time.perf_counter(), time.process_time()
        texts.step()
        spent.append(time.perf_counter() - began)
        worked.append(time.process_time() - work)
        if made % 1000 == 0 or made == args.tokens:
            # The step that makes the last token gives the pages back.
            pages = f"{texts.pages_used:7,}" if len(texts) else f"{'over':>7}"
            median, work = statistics.median(spent) * 1e3, statistics.median(worked) * 1e3
            print(
                f"{made:8,} {pages} {median:11.3f} {work:8.3f} {max(spent) * 1e3:9.2f}", flush=True
            )
            spent.clear()
            worked.clear()


if __name__ == "__main__":
    main()
