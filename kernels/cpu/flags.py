"""Comparisons of 64 numbers at once, an answer in each bit of a word."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

NUMBERS = 64
"""Numbers that are compared at once."""

_I1 = ir.IntType(1)
_I64 = ir.IntType(64)
_SINGLES = ir.VectorType(ir.FloatType(), NUMBERS)


def _flags(builder, comparison, numbers, limit):
    own = builder.load(builder.inttoptr(numbers, _SINGLES.as_pointer()), align=4, typ=_SINGLES)
    none = ir.Constant(_SINGLES, ir.Undefined)
    first = builder.insert_element(none, limit, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), NUMBERS), [0] * NUMBERS)
    limits = builder.shuffle_vector(first, none, zeros)
    return builder.bitcast(comparison(own, limits), _I64)


@intrinsic
def flags_above(typingctx, numbers, limit):
    """Which of `NUMBERS` float32 are above a limit; numbers: their address (intp)."""

    def codegen(context, builder, signature, args):
        return _flags(builder, lambda a, b: builder.fcmp_ordered(">", a, b), *args)

    return types.int64(types.intp, types.float32), codegen


@intrinsic
def flags_not_below(typingctx, numbers, limit):
    """Which of `NUMBERS` float32 are not below a limit: no number is not. numbers: as above."""

    def codegen(context, builder, signature, args):
        return _flags(builder, lambda a, b: builder.fcmp_unordered(">=", a, b), *args)

    return types.int64(types.intp, types.float32), codegen


@intrinsic
def lowest_flag(typingctx, flags):
    """The number of the lowest bit that is set; some bit must be."""

    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(_I1, 1))

    return types.int64(types.int64), codegen
