"""What goes on inside a model on a few tokens: entropies, logits, sizes, and what is dead.

`measure` watches an ordinary forward through hooks, as attention maps do (`gpt.maps`). Neither the
model nor the random numbers of training are changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpt.attention import Attention
from gpt.maps import Looks, looks
from gpt.model import GPT, Block
from gpt.plan import LayerPlan
from gpt.positions import ScoreTerm

OFFSETS = 4
"""Whether a head always looks 0, 1, 2 or 3 tokens back is told apart from other sharpness."""

FLAT_SIDE = {"relu2": 0.0, "gelu": -3.0, "gelu-exact": -3.0}
"""Where an MLP's bend begins to pass something; below, value and slope are (nearly) 0."""


@dataclass(frozen=True)
class LayerReport:
    """One block on the probe. Lists hold one number a head, averaged over the queries that have
    more than one key in sight.

    Attributes:
        entropy: of the attention weights, in nats.
        entropy_share: entropy over the logarithm of the number of keys in sight; 1: a plain mean.
        logit_max: largest magnitude of a scaled score before softmax.
        fixed: weight on the one key that gets most, of those that half the queries can see.
        offset: weight at the distance that gets most, of the nearest `OFFSETS`.
        head_rms: root mean square of what the head adds to the stream.
        attn_rms, mlp_rms: of what each branch adds to the stream.
        stream_rms: of the stream as it leaves the block.
        dead_units: share of the MLP's hidden units that no token of the probe wakes; None for
            swiglu, which has no flat side.
    """

    entropy: list[float]
    entropy_share: list[float]
    logit_max: list[float]
    fixed: list[float]
    offset: list[float]
    head_rms: list[float]
    attn_rms: float
    mlp_rms: float
    stream_rms: float
    dead_units: float | None = None


def measure(gpt: GPT, forward: Callable[[], object]) -> list[LayerReport]:
    """Watch one forward, and report on each block from first to last.

    Meanwhile the model is in evaluation mode (no dropout, so no random numbers), no gradients are
    recorded, and nothing that torch.compile made runs, since hooks would be compiled into it.

    Args:
        gpt: the model.
        forward: runs it on the probe, in the precision of training.
    """
    blocks = [part for part in gpt.modules() if isinstance(part, Block)]
    found: list[dict[str, Tensor]] = [{} for _ in blocks]
    with contextlib.ExitStack() as undo:
        undo.enter_context(_evaluating(gpt))
        for block, into in zip(blocks, found, strict=True):
            for handle in _watch(block, into):
                undo.callback(handle.remove)
        undo.enter_context(torch.no_grad())
        if gpt._compiled_call_impl is not None:
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        forward()
    reports = []
    for into in found:
        values: dict[str, Any] = {name: x.tolist() for name, x in into.items()}
        reports.append(LayerReport(**values))
    return reports


def gradient_norms(gpt: GPT) -> dict[str, float]:
    """Euclidean norm of the gradients by part: `embed`, `0`, `1`, … for the blocks, `head`; and
    `total`. Parts without gradients are left out; a tied head counts with the embedding."""
    parts: dict[str, list[Tensor]] = {}
    for name, parameter in gpt.named_parameters():
        if parameter.grad is not None:
            first, _, rest = name.partition(".")
            part = rest.partition(".")[0] if first == "blocks" else first
            part = {"embed_pos": "embed", "norm": "head"}.get(part, part)
            parts.setdefault(part, []).append(parameter.grad)
    if not parts:
        return {}
    norms = torch.stack([torch.stack([_norm(g) for g in grads]).norm() for grads in parts.values()])
    values = torch.cat((norms, norms.norm()[None])).tolist()  # one wait for the device
    return dict(zip([*parts, "total"], values, strict=True))


