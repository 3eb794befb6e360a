"""Lesson 01: why fuse RMSNorm?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from labkit.lab.exercises.exercise import Case, Exercise, Wrong, rounded
from labkit.lab.programs import triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _norm_cases() -> Iterator[Case]:
    for text, rows, weight, eps, dtype in (
        ("x = [[3, 4]]", [[3.0, 4.0]], [1.0, 1.0], 0.0, torch.float32),
        ("x = [[3, 4], [30, 40]]", [[3.0, 4.0], [30.0, 40.0]], [1.0, 1.0], 0.0, torch.float32),
        ("x = [[1, -1, 1]], weight = [1, 2, 3]", [[1.0, -1.0, 1.0]], [1.0, 2.0, 3.0], 0.0, torch.float32),
        ("x = [[1, 1]], eps = 3", [[1.0, 1.0]], [1.0, 1.0], 3.0, torch.float32),
        ("x [2, 1, 2]", [[[3.0, 4.0]], [[6.0, 2.0]]], [1.0, 1.0], 1e-6, torch.float32),
        ("x = [[300, -300, 0]] in float16", [[300.0, -300.0, 0.0]], [1.0, 1.0, 1.0], 1e-6, torch.float16),
    ):

        def run(
            fn: Callable[..., Any],
            rows: Any = rows,
            weight: list[float] = weight,
            eps: float = eps,
            dtype: torch.dtype = dtype,
        ) -> Any:
            x = torch.tensor(rows, dtype=dtype)
            y = fn(x, torch.tensor(weight, dtype=dtype), eps)
            kind = str(getattr(y, "dtype", type(y).__name__)).removeprefix("torch.")
            return {"y": rounded(y), "type": kind, "x afterwards": rounded(x)}

        yield Case(text, run)


NORM = Exercise(
    id="01.1",
    title="RMSNorm in PyTorch",
    name="rms_norm",
    difficulty="easy",
    stub='''
def rms_norm(x, weight, eps):
    """x / sqrt(mean(x²) + eps) * weight, the mean over the last dimension: x [..., E], weight [E] -> [..., E].

    Squares, mean and division in float32, whatever x's type is; the result has x's type again.
    """
    return ...  # about 3 lines
''',
    hints=(
        "Begin with `wide = x.float()` and end with `.to(x.dtype)`. In between nothing overflows.",
        "One number for each row: `wide.pow(2).mean(dim=-1, keepdim=True)`. `keepdim` lets it be divided by row.",
        "`torch.rsqrt(a)` is 1 / sqrt(a). eps goes under the root, next to the mean.",
    ),
    solution="""
def rms_norm(x, weight, eps):
    wide = x.float()
    mean_square = wide.pow(2).mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight
""",
    wrong=(
        Wrong(
            "subtracting the mean",
            """
def rms_norm(x, weight, eps):
    wide = x.float() - x.float().mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)).to(x.dtype) * weight
""",
            "you subtract the mean first. That is LayerNorm; RMSNorm leaves the mean where it is",
        ),
        Wrong(
            "float16 sums",
            """
def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight
""",
            "right, until x is float16: 300² is over 65,504, the largest float16, so the sum is infinite and the row "
            "is gone. Square and add in float32",
        ),
        Wrong(
            "float32 comes out",
            """
def rms_norm(x, weight, eps):
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps) * weight
""",
            "the numbers are right, but a float16 row comes back as float32. The next matrix product wants x's type",
        ),
        Wrong(
            "eps outside the root",
            """
def rms_norm(x, weight, eps):
    wide = x.float()
    return (wide / (wide.pow(2).mean(dim=-1, keepdim=True).sqrt() + eps)).to(x.dtype) * weight
""",
            "eps is added after the root. It belongs under it, to the mean of the squares",
        ),
        Wrong(
            "the sum of squares",
            """
def rms_norm(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).sum(dim=-1, keepdim=True) + eps)).to(x.dtype) * weight
""",
            "you divide by the root of the *sum* of squares, the row's length. The M in RMS is a mean",
        ),
        Wrong(
            "one mean for all rows",
            """
def rms_norm(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean() + eps)).to(x.dtype) * weight
""",
            "all rows share one mean. Each token is a row of its own: take the mean over the last dimension only",
        ),
        Wrong(
            "in place",
            """
def rms_norm(x, weight, eps):
    wide = x.float()
    x.copy_(wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps) * weight)
    return x
