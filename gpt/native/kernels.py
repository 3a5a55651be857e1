"""The compiled kernels, called with tensors.

    load()      compiles them if need be, and has them used from then on
    current()   them, or None

Their results are those of torch's kernels up to the order of additions: float32 sums throughout,
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
        self._linear = library.antiphon_linear
        self._linear.argtypes = [integer, integer, *[pointer] * 4, *[number] * 3, integer]
        self._attend = library.antiphon_attend
        self._attend.argtypes = [integer, integer, pointer]
        self._store = library.antiphon_store
        self._store.argtypes = [*[pointer] * 6, *[number] * 9]
        for function in (self._linear, self._attend, self._store):
            function.restype = None

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
        N, K = weight.shape
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], N))
        self._linear(
            self.level,
            x.dtype == torch.bfloat16,
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            x.numel() // K,
            N,
            K,
            torch.get_num_threads(),
        )
        return y

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
            log.info("decoding runs through torch, without kernels of our own: %s", error)
    return _current


def current() -> Kernels | None:
    """The kernels, if they are in use."""
    return _current


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
