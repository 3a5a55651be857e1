"""Attention under a pattern against the fused causal kernel, and against its own matrix products.

    python -m benchmarks.attention [--pattern window:256 --length 8192 --heads 8 --width 64]

Both sides get the same queries, keys and values, in the same run, in turn. `full` is torch's fused
kernel with `is_causal`; the pattern runs as `gpt.attention.attend` would have it. `products` does
the block rows' matrix products and nothing else: what is above it is softmax, masks and steps of
Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import interleave, machine
from gpt.attention import attend
from gpt.blocks import BlockPlan
from gpt.patterns import parse_pattern
from gpt.plan import AttentionPlan, LayerPlan

QKV = tuple[Tensor, Tensor, Tensor]


def make_products(plan: BlockPlan, q: Tensor, k: Tensor) -> Callable[[], None]:
    """Seven products a block row: two forward, five backward (one of them again)."""
    q, k = q.detach()[0], k.detach()[0]

    def products() -> None:
        into = torch.zeros_like(k)
        for bucket in plan.buckets:
            n = bucket.keys.shape[1]
            scores = q.new_empty(len(q), plan.size, n)
            for row, run in zip(bucket.numbers, bucket.runs, strict=True):
                first = row * plan.size
                rows = q[:, first : first + plan.size]
                keys = k[:, slice(*run)] if run else k[:, bucket.keys[0]]
                part = scores[:, : rows.shape[1]]
                for _ in range(3):
                    part.baddbmm_(rows, keys.transpose(1, 2), beta=0)
                for _ in range(2):
                    torch.bmm(part, keys)
                    into[:, :n].baddbmm_(part.transpose(1, 2), rows)

    return products


def make_full(of: QKV) -> Callable[[], Tensor]:
    q, k, v = of
    gqa = q.shape[1] != k.shape[1]
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)


def make_pattern(of: QKV, plan: LayerPlan) -> Callable[[], Tensor]:
    q, k, v = (x.transpose(1, 2) for x in of)
    return lambda: attend(q, k, v, plan, scale=q.shape[-1] ** -0.5).transpose(1, 2)


def make_both(forward: Callable[[], Tensor], of: QKV) -> Callable[[], object]:
    weight = torch.randn_like(of[0])
    return lambda: torch.autograd.grad(forward(), of, weight)


def measure(args: argparse.Namespace, T: int) -> None:
    H, K, D, B = args.heads, args.kv_heads or args.heads, args.width, args.batch
    q, k, v = (torch.randn(B, heads, T, D, requires_grad=True) for heads in (H, K, K))
    forwards = {"full": make_full((q, k, v))}
    subjects: dict[str, Callable[[], object]] = {}
    for text in args.pattern:
        plan = AttentionPlan.dense(B, T, pattern=parse_pattern(text)).layer(0)
        forwards[text] = make_pattern((q, k, v), plan)
        blocks = plan.groups[0].blocks
        if blocks is not None and (B, K) == (1, H):
            subjects[f"{text} products"] = make_products(blocks, q, k)
    for name, forward in forwards.items():
        subjects[f"{name} forward"] = torch.no_grad()(forward)
        subjects[f"{name} both"] = make_both(forward, (q, k, v))
    times = interleave(subjects, args.rounds)
    print(f"{T} tokens, {H} heads of {D}, {K} key heads, batch {B}; ratios are of the minima")
    for name, timing in times.items():
        against = times.get(f"full {name.rpartition(' ')[2]}")
        ratio = f"{min(against.seconds) / min(timing.seconds):6.2f}x" if against else ""
        print(f"  {name:32} {timing}   {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pattern", nargs="+", default=["window:256"])
    parser.add_argument("--length", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(machine())
    for T in args.length:
        measure(args, T)


if __name__ == "__main__":
    main()
