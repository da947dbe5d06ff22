"""Where things lie in a store: pure functions from digests and names to relative paths.

    store.json                                   the marker, {"format": 1}
    blobs/<target>/<profile>/<aa>/<key>.kv       one compressed chunk; <aa> is the first byte of its key
    profiles/<id>                                one frozen calibration
    profiles/by-config/<hash>                    the id of the profile in use for one configuration
    scales/by-config/<hash>                      the scales of an FP8 cache for one configuration
    predictors/<fingerprint>.safetensors         the predictor's weights as used
    prompts/<target>/<name>.parquet              which prompt is made of which chunks
    index/<target>/<profile>/<name>.parquet      one index part a committed task
    unverified/<target>/<profile>/<name>         which chunks no run has verified yet
    current/<model name>/<format>/<number>       which generation readers of a model follow; the highest number counts
    runs/<time>-<id>.json                        what one run was asked and what it came to
    quarantine/<path>                            what verification with --repair has put aside
    running/<name>                               a job that is at work; locks/gc: a collection or a repair is

Digests are 32 bytes and are written as 64 lower-case hex characters. A path is relative, uses "/", and means the same
on a local disk and on S3. What these functions refuse came out of data, so they raise DataError; what a user asks for
(a store's URI and options) raises UserError.
"""

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from codec.errors import DataError, UserError

SCHEMES = ("file://", "s3://")
MARKER = "store.json"
BLOBS, INDEX, PROMPTS, PROFILES, PREDICTORS, SCALES = "blobs", "index", "prompts", "profiles", "predictors", "scales"
BY_CONFIG = "by-config"
CURRENT, QUARANTINE, RUNNING, LOCKS, RUNS = "current", "quarantine", "running", "locks", "runs"
UNVERIFIED = "unverified"
DIGEST_BYTES = 32

_MAX_COMPONENT = 255  # bytes: the limit of the usual local file systems
_MAX_PATH = 800  # bytes: S3 allows 1,024 for the whole key, the prefix of the store included
_SECRET = re.compile(r"key|secret|token|password|username|credential|session", re.IGNORECASE)
_INDEX = re.compile(r"index/([0-9a-f]{64})/([0-9a-f]{64})/[^/]+")
_UNVERIFIED = re.compile(r"unverified/([0-9a-f]{64})/([0-9a-f]{64})/[0-9a-f]{64}")
_BLOB = re.compile(r"blobs/([0-9a-f]{64})/([0-9a-f]{64})/([0-9a-f]{2})/([0-9a-f]{64})\.kv")


def validate_path(path: str) -> str:
    """Return `path` when it may name an object of a store; raise DataError otherwise.

    Refused: absolute paths, empty components, "." and "..", components that begin with a dot (the store's own temporary
    files do), backslashes, control characters, question marks (s3fs takes "?versionId=" out of a name), text that is
    not UTF-8, and names longer than a disk or S3 would take.
    """
    reason = _fault(path)
    if reason:
        raise DataError(f"{path!r:.200} cannot be a path in a store: {reason}")
    return path


def _fault(path: str) -> str:
    if not isinstance(path, str) or not path:
        return "it is empty or no text"
    try:
        raw = path.encode("utf-8")
    except UnicodeEncodeError:
        return "it is not valid UTF-8"
    if path.startswith("/"):
        return "it is absolute"
    if any(character in "\\?" or ord(character) < 32 or ord(character) == 127 for character in path):
        return "it holds a backslash, a question mark or a control character"
    if len(raw) > _MAX_PATH:
        return f"it is longer than {_MAX_PATH} bytes"
    for component in path.split("/"):
        if not component:
            return "it has an empty component"
        if component.startswith("."):
            return "a component begins with a dot"
        if len(component.encode("utf-8")) > _MAX_COMPONENT:
            return f"a component is longer than {_MAX_COMPONENT} bytes"
    return ""


def validate_prefix(prefix: str) -> str:
    """Return a folder's path without its closing "/"; "" is the whole store. Raises DataError."""
    folder = prefix[:-1] if prefix.endswith("/") else prefix
    return validate_path(folder) if folder else ""


def digest_hex(digest: bytes, what: str = "digest") -> str:
    """64 hex characters of a 32-byte digest; DataError for anything else."""
    if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
        raise DataError(f"a {what} must be {DIGEST_BYTES} bytes, not {digest!r:.80}")
    return digest.hex()


def blob_path(target: bytes, profile: bytes, key: bytes) -> str:
    """Path of one chunk's blob; all three are 32-byte digests."""
    name = digest_hex(key, "chunk key")
    return f"{blob_prefix(target, profile)}/{name[:2]}/{name}.kv"


def blob_prefix(target: bytes, profile: bytes) -> str:
    """Folder of all blobs of one target under one profile."""
    return f"blobs/{digest_hex(target, 'target fingerprint')}/{digest_hex(profile, 'profile id')}"


def parse_blob_path(path: str) -> tuple[bytes, bytes, bytes]:
    """(target, profile, key) of a blob's path; DataError where `path` is none that `blob_path` makes."""
    match = _BLOB.fullmatch(path)
    if match is None or match[3] != match[4][:2]:
        raise DataError(f"{path!r:.300} is not the path of a blob")
    return bytes.fromhex(match[1]), bytes.fromhex(match[2]), bytes.fromhex(match[4])


def profile_path(profile: bytes) -> str:
    """Path of a frozen profile, named by its own digest."""
    return f"profiles/{digest_hex(profile, 'profile id')}"


