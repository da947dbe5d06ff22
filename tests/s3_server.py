"""Starts infra/dev-s3 for tests: a real S3 server on free loopback ports, ended by its own process id."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "infra" / "dev-s3"
BUCKET = "test-bucket"


@contextmanager
def s3_server(folder: Path, data: Path | None = None) -> Iterator[dict[str, str]]:
    """Yields the environment variables that a client needs. data: a folder for the server's files.

    Skips the test where the server's binary is missing.
    """
    server = S3Server(folder, data)
    try:
        yield server.environment
    finally:
        server.stop()


class S3Server:
    """A running server; one that is killed can be started again on the same port, with its files."""

    def __init__(self, folder: Path, data: Path | None = None) -> None:
        """As `s3_server`."""
        self._folder, self._data = folder, data
        self.environment = self._start("0", {})

    @property
    def port(self) -> int:
        """Of the S3 service."""
        return urlsplit(self.environment["AWS_ENDPOINT_URL"]).port or 0

    def kill(self) -> None:
        """End the server as a crash would."""
        os.kill(self._pid, signal.SIGKILL)
        self._script.wait()

    def restart(self) -> None:
        """Start it again after `kill`; it answers when this returns."""
        assert self._data is not None, "the files are gone with the server"
        self._start(str(self.port), self.environment)

    def stop(self) -> None:
        """End it in order."""
        self._script.send_signal(signal.SIGTERM)
        try:
            self._script.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._script.kill()
            self._script.wait()

    def _start(self, port: str, credentials: dict[str, str]) -> dict[str, str]:
        """The environment that it prints for clients; without the credentials where it was given them."""
        command = [sys.executable, str(SCRIPT), "--port", port, "--bucket", BUCKET]
        command += ["--log", str(self._folder / "weed.log"), *(["--dir", str(self._data)] if self._data else [])]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | credentials
        with open(self._folder / "dev-s3.err", "wb") as errors:
            self._script = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            return self._read_exports()
        except BaseException:
            with suppress(ProcessLookupError):
                self.stop()
            raise

    def _read_exports(self) -> dict[str, str]:
        assert self._script.stdout is not None
        exports: dict[str, str] = {}
        for line in self._script.stdout:
            if not line.startswith("export "):
                self._pid = int(re.findall(r"server pid: (\d+)", line)[0])
                break
            name, _, value = shlex.split(line)[1].partition("=")
            exports[name] = value
        if not exports:
            message = (self._folder / "dev-s3.err").read_text()
            if self._script.wait() == 2:
                pytest.skip(f"no S3 server to test against: {message}")
            pytest.fail(message)
        # Without this, a client without credentials asks the address of a cloud's metadata service.
        return {**exports, "AWS_EC2_METADATA_DISABLED": "true"}
