"""Have the C library keep what a step frees for the next step, which wants it again."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT = 2**30
"""Bytes free at the end of the heap from which on some are given back."""

LARGEST = 2**25
"""What is larger is asked of the system alone, and given back to it; the most that glibc allows."""

SET_BY = (
    "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)  # fmt: skip


def keep_freed_memory() -> bool:
    """Ask for it, from now on and in this process.

    By itself glibc gives large pieces back at once, and the system hands them out again page by
    page, each zeroed first: 1,000 to 4,000 pages in a training step of 0.8 M parameters, which is
    2 to 6 % of its time.

    Returns:
        Whether it is so: not where the C library is another, or where the user's environment says
        how it is to be.
    """
    libc = ctypes.CDLL(None)
    if any(name in os.environ for name in SET_BY) or not hasattr(libc, "mallopt"):
        return False
    # Both, as each that is set ends glibc's own adjusting.
    return bool(libc.mallopt(M_TRIM_THRESHOLD, KEPT) and libc.mallopt(M_MMAP_THRESHOLD, LARGEST))
