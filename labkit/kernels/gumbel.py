"""The noise of `sampling`, as functions for Triton kernels: the same 32-bit hash, bit for bit.

One number costs a `mix`, ten integer instructions, and then two exact logarithms of twenty each. A row has 150,000
tokens and one winner, so the logarithms are only taken where a bound says that it may be among them:

    noise = -log(-log u),   v = 1 - u,   -log u >= v,   so   noise <= -log v   (and almost equal where noise is large)

The bound takes one instruction of the hardware's approximate log₂.

Letters: u and v uniform in (0, 1), k0 and k1 the row's keys of `sampling.noise_keys`.
"""

from __future__ import annotations

from labkit.kernels.jit import jit, tl


@jit
def mix(x, key=0):
    """`sampling.mix` in uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15) ^ key
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@jit
def row_keys(parameters, position):
    """`sampling.noise_keys` of one row; parameters points at its slot's."""
    choice = tl.load(parameters + 7).to(tl.uint32, bitcast=True)
    low = tl.load(parameters + 8).to(tl.uint32, bitcast=True)
    high = tl.load(parameters + 9).to(tl.uint32, bitcast=True)
    first = mix(mix(low ^ 0x243F6A88) + high)
    second = mix(mix(high ^ 0x13198A2E) + low)
    where = mix(mix(position.to(tl.uint32) * 0x9E3779B9 + choice) ^ 0x03707344)
    return mix(first + where), mix(second ^ where)


@jit
def noise_bits(k0, k1, ids):
    """32 random bits for each token id."""
    return mix(ids.to(tl.uint32) * 0x9E3779B9 + k0, k1)


@jit
def noise(bits):
    """Gumbel noise from random bits, as `sampling.gumbel_noise` makes it."""
    u = (1.0 - 2.0**-24) - (bits >> 9).to(tl.float32) * (2.0**-23)
    return -tl.log(-tl.log(u))


@jit
def log2_bound(bits, FAST: tl.constexpr):
    """log₂ v: `noise` is not above -ln 2 times it, but for 1e-4 of rounding."""
    # 23 bits become the fraction of a float in [1, 2); subtracting all but half a step leaves v, exactly.
    v = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - (1.0 - 2.0**-24)
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [v], tl.float32, is_pure=True, pack=1)
    return tl.log2(v)
