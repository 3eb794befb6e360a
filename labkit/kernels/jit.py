"""Triton where there is one: macOS and Windows have none, and every module must be importable there.

    from labkit.kernels.jit import jit, tl, triton

Without a GPU, Triton's interpreter (TRITON_INTERPRET=1, set before the first import) runs kernels in NumPy, one program
after the other. That is for tests of small shapes: right in float32 and float16, silently wrong in bfloat16, and slow.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["interpreted", "jit", "tl", "triton"]

try:
    import triton
    import triton.language as tl

    jit: Any = triton.jit
except ImportError:
    triton = tl = None

    def jit(function: Any = None, **options: Any) -> Any:
        """Leaves a kernel that can never be launched as it is."""
        return function if function is not None else jit


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
