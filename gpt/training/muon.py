"""Muon for the matrices of the blocks and AdamW for all else, as one optimizer.

A step of Muon moves a matrix by its gradient's running mean with all singular values made about
equal (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024,
kellerjordan.github.io/posts/muon). A gradient is mostly a few large directions; made equal, the
small ones are learned as well. It means something only where a matrix takes one stream to another:
embeddings, the head and vectors are AdamW's.

Orthogonal columns say nothing of how long the rows are, and those of some neurons come out several
times as long as those of others. Each is divided by the root of its own running mean of squares
(Li et al., "NorMuon", arXiv 2510.05491), and the matrix keeps its size. Theirs are always rows;
here they are columns where a matrix has more of these, whose rows are about alike already.

torch.optim.Muon (torch 2.9 and later) does the matrices alone, so a second optimizer would have to
do the rest; it computes in bf16 on any device, one matrix after the other; and a layer that holds
queries, keys and values in one is one matrix to it. Hence this one. Its Newton-Schulz iteration
(`gpt.training.newton_schulz`) takes all matrices of a shape at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Optimizer

from gpt.footprint import MUON_AT_ONCE
from gpt.native import orthogonal
from gpt.native.gradients import is_plain
from gpt.native.kernels import current
from gpt.native.orthogonal import Matrix, Quintic
from gpt.training.newton_schulz import COEFFICIENTS, ITERATIONS, REST, SHIFT, orthogonalize

MUON, ADAMW = "muon", "adamw"

_Moved = list[tuple[Tensor, dict[str, Any]]]
"""Parameters, each with its group."""

KERNELS_TO = 512
"""Rows or columns, whichever are fewer, up to which our kernels are used where there are such. They
take 0.1 to 0.8 of torch's time for 32 to 256, 0.7 to 1.1 of it for 384 and 512, and about as long
for 768 (four square matrices, or four of four times the rows; one thread and two; AMD EPYC of the
third generation, AVX2, torch 2.13). Fewer matrices than threads leave some idle, so are torch's."""