""",
            "right, but you wrote over the caller's x. The engine still needs it: it is the residual stream",
        ),
    ),
    cases=_norm_cases,
)


def _bytes_cases() -> Iterator[Case]:
    for rows, width, number_bytes in ((1, 4, 1), (1, 4, 4), (10, 4, 2), (4096, 1024, 4)):

        def run(fn: Callable[..., Any], case: tuple[int, int, int] = (rows, width, number_bytes)) -> Any:
            return fn(*case)

        yield Case(f"norm_bytes(rows={rows}, width={width}, number_bytes={number_bytes})", run)


BYTES = Exercise(
    id="01.2",
    title="Bytes of an RMSNorm",
    name="norm_bytes",
    difficulty="medium",
    stub='''
def norm_bytes(rows, width, number_bytes):
    """(bytes of four operations, bytes of one): what moves between chip and memory for x [rows, width].

    Four: squares = x², their mean, x × scale, × weight. One: reads x and weight, writes the result.
    What has only one number for each row is left out; weight is [width].
    """
    return ...  # about 2 lines
''',
    hints=(
        "Go through the four operations and note for each what it reads and what it writes; both are bytes.",
        "x² reads a matrix and writes one. The mean reads one and writes next to nothing. How about the other two?",
        "Four: 2 + 1 + 2 + 2 matrices, and the weight once. One: a matrix in, a matrix out, and the weight once.",
    ),
    solution="""
def norm_bytes(rows, width, number_bytes):
    matrix, weight = rows * width * number_bytes, width * number_bytes
    return 7 * matrix + weight, 2 * matrix + weight
""",
    wrong=(
        Wrong(
            "reads only",
            """
def norm_bytes(rows, width, number_bytes):
    matrix, weight = rows * width * number_bytes, width * number_bytes
    return 4 * matrix + weight, matrix + weight
""",
            "you counted what is read. Writing costs as much: three of the four operations write a whole matrix, "
            "and the one operation writes its result",
        ),
        Wrong(
            "numbers",
            """
def norm_bytes(rows, width, number_bytes):
    return 7 * rows * width + width, 2 * rows * width + width
""",
            "these are numbers, not bytes: a number takes number_bytes of them",
        ),
        Wrong(
            "a weight for each row",
            """
def norm_bytes(rows, width, number_bytes):
    matrix = rows * width * number_bytes
    return 8 * matrix, 3 * matrix
""",
            "you read the weight anew for each row. It is one vector [width]; after the first row it is in a cache",
        ),
        Wrong(
            "one reads twice",
            """
def norm_bytes(rows, width, number_bytes):
    matrix, weight = rows * width * number_bytes, width * number_bytes
    return 7 * matrix + weight, 3 * matrix + weight
""",
            "the one operation needs x twice, for the squares and for the result. But it *reads* it once: "
            "a row stays on the chip in between",
        ),
    ),
    cases=_bytes_cases,
)


class Room:
    """A matrix in the middle of memory that belongs to others, so that what leaves the matrix is seen and harms nobody.

    Behind it lie BEYOND numbers, 1000 each.
    """

    BEYOND = 64

    def __init__(self, rows: Sequence[Sequence[float]], dtype: torch.dtype):
        values = torch.tensor(rows, dtype=dtype)
        self._all = torch.full((values.numel() + self.BEYOND,), 1000.0, dtype=dtype, device=DEVICE)
        self.matrix = self._all[: values.numel()].view(values.shape)
        self.matrix.copy_(values)

    def strangers(self) -> str:
        """What became of the numbers behind the matrix."""
        changed = int((self._all[self.matrix.numel() :] != 1000).sum())
        return f"{changed} overwritten" if changed else "as they were"


WEIGHT = [1.0, 2.0, 0.5, 1.0, 4.0, 1.0]  # powers of two: the same result whether it is rounded before or after them
UNWRITTEN = -7.0  # in a result before the kernel runs: no kernel here computes it


def _rows(count: int, width: int) -> list[list[float]]:
    """Small whole numbers, no two rows alike."""
    return [[float((3 * row + 2 * column + row * column) % 7 - 2) for column in range(width)] for row in range(count)]


def _kernel_cases() -> Iterator[Case]:
    for text, rows, eps, dtype in (
        ("x [1, 4], BLOCK=4", [[1.0, 2.0, -2.0, 4.0]], 1e-6, torch.float32),
        ("x [3, 4], BLOCK=4", _rows(3, 4), 1e-6, torch.float32),
        ("x [1, 4], eps=3", [[1.0, 1.0, -1.0, 1.0]], 3.0, torch.float32),
        ("x [1, 3], BLOCK=4", [[1.0, 2.0, -2.0]], 1e-6, torch.float32),
        ("x [4, 6], BLOCK=8", _rows(4, 6), 1e-6, torch.float32),
        ("x [1, 4] in float16, with 300 in it", [[300.0, -300.0, 300.0, 0.0]], 1e-6, torch.float16),
    ):

        def run(kernel: Any, rows: list[list[float]] = rows, eps: float = eps, dtype: torch.dtype = dtype) -> Any:
            x, out = Room(rows, dtype), Room([[UNWRITTEN] * len(rows[0])] * len(rows), dtype)
            width = len(rows[0])
            weight = Room([WEIGHT[:width]], dtype).matrix[0]
            kernel[(len(rows),)](x.matrix, weight, out.matrix, width, eps, BLOCK=triton.next_power_of_2(width))
            if (out.matrix == UNWRITTEN).all() and out.strangers() == "as they were":
                return ...
            return {"out": rounded(out.matrix), "behind it": out.strangers()}

        yield Case(text, run)


KERNEL = Exercise(
    id="01.3",
    title="RMSNorm in Triton",
    name="rms_norm_kernel",
    difficulty="medium",
    stub='''
@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    """Program r: row r of x [T, width], normalised, into row r of out. BLOCK >= width is a power of 2.

    x, weight, out point at the first number of each; the sum is float32.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    # about 4 lines
