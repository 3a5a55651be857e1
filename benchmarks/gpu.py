"""What one GPU gives, in one run of at most some minutes.

    python -m benchmarks.gpu --json gpu.json
    python -m benchmarks.gpu --device cpu --dry-run

Parts, in this order; each says its peak memory, and what does not fit into --seconds is left out
and named. A part that fails says so and the next one runs; --json is written anew after each.

  bandwidth   how fast a sum reads the device's memory: the limit of decoding
  decode N    steps of the engine (`gpt.generate.step`) with N texts of different lengths in
              bfloat16: tokens/s, and the share of the bandwidth that weights, keys and values take
  train       steps of gpt2-124m under bf16 autocast, eager and compiled: tokens/s, MFU
  attention   fused causal against window:256 by length, forward and backward, bfloat16
  varlen      torch's varlen_attn, over packed sequences and over pages of 256, which must give
              what scaled_dot_product_attention does before it is timed
  compile N   the engine's step with static shapes (as --deterministic runs it), eager against
              torch.compile's reduce-overhead, which replays CUDA graphs; same texts checked. A
              CPU has no CUDA graphs, so there the step is only traced, and that is said
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.bench.mixers import BOTH, Shape, make, phase_of
from gpt.bench.output import machine_facts, machine_line, write_results
from gpt.bench.rounds import interleave, waiter
from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.flops import flops_per_token
from gpt.generate import Model, step
from gpt.machine import speed_limit
from gpt.model import GPT
from gpt.pages import CachePages, pages_for
from gpt.params import SamplingParams
from gpt.sequence import Sequence as Text
from gpt.training.optim import OptimizerConfig, make_optimizer

PAGE, VARLEN_PAGE = 16, 256
WARM_UP = 2 * PAGE
"""Steps before any is timed: a page is begun in one of sixteen, which is a shape of its own."""

Found = dict[str, Any]
Kernel = Callable[..., Tensor]


@dataclass(frozen=True)
class Sizes:
    """How large everything is: for a GPU, or for a dry run."""

    config: GPTConfig
    batches: tuple[int, ...]
    prompt: int  # a multiple of PAGE; seven texts of eight have up to 7 pages more
    steps: int  # in a round
    rounds: int
    train_batch: int
    heads: int  # of attention
    lengths: tuple[int, ...]
    tokens: int  # that attention mixes, whatever their length
    probe: int  # bytes


FULL = Sizes(
    GPTConfig.preset("gpt2-124m"), (1, 8, 64), 208, 16, 5, 16, 12, (1024, 2048, 4096, 8192, 16384),
    16384, 2**32,
)  # fmt: skip
DRY = Sizes(
    GPTConfig.preset("gpt2-124m", n_layer=1, n_head=2, d_model=32, vocab_size=300, block_size=512),
    (3,), 208, 2, 1, 1, 2, (512,), 512, 2**22,
)  # fmt: skip


@dataclass
class Bench:
    """What the parts share.

    Attributes:
        bandwidth: bytes a second; 0 until it is measured.
    """

    device: torch.device
    sizes: Sizes
    wait: Callable[[], None] = field(init=False)
    bandwidth: float = 0.0

    def __post_init__(self) -> None:
        self.wait = waiter(self.device)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """Of one of several runs, the device idle before and after."""
        self.wait()
        began = time.perf_counter()
        for _ in range(times):
            work()
        self.wait()
        return (time.perf_counter() - began) / times


# --- Decoding -------------------------------------------------------------------------------------


def bandwidth(bench: Bench) -> list[Found]:
    probe = torch.ones(bench.sizes.probe // 4, device=bench.device)
    probe.sum()
    best = min(bench.seconds(probe.sum, 4) for _ in range(5))
    bench.bandwidth = bench.sizes.probe / best
    return [{"bytes_per_s": bench.bandwidth, "said": f"{bench.bandwidth / 1e9:.0f} GB/s"}]


class Decoding:
    """Texts of different lengths that have read their prompts, and go on a token a step.

    Args:
        model: takes the prompts.
        stepper: takes the steps; the same model, perhaps compiled.
        fixed: with static shapes, see `gpt.generate.step`.
    """

    def __init__(
        self, bench: Bench, model: GPT, stepper: Model, batch: int, *, fixed: bool = False
    ) -> None:
        self.stepper, self.fixed, config = stepper, fixed, model.config
        params = SamplingParams(temperature=0, seed=0, max_tokens=256, ignore_end_of_text=True)
        draw = torch.Generator().manual_seed(0)
        self.texts = [
            Text.start(
                torch.randint(
                    config.vocab_size, (bench.sizes.prompt + PAGE * (i % 8),), generator=draw
                ).tolist(),
                params, block_size=config.block_size, n_vocab=config.vocab_size, eot=0, ends=(),
            )
            for i in range(batch)
        ]  # fmt: skip
        held = sum(pages_for(len(text.ids) + 256, PAGE) for text in self.texts)
        dtype = model.dtype
        self.cache = KVCache(config, 1 + held, PAGE, dtype=dtype, device=bench.device)
        self.pages = CachePages(self.cache.spec.memories, self.cache.n_pages, PAGE)
        for text in self.texts:
            self._run(model, [(text, text.pending)])

    def _run(self, model: Model, work: list[tuple[Text, int]]) -> None:
        for text, n in work:
            assert self.pages.grow(text, text.computed + n), "there are pages for all"
        made = step(
            model, self.cache, work, n_vocab=self.stepper.config.vocab_size, fixed=self.fixed
        )
        assert all(each is not None and each.token >= 0 for each in made)

    def step(self) -> None:
        self._run(self.stepper, [(text, 1) for text in self.texts])

    @property
    def made(self) -> list[list[int]]:
        return [text.ids[text.prompt_len :] for text in self.texts]


def new_model(bench: Bench) -> GPT:
    torch.manual_seed(0)
    return GPT(bench.sizes.config).to(bench.device, torch.bfloat16).eval()


def step_bytes(config: GPTConfig, texts: list[Text]) -> int:
    """That a step reads: each weight once (of those looked up, nothing to speak of), and the keys
    and values of every text."""
    looked_up = config.block_size * config.d_model
    weights = sum(p.numel() for p in GPT(config).parameters()) - looked_up
    a_token = 2 * config.n_layer * config.kv_heads * config.head_width
    return 2 * (weights + a_token * sum(len(text.ids) for text in texts))


def timed_steps(bench: Bench, rows: dict[str, Decoding]) -> list[Found]:
    """Rows take turns, after a warm-up that meets every shape."""
    sizes = bench.sizes
    for row in rows.values():
        for _ in range(WARM_UP):
            row.step()
    taken: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(sizes.rounds):
        for name, row in rows.items():
            taken[name].append(bench.seconds(row.step, sizes.steps))
    found = []
    for name, row in rows.items():
        middle = statistics.median(taken[name])
        batch, read = len(row.texts), step_bytes(sizes.config, row.texts)
        share = read / middle / bench.bandwidth if bench.bandwidth else None
        found.append(
            {
                "row": name, "batch": batch, "steps_s": taken[name], "tokens_per_s": batch / middle,
                "step_bytes": read, "bandwidth_share": share,
                "said": f"{name}: {middle * 1e3:.2f} ms a step ({min(taken[name]) * 1e3:.2f} to "
                f"{max(taken[name]) * 1e3:.2f}), {batch / middle:,.0f} tokens/s, "
                + ("" if share is None else f"{share:.1%} of the bandwidth"),
            }
        )  # fmt: skip
    return found


def decode(bench: Bench, batch: int) -> list[Found]:
    model = new_model(bench)
    return timed_steps(bench, {"eager": Decoding(bench, model, model, batch)})


def compiled(bench: Bench, batch: int) -> list[Found]:
    """Static shapes, eager and compiled. The cache is written in place, which CUDA graphs allow
    only where it is known to stay where it is."""
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    dynamo.reset()
    counters.clear()
    model = new_model(bench)
    how: dict[str, Any] = {"mode": "reduce-overhead"} if bench.cuda else {"backend": "eager"}
    name = "reduce-overhead" if bench.cuda else "traced"
    faster: Any = torch.compile(model, dynamic=False, fullgraph=True, **how)
    rows = {
        "eager, static": Decoding(bench, model, model, batch, fixed=True),
        f"{name}, static": Decoding(bench, model, faster, batch, fixed=True),
    }
    for row in rows.values():
        for layer in range(bench.sizes.config.n_layer):
            held = row.cache.layer(layer)
            for pool in (held.keys, held.values):
                dynamo.mark_static_address(pool)
    found = timed_steps(bench, rows)
    eager, other = (row.made for row in rows.values())
    graphs, skips = counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]
    same = sum(a == b for a, b in zip(eager, other, strict=True))
    said = f"same texts {same}/{batch}; {graphs} graphs traced"
    if bench.cuda:
        said += f", of which {skips} without CUDA graphs"
    else:
        said += "; reduce-overhead is left out: there are no CUDA graphs without a GPU"
    return [*found, {"same": same, "graphs": graphs, "cudagraph_skips": skips, "said": said}]


# --- Training -------------------------------------------------------------------------------------


def train(bench: Bench) -> list[Found]:
    sizes, config, kind = bench.sizes, bench.sizes.config, bench.device.type
    torch.manual_seed(0)
    model = GPT(config).to(bench.device)
    optimizer = make_optimizer(model.named_parameters(), OptimizerConfig(), config, fused=True)
    ids = torch.randint(
        config.vocab_size, (sizes.train_batch, config.block_size + 1), device=bench.device
    )
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    faster: Any = torch.compile(model, **({} if bench.cuda else {"backend": "eager"}))

    def stepper(net: Any) -> Callable[[], None]:
        def once() -> None:
            with torch.autocast(kind, torch.bfloat16):
                loss = net(inputs, targets=targets) / targets.numel()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return once

    rows = {"eager": stepper(model), "compiled" if bench.cuda else "traced": stepper(faster)}
    times = interleave(rows, max(1, sizes.rounds), bench.wait)
    limit = speed_limit(bench.device, torch.bfloat16)
    found = []
    for name, timing in times.items():
        rate = targets.numel() / timing.median
        mfu = None if limit is None else rate * flops_per_token(config).training / limit.flops
        known = "MFU unknown: no peak in our table" if mfu is None else f"MFU {mfu:.1%}"
        said = f"{name}: {timing.median * 1e3:.1f} ms a step, {rate:,.0f} tokens/s, {known}"
        found.append({"row": name, "tokens_per_s": rate, "mfu": mfu, **timing.to_dict(),
                      "said": said})  # fmt: skip
    if limit is not None:
        found.append({"said": f"the limit is {limit.what}"})
    return found


# --- Attention ------------------------------------------------------------------------------------


def attention(bench: Bench) -> list[Found]:
    found = []
    for length in bench.sizes.lengths:
        batch = max(1, bench.sizes.tokens // length)
        heads = bench.sizes.heads
        shape = Shape(batch, length, heads, heads, 64, "bfloat16", str(bench.device))
        rows = {}
        for row in ("fused", "window:256"):
            mixer = make(row, shape)
            mixer.ready()
            rows[row] = phase_of(mixer, BOTH)
        times = interleave(rows, bench.sizes.rounds, bench.wait)
        for row, timing in times.items():
            each = timing.median / batch
            said = f"{length} tokens, {row}: {each * 1e3:.3f} ms a sequence"
            found.append({"row": row, "length": length, "batch": batch, **timing.to_dict(),
                          "said": said})  # fmt: skip
    return found


def varlen(bench: Bench) -> list[Found]:
    if not bench.cuda:
        return [{"said": "left out: varlen_attn has no kernel without a GPU"}]
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return [{"said": f"left out: torch {torch.__version__} has no varlen_attn"}]
    lengths = [bench.sizes.lengths[0] // n for n in (1, 2, 4, 8)]
    return [packed(bench, varlen_attn, lengths), paged(bench, varlen_attn, lengths * 16)]


def packed(bench: Bench, kernel: Kernel, lengths: Sequence[int]) -> Found:
    """Causal attention of whole sequences that lie behind one another."""
    q, k, v = _numbers(bench, sum(lengths), 3)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(bench.device, torch.int32)
    longest = max(lengths)

    def ours() -> Tensor:
        return kernel(q, k, v, starts, starts, longest, longest, window_size=(-1, 0))

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (x.split(list(lengths)) for x in (q, k, v))
        return torch.cat([_sdpa(*each, causal=True) for each in zip(*parts, strict=True)])

    return _judged(bench, f"packed, {len(lengths)} sequences", ours, alone, (q, k, v))


def paged(bench: Bench, kernel: Kernel, lengths: Sequence[int]) -> Found:
    """One query of each sequence, its keys in pages of 256 that lie anywhere."""
    counts = [pages_for(n, VARLEN_PAGE) for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    k, v = _numbers(bench, sum(counts) * VARLEN_PAGE, 2)
    (q,) = _numbers(bench, len(lengths), 1)
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, own in zip(tables, order.split(counts), strict=True):
        row[: len(own)] = own
    tables = tables.to(bench.device)
    used = torch.tensor(lengths, dtype=torch.int32, device=bench.device)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=bench.device)
    pools = [x.view(-1, VARLEN_PAGE, *x.shape[1:]) for x in (k, v)]

    def ours() -> Tensor:
        # One split: the automatic number of them is no pure function of a sequence's own length.
        return kernel(
            q, *pools, starts, None, 1, max(lengths), seqused_k=used, block_table=tables,
            num_splits=1,
        )  # fmt: skip

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = []
        for i, n in enumerate(lengths):
            pages = tables[i, : counts[i]].long()
            own = (x.view(-1, VARLEN_PAGE, *x.shape[1:])[pages].flatten(0, 1)[:n] for x in (k, v))
            found.append(_sdpa(q[i : i + 1], *own, causal=False))
        return torch.cat(found)

    found = _judged(bench, f"pages of 256, {len(lengths)} queries", ours, alone, (q, k, v))
    if "seconds" in found and bench.bandwidth:
        read = 2 * 2 * sum(lengths) * k.shape[1] * k.shape[2]
        found["bandwidth_share"] = share = read / found["seconds"] / bench.bandwidth
        found["said"] += f", {share:.1%} of the bandwidth"
    return found


def _numbers(bench: Bench, rows: int, count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return [
        torch.randn(rows, bench.sizes.heads, 64, generator=draw).to(bench.device, torch.bfloat16)
        for _ in range(count)
    ]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """(t, H, D) of one sequence."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)[0].transpose(0, 1)