def _norm(gradient: Tensor) -> Tensor:
    """Of the whole gradient, also where each process holds a part of it."""
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    full = getattr(norm, "full_tensor", None)
    return norm if full is None else full()


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _watch(block: Block, into: dict[str, Tensor]) -> list[Any]:
    """Hooks that put what they see of one block into `into`."""
    attn, mlp = block.attn, block.mlp
    scale = block.scale

    def before_attention(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        call = dict(zip(("x", "rotary", "plan"), given, strict=False)) | named
        q, k, _v = attn.project(call["x"], call["rotary"])
        with torch.autocast(q.device.type, enabled=False):
            into.update(
                head_statistics(
                    q, k, call["plan"], scale=attn.scale, term=attn.term, softcap=attn.softcap
                )
            )

    def before_out(_: nn.Module, given: tuple[Tensor]) -> None:
        with torch.autocast(given[0].device.type, enabled=False):
            into["head_rms"] = scale * _head_rms(attn, given[0])

    def after_up(_: nn.Module, __: Any, h: Tensor) -> None:
        into["dead_units"] = (h <= FLAT_SIDE[mlp.kind]).flatten(0, -2).all(0).float().mean()

    def rms_of(name: str, factor: float) -> Callable[[nn.Module, Any, Tensor], None]:
        def after(_: nn.Module, __: Any, x: Tensor) -> None:
            into[name] = factor * _rms(x)

        return after

    handles = [
        attn.register_forward_pre_hook(before_attention, with_kwargs=True),
        attn.out.register_forward_pre_hook(before_out),
        attn.register_forward_hook(rms_of("attn_rms", scale)),
        mlp.register_forward_hook(rms_of("mlp_rms", scale)),
        block.register_forward_hook(rms_of("stream_rms", 1.0)),
    ]
    if mlp.kind in FLAT_SIDE:
        handles.append(mlp.up.register_forward_hook(after_up))
    return handles


def _rms(x: Tensor) -> Tensor:
    return x.float().square().mean().sqrt()


def _head_rms(attn: Attention, y: Tensor) -> Tensor:
    """(H,) root mean square, over tokens and channels, of each head's share of the projection.

    With W_h the columns of a head, |W_h y|^2 = y^T (W_h^T W_h) y, whose middle is small.
    """
    H, D = attn.sizes[0], attn.head_dim
    heads = y.float().reshape(-1, H, D)  # (N, H, D)
    W = attn.out.weight.float().view(-1, H, D)  # (C, H, D)
    gram = torch.einsum("chd,che->hde", W, W)
    squares = (torch.einsum("nhd,hde->nhe", heads, gram) * heads).sum((0, 2))  # (H,)
    return (squares / (len(heads) * len(W))).clamp(min=0).sqrt()


def head_statistics(
    q: Tensor,
    k: Tensor,
    plan: LayerPlan,
    *,
    scale: float,
    term: ScoreTerm | None = None,
    softcap: float | None = None,
) -> dict[str, Tensor]:
    """Entropy, sharpness and largest score of each head, as `LayerReport` names them.

    Args:
        q: (..., H, D), the leading shape holding the plan's tokens in order.
        k: (..., K, D) of the same tokens: there is no cache.
        plan: who may look at whom.
        term, softcap: of the scores, as in `gpt.attention.attend`.

    Returns:
        (H,) each.
    """
    sums = _Sums(q.shape[-2], q.device)
    for look in looks(q, k, plan, scale=scale, term=term, softcap=softcap):
        sums.add(look)
    return sums.means()


class _Sums:
    """Running sums over groups and chunks of queries; every tensor is (H,)."""

    def __init__(self, heads: int, device: torch.device) -> None:
        zero = torch.zeros(heads, device=device)
        self.entropy, self.share, self.fixed, self.largest = zero, zero, zero, zero
        self.offsets = torch.zeros(OFFSETS, heads, device=device)
        self.offset_counts = torch.zeros(OFFSETS, 1, device=device)
        self.queries = torch.zeros((), device=device)
        self.sequences = 0
        # Of the group at hand: (b, H, s) weight and (b, 1, s) queries that each key got.
        self._per_key, self._seen = zero, zero

    def add(self, look: Looks) -> None:
        """Some queries of a group; those of one group come one after another."""
        group, sight, p = look.group, look.sight, look.weights
        b, s = group.b, group.s
        if look.first == 0:
            self._per_key = p.new_zeros(b, p.shape[1], s)
            self._seen = p.new_zeros(b, 1, s)
        self.largest = torch.maximum(
            self.largest, look.scores.abs().masked_fill(~sight, 0.0).amax((0, 2, 3))
        )
        keys = sight.sum(-1)  # (b or 1, 1, c)
        choice = keys > 1
        entropy = torch.special.entr(p).sum(-1) * choice  # (b, H, c)
        self.entropy = self.entropy + entropy.sum((0, 2))
        self.share = self.share + (entropy / keys.clamp(min=2).log()).sum((0, 2))
        self.queries = self.queries + choice.expand(b, 1, -1).sum()
        self._per_key += p.sum(2)
        self._seen += sight.sum(2)
        self._add_offsets(p, sight & choice.unsqueeze(-1), look.index + (s - group.t))
        if look.first + len(look.index) == group.t:
            often = self._seen * 2 >= group.t
            fixed = (self._per_key / self._seen.clamp(min=1) * often).amax(-1).sum(0)
            self.fixed = self.fixed + fixed
            self.sequences += b

    def _add_offsets(self, p: Tensor, counted: Tensor, place: Tensor) -> None:
        """Weight at each distance, of the queries whose own keys are at `place` (c,)."""
        b, H = p.shape[:2]
        for distance in range(OFFSETS):
            at = (place - distance).clamp(min=0)[None, None, :, None]
            there = (place >= distance) & counted.gather(
                -1, at.expand(*counted.shape[:3], 1)
            ).squeeze(-1)  # (b or 1, 1, c)
            weight = p.gather(-1, at.expand(b, H, -1, 1)).squeeze(-1) * there
            self.offsets[distance] += weight.sum((0, 2))
            self.offset_counts[distance] += there.expand(b, 1, -1).sum()

    def means(self) -> dict[str, Tensor]:
        """NaN where no query had a choice."""
        return {
            "entropy": self.entropy / self.queries,
            "entropy_share": self.share / self.queries,
            "logit_max": self.largest,
            "fixed": self.fixed / self.sequences,
            "offset": (self.offsets / self.offset_counts.clamp(min=1)).amax(0),
        }
