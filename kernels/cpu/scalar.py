"""What every CPU kernel shares: widening, narrowing, prefetching, a vectorisable exponential.

KV elements are stored as bit patterns, and the NumPy type of an array says which: ``uint16`` holds
bfloat16, ``int16`` holds IEEE half precision (Numba has no such scalars on a CPU), ``float32`` is
itself.
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Reductions may be reordered; infinities keep their meaning (an empty set has lse = -inf)."""

_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_F32 = ir.FloatType()
_F16 = ir.HalfType()


@intrinsic
def widen(typingctx, pattern):
    """The float32 value of a stored element."""

    def from_bfloat16(context, builder, signature, args):
        bits = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(bits, _F32)

    def from_half(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], _F16), _F32)

    def from_single(context, builder, signature, args):
        return args[0]

    codegen = {types.uint16: from_bfloat16, types.int16: from_half, types.float32: from_single}
    return types.float32(pattern), codegen[pattern]


@intrinsic
def _from_bits(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), codegen


@intrinsic
def _to_bits(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _I32)

    return types.int32(types.float32), codegen


@intrinsic
def narrow(typingctx, value, like):
    """`value` (float32) rounded to nearest even and stored as an element of the type of `like`."""

    def to_bfloat16(context, builder, signature, args):
        bits = builder.bitcast(args[0], _I32)
        sixteen = ir.Constant(_I32, 16)
        odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(_I32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
        quiet_nan = ir.Constant(_I32, 0x7FC00000)
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(
            builder.lshr(builder.select(is_nan, quiet_nan, rounded), sixteen), _I16
        )

    def to_half(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], _F16), _I16)

    def to_single(context, builder, signature, args):
        return args[0]

    codegen = {types.uint16: to_bfloat16, types.int16: to_half, types.float32: to_single}
    return like(types.float32, like), codegen[like]


@intrinsic
def prefetch(typingctx, array, row, column):
    """Start loading the cache line of ``array[row, column]``; no effect on results."""

    def codegen(context, builder, signature, args):
        where = context.make_array(signature.args[0])(context, builder, args[0])
        indices = [context.cast(builder, args[i], signature.args[i], types.intp) for i in (1, 2)]
        address = cgutils.get_item_pointer(context, builder, signature.args[0], where, indices)
        byte = ir.IntType(8).as_pointer()
        signature_of_prefetch = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(
            builder.module, signature_of_prefetch, "llvm.prefetch.p0"
        )
        read, keep, data = (ir.Constant(_I32, n) for n in (0, 3, 1))
        builder.call(function, [builder.bitcast(address, byte), read, keep, data])
        return context.get_dummy_value()

    return types.none(array, row, column), codegen


@intrinsic
def widest_vectors(typingctx):
    """Let the loops of the kernel that calls this use vectors of 512 bits where there are any.

    LLVM prefers half of that for many processors; exponentials take two thirds of the time.
    """

    def codegen(context, builder, signature, args):
        # llvmlite knows no attributes with values; a set takes what is written as one.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), codegen


_SIGNLESS = np.int32(0x7FFFFFFF)


@njit(inline="always")
def ordered(x):
    """An integer that is larger for a larger x: their maximum is vector code, that of floats not.

    A NaN is beyond both infinities, by its sign.
    """
    bits = _to_bits(x)
    return np.int32(bits ^ ((bits >> np.int32(31)) & _SIGNLESS))


@njit(inline="always")
def from_ordered(key):
    """The number that `ordered` made `key` of."""
    return _from_bits(np.int32(key ^ ((key >> np.int32(31)) & _SIGNLESS)))


_LOG2_E = np.float32(1.4426950408889634)
_P5, _P4, _P3, _P2, _P1 = (
    np.float32(x) for x in (0.00132647273, 0.00967151299, 0.0555073358, 0.240222424, 0.693147004)
)
"""(2**f - 1) / f for f between -1/2 and 1/2; 2**f is then off by 1.1e-7 of it at most."""
_LOWEST = np.float32(-87.0)


@njit(inline="always", fastmath=FAST)
def exp_nonpositive(x):
    """e**x for x <= 0, to a relative error of (4 - 2x) * 2**-24; at least e**-87 (under 2e-38)."""
    t = max(x, _LOWEST) * _LOG2_E
    whole = np.int32(t - np.float32(0.5))
    f = t - np.float32(whole)
    p = _P5
    p = p * f + _P4
    p = p * f + _P3
    p = p * f + _P2
    p = p * f + _P1
    p = p * f + np.float32(1.0)
    return _from_bits(np.int32(_to_bits(p) + (whole << np.int32(23))))


_LN_2 = np.float32(math.log(2.0))
_ROOT_HALF_BITS = np.int32(0x3F3504F3)
_EXPONENT = np.int32(-1 << 23)
_D0, _D1, _D2, _D3, _D4, _D5, _D6, _D7, _D8 = (
    np.float32(x)
    for x in (
        0.999999974, -0.49999987, 0.333341835, -0.250021542, 0.199569719,
        -0.165606753, 0.149491349, -0.14377505, 0.0874405312,
    )
)  # fmt: skip
"""ln(1 + f) / f for 1 + f between the roots of 1/2 and 2, fitted at Chebyshev's points: to 3e-8."""


@njit(inline="always", fastmath=FAST)
def log_positive(x):
    """ln x for a normal number x > 0, to a relative error of 4e-7: np.log is no vector code."""
    bits = _to_bits(x)
    whole = np.int32(bits - _ROOT_HALF_BITS) & _EXPONENT
    f = _from_bits(np.int32(bits - whole)) - np.float32(1.0)
    p = _D8
    p = p * f + _D7
    p = p * f + _D6
    p = p * f + _D5
    p = p * f + _D4
    p = p * f + _D3
    p = p * f + _D2
    p = p * f + _D1
    p = p * f + _D0
    return np.float32(np.int32(whole >> np.int32(23))) * _LN_2 + f * p
