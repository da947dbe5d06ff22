"""Processes that compute keep the memory they free."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import resource, numpy as np, torch
from pipeline.worker_process import settle
settle(1)
assert torch.get_num_threads() == 1
def layer():
    for array in [np.empty(1 << 17) for _ in range(8)]:
        array.fill(1.0)
layer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    layer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory; run this on such a Linux"
)
@pytest.mark.parametrize("told", [False, True])
def test_pages_are_asked_for_once(told: bool) -> None:
    """8 MB a layer are 2,048 pages: without `settle` they come anew each time, and so they do where the user has said so."""
    given = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"} if told else {}
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | given
    done = subprocess.run([sys.executable, "-c", CODE], env=env, check=True, capture_output=True, text=True)
    faults = int(done.stdout)
    assert faults > 20 * 2000 if told else faults < 2000
