"""x Wᵀ + b, in whichever form the machine does fastest for this number of rows.

A decode step has a row for each sequence, and its time is the time to read W. C++ of our own (csrc/linear.cpp) does
that up to 16 rows. Beyond, a BLAS library is faster, and on a CPU the two ways to write the product differ: with
X [T, I] and W [O, I] it can be X Wᵀ, or W Xᵀ given back as its transpose. Milliseconds for all layer matrices of a
135M-parameter model (Intel Xeon, AVX-512, MKL, two threads, float32):

    rows        1     2     4     8    12    16
    C++        20    19    23    27    34    45
    X Wᵀ       21    21    39    49    60    67
    W Xᵀ       20    34    39    40    41    41

With hundreds of rows W Xᵀ is still ahead by up to a tenth, but its result lies column by column in memory. So there it
is taken only for who asks for it with `any_layout`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from labkit.kernels import backend, native

CPP_ROWS = range(1, 13)  # where C++ is ahead
FEW_ROWS = range(4, 65)  # where W Xᵀ is ahead, the cost of its layout included


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, any_layout: bool = False) -> Tensor:
    """A linear layer.

    Args:
        x: [T, I]
        weight: [O, I]
        bias: [O]
        any_layout: the result may be a transposed view, also where that does not pay by itself.

    Returns:
        [T, O]; for few rows on a CPU it may be a transposed view.
    """
    rows = x.shape[0]
    if rows in CPP_ROWS and backend.on_cpp(x, weight):
        return native.linear(x, weight, bias)
    if x.device.type != "cpu" or not (rows in FEW_ROWS or (any_layout and rows > 1)):
        return functional.linear(x, weight, bias)
    if bias is None:
        return torch.mm(weight, x.t()).t()
    return torch.addmm(bias.unsqueeze(1), weight, x.t()).t()
