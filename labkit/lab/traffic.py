"""`lab.traffic` and `lab.peak`: which operations does PyTorch really run, what do they move, what do they keep?"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Operation:
    """One operation that PyTorch ran."""

    name: str
    read: int  # bytes of its inputs
    written: int  # bytes of its result

    def __str__(self) -> str:
        return f"{self.name:<20} reads {self.read:>12,} bytes, writes {self.written:>12,}"


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = sum(tensor.nbytes for tensor in _tensors((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not func.name().startswith("aten::empty"):  # these move nothing
            name = func.name().removeprefix("aten::").partition(".")[0]
            self.operations.append(Operation(name, read, sum(tensor.nbytes for tensor in _tensors(out))))
        return out


def traffic(fn: Callable[..., Any], *arguments: Any) -> list[Operation]:
    """The operations of `fn(*arguments)` in their order: each reads its inputs from memory and writes its result."""
    with _Recorder() as recorder:
        fn(*arguments)
    return recorder.operations


class _Keeper(TorchDispatchMode):
    """Counts the bytes that operations have made and that are still in use."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:  # else a view of an input, or the input itself
                self.kept += storage.nbytes()
                weakref.finalize(tensor, self._free, storage.nbytes())
        self.peak = max(self.peak, self.kept)
        return out

    def _free(self, size: int) -> None:
        self.kept -= size


def peak(fn: Callable[..., Any], *arguments: Any) -> int:
    """The most bytes of results and intermediate results that `fn(*arguments)` has in memory at once.

    What a single operation needs within itself is not counted: PyTorch does not tell.
    """
    with _Keeper() as keeper:
        fn(*arguments)
    return keeper.peak
