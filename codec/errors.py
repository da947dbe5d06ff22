"""The three kinds of error that this project raises, and what a blob can be wrong with.

Every message is one sentence that names the thing, the place and, where there is one, the way out.
"""

from __future__ import annotations


class KVCodecError(Exception):
    """Base of every error raised on purpose."""


class UserError(KVCodecError):
    """What the caller asked for cannot be done (exit status 2)."""


class DataError(KVCodecError):
    """Stored or computed data are not what they must be (exit status 1)."""


class StorageError(KVCodecError):
    """The storage did not do what it was asked to (exit status 1)."""


class UnsupportedArchitecture(UserError):
    """No predictor is written for this model family."""


class UnsupportedFormat(UserError):
    """The number format of a tensor or a request is none that the codec codes."""


class InexactBackend(DataError):
    """This machine's arithmetic gave another integer than the exact one; it must not code anything."""


class KnownAnswerMismatch(DataError):
    """This process computes other bits than the one that made the profile."""


class PredictorError(DataError):
    """A stored predictor is malformed or is not the one asked for."""


class ProfileError(DataError):
    """A stored profile is malformed."""


class BlobError(DataError):
    """Base of everything that can be wrong with a blob."""


class NotABlob(BlobError):
    """The bytes do not begin with the magic number."""


class UnsupportedVersion(BlobError):
    """The blob was written by another format version."""


class TruncatedBlob(BlobError):
    """The blob ends early, or has bytes after its end."""


class OversizedHeader(BlobError):
    """The header claims more than the format allows."""


class MalformedHeader(BlobError):
    """Header fields contradict each other, or the header's checksum differs."""


class CorruptBlob(BlobError):
    """The checksum of the whole blob differs."""


class WrongTarget(BlobError):
    """The blob holds another model's cache."""


class WrongPredictor(BlobError):
    """The blob was coded with another predictor."""


class WrongProfile(BlobError):
    """The blob was coded with another profile."""


class WrongKey(BlobError):
    """The blob is of another prefix: it was swapped or renamed."""


class WrongParent(BlobError):
    """The blob continues another chain of bits than the one that was decoded."""


class LayerMismatch(BlobError):
    """A decoded tensor has another checksum than the one stored before encoding."""


class ChunkFailed(BlobError):
    """One chunk of those decoded together cannot be decoded: number `chunk` of task number `task`."""

    def __init__(self, message: str, task: int, chunk: int) -> None:
        super().__init__(message)
        self.task, self.chunk = task, chunk

    def __reduce__(self) -> tuple[type[ChunkFailed], tuple[str, int, int]]:
        return ChunkFailed, (str(self), self.task, self.chunk)
