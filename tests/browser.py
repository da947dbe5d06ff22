"""A headless Chromium for tests of pages: what a page says once it is rendered, and a picture of it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


@functools.cache
def chromium() -> str:
    """The browser's path; installed where that is possible, else the test is skipped with the way out."""
    for attempt in range(2):
        for name in NAMES:
            if found := shutil.which(name):
                return found
        if attempt or os.geteuid() or not shutil.which("apt-get"):
            break
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for arguments in (("update", "-qq"), ("install", "-y", "-qq", "--no-install-recommends", "chromium")):
            subprocess.run(["apt-get", *arguments], timeout=400, check=False, env=environment, **quiet)  # type: ignore[call-overload]
    pytest.skip("no Chromium is installed, and it could not be: apt-get install chromium")


def _run(page: Path, folder: Path, *arguments: str) -> str:
    command = [
        chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ]
    command += [f"--user-data-dir={folder / 'profile'}", "--disable-background-networking", "--no-first-run"]
    command += [*arguments, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def rendered(page: Path, folder: Path) -> str:
    """The page's document after the browser has read it."""
    return _run(page, folder, "--dump-dom")


def screenshot(page: Path, folder: Path, *, dark: bool = False, height: int = 2400) -> Path:
    """A picture of the page, a PNG 1,180 pixels wide."""
    out = folder / f"{'dark' if dark else 'light'}.png"
    scheme = ("--blink-settings=preferredColorScheme=0",) if dark else ("--blink-settings=preferredColorScheme=1",)
    _run(page, folder, f"--window-size=1180,{height}", f"--screenshot={out}", *scheme)
    return out