def profile_config_path(config_hash: bytes) -> str:
    """Path of the object that names the profile in use for a configuration (target, predictor, settings)."""
    return f"profiles/by-config/{digest_hex(config_hash, 'configuration hash')}"


def scales_config_path(config_hash: bytes) -> str:
    """Path of the scales of an FP8 cache for a configuration (target, format, mode)."""
    return f"scales/by-config/{digest_hex(config_hash, 'configuration hash')}"


def predictor_path(fingerprint: bytes) -> str:
    """Path of a predictor's weights."""
    return f"predictors/{digest_hex(fingerprint, 'predictor fingerprint')}.safetensors"


def prompts_path(target: bytes, name: bytes) -> str:
    """Path of one part that says which prompts are made of which chunks; `name` is a digest of its contents."""
    return f"{prompts_prefix(target)}/{digest_hex(name, 'part name')}.parquet"


def prompts_prefix(target: bytes) -> str:
    """Folder of all prompts parts of one target."""
    return f"prompts/{digest_hex(target, 'target fingerprint')}"


def index_path(target: bytes, profile: bytes, name: bytes) -> str:
    """Path of one index part; `name` is a digest of the rows in it."""
    return f"{index_prefix(target, profile)}/{digest_hex(name, 'part name')}.parquet"


def index_prefix(target: bytes, profile: bytes) -> str:
    """Folder of all index parts of one target under one profile."""
    return f"index/{digest_hex(target, 'target fingerprint')}/{digest_hex(profile, 'profile id')}"


def target_index_prefix(target: bytes) -> str:
    """Folder of all index parts of one target, whatever the profile."""
    return f"index/{digest_hex(target, 'target fingerprint')}"


def unverified_path(target: bytes, profile: bytes, name: bytes) -> str:
    """Path of what names chunks that are stored and not verified; `name` is a digest of it."""
    return f"{unverified_prefix(target, profile)}/{digest_hex(name, 'digest')}"


def unverified_prefix(target: bytes, profile: bytes) -> str:
    """Folder of these under one target and profile."""
    return f"{UNVERIFIED}/{digest_hex(target, 'target fingerprint')}/{digest_hex(profile, 'profile id')}"


def parse_unverified_path(path: str) -> tuple[bytes, bytes]:
    """(target, profile) of such a path; DataError where `path` is none that `unverified_path` makes."""
    match = _UNVERIFIED.fullmatch(path)
    if match is None:
        raise DataError(f"{path!r:.300} does not name unverified chunks")
    return bytes.fromhex(match[1]), bytes.fromhex(match[2])


def parse_index_path(path: str) -> tuple[bytes, bytes]:
    """(target, profile) of an index part's path; DataError where `path` is none that `index_path` makes."""
    match = _INDEX.fullmatch(path)
    if match is None:
        raise DataError(f"{path!r:.300} is not the path of an index part")
    return bytes.fromhex(match[1]), bytes.fromhex(match[2])


def current_path(model_name: str, cache_format: str, number: int) -> str:
    """Path of entry `number` of the pointer for a model's caches in one format.

    The name is percent-encoded, so "a/b" and "..", too, are plain file names.
    """
    try:
        name = quote(model_name, safe=" +=,@")
    except UnicodeEncodeError:
        raise DataError(f"the model name {model_name!r:.200} is not valid UTF-8") from None
    if name.startswith("."):
        name = "%2E" + name[1:]
    if not re.fullmatch(r"[a-z0-9_]+", cache_format) or not 0 <= number < 10**8:
        raise DataError(f"{cache_format!r:.80} and {number} are no cache format and no number of a pointer's entry")
    return validate_path(f"{CURRENT}/{name}/{cache_format}/{number:08}")


def run_path(started: str, run: str) -> str:
    """Path of a run's record: `started` as YYYYMMDDTHHMMSSZ, so that a listing is in the order of time."""
    return validate_path(f"{RUNS}/{started}-{run}.json")


def parse_store_uri(uri: str) -> tuple[bool, str]:
    """(is it local, absolute folder or "bucket/prefix") of a store's URI. Raises UserError."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        if not uri or re.match(r"(s3a?|file):", uri):
            raise UserError(f"{uri!r:.300} is no place for a store: give a folder, {' or '.join(SCHEMES)}")
        return True, os.path.abspath(os.path.expanduser(uri))
    if scheme == "file":
        if not rest.startswith("/"):
            raise UserError(f"{uri!r:.300} has no absolute path: write file:///folder")
        return True, os.path.abspath(rest)
    if scheme != "s3":
        raise UserError(f"a store cannot be at {scheme:.50}://: supported are {', '.join(SCHEMES)} and plain folders")
    bucket, _, prefix = rest.strip("/").partition("/")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
        # Not shown: what stands before an "@" may be a secret.
        raise UserError("an s3:// store needs the name of a bucket after s3://, without credentials or endpoint")
    try:
        return False, f"{bucket}/{validate_prefix(prefix)}".rstrip("/")
    except DataError as error:
        raise UserError(f"s3://{bucket}/… is no place for a store: {error}") from error


def refuse_secrets(options: Mapping[str, Any]) -> None:
    """Raise UserError where storage options hold credentials: they would travel in pickles and stand in logs."""
    for name in [*options, *options.get("client_kwargs", {})]:
        if _SECRET.search(name):
            raise UserError(f"the storage option {name} is not taken: credentials come from the environment alone")
