"""Group ranges, quantising and restoring over the tokens of an extent's blocks.

Arguments are described once, in `tierstore.kernels.quantise`. No operation is reordered or fused,
so that the codes equal those of the plain NumPy version byte for byte.
"""

import numpy as np
from numba import njit

from tierstore.kernels.cpu.scalar import narrow, widen

_MAGNITUDE = np.int32(0x7FFFFFFF)
_LARGEST = np.float32(65504.0)
_HALF = np.float32(0.5)
_SMALLEST_NORMAL = np.int32(0x3C800000)  # 2**-6, the smallest normal e4m3 number
_SUBNORMAL = np.float32(16384.0)  # Added to a smaller number, it leaves multiples of 2**-9.
_SUBNORMAL_BITS = np.int32(0x46800000)


@njit(cache=True, nogil=True, error_model="numpy")
def ranges(rows, first, tokens, channels, token_group, channel_group, low, high):
    """Fill `low` and `high` with ordered integers; returns the bits of the largest magnitude.

    ``bits ^ ((bits >> 31) & 0x7FFFFFFF)`` orders floats as integers, whose minimum vectorises.
    """
    groups, wide = low.shape
    low[:] = _MAGNITUDE
    high[:] = ~_MAGNITUDE
    x = np.empty(channels, np.float32)
    bits = x.view(np.int32)
    peak = np.int32(0)
    for t in range(rows.shape[0] * tokens):
        at = first + (t % tokens) * channels
        part = rows[t // tokens, at : at + channels]
        for c in range(channels):
            x[c] = widen(part[c])
        most = np.int32(0)
        for c in range(channels):
            most = max(most, np.int32(bits[c] & _MAGNITUDE))
        peak = max(peak, most)
        g = min(t // token_group, groups - 1)
        if channel_group == 1:
            lowest = low[g]
            highest = high[g]
            for c in range(channels):
                key = np.int32(bits[c] ^ ((bits[c] >> 31) & _MAGNITUDE))
                lowest[c] = min(lowest[c], key)
                highest[c] = max(highest[c], key)
        else:
            for w in range(wide):
                a = low[g, w]
                b = high[g, w]
                for c in range(w * channel_group, min((w + 1) * channel_group, channels)):
                    key = np.int32(bits[c] ^ ((bits[c] >> 31) & _MAGNITUDE))
                    a = min(a, key)
                    b = max(b, key)
                low[g, w] = a
                high[g, w] = b
    return peak


@njit(inline="always")
def _spread(values, g, channel_group, channels, out):
    """`out` [channels]: the value of each channel's group."""
    for w in range(values.shape[1]):
        value = values[g, w]
        for c in range(w * channel_group, min((w + 1) * channel_group, channels)):
            out[c] = value


@njit(cache=True, nogil=True, error_model="numpy")
def encode_integers(rows, first, tokens, channels, token_group, channel_group, low, scale,
                    bits, codes):  # fmt: skip
    groups = low.shape[0]
    half = (channels + 1) // 2
    top = np.float32((1 << bits) - 1)
    zero = np.empty(channels, np.float32)
    step = np.empty(channels, np.float32)
    q = np.zeros(2 * half, np.uint8)
    for t in range(rows.shape[0] * tokens):
        at = first + (t % tokens) * channels
        part = rows[t // tokens, at : at + channels]
        g = min(t // token_group, groups - 1)
        if channel_group == 1:
            zero[:] = low[g]
            step[:] = scale[g]
        else:
            _spread(low, g, channel_group, channels, zero)
            _spread(scale, g, channel_group, channels, step)
        for c in range(channels):
            level = (widen(part[c]) - zero[c]) / step[c] + _HALF
            q[c] = np.uint8(np.int32(min(level, top)))
        line = codes[t]
        if bits == 8:
            for c in range(channels):
                line[c] = q[c]
        else:
            for c in range(half):
                line[c] = q[c] | (q[c + half] << np.uint8(4))


@njit(cache=True, nogil=True, error_model="numpy")
def decode_integers(codes, low, scale, bits, tokens, channels, token_group, channel_group,
                    rows, first):  # fmt: skip
    groups = low.shape[0]
    half = (channels + 1) // 2
    zero = np.empty(2 * half, np.float32)
    step = np.empty(2 * half, np.float32)
    q = np.empty(2 * half, np.uint8)
    for t in range(rows.shape[0] * tokens):
        at = first + (t % tokens) * channels
        part = rows[t // tokens, at : at + channels]
        g = min(t // token_group, groups - 1)
        if channel_group == 1:
            zero[:channels] = low[g]
            step[:channels] = scale[g]
        else:
            _spread(low, g, channel_group, channels, zero)
            _spread(scale, g, channel_group, channels, step)
        line = codes[t]
        if bits == 8:
            for c in range(channels):
                q[c] = line[c]
        else:
            for c in range(half):
                q[c] = line[c] & np.uint8(15)
                q[c + half] = line[c] >> np.uint8(4)
        for c in range(channels):
            x = zero[c] + np.float32(q[c]) * step[c]
            part[c] = narrow(min(max(x, -_LARGEST), _LARGEST), part[c])


@njit(cache=True, nogil=True, error_model="numpy")
def encode_floats(rows, first, tokens, channels, token_group, channel_group, scale, codes):
    groups = scale.shape[0]
    step = np.empty(channels, np.float32)
    y = np.empty(channels, np.float32)
    bits = y.view(np.int32)
    small = np.empty(channels, np.float32)
    small_bits = small.view(np.int32)
    for t in range(rows.shape[0] * tokens):
        at = first + (t % tokens) * channels
        part = rows[t // tokens, at : at + channels]
        g = min(t // token_group, groups - 1)
        if channel_group == 1:
            step[:] = scale[g]
        else:
            _spread(scale, g, channel_group, channels, step)
        for c in range(channels):
            y[c] = widen(part[c]) / step[c]
            small[c] = abs(y[c]) + _SUBNORMAL
        line = codes[t]
        for c in range(channels):
            sign = (bits[c] >> np.int32(24)) & np.int32(0x80)
            a = bits[c] & _MAGNITUDE
            rounded = a + np.int32(0x7FFFF) + ((a >> np.int32(20)) & np.int32(1))
            normal = min((rounded >> np.int32(20)) - np.int32(960), np.int32(0x7E))
            tiny = small_bits[c] - _SUBNORMAL_BITS
            code = normal if a >= _SMALLEST_NORMAL else tiny
            line[c] = np.uint8(sign | code)


@njit(cache=True, nogil=True, error_model="numpy")
def decode_floats(codes, scale, table, tokens, channels, token_group, channel_group, rows, first):
    groups = scale.shape[0]
    step = np.empty(channels, np.float32)
    for t in range(rows.shape[0] * tokens):
        at = first + (t % tokens) * channels
        part = rows[t // tokens, at : at + channels]
        g = min(t // token_group, groups - 1)
        if channel_group == 1:
            step[:] = scale[g]
        else:
            _spread(scale, g, channel_group, channels, step)
        line = codes[t]
        for c in range(channels):
            x = table[line[c]] * step[c]
            part[c] = narrow(min(max(x, -_LARGEST), _LARGEST), part[c])
