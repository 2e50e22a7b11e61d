"""Sort keys: (value, tie-break) in one int64, so that an order is one integer maximum.

Higher value first, then lower tie-break. The upper 32 bits hold the float, mapped to a signed
integer of the same order, the lower 32 the inverted tie-break. NaN must be replaced before; the
two zeros are one value.
"""

from __future__ import annotations

from vllm_uno.vllm_hooks.runner_api import tl, triton

# Below every order (that of -inf is -2139095041) and every key.
NO_ORDER = -(2**31)
NO_KEY = NO_ORDER * 2**32


@triton.jit
def float_order(value):
    """int32 of the same order as a float32 (Triton device function)."""
    # IEEE: the bits of negative floats fall as the value rises.
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def order_float(order):
    """The float32 of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack_key(order, tie):
    """int64 key of an int32 order and an int in [0, 2^31)."""
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - tie).to(tl.int64)


@triton.jit
def key_order(key):
    """The order of a key; of `NO_KEY` `NO_ORDER`."""
    return (key >> 32).to(tl.int32)


@triton.jit
def key_tie(key):
    """The tie-break of a key, int32; of `NO_KEY` 2^31 - 1."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
