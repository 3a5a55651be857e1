"""The plan of chunks whose earlier tokens are in the cache: which pages are read, and together with
which. Built on the host every step, so its cost is that of the pages that are read, whatever the
length of the text.

A chunk reads the pages of what its first query may see at the earliest, up to its own end, and
those of the first positions if its memory keeps them (`gpt.pages.split_table`); the keys of a group
then stand at absolute positions `k_pos` that need not follow one another:

    window:6+sinks:1, pages of 4, a query at 21      pages   0       4       5
                                                     k_pos   0 1 2 3 16 … 19 20 … 23
                                                     seen    ▪ · · · ▪▪▪▪    ▪▪··

What a page holds besides (positions that have left the window, the null page, what lies behind a
text's end) is hidden by the mask: `Pattern.seen` denies every key that is not seen, and every later
one. It must be finite, though, since nothing times NaN is NaN: no page is read before its own text
has written to it, and one that is begun without being filled is zeroed first (`LayerPlan.begun`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from operator import eq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpt.groups import Group, LayerPlan
from gpt.pages import pages_for, split_table
from gpt.patterns import LayerPatterns, Memory, Pattern
from gpt.pool import NULL_PAGE


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence that a forward runs.

    Attributes:
        start: position of the first; everything before it is in the cache already.
        length: how many.
        tables: the sequence's block table in each group of layers that remember the same (in the
            order of `LayerPatterns.memories`), and last that of the state, if the model has
            convolutions (`gpt.conv`); each covers at least `start + length` positions.
    """

    start: int
    length: int
    tables: Seq[Seq[int]]

    @property
    def end(self) -> int:
        return self.start + self.length


class _Reach(NamedTuple):
    """The pages that a chunk reads: those before `sinks`, and from `first` up to `stop`."""

    sinks: int
    first: int
    stop: int

    @property
    def pages(self) -> int:
        return self.sinks + self.stop - self.first


@dataclass(frozen=True)
class _Layout:
    """A group as far as it does not depend on what its pattern allows.

    Attributes:
        members: which of the chunks.
        group: what they read.
        exact: whether each member reads just the keys that its memory keeps for its last query.
    """

    members: list[int]
    group: Group
    exact: bool


def paged_plans(
    chunks: Seq[Chunk],
    page_size: int,
    patterns: LayerPatterns,
    device: torch.device | str,
    fixed: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, tuple[LayerPlan, ...]]:
    """The position of each token, (N,), and the plan of each kind of pattern."""
    rows = _Rows(chunks, device)
    shared = [
        (
            _fixed_layouts(chunks, i, page_size, rows)
            if fixed
            else _layouts(chunks, memory, i, page_size, rows, in_place),
            *_places(chunks, i, page_size, device),
        )
        for i, memory in enumerate(patterns.memories)
    ]
    kinds = []
    for pattern, memory in zip(patterns.kinds, patterns.kind_memories, strict=True):
        layouts, slots, begun = shared[memory]
        groups = tuple(_look(layout, chunks, pattern) for layout in layouts)
        kinds.append(LayerPlan(groups, slots, begun))
    return rows.positions, tuple(kinds)


class _Rows:
    """Where chunks' tokens stand, among all and in their texts; asked for by several groups."""

    def __init__(self, chunks: Seq[Chunk], device: torch.device | str) -> None:
        self.device = device
        self._all = tuple(range(len(chunks)))
        self._firsts: list[int] = []
        self._lengths = [chunk.length for chunk in chunks]
        positions: list[int] = []
        for chunk in chunks:
            self._firsts.append(len(positions))
            positions.extend(range(chunk.start, chunk.end))
        self.positions = torch.tensor(positions, device=device)
        self._known: dict[tuple[int, ...], tuple[Tensor | None, Tensor]] = {}

    def of(self, members: list[int]) -> tuple[Tensor | None, Tensor]:
        """The rows of some chunks of equal length (None: of all tokens in order), and their
        positions (b, t)."""
        key = tuple(members)
        if key not in self._known:
            t = self._lengths[members[0]]
            rows = None
            if key != self._all:
                firsts = torch.tensor([self._firsts[i] for i in members])
                rows = (firsts[:, None] + torch.arange(t)).flatten().to(self.device)
            at = self.positions if rows is None else self.positions[rows]
            self._known[key] = rows, at.view(-1, t)
        return self._known[key]