class MuonAdamW(Optimizer):
    """Groups of kind `muon` and of kind `adamw`, each with its own rate and weight decay.

    A group of kind `muon` also has `momentum`, `beta2`, the decay of the neurons' means of squares
    (0: none are kept, and a step is Muon's as it was first published), and `rows`: of how many rows
    each of the matrices is that lie upon one another in its parameters; empty: a parameter is one
    matrix.

    Sharded parameters (DTensor) are gathered, some at a time, and every process computes the same
    step; what is kept stays sharded, but for the one number of a neuron.

    Args:
        groups: dicts with `params`, `kind` and settings.
        lr: of groups that name none.
        fused: update all of AdamW's parameters in one kernel.

    Raises:
        ValueError: a group of neither kind, or one of kind `muon` with what is no matrix or whose
            `rows` do not add up.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float = 1e-3, *, fused: bool = False
    ) -> None:
        super().__init__(list(groups), {"lr": lr, "weight_decay": 0.0})
        for group in self.param_groups:
            _check(group)
        # It shares our groups and our state, gives the former its defaults, and keeps nothing.
        rest = self._of_kind(ADAMW)
        self._adamw = AdamW(rest, lr=lr, fused=fused) if rest else None

    def _of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["kind"] == kind]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but for the means of squares, which would become as coarse as the weights."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        ours = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(saved, ours, strict=True):
            squares = state_dict["state"].get(number, {}).get("squares")
            if squares is not None:
                self.state[p]["squares"] = squares.to(p.device, _exact_dtype(p), copy=True)
        for group in self.param_groups:
            _check(group)  # what one from before there was such a setting lacks

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        """One step of both kinds."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = [(p, g) for g in self._of_kind(MUON) for p in g["params"] if p.grad is not None]
        for some in _portions(moved):
            self._move(some)
        if self._adamw is not None:
            # Loading a state puts others in their place.
            self._adamw.param_groups, self._adamw.state = self._of_kind(ADAMW), self.state
            self._adamw.step()
        return loss

    def _move(self, some: _Moved) -> None:
        """Muon's step for parameters, each with its group."""
        for p, group in some:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            if not group["beta2"]:
                self.state[p].pop("squares", None)  # they would be old ones when it is set again
            elif "squares" not in self.state[p]:
                self.state[p]["squares"] = _squares_for(p, group["rows"])
        found: list[Tensor] = []
        some = self._left_by_kernels(some)
        for group, params in _by_group(some):
            grads = [_local(p.grad) for p in params if p.grad is not None]
            means = [_local(self.state[p]["momentum"]) for p in params]
            torch._foreach_lerp_(means, grads, 1 - group["momentum"])
            # Nesterov's: the newest gradient counts once more.
            newest = torch._foreach_lerp(grads, means, group["momentum"])
            found += [_gathered(update, p) for update, p in zip(newest, params, strict=True)]
        equalize(found, [self._manner(p, group) for p, group in some])
        updates = iter(found)
        for group, params in _by_group(some):
            weights = [_local(p) for p in params]
            here = [_part(next(updates), p) for p in params]
            if group["weight_decay"]:
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, here, alpha=-group["lr"])

    def _manner(self, p: Tensor, group: dict[str, Any]) -> Manner:
        beta2 = group["beta2"]
        return Manner(group["rows"], self.state[p]["squares"] if beta2 else None, beta2)

    def _left_by_kernels(self, some: _Moved) -> _Moved:
        """Move those that our kernels are faster for. Returns the others."""
        kernels = current()
        if kernels is None:
            return some
        matrices: list[Matrix] = []
        ours: list[Tensor] = []
        others: _Moved = []
        for p, group in some:
            tensors = (p, self.state[p]["momentum"], p.grad)
            heights, columns = group["rows"] or (len(p),), p.shape[1]
            squares = self.state[p]["squares"] if group["beta2"] else None
            kept = tensors if squares is None else (*tensors, squares)
            if (
                not all(x is not None and is_plain(x) and x.is_contiguous() for x in kept)
                or tensors[1].shape != p.shape
                or (squares is not None and squares.numel() != _neurons(heights, columns))
                or min(max(heights), columns) > KERNELS_TO
            ):
                others.append((p, group))
                continue
            ours.append(p)
            starts = [x.data_ptr() for x in tensors if x is not None]
            place = None if squares is None else squares.data_ptr()
            keep = 1 - group["lr"] * group["weight_decay"]
            for height in heights:
                rate = group["lr"] * _scale((height, columns))
                settings = (group["momentum"], group["beta2"], rate, keep)
                matrices.append(Matrix(*starts, place, height, columns, *settings))
                starts = [start + height * columns * p.itemsize for start in starts]
                if place is not None:
                    place += max(height, columns) * p.itemsize
        if len(matrices) < torch.get_num_threads():
            return some
        matrices.sort(key=lambda m: -m.rows * m.columns)  # so that threads end together
        floor = torch.finfo(torch.float32).tiny ** 0.5
        quintic = Quintic(SHIFT, REST, COEFFICIENTS[2], floor, ITERATIONS)
        orthogonal.step(kernels, matrices, quintic)
        torch.autograd.graph.increment_version(ours)
        return others


class Manner(NamedTuple):
    """How a parameter is made a step of.

    Attributes:
        rows: of each matrix in it; empty: it is one.
        squares: a running mean for each row of its matrices, or for each column of those with more
            columns than rows, one matrix after the other; changed in place. None: there are none.
        beta2: their decay.
    """

    rows: tuple[int, ...] = ()
    squares: Tensor | None = None
    beta2: float = 0.0


def equalize(found: Sequence[Tensor], manners: Sequence[Manner]) -> None:
    """Make them Muon's steps at a rate of 1. Matrices of a shape go together, whatever they are of.

    Each is scaled by sqrt(rows / columns) where it has more rows than columns, so that it changes
    what comes out by as much as the numbers that go in, however wide the layer is (Jordan et al.).

    Args:
        found: what each parameter would move by, (M, N) of its own; changed in place.
        manners: of each parameter.
    """
    alike: dict[Any, list[tuple[Tensor, Tensor | None]]] = {}
    for update, manner in zip(found, manners, strict=True):
        for part, squares in _runs(update, manner):
            alike.setdefault((part.shape[1:], manner.beta2), []).append((part, squares))
    for (shape, beta2), runs in alike.items():
        parts = [part for part, _ in runs]
        x = orthogonalize(torch.cat(parts).to(_work_dtype(parts[0])))
        kept = [squares for _, squares in runs if squares is not None]
        if kept:
            squares = torch.cat(kept)
            even_out(x, squares, beta2)
            torch._foreach_copy_(kept, torch.split(squares, [len(each) for each in kept]))
        x.mul_(_scale(shape))
        torch._foreach_copy_(parts, torch.split(x, [len(part) for part in parts]))


