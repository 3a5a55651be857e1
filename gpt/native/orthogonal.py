"""Muon's step by our own kernel: each thread has a matrix in its caches (`orthogonal.inl`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from gpt.native.kernels import Kernels


class Matrix(ctypes.Structure):
    """`struct Matrix` of kernels.cpp: addresses of float32 numbers, side by side.

    What it becomes is `keep` times the weight less `rate` times the step. `squares` may be null.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "mean", "grad", "squares")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_float) for name in ("momentum", "beta2", "rate", "keep")),
    )


class Quintic(ctypes.Structure):
    """`struct Quintic` of kernels.cpp: each turn's square (G + shift)^2 + rest."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("shift", "rest", "square", "floor")),
        ("iterations", ctypes.c_int),
    )


def step(kernels: Kernels, matrices: Sequence[Matrix], quintic: Quintic) -> None:
    """Take `gpt.training.muon`'s step with each; means, squares and weights change in place."""
    all_of_them = (Matrix * len(matrices))(*matrices)
    kernels.muon(
        kernels.level,
        ctypes.addressof(all_of_them),
        len(matrices),
        ctypes.addressof(quintic),
        torch.get_num_threads(),
    )
