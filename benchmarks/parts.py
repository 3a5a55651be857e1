"""Where a decode step goes, beside what the memory allows.

    python -m benchmarks.parts [--preset gpt2-124m --dtype bfloat16 --texts 1 --steps 40]

A model of random weights is sped up as the server does it, and texts go on a token a step through
`gpt.generate.step`, without a server and without a scheduler. Three things take turns, so that a
slow spell of the machine hits all of them:

  sum of all weights  torch reads each weight once, as a step must: about what the memory allows
  a step              with no clock in it
  a step in parts     another one, with a clock around each of its parts

Parts are the calls of the kernels (products, with what lies between them; norms and turns of
queries and keys; attention; storing keys and values), the plan of the attention, and the draw of
the tokens. "torch's products" are those of more rows than ours are the fastest for, or all, if
there are no kernels here or the model is so small that it keeps to torch. The rest is Python, and
torch's small operations. A clock takes some tenths of a microsecond a call, which the rest bears.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt.generate
from gpt.bench.output import machine_facts, machine_line, table
from gpt.cache import PAGE_SIZE, KVCache
from gpt.config import PRESETS, GPTConfig
from gpt.generate import step
from gpt.model import GPT
from gpt.native.hugepages import take_out
from gpt.native.kernels import Kernels
from gpt.native.linear import speed_up
from gpt.pages import CachePages, pages_for
from gpt.params import SamplingParams
from gpt.plan import AttentionPlan
from gpt.sequence import Sequence

WARM_UP = 3
"""Steps that do not count."""


def _chain_bytes(kernels: Kernels, products: Any, x: Tensor, *_: object) -> int:
    return x.element_size() * sum(product.N * product.K for product in products)


def _linear_bytes(x: Tensor, weight: Tensor, *_: object) -> int:
    return weight.nbytes


PARTS: dict[str, tuple[Any, str, Callable[..., int] | None]] = {
    "products": (Kernels, "chain", _chain_bytes),
    "torch's products": (F, "linear", _linear_bytes),
    "norms and turns of heads": (Kernels, "turn", None),
    "attention": (Kernels, "attend", None),
    "storing keys and values": (Kernels, "store", None),
    "plan": (AttentionPlan, "paged", None),
    "drawing": (gpt.generate, "_draw", None),
}
"""Of each: whose function it is, its name, and the bytes of weights that a call of it reads. None
calls another."""


class Call:
    """One that was timed.

    Attributes:
        size: bytes of weights that it read.
    """

    def __init__(self, part: str, seconds: float, arguments: tuple[Any, ...]) -> None:
        self.part, self.seconds, self._arguments = part, seconds, arguments

    @property
    def size(self) -> int:
        of = PARTS[self.part][2]
        return 0 if of is None else of(*self._arguments)


@contextlib.contextmanager
def watched() -> Iterator[list[Call]]:
    """The calls of all parts meanwhile. What is to be known of one is worked out later, when no
    clock runs."""
    calls: list[Call] = []

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **options)
            calls.append(Call(part, time.perf_counter() - began, args))
            return result

        return call

    with contextlib.ExitStack() as stack:
        for part, (owner, name, _) in PARTS.items():
            stack.enter_context(mock.patch.object(owner, name, timed(part, getattr(owner, name))))
        yield calls


class Texts:
    """Texts of equally many random tokens, which go on greedily, a token a step.

    Args:
        most: tokens that each may come to have.
    """

    def __init__(self, model: GPT, texts: int, prompt: int, most: int) -> None:
        self._model, self._n_vocab = model, model.config.vocab_size
        params = SamplingParams(temperature=0, seed=0, ignore_end_of_text=True)
        self._texts = [
            Sequence.start(
                torch.randint(self._n_vocab, (prompt,)).tolist(), params,
                block_size=model.config.block_size, n_vocab=self._n_vocab, eot=None,
            )
            for _ in range(texts)
        ]  # fmt: skip
        n_pages = 1 + texts * pages_for(most, PAGE_SIZE)
        self._cache = KVCache(model.config, n_pages, PAGE_SIZE, dtype=model.dtype)
        pages = CachePages(self._cache.spec.memories, n_pages, PAGE_SIZE)
        for text in self._texts:
            assert pages.grow(text, most), "there are pages for all"
        for text in self._texts:
            self._run([(text, prompt)])

    def step(self) -> None:
        self._run([(text, 1) for text in self._texts])

    def _run(self, work: list[tuple[Sequence, int]]) -> None:
        step(self._model, self._cache, work, n_vocab=self._n_vocab)


def sum_weights(model: nn.Module) -> None:
    """Read all weights; those of bf16 as float32 numbers, as torch adds them up slowly."""
    for weight in model.parameters():
        flat = weight.detach().view(-1)
        flat = flat[: flat.numel() // 2 * 2] if flat.dtype == torch.bfloat16 else flat
        flat.view(torch.float32).sum()


@dataclass
class Measured:
    """Seconds of all rounds.

    Attributes:
        plain, reading: steps without a clock in them, and sums of all weights.
        whole: steps with clocks.
        parts: of each part that there was.
        calls, sizes: of each part, in a step: calls, and bytes of weights that they read.
    """

    plain: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


def measure(model: GPT, texts: Texts, steps: int) -> Measured:
    """So many rounds of a sum, a step and a step in parts."""
    found = Measured()
    for i in range(WARM_UP + steps):
        reading = _seconds(lambda: sum_weights(model))
        plain = whole = 0.0
        calls: list[Call] = []
        for clocks in (False, True) if i % 2 else (True, False):  # neither always follows the sum
            if clocks:
                with watched() as calls:
                    whole = _seconds(texts.step)
            else:
                plain = _seconds(texts.step)
        if i < WARM_UP:
            continue
        found.reading.append(reading)
        found.plain.append(plain)
        found.whole.append(whole)
        for part in PARTS:
            own = [call for call in calls if call.part == part]
            if own:
                found.parts.setdefault(part, []).append(sum(call.seconds for call in own))
                found.calls[part] = len(own)
                found.sizes[part] = sum(call.size for call in own)
    return found


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def show(found: Measured, weight_bytes: int) -> Iterator[str]:
    """A table, and how a step compares with a sum of the same round."""
    whole = statistics.median(found.whole)

    def row(name: str, seconds: list[float], size: int = 0, *, part: bool = True) -> list[str]:
        middle = statistics.median(seconds)
        return [
            name,
            str(found.calls.get(name, "")),
            f"{middle * 1e3:.3f}",
            f"({min(seconds) * 1e3:.3f}, {max(seconds) * 1e3:.3f})",
            f"{middle / whole:.1%}" if part else "",
            f"{size / middle / 1e9:.1f}" if size else "",
        ]

    rows = [row(part, each, found.sizes[part]) for part, each in found.parts.items()]
    timed = map(sum, zip(*found.parts.values(), strict=True))
    rest = [step - parts for step, parts in zip(found.whole, timed, strict=True)]
    rows += [
        row("the rest", rest),
        row("a step in parts", found.whole),
        row("a step", found.plain, part=False),
        row("sum of all weights", found.reading, weight_bytes, part=False),
    ]
    yield from table(["", "calls", "ms a step", "(min, max)", "share", "GB/s"], rows)
    over = [step / sum_ for step, sum_ in zip(found.plain, found.reading, strict=True)]
    yield f"a step takes {statistics.median(over):.2f} times as long as the sum ahead of it"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--preset", default="gpt2-124m", choices=PRESETS, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"],
        help="of weights and cache (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--texts", type=int, default=1, metavar="N", help="made together (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt", type=int, default=16, metavar="N",
        help="tokens of each before the first step (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="(default: torch's own choice)")
    args = parser.parse_args()
    for name in ("texts", "prompt", "steps", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.threads:
        torch.set_num_threads(args.threads)

    torch.manual_seed(0)
    most = args.prompt + 2 * (WARM_UP + args.steps) + 1
    config = GPTConfig.preset(args.preset)
    config = config.replace(
        vocab_size=max(config.vocab_size, 257), block_size=max(config.block_size, most)
    )
    model = GPT(config).eval().to(getattr(torch, args.dtype))
    take_out(model)
    routes = speed_up(model)
    print(machine_line(machine_facts()))
    ways = "no kernels of our own" if routes is None else str(routes)
    print(
        f"{args.preset}, {model.num_params() / 1e6:.1f} M parameters in {args.dtype}, "
        f"{args.texts} text{'s' * (args.texts > 1)} of {args.prompt} tokens, "
        f"{args.steps} rounds; {ways}",
        flush=True,
    )
    found = measure(model, Texts(model, args.texts, args.prompt, most), args.steps)
    print("\n".join(show(found, sum(weight.nbytes for weight in model.parameters()))))


if __name__ == "__main__":
    main()
