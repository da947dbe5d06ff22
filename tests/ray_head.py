"""Starts a Ray head of our own for tests, on free loopback ports, ended by the id of its process group."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ports import LOOPBACK, free_ports

RAY = Path(sys.executable).with_name("ray")


@dataclass(frozen=True)
class Head:
    """A running head: the address that drivers join, that of the dashboard (which takes submitted jobs), where Prometheus asks for
    metrics, its process."""

    address: str
    dashboard: str
    metrics: str
    pid: int


@contextlib.contextmanager
def ray_head(folder: Path, cpus: int = 4, environment: dict[str, str] | None = None) -> Iterator[Head]:
    """A head with so many logical CPUs, whose log goes into `folder`; workers inherit the environment."""
    names = (
        "--port", "--dashboard-port", "--ray-client-server-port", "--dashboard-agent-listen-port", "--metrics-export-port"
    )  # fmt: skip
    ports = free_ports(len(names))
    command = [str(RAY), "start", "--head", "--block", f"--num-cpus={cpus}", "--object-store-memory=200000000"]
    command += [f"--node-ip-address={LOOPBACK}", f"--dashboard-host={LOOPBACK}", "--disable-usage-stats"]
    command += [f"{name}={port}" for name, port in zip(names, ports, strict=True)]
    command.append(f"--system-config={json.dumps({'metrics_report_interval_ms': 500})}")
    # Unix sockets have short names: pytest's folders would make them too long.
    temporary = Path("/tmp") / f"kv-{os.getpid()}"
    command.append(f"--temp-dir={temporary}")
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True)
    dashboard = f"http://{LOOPBACK}:{ports[1]}"
    try:
        _wait_for(f"{dashboard}/api/version", process, folder / "log")
        yield Head(f"{LOOPBACK}:{ports[0]}", dashboard, f"http://{LOOPBACK}:{ports[-1]}/metrics", process.pid)
    finally:
        # Its process group is all that it started; asked politely, it would first drain the node for half a minute.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(temporary, ignore_errors=True)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the head ended with {process.returncode}: {log.read_text()}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"no answer from the head: {log.read_text()}")
