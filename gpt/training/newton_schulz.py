"""Singular values made about 1: Muon's iteration (Newton-Schulz), by torch's operations.

`gpt/native/orthogonal.inl` is the same for a processor, and is held to this.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a x + b x^3 + c x^5 (Jordan et al.): steep at 0, so that small singular values
grow fast, at the price of ending anywhere in about 0.7 to 1.2 instead of at 1."""

ITERATIONS = 5

# a + b G + c G^2 as c (G + SHIFT)^2 + REST, which needs no copy of G.
SHIFT = COEFFICIENTS[1] / (2 * COEFFICIENTS[2])
REST = COEFFICIENTS[0] - COEFFICIENTS[2] * SHIFT**2


@torch.no_grad()
def orthogonalize(x: Tensor) -> Tensor:
    """Make all singular values about 1 and keep the singular vectors: U S V^T becomes about U V^T.

    Singular values from 1/500 of the Frobenius norm on arrive in 0.65 to 1.25; smaller ones are on
    their way there, and zero stays zero.

    Args:
        x: (b, M, N) matrices, changed in place.

    Returns:
        (b, M, N).
    """
    # No singular value may be above 1 at first. The floor keeps a zero gradient zero.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x.div_(norm.clamp_min_(torch.finfo(x.dtype).tiny ** 0.5))
    stands = x.shape[-2] > x.shape[-1]
    wide = x.mT if stands else x
    M, N = wide.shape[-2:]
    if x.dtype == torch.bfloat16 or M % 2:
        made = _turns(wide)
    elif N < 2 * M:
        made = _turns_in_halves(wide)
    else:
        factor = _factor(wide)
        return torch.bmm(x, factor) if stands else torch.bmm(factor, x)
    return made.mT if stands else made


def _turns(x: Tensor) -> Tensor:
    """The iteration as it is written: x becomes (a + b x x^T + c (x x^T)^2) x."""
    a, b, c = COEFFICIENTS
    # New memory costs as much as a small product, so two buffers take turns.
    gram = x.new_empty(len(x), x.shape[1], x.shape[1])
    poly, other = torch.empty_like(gram), torch.empty_like(x)
    for _ in range(ITERATIONS):
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
        torch.baddbmm(x, poly, x, beta=a, out=other)
        x, other = other, x
    return x


# --- The same without the quarter above the diagonal ---------------------------------------------


class _Symmetric:
    """b symmetric matrices of 2h rows without the quarter above the diagonal.

    All that is made of one such matrix is symmetric, too, and so a quarter of the work of its
    products need not be done.

    Attributes:
        ends: (2 b, h, h), the quarters at the upper left, then those at the lower right.
        first, last: (b, h, h) views, either of them.
        low, high: (b, h, h), the quarter at the lower left, and its transpose, a view.
        diagonal: (2 b, h) view.
    """

    def __init__(self, like: Tensor, b: int, h: int) -> None:
        self.ends, self.low = like.new_empty(2 * b, h, h), like.new_empty(b, h, h)
        self.first, self.last, self.high = self.ends[:b], self.ends[b:], self.low.mT
        self.diagonal = self.ends.diagonal(dim1=-2, dim2=-1)

    def be_gram(self, upper: Tensor, lower: Tensor) -> None:
        """x x^T, from x's upper and lower rows."""
        torch.bmm(upper, upper.mT, out=self.first)
        torch.bmm(lower, lower.mT, out=self.last)
        torch.bmm(lower, upper.mT, out=self.low)

    def be_product(self, one: _Symmetric, two: _Symmetric, scale: float = 1.0) -> None:
        """Of two that commute, times a number."""
        self.ends.baddbmm_(one.ends, two.ends, beta=0, alpha=scale)
        self.first.baddbmm_(one.high, two.low, alpha=scale)
        self.last.baddbmm_(one.low, two.high, alpha=scale)
        self.low.baddbmm_(one.low, two.first, beta=0, alpha=scale)
        self.low.baddbmm_(one.last, two.low, alpha=scale)

    def be_polynomial(self, gram: _Symmetric) -> None:
        """a + b gram + c gram^2; gram itself is shifted."""
        gram.diagonal.add_(SHIFT)
        self.be_product(gram, gram, COEFFICIENTS[2])
        self.diagonal.add_(REST)

    def times(self, x: Tensor, out: Tensor) -> None:
        """The product with (2 b, h, N), the upper rows of b matrices, then their lower rows."""
        b = len(self.low)
        torch.bmm(self.ends, x, out=out)
        out[:b].baddbmm_(self.high, x[b:])
        out[b:].baddbmm_(self.low, x[:b])

    def whole(self) -> Tensor:
        above = torch.cat([self.first, self.high], dim=-1)
        return torch.cat([above, torch.cat([self.low, self.last], dim=-1)], dim=-2)


def _turns_in_halves(x: Tensor) -> Tensor:
    """As `_turns`, in x's own memory."""
    b, M, _ = x.shape
    halves = x.view(b, 2, M // 2, -1).transpose(0, 1)
    now = halves.flatten(0, 1).contiguous()
    gram, poly, other = _Symmetric(x, b, M // 2), _Symmetric(x, b, M // 2), torch.empty_like(now)
    for _ in range(ITERATIONS):
        gram.be_gram(now[:b], now[b:])
        poly.be_polynomial(gram)
        poly.times(now, other)
        now, other = other, now
    halves.copy_(now.view(2, b, M // 2, -1))
    return x


def _factor(x: Tensor) -> Tensor:
    """What the iteration multiplies x by in all, from the products of its rows alone.

    Each turn multiplies x by a polynomial P of x x^T, and so x x^T by P twice: x itself is not
    needed until the end, which spares most of the work where it is long. bf16 is too coarse for it.
    """
    b, M, _ = x.shape
    h = M // 2
    gram, poly, factor, other = (_Symmetric(x, b, h) for _ in range(4))
    gram.be_gram(x[:, :h], x[:, h:])
    for i in range(ITERATIONS):
        poly.be_polynomial(gram)
        if i + 1 < ITERATIONS:
            gram.diagonal.sub_(SHIFT)
            other.be_product(poly, gram)
            gram.be_product(other, poly)
        if i == 0:
            factor, poly = poly, factor
        else:
            other.be_product(poly, factor)
            factor, other = other, factor
    return factor.whole()