def _places(
    chunks: Seq[Chunk], table: int, page_size: int, device: torch.device | str
) -> tuple[Tensor, Tensor | None]:
    """Where the tokens go in the pool of a group of layers, and which pages they begin only."""
    slots: list[int] = []
    begun: list[int] = []
    for chunk in chunks:
        pages = chunk.tables[table]
        stop = pages_for(chunk.end, page_size)
        if chunk.length < 1 or len(pages) < stop:
            raise ValueError(
                f"a chunk of {chunk.length} tokens from {chunk.start} needs {stop} pages of "
                f"{page_size}, has {len(pages)}"
            )
        if chunk.length == 1:
            place = chunk.start % page_size
            slots.append(pages[stop - 1] * page_size + place)
            if place == 0 and page_size > 1:
                begun.append(pages[stop - 1])
            continue
        for i in range(chunk.start // page_size, stop):
            first, last = i * page_size, min((i + 1) * page_size, chunk.end)
            slot = pages[i] * page_size - first  # of position 0, if it were in this page
            slots.extend(range(slot + max(first, chunk.start), slot + last))
        if chunk.end % page_size and (stop - 1) * page_size >= chunk.start:
            begun.append(pages[stop - 1])
    return (
        torch.tensor(slots, device=device),
        torch.tensor(begun, device=device) if begun else None,
    )


def _layouts(
    chunks: Seq[Chunk],
    memory: Memory,
    table: int,
    page_size: int,
    rows: _Rows,
    in_place: bool = False,
) -> list[_Layout]:
    """The groups that chunks form under one memory.

    Single tokens go together with those that read a like number of pages, so that one long sequence
    does not pad thirty short ones: keys padded in vain stay below a quarter. Sequences past their
    window all read alike, however long they are. If keys are read in place, nothing is padded and
    all single tokens go together. Longer chunks do so only if they have the same borders.
    """
    reaches = []
    keyed: dict[tuple[int, ...], list[int]] = {}
    for i, chunk in enumerate(chunks):
        sinks, first = split_table(memory, chunk.start, page_size)
        reach = _Reach(sinks, first, pages_for(chunk.end, page_size))
        reaches.append(reach)
        key: tuple[int, ...] = (chunk.start, chunk.length)
        if chunk.length == 1:
            count = reach.pages
            if memory.window is not None and first:  # or one page less, as the window lies
                count = sinks + pages_for(memory.window - 1, page_size) + 1
            key = () if in_place else (_bucket(count),)
        keyed.setdefault(key, []).append(i)
    return [
        _layout(members, chunks, reaches, memory, table, page_size, rows)
        for members in keyed.values()
    ]


def _fixed_layouts(chunks: Seq[Chunk], table: int, page_size: int, rows: _Rows) -> list[_Layout]:
    """The groups of a plan that is fixed: keys are all positions from 0 to a border, so the place
    of a key among them is its own, and how many there are follows from the text's length alone.
    Pages that were given back, and those behind the end, are the null page."""
    keyed: dict[tuple[int, ...], list[int]] = {}
    for i, chunk in enumerate(chunks):
        key = (chunk.start, chunk.length) if chunk.length > 1 else (_border(chunk.end),)
        keyed.setdefault(key, []).append(i)
    layouts = []
    for members in keyed.values():
        s = _border(chunks[members[0]].end)
        n_pages = pages_for(s, page_size)
        pages: list[Seq[int]] = []
        for i in members:
            own = chunks[i].tables[table][: pages_for(chunks[i].end, page_size)]
            pages.append([*own, *[NULL_PAGE] * (n_pages - len(own))])
        where, q_pos = rows.of(members)
        group = Group(
            len(members), q_pos.shape[-1], s, q_pos, torch.arange(s, device=rows.device)[None],
            rows=where,
            pages=_table(pages, rows.device),
            fixed=True,
        )  # fmt: skip
        layouts.append(_Layout(members, group, exact=False))
    return layouts


def _border(keys: int) -> int:
    """Up to where keys are read: 64, 128, 192, 512, 1024, … (`gpt.deterministic` says why)."""
    step = 64 if keys <= 192 else 512
    return -(-keys // step) * step


def _bucket(pages: int) -> int:
    """1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, …: four steps an octave."""
    step = max(1, 1 << max(0, (pages - 1).bit_length() - 3))
    return -(-pages // step) * step


def _layout(
    members: list[int],
    chunks: Seq[Chunk],
    reaches: list[_Reach],
    memory: Memory,
    table: int,
    page_size: int,
    rows: _Rows,
) -> _Layout:
    device, members_reach = rows.device, [reaches[i] for i in members]
    first = members_reach[0]
    alike = members_reach.count(first) == len(members)
    n_pages = max(reach.pages for reach in members_reach)
    pages: list[Seq[int]] = []
    backs: list[int] = []  # of each member, the keys read up to its own end
    for i, (sinks, begin, stop) in zip(members, members_reach, strict=True):
        own = chunks[i].tables[table]
        mine = [*own[:sinks], *own[begin:stop]] if sinks else own[begin:stop]
        short = n_pages - len(mine)
        pages.append([*mine, *[NULL_PAGE] * short] if short else mine)
        backs.append(chunks[i].end - (stop - len(mine)) * page_size)
    skip, end = 0, max(backs)
    if memory.window is not None and not memory.sinks:
        # Keys before the window can be left out, unless the first positions stand before them.
        skip = min(
            max(0, memory.first(chunks[i].start) - reach.first * page_size)
            for i, reach in zip(members, members_reach, strict=True)
        )
    s = end - skip

    own = pages[0]
    side_by_side = len(members) == 1 and all(map(eq, own, range(own[0], own[0] + n_pages)))
    if alike and not first.sinks:
        begin = first.first * page_size
        k_pos = torch.arange(begin + skip, begin + end, device=device)[None]
    else:
        # Absolute positions; what pads them comes after every query.
        numbers = _table(
            [
                [*range(sinks), *range(begin, stop), *[stop] * (n_pages - sinks - stop + begin)]
                for sinks, begin, stop in members_reach
            ],
            device,
        )
        k_pos = numbers[:, :, None] * page_size + torch.arange(page_size, device=device)
        k_pos = k_pos.flatten(1)[:, skip:end]
    where, q_pos = rows.of(members)
    group = Group(
        len(members), q_pos.shape[-1], s, q_pos, k_pos,
        rows=where,
        pages=None if side_by_side else _table(pages, device),
        skip=skip,
        first_slot=own[0] * page_size + skip if side_by_side else None,
    )  # fmt: skip
    return _Layout(members, group, all(memory.positions(chunks[i].end) == s for i in members))


def _table(rows: list[Seq[int]], device: torch.device | str) -> Tensor:
    """(b, n) int64; numpy reads lists of lists several times as fast as torch does."""
    return torch.from_numpy(np.array(rows, dtype=np.int64)).to(device)


def _look(layout: _Layout, chunks: Seq[Chunk], pattern: Pattern) -> Group:
    """The group with what its queries may see."""
    group, members = layout.group, [chunks[i] for i in layout.members]
    short = all(chunk.end <= pattern.causal_until for chunk in members)
    if not group.fixed and short and all(chunk.start == 0 for chunk in members):
        return replace(group, causal=True)
    if not group.fixed and group.t == 1 and layout.exact and (short or pattern.sees_memory):
        return group
    mask = pattern.seen(group.q_pos[:, None, :, None], group.k_pos[:, None, None, :])
    return replace(group, mask=mask)  # (b, 1, t, s)
