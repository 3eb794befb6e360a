"""A kernel's programs, one after the other in Python, with a note of every load and store: what a GPU does all at once.

`trace` works on any machine: it runs the kernel's own Python code with a stand-in for `tl` that knows what the lessons'
kernels use. Where there is no Triton (macOS), the same stand-in runs the kernels:

    from labkit.lab.programs import tl, triton
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from labkit.kernels.jit import tl as _tl
from labkit.kernels.jit import triton as _triton

__all__ = ["Access", "Trace", "tl", "trace", "triton"]


@dataclass(frozen=True)
class Access:
    """One load or store of one program: a place for each lane, and which lanes take part."""

    program: int
    kind: str  # load or store
    tensor: str  # the kernel's name for it
    places: tuple[int, ...]  # in numbers from the tensor's first
    mask: tuple[bool, ...]
    line: str  # of the kernel

    def used(self) -> list[int]:
        """The places of the lanes that take part."""
        return [place for place, on in zip(self.places, self.mask) if on]


@dataclass
class Trace:
    """What a launch did. Shapes are those of the tensors it was given."""

    shapes: dict[str, tuple[int, ...]]
    bytes_of_a_number: dict[str, int]
    programs: int = 0
    accesses: list[Access] = field(default_factory=list)

    def size(self, tensor: str) -> int:
        """How many numbers a tensor has."""
        return torch.Size(self.shapes[tensor]).numel()

    def bytes_asked(self) -> int:
        """What all programs together asked for."""
        return sum(len(access.used()) * self.bytes_of_a_number[access.tensor] for access in self.accesses)

    def bytes_moved(self) -> int:
        """What memory has to move for that: what was read before is in a cache, and what is written leaves once."""
        touched = {(access.kind, access.tensor, place) for access in self.accesses for place in access.used()}
        return sum(self.bytes_of_a_number[tensor] for _, tensor, _ in touched)

    def outside(self) -> list[Access]:
        """Accesses that leave their tensor."""
        return [a for a in self.accesses if any(not 0 <= place < self.size(a.tensor) for place in a.used())]


class Pointer:
    """Where numbers of a tensor lie, as a kernel adds it up."""

    def __init__(self, name: str, tensor: Tensor, places: Any = 0):
        self.name, self.tensor, self.places = name, tensor, places
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.name, self.tensor, self.places + more)

    __radd__ = __add__

    def numbers(self) -> Tensor:
        """The memory from the tensor's first number on, also what lies behind its last one."""
        behind = self.tensor.untyped_storage().nbytes() // self.tensor.element_size() - self.tensor.storage_offset()
        return torch.as_strided(self.tensor, (behind,), (1,))


class Language:
    """Stands in for triton.language in one program of a launch."""

    constexpr = int
    float16, float32, float64 = torch.float16, torch.float32, torch.float64
    bfloat16, int32, int64 = torch.bfloat16, torch.int32, torch.int64
    exp, sqrt, rsqrt, abs = torch.exp, torch.sqrt, torch.rsqrt, torch.abs
    where, maximum, minimum = torch.where, torch.maximum, torch.minimum

    def __init__(self, trace: Trace | None = None, program: tuple[int, ...] = (), grid: tuple[int, ...] = ()):
        self._trace, self._program, self._grid = trace, program, grid

    def program_id(self, axis: int) -> int:
        return self._program[axis] if axis < len(self._program) else 0

    def num_programs(self, axis: int) -> int:
        return self._grid[axis] if axis < len(self._grid) else 1

    def arange(self, start: int, end: int) -> Tensor:
        if (end - start) & (end - start - 1):
            raise ValueError(f"arange's range must be a power of 2, and {end} - {start} is none")
        return torch.arange(start, end)

    def zeros(self, shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def sum(self, x: Tensor, axis: int | None = None, keep_dims: bool = False) -> Tensor:
        return x.sum() if axis is None else x.sum(axis, keepdim=keep_dims)

    def max(self, x: Tensor, axis: int | None = None, keep_dims: bool = False) -> Tensor:
        return x.max() if axis is None else x.amax(axis, keepdim=keep_dims)

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0.0) -> Tensor:
        places, on = self._note("load", pointer, mask)
        numbers = pointer.numbers()
        there = on & (places >= 0) & (places < len(numbers))
        # What nobody wrote is nan here. On a GPU it is whatever lies there, or the end of the program.
        return torch.where(there, numbers[places.clamp(0, len(numbers) - 1)], torch.where(on, torch.nan, other)).to(
            numbers.dtype
        )

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        places, on = self._note("store", pointer, mask)
        numbers = pointer.numbers()
        value = torch.as_tensor(value).to(numbers.dtype).broadcast_to(places.shape)
        there = on & (places >= 0) & (places < len(numbers))
        numbers[places[there]] = value[there]

    def _note(self, kind: str, pointer: Pointer, mask: Any) -> tuple[Tensor, Tensor]:
        places = torch.as_tensor(pointer.places)
        on = torch.ones_like(places, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        places, on = torch.broadcast_tensors(places, on)
        if self._trace is not None:
            caller = sys._getframe(2)
            line = linecache.getline(caller.f_code.co_filename, caller.f_lineno).strip()
            lanes = tuple(places.flatten().tolist()), tuple(on.flatten().tolist())
            self._trace.accesses.append(Access(self._trace.programs, kind, pointer.name, *lanes, line))
        return places, on


class Kernel:
    """What `triton.jit` makes where there is no Triton."""

    def __init__(self, fn: Callable[..., None]):
        self.fn = fn
        self.__name__ = fn.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self.run, grid)

    def run(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        _run(self.fn, grid, arguments, options, None)


class StandIn:
    """What the lessons use of the module triton."""

    jit = Kernel

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << max(n - 1, 0).bit_length()


def _run(
    fn: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any], note: Trace | None
) -> None:
    known = inspect.signature(fn).parameters
    given = inspect.signature(fn).bind(*arguments, **{k: v for k, v in options.items() if k in known}).arguments
    given = {k: Pointer(k, v) if isinstance(v, Tensor) else v for k, v in given.items()}
    for program in itertools.product(*map(range, reversed(grid))):
        language = Language(note, program[::-1], grid)
        types.FunctionType(fn.__code__, fn.__globals__ | {"tl": language}, closure=fn.__closure__)(**given)
        if note is not None:
            note.programs += 1


def trace(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Trace:
    """Run a kernel of the lessons as `kernel[grid](*arguments, **options)` does, on CPU tensors, and note what it does.

    The kernel must call Triton's language `tl`, as everybody does.

    Raises:
        ValueError: a tensor is not contiguous: its places would not be those of its picture.
    """
    fn = getattr(kernel, "fn", kernel)
    names = list(inspect.signature(fn).parameters)
    tensors = {n: a for n, a in [*zip(names, arguments), *options.items()] if isinstance(a, Tensor)}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous; give {name}.contiguous()")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    note = Trace(shapes, {name: tensor.element_size() for name, tensor in tensors.items()})
    _run(fn, grid, arguments, options, note)
    return note


if _triton is not None:
    triton, tl = _triton, _tl
else:
    triton, tl = StandIn(), Language()
