"""The structure of a GGUF file, checked in bounded time and memory before a general reader is let near it.

The gguf package believes the counts that a file claims: a file of a hundred bytes keeps it busy for ever. Here nothing
is read or stepped over that the file cannot hold. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from codec.errors import UserError

VERSIONS = (2, 3)
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 8


class _Broken(Exception):
    """What is wrong with the file (half a sentence)."""


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def matrix_types(path: Path) -> set[str]:
    """Names of the number formats that the file's matrices have (Q4_1, BF16, …), once its structure is found sound.

    Raises UserError when the file cannot be read, is no GGUF, is truncated, or claims more than it holds.
    """
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise _Broken("no GGUF file" if file.read(4) != b"GGUF" else "truncated within its header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data).check()
    except OSError as error:
        raise UserError(f"the model file {str(path)!r} cannot be read ({error.strerror})") from error
    except _Broken as error:
        raise UserError(f"the model file {str(path)!r} is {error}") from error


class _Cursor:
    """Steps through the file; every step is checked against its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.end = data, 0, len(data)
        self.alignment = 32
        self.blocks_named = False

    def check(self) -> set[str]:
        if self.data[:4] != b"GGUF":
            raise _Broken("no GGUF file: it does not begin with the letters GGUF")
        self.at = 4
        version = self.number("I")
        if version not in VERSIONS:
            raise _Broken(f"GGUF of version {version}, accepted are little-endian 2 and 3")
        tensors, fields = self.count(24), self.count(13)
        for _ in range(fields):
            self.field()
        table = [self.tensor() for _ in range(tensors)]
        if not table or not self.blocks_named:  # transformers would build some default model of billions of weights
            raise _Broken("a GGUF file without a language model: it lacks tensors or the field block_count")
        if len({tensor.name for tensor in table}) < tensors:
            raise _Broken("a corrupt GGUF file: it names a tensor twice")
        start = -(-self.at // self.alignment) * self.alignment
        return {self.extent(tensor, start) for tensor in table} - {""}

    def skip(self, size: int) -> int:
        """The position before a step of `size` bytes."""
        if size > self.end - self.at:
            raise _Broken(f"a truncated or corrupt GGUF file: it ends within its header (at byte {self.at})")
        before, self.at = self.at, self.at + size
        return before

    def number(self, kind: str) -> int:
        size = struct.calcsize("<" + kind)
        return int(struct.unpack_from("<" + kind, self.data, self.skip(size))[0])

    def count(self, least: int) -> int:
        """A number of things of which each takes at least `least` bytes of the rest of the file."""
        count = self.number("Q")
        if count * least > self.end - self.at:
            raise _Broken("a truncated or corrupt GGUF file: it claims more entries than it has bytes for")
        return count

    def text(self) -> bytes:
        size = self.count(1)
        start = self.skip(size)
        return self.data[start : start + size]

    def field(self) -> None:
        key = self.text()
        self.blocks_named |= key.endswith(b".block_count")
        kind = self.number("I")
        if key == b"general.alignment" and kind == 4:
            self.alignment = self.number("I")
            if self.alignment == 0 or self.alignment & (self.alignment - 1):
                raise _Broken("a corrupt GGUF file: its alignment is no power of two")
        else:
            self.value(kind)

    def value(self, kind: int) -> None:
        if kind == _STRING:
            self.skip(self.count(1))
        elif kind == _ARRAY:
            item = self.number("I")
            if item == _STRING:
                for _ in range(self.count(8)):
                    self.skip(self.count(1))
            else:  # arrays of arrays are allowed by the format and used by nobody
                self.skip(self.count(self.scalar(item)) * self.scalar(item))
        else:
            self.skip(self.scalar(kind))

    def scalar(self, kind: int) -> int:
        if kind not in _SCALAR_BYTES:
            raise _Broken(f"a corrupt GGUF file: its metadata has a value of unknown type {kind}")
        return _SCALAR_BYTES[kind]

    def tensor(self) -> _Tensor:
        name = self.text().decode("utf-8", "replace")
        dims = self.number("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise _Broken(f"a corrupt GGUF file: the tensor {name!r} has {dims} dimensions")
        return _Tensor(name, tuple(self.number("Q") for _ in range(dims)), self.number("I"), self.number("Q"))

    def extent(self, tensor: _Tensor, start: int) -> str:
        """Check that the tensor's bytes are in the file; the name of its number format, "" for a vector."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(tensor.kind)
        except ValueError:
            raise _Broken(f"a GGUF file whose tensor {tensor.name!r} has the unknown type {tensor.kind}") from None
        block, size = GGML_QUANT_SIZES[kind]
        bytes_needed = -(-prod(tensor.shape) // block) * size
        if tensor.offset % self.alignment or start + tensor.offset + bytes_needed > self.end:
            raise _Broken(f"a truncated or corrupt GGUF file: the tensor {tensor.name!r} goes past its end")
        return str(kind.name) if len(tensor.shape) > 1 else ""
