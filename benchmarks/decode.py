"""Cached against uncached decoding: the same greedy tokens, with the KV cache and without.

    python -m benchmarks.decode [--preset base --prompt 32 --tokens 256]

Without a cache every token costs a forward over the whole text so far; with one it costs a forward
over one token, which reads each weight once.
"""

from __future__ import annotations

import argparse

import torch

from gpt.bench.output import machine_facts, machine_line
from gpt.bench.rounds import interleave
from gpt.config import PRESETS, GPTConfig
from gpt.generate import generate
from gpt.model import GPT
from gpt.params import SamplingParams
from gpt.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tiny", choices=PRESETS)
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to make")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = Tokenizer.bytes()
    config = GPTConfig.preset(args.preset)
    config = config.replace(
        vocab_size=max(config.vocab_size, 2048),
        block_size=max(config.block_size, args.prompt + args.tokens),
    )
    model = GPT(config).eval()
    prompt = torch.randint(0, tokenizer.n_vocab, (args.prompt,)).tolist()
    params = SamplingParams(temperature=0, seed=0, max_tokens=args.tokens)

    def cached() -> list[int]:
        return [piece.token for piece in generate(model, tokenizer, prompt, params)]

    @torch.inference_mode()
    def uncached() -> list[int]:
        ids = list(prompt)
        for _ in range(args.tokens):
            logits = model(torch.tensor([ids]))[0, -1, : tokenizer.n_vocab]
            ids.append(int(logits.argmax()))
            if ids[-1] == tokenizer.eot:
                break
        return ids[len(prompt) :]

    same = cached() == uncached()
    times = interleave({"cached": cached, "uncached": uncached}, args.rounds)
    made = len(cached())
    print(machine_line(machine_facts()))
    print(
        f"{args.preset}, {model.num_params() / 1e6:.1f} M parameters, float32, "
        f"prompt {args.prompt}, {made} greedy tokens; same tokens: {same}"
    )
    for name, timing in times.items():
        print(f"  {name:9} {timing}   {made / timing.median:8.1f} tokens/s")
    print(f"  ratio     {times['uncached'].median / times['cached'].median:.1f}x")


if __name__ == "__main__":
    main()
