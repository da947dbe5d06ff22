"""Starts infra/dev-s3 for tests: a real S3 server on free loopback ports, ended by its own process id."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "infra" / "dev-s3"
BUCKET = "test-bucket"


@contextmanager
def s3_server(folder: Path, data: Path | None = None) -> Iterator[dict[str, str]]:
    """Yields the environment variables that a client needs. data: a folder for the server's files.

    Skips the test where the server's binary is missing.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with open(folder / "dev-s3.err", "wb") as errors:
        script = subprocess.Popen(
            [
                sys.executable,
                str(SCRIPT),
                "--port",
                "0",
                "--bucket",
                BUCKET,
                "--log",
                str(folder / "weed.log"),
                *(["--dir", str(data)] if data else []),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield _read_exports(script, folder)
    finally:
        script.send_signal(signal.SIGTERM)
        try:
            script.wait(timeout=20)
        except subprocess.TimeoutExpired:
            script.kill()
            script.wait()


def _read_exports(script: "subprocess.Popen[str]", folder: Path) -> dict[str, str]:
    assert script.stdout is not None
    exports: dict[str, str] = {}
    for line in script.stdout:
        if not line.startswith("export "):
            break
        name, _, value = shlex.split(line)[1].partition("=")
        exports[name] = value
    if not exports:
        message = (folder / "dev-s3.err").read_text()
        if script.wait() == 2:
            pytest.skip(f"no S3 server to test against: {message}")
        pytest.fail(message)
    # Without this, a client without credentials asks the address of a cloud's metadata service.
    return {**exports, "AWS_EC2_METADATA_DISABLED": "true"}