''',
    hints=(
        "A program's row begins `row * width` numbers behind `x`. "
        "`tl.load(x + row * width + column, mask=inside, other=0.0)` loads it; a lane outside the mask gets 0, which "
        "adds nothing to the sum.",
        "`.to(tl.float32)` before squaring. `tl.sum(value * value, axis=0) / width` is the mean: the true width, for "
        "that many lanes hold numbers.",
        "Multiply with `tl.rsqrt(mean + eps)` and with the weight, loaded at `weight + column` with the same mask; "
        "`tl.store(out + row * width + column, result, mask=inside)` turns it into out's type.",
    ),
    solution="""
@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value * scale * w, mask=inside)
""",
    wrong=(
        Wrong(
            "subtracting the mean",
            """
@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value * scale * w, mask=inside)
""",
            "you subtract the mean first. That is LayerNorm; RMSNorm leaves the mean where it is",
        ),
        Wrong(
            "no mask at the load",
            """
@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value * scale * w, mask=inside)
""",
            "right where the row fills the block. Elsewhere the lanes behind its end load numbers that are not the "
            "row's, and they count in your sum: mask=inside, other=0.0",
        ),
        Wrong(
            "no mask at the store",
            """
@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value * scale * w)
""",
            "the row is right, but the lanes behind its end store too, into memory that is not the row's. "
            "On a GPU that is another program's result, or another tensor",
        ),
        Wrong(
            "no masks",
            """
@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * width + column).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    w = tl.load(weight + column).to(tl.float32)
    tl.store(out + row * width + column, value * scale * w)
""",
            "right where the row fills the block. Elsewhere the lanes behind its end load numbers that are not the "
            "row's and store where nothing is theirs: three accesses, three masks",
        ),
        Wrong(
            "rows BLOCK apart",
            """
@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * BLOCK + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * BLOCK + column, value * scale * w, mask=inside)
""",
            "your rows begin BLOCK numbers apart. BLOCK is how many lanes a program has; in memory a row follows the "
            "last one after width numbers",
        ),
        Wrong(
            "eps outside the root",
            """
@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    size = tl.sqrt(tl.sum(value * value, axis=0) / width) + eps
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value / size * w, mask=inside)
""",
            "eps is added after the root. It belongs under it, to the mean of the squares",
        ),
        Wrong(
            "the mean over the block",
            """
@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / BLOCK + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value * scale * w, mask=inside)
""",
            "you divide by BLOCK. The masked lanes hold zeros and are no numbers of the row: divide by width",
        ),
        Wrong(
            "float16 squares",
            """
@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0)
    scale = tl.rsqrt((tl.sum(value * value, axis=0) / width + eps).to(tl.float32))
    w = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * width + column, value * scale * w, mask=inside)
""",
            "right, until x is float16: 300² is over 65,504, the largest float16. Convert what you loaded with "
            ".to(tl.float32) before you square it",
        ),
        Wrong(
            "always the first row",
            """
@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + column, value * scale * w, mask=inside)
""",
            "every program works on the first row, and the others stay unwritten. "
            "A program knows its row by tl.program_id(0) only: add row * width to x and to out",
        ),
    ),
    cases=_kernel_cases,
)


def _fused_cases() -> Iterator[Case]:
    for text, rows, stream in (
        ("x [1, 4], BLOCK=4", [[1.0, 2.0, -2.0, 4.0]], [[1.0, 1.0, 3.0, -1.0]]),
        ("x [2, 3], BLOCK=4", _rows(2, 3), _rows(3, 3)[1:]),
        ("x [4, 6], BLOCK=8", _rows(4, 6), _rows(5, 6)[1:]),
    ):

        def run(kernel: Any, rows: list[list[float]] = rows, stream: list[list[float]] = stream) -> Any:
            width = len(rows[0])
            x, residual = Room(rows, torch.float32), Room(stream, torch.float32)
            out = Room([[UNWRITTEN] * width] * len(rows), torch.float32)
            weight = Room([WEIGHT[:width]], torch.float32).matrix[0]
            block = triton.next_power_of_2(width)
            kernel[(len(rows),)](x.matrix, residual.matrix, weight, out.matrix, width, 1e-6, BLOCK=block)
            if (out.matrix == UNWRITTEN).all() and residual.matrix.tolist() == stream:
                return ...
            behind = "as they were" if out.strangers() == residual.strangers() == "as they were" else "overwritten"
            return {"residual": rounded(residual.matrix), "out": rounded(out.matrix), "behind them": behind}

        yield Case(text, run)


FUSED = Exercise(
    id="01.4",
    title="The addition too",
    name="add_rms_norm_kernel",
    difficulty="medium",
    stub='''