def _judged(
    bench: Bench,
    name: str,
    ours: Callable[[], Tensor],
    alone: Callable[[Tensor, Tensor, Tensor], Tensor],
    given: tuple[Tensor, Tensor, Tensor],
) -> Found:
    """Timed if it is as near the exact result as torch's own kernel in bfloat16, within a factor of
    two; else named as wrong."""
    with torch.no_grad():
        exact = alone(*(x.float() for x in given))
        rounding = float((alone(*given).float() - exact).abs().max())
        off = float((ours().float() - exact).abs().max())
        equal = off <= 2 * rounding + 1e-3 and math.isfinite(off)
        said = f"{name}: off by {off:.1e}, scaled_dot_product_attention {rounding:.1e}"
        if not equal:
            return {"row": name, "equal": False, "said": f"{said}: WRONG, so not timed"}
        taken = min(bench.seconds(ours, 10) for _ in range(3))
    said += f"; {taken * 1e6:.0f} us"
    return {"row": name, "equal": True, "seconds": taken, "said": said}


# --- The run --------------------------------------------------------------------------------------


def parts_of(bench: Bench) -> dict[str, tuple[float, Callable[[], list[Found]]]]:
    """What each part needs on a GPU at most, in seconds, and its work; what matters most first."""
    found: dict[str, tuple[float, Callable[[], list[Found]]]] = {
        "bandwidth": (10, partial(bandwidth, bench))
    }
    for n in bench.sizes.batches:
        found[f"decode {n}"] = (25, partial(decode, bench, n))
    found["train"] = (100, partial(train, bench))
    found["attention"] = (40, partial(attention, bench))
    found["varlen"] = (20, partial(varlen, bench))
    for n in bench.sizes.batches:
        found[f"compile {n}"] = (75, partial(compiled, bench, n))
    return found


