"""The compiled kernels, called with tensors.

    load()      compiles them if need be, and has them used from then on
    current()   them, or None

Their results are those of torch's kernels up to the order of additions (and dropout's random
numbers): float32 sums throughout,
also for bf16 weights, which are widened as they are read.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

import torch
from torch import Tensor

from gpt.groups import Group
from gpt.native.build import NotBuiltError, build

log = logging.getLogger(__name__)

LEVELS = ("no vector extensions", "AVX2", "AVX-512")
DTYPES = (torch.float32, torch.bfloat16)

_current: Kernels | None = None
_refused: str | None = None


class _Attend(ctypes.Structure):
    """`struct Attend` of kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "out")),
        *((name, ctypes.c_void_p) for name in ("rows", "pages", "sees", "bias")),
        *((name, ctypes.c_int64) for name in ("b", "t", "H", "K", "D", "s", "n_pages")),
        *((name, ctypes.c_int64) for name in ("page_size", "skip", "first_slot", "slots", "q_row")),
        *((name, ctypes.c_int64) for name in ("bias_b", "bias_h")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("threads", ctypes.c_int),
    )


class _Turn(ctypes.Structure):
    """`struct Turn` of kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "q_weight", "k_weight", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("row", "H", "K", "D", "pairs")),
        ("eps", ctypes.c_float),
        ("interleaved", ctypes.c_int),
    )


class Product(ctypes.Structure):
    """`struct Product` of kernels.cpp: one of a chain of products. `prepared` makes them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "onto", "y")),
        *((name, ctypes.c_void_p) for name in ("norm_weight", "norm_bias")),
        *((name, ctypes.c_int64) for name in ("onto_y_of", "N", "K")),
        ("eps", ctypes.c_double),
        ("scale", ctypes.c_float),
        ("before", ctypes.c_int),
    )


BEFORE = ("", "layernorm", "rmsnorm", "gelu", "relu2", "swiglu")
"""What a row may go through before it is multiplied, as kernels.cpp counts them."""


def prepared(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    before: str = "",
    norm: tuple[Tensor, Tensor | None, float] | None = None,
    onto_y_of: int = -1,
    scale: float = 1.0,
) -> Product:
    """before(x) weight^T + bias, without addresses of x and y; whoever uses it keeps the tensors.

    Args:
        weight, bias: (N, K) and (N,), contiguous.
        before: of `BEFORE`; of `swiglu` rows of x have 2 K numbers, gates first.
        norm: weight and bias (K,) and epsilon of a norm.
        onto_y_of: which earlier product of the chain it is added to, times `scale`; -1: none.
    """
    N, K = weight.shape
    made = Product(weight=weight.data_ptr(), N=N, K=K, onto_y_of=onto_y_of, scale=scale)
    made.before = BEFORE.index(before)
    if bias is not None:
        made.bias = bias.data_ptr()
    if norm is not None:
        norm_weight, norm_bias, made.eps = norm
        made.norm_weight = norm_weight.data_ptr()
        made.norm_bias = None if norm_bias is None else norm_bias.data_ptr()
    return made


