"""What a process that computes does first: take its threads, and keep the memory that it frees while it works on a chunk."""

from __future__ import annotations

import ctypes
import os

import torch

# of glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGE = 8 << 20  # arrays of this size are few, and often not filled: they come and go by themselves
_KEPT = 1 << 30


def settle(threads: int) -> None:
    """Use so many threads for tensors, and keep freed memory for what comes next.

    Layers come and go in arrays of some hundred kilobytes. By default the allocator gives the pages back each time, and each time the
    kernel clears them again. No more is kept than was once in use, and no more than a gigabyte lies idle at the heap's end. Who has set
    MALLOC_TRIM_THRESHOLD_ keeps what it says; where the C library is not glibc, nothing is changed.
    """
    torch.set_num_threads(threads)
    if "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return
    _allocator("mallopt", _MMAP_THRESHOLD, _LARGE)
    _allocator("mallopt", _TRIM_THRESHOLD, _KEPT)


def give_back() -> None:
    """Return freed memory to the system now: between pieces of work that take memory of other sizes, and for who measures."""
    _allocator("malloc_trim", 0)


def _allocator(name: str, *values: int) -> None:
    """Call a function of glibc's allocator; of another library, none."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*values)
