"""Muon's iteration by our own kernel: each thread has a matrix in its caches (`orthogonal.inl`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from gpt.native.kernels import Kernels


class Matrix(ctypes.Structure):
    """`struct Matrix` of kernels.cpp: float32 numbers side by side, and times what."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class Quintic(ctypes.Structure):
    """`struct Quintic` of kernels.cpp: each turn's square (G + shift)^2 + rest."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("shift", "rest", "square", "floor")),
        ("iterations", ctypes.c_int),
    )


def orthogonalize(kernels: Kernels, matrices: Sequence[Matrix], quintic: Quintic) -> None:
    """What `gpt.training.muon` makes of them, in place."""
    all_of_them = (Matrix * len(matrices))(*matrices)
    kernels.orthogonalize(
        kernels.level,
        ctypes.addressof(all_of_them),
        len(matrices),
        ctypes.addressof(quintic),
        torch.get_num_threads(),
    )
