"""What a figure was measured on, and how much memory it took."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from pipeline.ray_runtime import available_cores


def describe() -> dict[str, Any]:
    """CPU model, logical processors, load (1-minute average, processes of others included) and versions."""
    return {
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "arch": platform.machine(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def peak_rss_bytes() -> int:
    """The most memory that this process has held so far.

    Linux counts the parent's memory into a child's ru_maxrss when the child is started, so VmHWM is asked where there is one.
    """
    if found := _status("VmHWM:"):
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int:
    """Memory that this process holds now; its peak where the system does not say."""
    return _status("VmRSS:") or peak_rss_bytes()


def reset_peak() -> bool:
    """Let `peak_rss_bytes` begin anew; false where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    """A size in /proc/self/status, in bytes; 0 where there is none."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return 0