def even_out(x: Tensor, squares: Tensor, beta2: float) -> None:
    """Divide each row by the root of its running mean of squares, or each column where there are
    more of these, and give each matrix the Frobenius norm that it had (NorMuon).

    That the means begin at 0 makes all of them too small by the same factor, which that undoes.

    Args:
        x: (b, M, N), changed in place.
        squares: (b, max(M, N)), changed in place, float32 or float64.
        beta2: its decay.
    """
    along = -1 if x.shape[-2] >= x.shape[-1] else -2
    exact = x.to(squares.dtype)  # bf16 keeps too few digits of a mean
    squares.lerp_(exact.square().mean(along), 1 - beta2)
    least = torch.finfo(squares.dtype).tiny
    evened = exact * squares.clamp_min(least).rsqrt_().unsqueeze(along)
    before = torch.linalg.vector_norm(exact, dim=(-2, -1), keepdim=True)
    after = torch.linalg.vector_norm(evened, dim=(-2, -1), keepdim=True)
    x.copy_(evened.mul_(before / after.clamp_min_(least)))


def _scale(shape: Sequence[int]) -> float:
    return math.sqrt(max(1.0, shape[-2] / shape[-1]))


def _runs(update: Tensor, manner: Manner) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The matrices in a parameter, (b, rows, N) for neighbours of one height, and their squares,
    (b, max(rows, N))."""
    N, row, place = update.shape[1], 0, 0
    for height, each in itertools.groupby(manner.rows or (len(update),)):
        b, neurons = len(list(each)), max(height, N)
        squares = None
        if manner.squares is not None:
            squares = manner.squares[place : place + b * neurons].view(b, neurons)
        yield update[row : row + b * height].view(b, height, N), squares
        row, place = row + b * height, place + b * neurons


def _squares_for(p: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Zeros for what `Manner.squares` holds, whole in every process."""
    neurons = _neurons(rows or (len(p),), p.shape[1])
    return torch.zeros(neurons, dtype=_exact_dtype(p), device=p.device)


def _neurons(heights: Iterable[int], columns: int) -> int:
    return sum(max(height, columns) for height in heights)


def _exact_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _by_group(some: _Moved) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """The parameters of each group, groups in order."""
    for _, each in itertools.groupby(some, key=lambda pair: id(pair[1])):
        pairs = list(each)
        yield pairs[0][1], [p for p, _ in pairs]


def _portions(moved: _Moved) -> Iterator[_Moved]:
    """As many parameters at a time as MUON_AT_ONCE lets, at least one."""
    some: _Moved = []
    left = MUON_AT_ONCE
    for each in moved:
        if some and each[0].numel() > left:
            yield some
            some, left = [], MUON_AT_ONCE
        some.append(each)
        left -= each[0].numel()
    if some:
        yield some


def _work_dtype(x: Tensor) -> torch.dtype:
    """bf16 is enough, but only GPUs are faster with it."""
    if x.device.type == "cuda":
        return torch.bfloat16
    return _exact_dtype(x)


def _check(group: dict[str, Any]) -> None:
    if group["kind"] not in (MUON, ADAMW):
        raise ValueError(f"a group is of kind {group['kind']!r}, but must be of {MUON} or {ADAMW}")
    if group["kind"] == ADAMW:
        return
    group.setdefault("momentum", 0.95)
    group.setdefault("beta2", 0.0)
    group.setdefault("rows", ())
    for p in group["params"]:
        if p.ndim != 2 or sum(group["rows"]) not in (0, p.shape[0]):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} cannot be matrices of "
                f"{group['rows'] or 'all'} rows"
            )


# --- Sharded parameters -------------------------------------------------------------------------


def _local(x: Tensor) -> Tensor:
    """What this process holds of it, to be changed in place."""
    return x.to_local() if isinstance(x, DTensor) else x


def _gathered(update: Tensor, p: Tensor) -> Tensor:
    """All of an update of which each process has what it has of the parameter."""
    if not isinstance(p, DTensor):
        return update
    spread = DTensor.from_local(
        update, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return spread.full_tensor()


def _part(update: Tensor, p: Tensor) -> Tensor:
    """The inverse of `_gathered`. Nothing is sent: every process has all of it."""
    if not isinstance(p, DTensor):
        return update
    everywhere = [Replicate()] * p.device_mesh.ndim
    whole = DTensor.from_local(update, p.device_mesh, everywhere, run_check=False)
    return whole.redistribute(placements=p.placements).to_local()