@triton.jit
def add_rms_norm_kernel(x, residual, weight, out, width, eps, BLOCK: tl.constexpr):
    """Program r, row r: residual += x, and out = the RMSNorm of that sum. All are [T, width] but weight [width]."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    # about 7 lines: those of 01.3, and what is new
''',
    hints=(
        "Load both rows, add them, and go on with the sum where 01.3 went on with the row.",
        "The sum has two readers: this norm, which has it at hand, and the next block, which will look for it in "
        "`residual`.",
        "`tl.store(residual + row * width + column, total, mask=inside)` as soon as you have `total`; "
        "then its mean square, and `tl.store(out + …)` as before.",
    ),
    solution="""
@triton.jit
def add_rms_norm_kernel(x, residual, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    total = tl.load(x + place, mask=inside, other=0.0) + tl.load(residual + place, mask=inside, other=0.0)
    tl.store(residual + place, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, wide * scale * w, mask=inside)
""",
    wrong=(
        Wrong(
            "the sum is not kept",
            """
@triton.jit
def add_rms_norm_kernel(x, residual, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    total = tl.load(x + place, mask=inside, other=0.0) + tl.load(residual + place, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + place, total * scale * w, mask=inside)
""",
            "out is right, but residual is what it was. The next block adds to the sum: store it",
        ),
        Wrong(
            "the norm of x",
            """
@triton.jit
def add_rms_norm_kernel(x, residual, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    value = tl.load(x + place, mask=inside, other=0.0)
    tl.store(residual + place, value + tl.load(residual + place, mask=inside, other=0.0), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + place, value * scale * w, mask=inside)
""",
            "residual is right, but you normalised x alone. The next block reads the norm of the whole stream: the sum",
        ),
        Wrong(
            "the norm into the stream",
            """
@triton.jit
def add_rms_norm_kernel(x, residual, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    total = tl.load(x + place, mask=inside, other=0.0) + tl.load(residual + place, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(residual + place, total * scale * w, mask=inside)
    tl.store(out + place, total * scale * w, mask=inside)
""",
            "out is right, but you stored the normalised row into residual. The stream itself is never normalised: "
            "it gets the plain sum",
        ),
        Wrong(
            "no masks",
            """
@triton.jit
def add_rms_norm_kernel(x, residual, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    total = tl.load(x + place) + tl.load(residual + place)
    tl.store(residual + place, total, mask=inside)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
    w = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + place, total * scale * w, mask=inside)
""",
            "right where the row fills the block. Elsewhere both loads bring numbers from behind the row's end into "
            "the sum of squares: mask=inside, other=0.0",
        ),
    ),
    cases=_fused_cases,
)

EXERCISES = (NORM, BYTES, KERNEL, FUSED)
