"""The memory that a piece of work takes at most: measured, not counted.

On a CPU that is how far the resident memory of a process grows. A process that has worked before
holds pages that the next work reuses, so each measurement has one of its own, forked from a server
that has imported what is needed and done nothing else (a fork of this process would inherit locks
of its threads). In it, glibc's allocator is told to give large blocks back at once: what is
measured is then the peak of the tensors that live together, whatever kernel makes them, without the
allocator's holes. On a GPU torch's allocator keeps the peak itself.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import sys
from multiprocessing.connection import Connection
from typing import Protocol

import torch

M_MMAP_THRESHOLD = -3
LARGE = 64 * 2**10
PRELOAD = ["gpt.bench.memory", "gpt.bench.mixers"]
"""What the server imports once, so that its forks need not: all that any work here is made of."""


class Work(Protocol):
    """What is measured. In a process of its own it must be picklable.

    `prepare` makes what does not count (inputs), `warm_up` runs the same code on something small,
    so that what libraries load and keep does not count, and `__call__` is the work.
    """

    def prepare(self) -> None: ...

    def warm_up(self) -> None: ...

    def __call__(self) -> None: ...


def peak_on_cpu(work: Work, threads: int) -> int | None:
    """Bytes that the work adds to a process at most; None if the process was killed.

    Args:
        threads: that torch takes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(work, threads, sender), daemon=True)
    process.start()
    sender.close()
    try:
        found: int = receiver.recv()
    except EOFError:  # killed: out of memory, as a rule
        return None
    finally:
        receiver.close()
        process.join()
    return found


def _measure(work: Work, threads: int, sender: Connection) -> None:
    try:
        torch.set_num_threads(threads)
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_MMAP_THRESHOLD, LARGE)  # a fixed threshold, and no holes
        work.prepare()
        work.warm_up()
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        before = _reset_peak()
        work()
        sender.send(max(0, _peak() - before))
    except KeyboardInterrupt:
        os._exit(1)  # the parent has been told, too, and reports it
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        os._exit(1)  # more than there is: as if it had been killed


def _reset_peak() -> int:
    """Start the peak anew where the system can (Linux), and return it."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        pass  # then it is that of the preparation, which is a little more
    return _peak()


def _peak() -> int:
    """Bytes. /proc knows of the reset; getrusage may not."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_on_gpu(work: Work, device: torch.device) -> int:
    """Bytes that the work adds to what torch has allocated on a CUDA device at most."""
    work.prepare()
    work.warm_up()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
