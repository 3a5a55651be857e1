"""Short causal convolutions: each token is mixed with the few before it, channel by channel.

    y_t = x_t + sum over j = 0 … k - 1 of w_j * x_(t - j)        w: (C, 1, k), x before the text: 0

What goes into attention and MLP passes through one each: a head can then match the *pair* of a
token and its neighbour, for which it otherwise takes two layers. Depthwise and residual as the
"Canon layers" A and C of Allen-Zhu, "Physics of language models: part 4.1", 2025; token shifts of
this kind are older (So et al., Primer, arXiv 2109.08668; Peng et al., RWKV, arXiv 2305.13048). The
weights begin at 0, so that at the start a model is the one without.

**In the cache.** The next token needs the inputs of the k - 1 before it, in every layer and of both
convolutions. That is a state of fixed size, but one that must also be found wherever another text
may start from (the prefix cache) or go on (a preempted text). So it is kept *per page*: of the
tokens that a page holds, the state's page holds the inputs of the last m = min(k - 1, page_size), a
ring within the page,

    slot of position p  =  page * m + (p mod page_size) mod m

        k = 4, pages of 8        position   0 1 2 3 4 5 6 7 | 8 9
        after 10 tokens          slot           · · 2 0 1 · | 0 1 ·      5, 6, 7 stay; 8, 9 so far

and everything else is that of a group of layers which remember a window of k: a block table, pages
given back behind the window, shared if they are full, found by their text. A text that starts from
full pages finds the state as it was at the end of the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.cachespec import ring
from gpt.native import gradients
from gpt.pages import pages_for
from gpt.pool import NULL_PAGE

if TYPE_CHECKING:
    from gpt.config import GPTConfig
    from gpt.paged import Chunk


@dataclass(frozen=True)
class ShiftPlan:
    """Where the tokens of a paged plan find the inputs before them.

    Attributes:
        reads: (R,) slots of the state that are read.
        sources: (k - 1, N) for each step back and each token, which of the R inputs read and the N
            at hand, one after the other.
        rows: (W,) the tokens whose inputs are kept.
        slots: (W,) and where.
    """

    reads: Tensor
    sources: Tensor
    rows: Tensor
    slots: Tensor


def shift_plan(
    chunks: Seq[Chunk], table: int, width: int, page_size: int, device: torch.device | str
) -> ShiftPlan:
    """The plan for chunks whose earlier tokens are in the cache.

    Args:
        table: which of a chunk's block tables is the state's.
        width: of the convolutions, k.

    Raises:
        ValueError: a chunk has too few pages.
    """
    m, back = ring(width, page_size), width - 1
    reads: list[int] = []
    rows: list[int] = []
    slots: list[int] = []
    first = 0
    for chunk in chunks:
        pages = chunk.tables[table]
        if len(pages) < pages_for(chunk.end, page_size):
            raise ValueError(f"{chunk.end} tokens of a state in {len(pages)} pages")
        for p in range(chunk.start - 1, chunk.start - 1 - back, -1):
            # Before the text: the null page, which stays 0.
            page = pages[p // page_size] if p >= 0 else NULL_PAGE
            reads.append(page * m + p % page_size % m if p >= 0 else page)
        for i in range(chunk.start // page_size, pages_for(chunk.end, page_size)):
            stop = min((i + 1) * page_size, chunk.end)
            for p in range(max(chunk.start, i * page_size, stop - m), stop):
                rows.append(first + p - chunk.start)
                slots.append(pages[i] * m + p % page_size % m)
        first += chunk.length
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
    ends = lengths.cumsum()
    of = np.repeat(np.arange(len(chunks)), lengths)  # (N,) the chunk of each token
    place = np.arange(first) - (ends - lengths)[of]  # within its chunk
    steps = np.arange(1, width)[:, None]
    cached = of * back + steps - 1 - place  # one step back from a chunk's first is its first read
    at_hand = len(reads) + np.arange(first) - steps
    sources = np.where(place >= steps, at_hand, cached)

    def on_device(numbers: object) -> Tensor:
        return torch.from_numpy(np.asarray(numbers, dtype=np.int64)).to(device)

    return ShiftPlan(on_device(reads), on_device(sources), on_device(rows), on_device(slots))


class ShortConv(nn.Module):
    """One convolution. Its weights are (C, 1, k), as those of a depthwise `nn.Conv1d`, but by
    distance: `weight[:, 0, j]` is for the token j back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.width = config.conv_width
        self.weight = nn.Parameter(torch.zeros(config.d_model, 1, config.conv_width))

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        plan: ShiftPlan | None = None,
        state: Tensor | None = None,
    ) -> Tensor:
        """Mix each token with those before it.

        Args:
            x: (B, T, C) whole sequences, or (N, C) tokens of a paged plan.
            positions: of the tokens; within a document they begin at 0, and nothing before it is
                seen.
            plan, state: of a paged plan; the state (slots, C) is read and extended in place.

        Returns:
            Like x.
        """
        whole = plan is None or state is None
        if whole and (kernels := gradients.suit(x, self.weight)) is not None:
            return gradients.convolve(kernels, x, self.weight, positions)
        weights = self.weight[:, 0].to(x.dtype).t()  # (k, C)
        y = torch.addcmul(x, x, weights[0])
        if plan is not None and state is not None:
            inputs = torch.cat((state.index_select(0, plan.reads).to(x.dtype), x))
            state.index_copy_(0, plan.slots, x.index_select(0, plan.rows).to(state.dtype))
            for j in range(1, self.width):
                y = torch.addcmul(y, inputs.index_select(0, plan.sources[j - 1]), weights[j])
            return y
        T, back = x.shape[-2], self.width - 1
        padded = F.pad(x, (0, 0, back, 0))
        for j in range(1, self.width):
            earlier = padded[..., back - j : back - j + T, :]
            if positions.ndim > 1:  # documents begin within sequences
                earlier = earlier.masked_fill(positions[..., None] < j, 0)
            y = torch.addcmul(y, earlier, weights[j])
        return y
