"""Time to the first token of a prompt whose beginning the server has computed, against one that
is new to it.

    python -m benchmarks.prefix [--preset small --shared 512 --own 16 --rounds 5]

One server on a real port, one client, nobody else. In each round a prompt of random tokens is asked
three times for one token: new (cold), the same again, and with the same shared beginning and an end
of its own; warm asks must report that they were served from the cache. The texts are checked to be
those of a server without a prefix cache.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import time

import torch

from gpt.bench.output import machine_facts, machine_line
from gpt.config import PRESETS, GPTConfig
from gpt.model import GPT
from gpt.tokenizer import Tokenizer
from serve.background import BackgroundServer
from serve.client import Client
from serve.engine import Engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="small", choices=sorted(PRESETS))
    parser.add_argument("--shared", type=int, default=512, help="tokens in common")
    parser.add_argument("--own", type=int, default=16, help="tokens of each prompt's own")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    print(machine_line(machine_facts()))

    tokenizer = Tokenizer.bytes()
    length = args.shared + args.own
    config = GPTConfig.preset(
        args.preset, vocab_size=tokenizer.n_vocab, block_size=max(1024, 2 * length)
    )
    torch.manual_seed(0)
    model = GPT(config).eval()
    print(f"{model.num_params() / 1e6:.1f} M parameters, {args.shared} + {args.own} tokens")
    numbers = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [numbers.randrange(256) for _ in range(n)]

    seconds: dict[str, list[float]] = {"cold": [], "same prompt": [], "same beginning": []}
    asked: list[tuple[list[int], list[int]]] = []
    engine = Engine(model, tokenizer, name="prefix", max_running=4)
    with BackgroundServer(engine) as server, Client(server.target) as client:
        for number in range(args.rounds + 1):
            shared = tokens(args.shared)
            first = shared + tokens(args.own)
            prompts = [first, first, shared + tokens(args.own)]
            for kind, prompt in zip(seconds, prompts, strict=True):
                start = time.perf_counter()
                answer = client.generate(prompt, max_tokens=1, temperature=0.0)
                took = time.perf_counter() - start
                wanted = 0 if kind == "cold" else args.shared // 16 * 16
                if answer.finish.cached_tokens < wanted:
                    raise SystemExit(
                        f"{kind}: only {answer.finish.cached_tokens} tokens were found"
                    )
                asked.append((prompt, answer.token_ids))
                if number:  # the first round warms up
                    seconds[kind].append(took)
    engine = Engine(model, tokenizer, name="plain", max_running=4, prefix_cache=False)
    with BackgroundServer(engine) as server, Client(server.target) as client:
        for prompt, found in asked[:3]:
            plain = client.generate(prompt, max_tokens=1, temperature=0.0).token_ids
            if plain != found:
                raise SystemExit(f"the cache gave {found}, without it {plain}")

    cold = statistics.median(seconds["cold"])
    for kind, values in seconds.items():
        middle = statistics.median(values)
        print(
            f"{kind:>15}  {middle * 1e3:8.1f} ms ({min(values) * 1e3:.1f} to "
            f"{max(values) * 1e3:.1f})  {cold / middle:5.1f} times"
        )


if __name__ == "__main__":
    main()
