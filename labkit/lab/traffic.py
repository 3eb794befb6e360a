"""`lab.traffic`: which operations does PyTorch really run, and how many bytes does each one read and write?"""

from __future__ import annotations

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