def run_part(bench: Bench, name: str, work: Callable[[], list[Found]]) -> Found:
    """A part's rows, seconds and peak memory; if it fails, why."""
    part: Found = {"part": name, "rows": []}
    if bench.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
    began = time.perf_counter()
    try:
        part["rows"] = work()
    except Exception as error:  # noqa: BLE001 - the other parts are worth having
        part["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    part["seconds"] = time.perf_counter() - began
    if bench.cuda:
        part["peak_bytes"] = torch.cuda.max_memory_allocated(bench.device)
    return part


def show(part: Found) -> None:
    peak = f", peak {part['peak_bytes'] / 2**30:.2f} GiB" if "peak_bytes" in part else ""
    print(f"{part['part']} ({part['seconds']:.1f} s{peak})")
    for row in part["rows"]:
        print(f"  {row['said']}")
    if "failed" in part:
        print(f"  failed: {part['failed']}")


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="(default: cuda)")
    parser.add_argument(
        "--seconds", type=float, default=480, help="for everything (default: %(default)s)"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--json", metavar="FILE", help="write all numbers into a file")
    args = parser.parse_args()
    began = time.perf_counter()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use; --device cpu --dry-run tries the script")
    if device.type != "cuda" and not args.dry_run:
        parser.error(f"--device {args.device} is for a dry run only; add --dry-run")
    bench = Bench(device, DRY if args.dry_run else FULL)
    facts = machine_facts(str(device))
    print(machine_line(facts), flush=True)
    found: list[Found] = []
    for name, (needs, work) in parts_of(bench).items():
        left = args.seconds - (time.perf_counter() - began)
        if left < (0 if args.dry_run else needs):
            part = {"part": name, "rows": [], "seconds": 0.0}
            part["failed"] = f"left out: {left:.0f} s are left, it may take {needs:.0f}"
        else:
            part = run_part(bench, name, work)
        show(part)
        found.append(part)
        if args.json:
            write_results(args.json, "gpu", args, facts, found, interrupted=False)
    print(f"{time.perf_counter() - began:.0f} s in all")
    return int(any("failed" in part and "left out" not in part["failed"] for part in found))


if __name__ == "__main__":
    raise SystemExit(main())
