"""Digests of weight files, remembered from run to run: a model of many gigabytes is read through once, not at every start.

What is remembered is for one state of one file: path, device, inode, size, and the times of its last change of contents and of anything
else. A file that is written to, or that another one takes the place of, has another state, so weights that change under the same name
are noticed. It lies in KV_CACHE_DIR, or else in the user's cache folder; KV_CACHE_DIR=off remembers nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from codec.errors import UserError

READ = 1 << 22
SETTLED_NS = 3 * 10**9  # a file that was changed less long ago may change again without its times telling
DIGEST_BYTES = 32


def file_digest(path: Path) -> bytes:
    """BLAKE2b-256 of a file's contents. Raises UserError when it cannot be read."""
    try:
        return _digest_of(_state(path))
    except OSError as error:
        raise UserError(f"the weight file {str(path)!r} cannot be read ({error.strerror})") from error


State = tuple[str, int, int, int, int, int]


def _state(path: Path) -> State:
    found = path.stat()
    return str(path.resolve()), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@functools.lru_cache(maxsize=1024)
def _digest_of(state: State) -> bytes:
    kept = _kept(state)
    if kept is not None:
        return kept
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with open(state[0], "rb") as file:
        while block := file.read(READ):
            digest.update(block)
    found = digest.digest()
    if _state(Path(state[0])) != state:
        raise UserError(f"the weight file {state[0]!r} is being written; try again when it is complete")
    if time.time_ns() - max(state[4:]) > SETTLED_NS:
        _keep(state, found)
    return found


def _folder() -> Path | None:
    own = os.environ.get("KV_CACHE_DIR", "")
    if own == "off":
        return None
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kv-cache-codec"
    return base / "fingerprints"


def _place(state: State) -> Path | None:
    folder = _folder()
    name = hashlib.blake2b(repr(state).encode(), digest_size=16).hexdigest()
    return None if folder is None else folder / name


def _kept(state: State) -> bytes | None:
    place = _place(state)
    if place is None:
        return None
    try:
        text = place.read_text(encoding="ascii")
        owner = place.stat().st_uid
        found = bytes.fromhex(text)
    except (OSError, ValueError):
        return None
    return found if len(found) == DIGEST_BYTES and owner == os.getuid() else None


def _keep(state: State, digest: bytes) -> None:
    """A cache that cannot be written is no reason to stop."""
    place = _place(state)
    if place is None:
        return
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = place.with_name(f".{place.name}.{os.getpid()}")
        temporary.write_text(digest.hex(), encoding="ascii")
        os.replace(temporary, place)
