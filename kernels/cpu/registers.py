"""Loops whose running results stay in vector registers, where Numba's arrays would be in memory."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 64
"""Points that are compared with a centroid at once."""

CHANNELS = 32
"""Columns of a product that are summed up at once."""

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_FUSED = ("contract",)
_SINGLE = 4


def _load(builder, address, kind):
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4, typ=kind)


def _store(builder, value, address):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _splat(builder, scalar, count):
    """A vector of `count` times the same number."""
    kind = ir.VectorType(scalar.type, count)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, count), [0] * count)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def _multiply_add(builder, a, b, c):
    return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)


def _offset(builder, address, index, nbytes):
    return builder.add(address, builder.mul(index, ir.Constant(_I64, nbytes)))


@intrinsic(prefer_literal=True)
def best_of_centroids(typingctx, points, centroids, offsets, clusters, out, dim):
    """For `LANES` points, the centroid with the largest ``point . centroid + offset``, the first.

    Addresses (intp): points float32 [dim, LANES]; centroids float32 [clusters, dim]; offsets
    float32 [clusters]; out int32 [LANES], 0 for a point that fits nothing. dim is a constant.
    """
    dims = dim.literal_value
    fits, places = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)

    def codegen(context, builder, signature, args):
        own = [
            _load(builder, builder.add(args[0], ir.Constant(_I64, j * LANES * _SINGLE)), fits)
            for j in range(dims)
        ]
        least = ir.Constant(fits, [float("-inf")] * LANES)
        best = cgutils.alloca_once_value(builder, least)
        at = cgutils.alloca_once_value(builder, ir.Constant(places, [0] * LANES))
        with cgutils.for_range(builder, args[3]) as loop:
            first = _offset(builder, args[1], loop.index, dims * _SINGLE)
            offset = _load(builder, _offset(builder, args[2], loop.index, _SINGLE), _F32)
            fit = _splat(builder, offset, LANES)
            for j in range(dims):
                x = _load(builder, builder.add(first, ir.Constant(_I64, j * _SINGLE)), _F32)
                fit = _multiply_add(builder, own[j], _splat(builder, x, LANES), fit)
            known = builder.load(best)
            is_better = builder.fcmp_ordered(">", fit, known)
            place = _splat(builder, builder.trunc(loop.index, _I32), LANES)
            builder.store(builder.select(is_better, fit, known), best)
            builder.store(builder.select(is_better, place, builder.load(at)), at)
        _store(builder, builder.load(at), args[4])
        return context.get_dummy_value()

    return types.none(points, centroids, offsets, clusters, out, dim), codegen


@intrinsic(prefer_literal=True)
def multiply_tile(typingctx, left, right, length, out, stride, rows):
    """`rows` x `CHANNELS` numbers of a matrix product, ``out = left @ right``.

    Addresses (intp): left float32 [rows, length]; right float32 [length, CHANNELS]; out float32,
    its rows `stride` bytes apart. rows is a constant.
    """
    count, kind = rows.literal_value, ir.VectorType(_F32, CHANNELS)

    def codegen(context, builder, signature, args):
        zero = ir.Constant(kind, [0.0] * CHANNELS)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(count)]
        step = builder.mul(args[2], ir.Constant(_I64, _SINGLE))
        with cgutils.for_range(builder, args[2]) as loop:
            column = _offset(builder, args[0], loop.index, _SINGLE)
            own = _load(builder, _offset(builder, args[1], loop.index, CHANNELS * _SINGLE), kind)
            for row in range(count):
                at = builder.add(column, builder.mul(step, ir.Constant(_I64, row)))
                x = _splat(builder, _load(builder, at, _F32), CHANNELS)
                builder.store(_multiply_add(builder, x, own, builder.load(sums[row])), sums[row])
        for row in range(count):
            at = builder.add(args[3], builder.mul(args[4], ir.Constant(_I64, row)))
            _store(builder, builder.load(sums[row]), at)
        return context.get_dummy_value()

    return types.none(left, right, length, out, stride, rows), codegen
