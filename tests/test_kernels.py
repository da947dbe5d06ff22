"""Compiled code that is kept from process to process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CODEC = Path(__file__).resolve().parent.parent / "codec"
INNER = "from codec.kernels import inlined\n\n\n@inlined\ndef inner():\n    return {}\n"
OUTER = "from codec.inner import inner\nfrom codec.kernels import compiled\n\n\n@compiled\ndef outer():\n    return inner()\n"


def outer(folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", "from codec.outer import outer; print(outer(), outer.stats.cache_hits)"]
    return subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_kept_code_does_not_outlive_what_it_was_made_of(tmp_path: Path) -> None:
    """A loop whose own file is unchanged, but not that of a function it calls: an update by git changes just those files."""
    package = tmp_path / "codec"
    package.mkdir()
    for name in ("kernels.py", "compiled_cache.py", "cells.py", "formats.py", "errors.py"):
        shutil.copy(CODEC / name, package / name)
    (package / "__init__.py").touch()
    (package / "outer.py").write_text(OUTER)
    (package / "inner.py").write_text(INNER.format(1))
    assert outer(tmp_path) == "1 Counter()\n"
    assert outer(tmp_path).startswith("1 Counter({"), "kept for the next process"
    (package / "inner.py").write_text(INNER.format(22))
    assert outer(tmp_path) == "22 Counter()\n"
    (package / "deep").mkdir()
    for number in (3, 44):  # in a folder of its own
        (package / "deep" / "inner.py").write_text(INNER.format(number))
        (package / "outer.py").write_text(OUTER.replace("codec.inner", "codec.deep.inner"))
        os.utime(package / "outer.py", (10**9, 10**9))
        assert outer(tmp_path) == f"{number} Counter()\n"
