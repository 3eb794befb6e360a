"""A GGUF file: metadata and tensors, checked before anything is read.

    magic "GGUF" | version | number of tensors | number of metadata pairs
    metadata:    key, type, value …
    tensor list: name, dimensions (fastest first), type, offset from the start of the data …
    padding to general.alignment
    data

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here, because every
number in it has to be checked against the file before it is believed (and because it is read in one pass, a
vocabulary of 49,152 words in 0.1 s). Block formats and dequantising are the `gguf` package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from labkit.errors import ModelError

MAGIC, VERSIONS = b"GGUF", (2, 3)
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9  # an array in an array is possible in the format, and in no model's file
# gguf.dequantize works through 16 rows at a time; with this many elements in them it is limited by memory, not Python.
_ELEMENTS_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor list. `shape` is in rows-first order, the reverse of the file's."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int  # from the start of the file
    num_bytes: int


class GgufFile:
    """The header of a GGUF file, and its tensors on demand.

    Attributes:
        metadata: every key with its value; arrays are lists.
        tensors: by name, each of them known to lie inside the file, aligned and apart from the others.

    Raises:
        ModelError: naming the file and the tensor or key that is damaged or not supported.
    """

    def __init__(self, path: Path):
        self.path = path
        self.size = path.stat().st_size
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        if self.size < 24:
            raise ModelError(f"{path} is no GGUF file, or cut short: it has {self.size} bytes")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != MAGIC:
                raise ModelError(f"{path} is no GGUF file: it begins with {bytes(data[:4])!r}, not with {MAGIC!r}")
            self._read_header(_Cursor(path, data))

    def _read_header(self, cursor: _Cursor) -> None:
        version = cursor.scalar("I")
        if version not in VERSIONS:
            raise ModelError(
                f"{self.path} has GGUF version {version}; versions {VERSIONS} in little-endian order run here"
            )
        num_tensors, num_pairs = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(num_pairs):
            key = cursor.string()
            if key in self.metadata:
                raise ModelError(f"{self.path}: metadata key {key} is there twice")
            self.metadata[key] = cursor.value(cursor.scalar("I"), key)
        found = [self._read_tensor(cursor) for _ in range(num_tensors)]
        alignment = self._alignment()
        self._place(found, -(-cursor.at // alignment) * alignment, alignment)

    def _read_tensor(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = cursor.string(), cursor.scalar("I")
        if not 1 <= num_dims <= 4:
            raise ModelError(f"{self.path}: tensor {name} has {num_dims} dimensions; 1 to 4 are possible")
        dims = [cursor.scalar("Q") for _ in range(num_dims)]
        return name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 30 or alignment & (alignment - 1):
            raise ModelError(
                f"{self.path} ({self.size} bytes): general.alignment is {alignment}; "
                "it must be a power of two from 8 up"
            )
        return alignment

    def _place(self, found: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int) -> None:
        """Check where each tensor says that it lies. Plain Python integers: nothing wraps around."""
        for name, shape, type_number, offset in found:
            where = f"{self.path}: tensor {name} at offset {offset} of the data, which starts at byte {start},"
            try:
                kind = GGMLQuantizationType(type_number)
            except ValueError:
                raise ModelError(f"{where} has the unknown type {type_number}") from None
            if kind.name not in TYPES:
                raise ModelError(f"{where} is of type {kind.name}; those that run here are {', '.join(TYPES)}")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if min(shape) < 1 or shape[-1] % block:
                raise ModelError(f"{where} has rows of {shape[-1]} numbers; {kind.name} comes in blocks of {block}")
            num_bytes = math.prod(shape) // block * block_bytes
            if offset % alignment:
                raise ModelError(f"{where} is not aligned to {alignment} bytes (file of {self.size} bytes)")
            if start + offset + -(-num_bytes // alignment) * alignment > self.size:  # the last one is padded too
                raise ModelError(f"{where} needs {num_bytes} bytes, but the file ends after {self.size} bytes")
            if name in self.tensors:
                raise ModelError(f"{where} is in the list twice (file of {self.size} bytes)")
            self.tensors[name] = GgufTensor(name, shape, kind, start + offset, num_bytes)
        end, before = 0, ""
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise ModelError(
                    f"{self.path}: tensor {tensor.name} at offset {tensor.offset - start} of the data overlaps "
                    f"tensor {before} (file of {self.size} bytes)"
                )
            end, before = tensor.offset + tensor.num_bytes, tensor.name

    def read(self, name: str) -> NDArray[Any]:
        """One tensor, dequantised to float32; F32 and F16 as they are, mapped from the file. Shape: rows first."""
        tensor = self.tensors[name]
        try:
            raw = np.memmap(self.path, np.uint8, "c", tensor.offset, (tensor.num_bytes,))
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path}: tensor {name} cannot be read: {error}") from None
        if tensor.type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            kind = np.float32 if tensor.type == GGMLQuantizationType.F32 else np.float16
            return raw.view(np.ndarray).view(kind).reshape(tensor.shape)
        return _dequantize(raw.view(np.ndarray), tensor.type).reshape(tensor.shape)


def _dequantize(raw: NDArray[np.uint8], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    """gguf.dequantize over rows of our own length: blocks do not know which row of the matrix they are in."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row_bytes = _ELEMENTS_AT_ONCE // 16 // block * block_bytes
    whole = len(raw) // row_bytes * row_bytes
    out = np.empty(len(raw) // block_bytes * block, np.float32)
    split = whole // block_bytes * block
    if whole:
        out[:split] = dequantize(raw[:whole].reshape(-1, row_bytes), kind).reshape(-1)
    if whole < len(raw):
        out[split:] = dequantize(raw[whole:].reshape(1, -1), kind).reshape(-1)
    return out


class _Cursor:
    """Reads the header from front to back and never past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.at = len(MAGIC)

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > len(self.data) - self.at:
            self.cut(num_bytes)
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def cut(self, num_bytes: int) -> NoReturn:
        raise ModelError(
            f"{self.path} is damaged or cut short: its header asks for {num_bytes} bytes at byte {self.at}, "
            f"the file has {len(self.data)}"
        )

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        raw = self.take(self.scalar("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ModelError(f"{self.path} is damaged: a string before byte {self.at} is not UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: metadata key {key} has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self, key: str) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            width = struct.calcsize("<" + _SCALARS[kind])
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self.take(count * width))) if count else []
        if kind != _STRING:
            raise ModelError(f"{self.path}: metadata key {key} is a list of type {kind}, which is not supported")
        if count * 8 > len(self.data) - self.at:  # a string takes 8 bytes at least: a lying count is found here
            self.cut(count * 8)
        return [self.string() for _ in range(count)]