class Kernels:
    """A compiled library.

    Args:
        path: of it.
        level: which instructions to use, an index of `LEVELS`; None: the best that there are.

    Attributes:
        wide: whether torch's products of bf16 numbers are slower here than those of the same
            numbers as float32 (`gpt.native.linear.measure`).

    Raises:
        NotBuiltError: it cannot be loaded.
    """

    def __init__(self, path: Path, level: int | None = None) -> None:
        try:
            # All symbols now: one that is missing would otherwise end the process later.
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
        except OSError as error:
            raise NotBuiltError(f"they do not load: {error}") from None
        self.wide = False
        best = int(library.antiphon_level())
        self.level = best if level is None else min(level, best)
        pointer, number, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._chain = library.antiphon_chain
        self._chain.argtypes = [integer, integer, pointer, number, number, integer]
        self._turn = library.antiphon_turn
        self._turn.argtypes = [integer, integer, pointer, number]
        self._attend = library.antiphon_attend
        self._attend.argtypes = [integer, integer, pointer]
        self._store = library.antiphon_store
        self._store.argtypes = [*[pointer] * 6, *[number] * 9]
        # The modules beside this one call these: gradients, causal, orthogonal.
        self.norm, self.convolve = library.antiphon_norm, library.antiphon_convolve
        self.take_apart, self.causal = library.antiphon_take_apart, library.antiphon_causal
        self.square_relu = library.antiphon_square_relu
        self.square_relu.argtypes = [integer, pointer, pointer, pointer, number, integer]
        self.drop = library.antiphon_drop
        single = ctypes.c_float
        self.drop.argtypes = [
            integer, pointer, pointer, pointer, number, ctypes.c_uint64, single, single, integer
        ]  # fmt: skip
        self.muon = library.antiphon_muon
        self.muon.argtypes = [integer, pointer, number, pointer, integer]
        both_ways = (self.norm, self.convolve, self.take_apart, self.causal)
        for function in both_ways:
            function.argtypes = [integer, integer, pointer]
        for function in (
            self._chain, self._turn, self._attend, self._store, self.square_relu,
            self.drop, self.muon, *both_ways,
        ):  # fmt: skip
            function.restype = None

    def __deepcopy__(self, memo: object) -> Kernels:
        return self  # a model that has been copied uses the same

    @property
    def instructions(self) -> str:
        return LEVELS[self.level]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x weight^T + bias, all of one dtype of `DTYPES`, on the CPU.

        Args:
            x: (..., K).
            weight: (N, K), contiguous.
            bias: (N,).

        Returns:
            (..., N).
        """
        y = x.new_empty((*x.shape[:-1], len(weight)))
        self.chain((Product * 1)(prepared(weight, bias)), x, y)
        return y

    def chain(
        self, products: ctypes.Array[Product], x: Tensor, y: Tensor, onto: Tensor | None = None
    ) -> None:
        """Products one after the other, the first of x and each of the one before, the last into y.

        Args:
            products: of `prepared`, one to three; addresses are written into them.
            x: (..., K) of the first's, or twice K for `swiglu`.
            y: (..., N) of the last's, contiguous. All tensors are of one dtype of `DTYPES`.
            onto: (..., N) of the first's, contiguous, to which that is added.
        """
        assert len(products) <= 3, "there is memory for the results of two"
        x = x.contiguous()
        first = products[0]
        first.x, products[-1].y = x.data_ptr(), y.data_ptr()
        if onto is not None:
            first.onto = onto.data_ptr()
        self._chain(
            self.level,
            x.dtype == torch.bfloat16,
            ctypes.addressof(products),
            len(products),
            y.numel() // products[-1].N,
            torch.get_num_threads(),
        )

    def turn(
        self,
        qkv: Tensor,
        heads: tuple[int, int, int],
        norms: tuple[Tensor, Tensor, float] | None,
        table: tuple[Tensor, Tensor, bool] | None,
    ) -> None:
        """Norm queries and keys by their root mean square, and turn them, where they lie.

        Args:
            qkv: (..., (H + 2 K) * D), contiguous.
            heads: H, K and D.
            norms: weights (D,) for queries and for keys, of qkv's dtype, and epsilon.
            table: cosines and sines, R / 2 float32 numbers for each token, contiguous, and whether
                neighbours are a pair.
        """
        H, K, D = heads
        row = (H + 2 * K) * D
        call = _Turn(rows=qkv.data_ptr(), row=row, H=H, K=K, D=D)
        if norms is not None:
            call.q_weight, call.k_weight = norms[0].data_ptr(), norms[1].data_ptr()
            call.eps = norms[2]
        if table is not None:
            cos, sin, call.interleaved = table
            call.cos, call.sin, call.pairs = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        self._turn(
            self.level, qkv.dtype == torch.bfloat16, ctypes.addressof(call), qkv.numel() // row
        )

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        group: Group,
        page_size: int,
        scale: float,
        bias: Tensor | None = None,
        softcap: float = 0.0,
    ) -> None:
        """The queries of a group, over pages read where they lie.

        Args:
            q: (N, H, D), of all tokens; heads side by side.
            keys, values: (K, slots, D) of the cache, of q's dtype.
            out: (N, H, D), contiguous; the group's rows are written.
            bias: (b or 1, H or 1, t, s) is added to the scores, -inf where a query may not look;
                None: the group's mask alone says.
            softcap: scores are kept within it by a tanh before the bias is added; 0: they are not.
        """
        H, D = q.shape[-2:]
        sees = None
        if bias is not None:
            bias = bias.float().contiguous()
        elif group.mask is not None:
            sees = group.mask.expand(group.b, -1, -1, -1).contiguous()
        rows, pages = group.rows, group.pages
        call = _Attend(
            q.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            None if rows is None else rows.data_ptr(),
            None if pages is None else pages.data_ptr(),
            None if sees is None else sees.data_ptr(),
            None if bias is None else bias.data_ptr(),
            group.b,
            group.t,
            H,
            keys.shape[0],
            D,
            group.s,
            0 if pages is None else pages.shape[1],
            page_size,
            group.skip,
            group.first_slot or 0,
            keys.shape[1],
            q.stride(-3),
            0 if bias is None or bias.shape[0] == 1 else bias.stride(0),
            0 if bias is None or bias.shape[1] == 1 else bias.stride(1),
            scale,
            softcap,
            torch.get_num_threads(),
        )
        self._attend(self.level, q.dtype == torch.bfloat16, ctypes.addressof(call))

    def store(
        self,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        begun: Tensor | None,
        page_size: int,
    ) -> None:
        """New tokens' keys and values, (N, K, D) with heads side by side, into their slots of the
        cache, (K, slots, D); pages that are only begun are zeroed first."""
        K, n_slots, D = keys.shape
        self._store(
            k.data_ptr(),
            v.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            slots.data_ptr(),
            None if begun is None else begun.data_ptr(),
            slots.numel(),
            K,
            D,
            k.stride(-3),
            v.stride(-3),
            n_slots,
            0 if begun is None else begun.numel(),
            page_size,
            keys.element_size(),
        )


def load(path: Path | None = None) -> Kernels | None:
    """Compile the kernels if need be, and use them from now on in this process.

    Args:
        path: a library that was built; None: `gpt.native.build.build` sees to it.

    Returns:
        None if there are none; the reason is logged, once.
    """
    global _current, _refused
    if _current is None and _refused is None:
        try:
            _current = Kernels(path or build())
        except NotBuiltError as error:
            _refused = str(error)
            log.info("all runs through torch, without kernels of our own: %s", error)
    return _current


def current() -> Kernels | None:
    """The kernels, if they are in use."""
    return _current


def instructions() -> str:
    """What the kernels in use are compiled for; none: torch's are."""
    return "none" if _current is None else _current.instructions


def use(kernels: Kernels | None) -> None:
    """Have these used from now on, or none."""
    global _current
    _current = kernels


def serves(pool: Tensor) -> bool:
    """Whether few queries over a cache of this kind are computed by the kernels."""
    return _current is not None and pool.device.type == "cpu" and pool.dtype in DTYPES


def widens(x: Tensor) -> bool:
    """Whether torch's kernels should be given x as float32."""
    return (
        _current is not None
        and _current.wide
        and x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
    )


def in_rows(x: Tensor) -> bool:
    """Whether the heads of (N, heads, D) lie side by side, as the kernels read them."""
    return x.dim() == 3 and x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]
