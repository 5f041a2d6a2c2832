"""Loops whose running results stay in vector registers, where Numba's arrays would be in memory."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 64
"""Points that are compared with centroids at once."""

CENTROIDS = 4
"""Centroids that they are compared with at once."""

CHANNELS = 32
"""Columns of a product that are summed up at once."""

WIDTH = 16
"""Elements of a key or value that are multiplied at once."""

MOST_SUMS = 16
"""Sums that stay in registers beside what is multiplied."""

_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_F16 = ir.HalfType()
_SINGLES = ir.VectorType(_F32, WIDTH)
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


@intrinsic
def turn_points(typingctx, points, out, dim):
    """`LANES` points of `dim` float32 each, a multiple of 4, as [dim, LANES]. Addresses (intp)."""
    some = ir.VectorType(_F32, 4)

    def codegen(context, builder, signature, args):
        point = builder.mul(args[2], ir.Constant(_I64, _SINGLE))
        with cgutils.for_range(builder, builder.udiv(args[2], ir.Constant(_I64, 4))) as loop:
            source = _offset(builder, args[0], loop.index, 4 * _SINGLE)
            target = _offset(builder, args[1], loop.index, 4 * _SINGLE * LANES)
            for first in range(0, LANES, WIDTH):
                places = [ir.Constant(_I64, first + lane) for lane in range(WIDTH)]
                places = [builder.add(source, builder.mul(point, place)) for place in places]
                own = _joined(builder, [_load(builder, place, some) for place in places])
                for j in range(4):
                    channel = builder.shuffle_vector(own, own, _lanes(range(j, 4 * WIDTH, 4)))
                    place = ir.Constant(_I64, (j * LANES + first) * _SINGLE)
                    _store(builder, channel, builder.add(target, place))
        return context.get_dummy_value()

    return types.none(points, out, dim), codegen


@intrinsic
def best_of_centroids(typingctx, points, centroids, offsets, clusters, out, dim):
    """For `LANES` points, the centroid with the largest ``point . centroid + offset``, the first.

    Addresses (intp): points float32 [dim, LANES]; centroids float32 [clusters, dim]; offsets
    float32 [clusters]; out int64 [LANES], 0 for a point that fits nothing. clusters is a multiple
    of `CENTROIDS`.
    """
    fits, places = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)

    def codegen(context, builder, signature, args):
        best = cgutils.alloca_once_value(builder, ir.Constant(fits, [float("-inf")] * LANES))
        at = cgutils.alloca_once_value(builder, ir.Constant(places, [0] * LANES))
        sums = [cgutils.alloca_once(builder, fits) for _ in range(CENTROIDS)]
        row = builder.mul(args[5], ir.Constant(_I64, _SINGLE))
        turns = builder.udiv(args[3], ir.Constant(_I64, CENTROIDS))
        with cgutils.for_range(builder, turns) as loop:
            first = builder.mul(loop.index, ir.Constant(_I64, CENTROIDS))
            for number, total in enumerate(sums):
                place = builder.add(first, ir.Constant(_I64, number))
                offset = _load(builder, _offset(builder, args[2], place, _SINGLE), _F32)
                builder.store(_splat(builder, offset, LANES), total)
            start = builder.add(args[1], builder.mul(first, row))
            with cgutils.for_range(builder, args[5]) as inner:
                own = _load(builder, _offset(builder, args[0], inner.index, LANES * _SINGLE), fits)
                column = _offset(builder, start, inner.index, _SINGLE)
                for number, total in enumerate(sums):
                    place = builder.add(column, builder.mul(row, ir.Constant(_I64, number)))
                    x = _splat(builder, _load(builder, place, _F32), LANES)
                    builder.store(_multiply_add(builder, own, x, builder.load(total)), total)
            for number, total in enumerate(sums):
                fit, known = builder.load(total), builder.load(best)
                is_better = builder.fcmp_ordered(">", fit, known)
                place = builder.trunc(builder.add(first, ir.Constant(_I64, number)), _I32)
                place = _splat(builder, place, LANES)
                builder.store(builder.select(is_better, fit, known), best)
                builder.store(builder.select(is_better, place, builder.load(at)), at)
        _store(builder, builder.sext(builder.load(at), ir.VectorType(_I64, LANES)), args[4])
        return context.get_dummy_value()

    return types.none(points, centroids, offsets, clusters, out, dim), codegen


@intrinsic(prefer_literal=True)
def add_row(typingctx, points, sums, dim):
    """``sums += points`` for so many float32 numbers. Addresses (intp); dim is a constant."""
    kind = ir.VectorType(_F32, dim.literal_value)

    def codegen(context, builder, signature, args):
        total = builder.fadd(_load(builder, args[1], kind), _load(builder, args[0], kind))
        _store(builder, total, args[1])
        return context.get_dummy_value()

    return types.none(points, sums, dim), codegen


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


def tokens_at_once(group, dim, tokens):
    """How many keys or values a tile may have, a divisor of `tokens`; 0 if tiles do not fit."""
    if dim % WIDTH or group > MOST_SUMS:
        return 0
    return max((n for n in (2, 4) if tokens % n == 0 and n * group <= MOST_SUMS), default=1)


@intrinsic(prefer_literal=True)
def dot_tile(typingctx, keys, first, query, out, at, dim, tokens, group):
    """``out[g, at + t] = query[g] . keys[first + t * dim :][:dim]``, sums of single precision.

    keys: stored elements, flat; or [n, dim], of which `first` is a row then, or an array of
    `tokens` rows anywhere, as int64. query: float32 [group, dim]. out: float32. dim, tokens and
    group are constants that `tokens_at_once` allows.
    """
    size, count, heads = dim.literal_value, tokens.literal_value, group.literal_value

    def codegen(context, builder, signature, args):
        key, q, target = (_Elements(context, builder, signature, args, n) for n in (0, 2, 3))
        places = _places(context, builder, signature, args, 1, count)
        _store_dots(builder, [(key, q)], places, target, args[4], size, heads)
        return context.get_dummy_value()

    return types.none(keys, _kind(first), query, out, types.intp, dim, tokens, group), codegen


@intrinsic(prefer_literal=True)
def box_tile(typingctx, high, low, first, above, below, out, at, dim, tokens, group):
    """``out[g, at + t] = above[g] . high[first + t] + below[g] . low[first + t]``.

    high, low: stored elements [n, dim]. The rest is as for `dot_tile`.
    """
    size, count, heads = dim.literal_value, tokens.literal_value, group.literal_value

    def codegen(context, builder, signature, args):
        hi, lo, up, down, target = (
            _Elements(context, builder, signature, args, n) for n in (0, 1, 3, 4, 5)
        )
        places = _places(context, builder, signature, args, 2, count)
        _store_dots(builder, [(hi, up), (lo, down)], places, target, args[6], size, heads)
        return context.get_dummy_value()

    kinds = high, low, types.intp, above, below, out, types.intp, dim, tokens, group
    return types.none(*kinds), codegen


def _store_dots(builder, factors, places, target, at, size, heads):
    """For vectors at some places and all heads the sum of their products with queries."""
    count = len(places)
    sums = [ir.Constant(_SINGLES, [0.0] * WIDTH)] * (heads * count)
    for j in range(0, size, WIDTH):
        for key, q in factors:
            own = [key.load(key.vector(place, size, j)) for place in places]
            for g in range(heads):
                x = q.load(q.place(g, j))
                for t in range(count):
                    sums[g * count + t] = _multiply_add(builder, own[t], x, sums[g * count + t])
    totals = _added_up(builder, sums)
    for g in range(heads):
        for t in range(count):
            total = builder.extract_element(totals, ir.Constant(_I32, g * count + t))
            builder.store(total, target.address(target.place(g, t, at)))


def _kind(first):
    """The type of where vectors are: one behind the other, or rows anywhere."""
    return first if isinstance(first, types.Array) else types.intp


def _places(context, builder, signature, args, which, count):
    """Where each of some vectors is: a number to begin at, and how many vectors to go on."""
    if not isinstance(signature.args[which], types.Array):
        return [(args[which], t) for t in range(count)]
    rows = _Elements(context, builder, signature, args, which)
    return [(builder.load(rows.address((ir.Constant(_I64, t),))), 0) for t in range(count)]


@intrinsic(prefer_literal=True)
def add_tile(typingctx, values, first, weights, at, out, dim, tokens, group):
    """``out[g] += weights[g, at + t] * values[first + t * dim :][:dim]`` for all t.

    values, first: as keys for `dot_tile`. weights, and out [group, dim]: float32. dim, tokens and
    group are constants that `tokens_at_once` allows.
    """
    size, count, heads = dim.literal_value, tokens.literal_value, group.literal_value

    def codegen(context, builder, signature, args):
        value, weight, total = (_Elements(context, builder, signature, args, n) for n in (0, 2, 4))
        places = _places(context, builder, signature, args, 1, count)
        factors = [
            [builder.load(weight.address(weight.place(g, t, args[3]))) for t in range(count)]
            for g in range(heads)
        ]
        factors = [[_splat(builder, factor, WIDTH) for factor in own] for own in factors]
        for j in range(0, size, WIDTH):
            own = [value.load(value.vector(place, size, j)) for place in places]
            for g in range(heads):
                x = total.load(total.place(g, j))
                for vector, factor in zip(own, factors[g], strict=True):
                    x = _multiply_add(builder, vector, factor, x)
                place = total.address(total.place(g, j))
                builder.store(x, builder.bitcast(place, _SINGLES.as_pointer()), align=_SINGLE)
        return context.get_dummy_value()

    kinds = values, _kind(first), weights, types.intp, out, dim, tokens, group
    return types.none(*kinds), codegen


class _Elements:
    """The array that is argument `which` of an intrinsic, whatever its last stride is."""

    def __init__(self, context, builder, signature, args, which):
        self._context, self._builder = context, builder
        self._kind = signature.args[which]
        self._array = context.make_array(self._kind)(context, builder, args[which])

    def place(self, row, column, start=None):
        """Indices of a column, counted from `start`."""
        column = ir.Constant(_I64, column)
        return ir.Constant(_I64, row), column if start is None else self._builder.add(start, column)

    def vector(self, place, size, column):
        """Indices of a column of the vector at one of `_places`, of vectors of that size."""
        first, number = place
        if self._kind.ndim == 1:
            return (self._builder.add(first, ir.Constant(_I64, number * size + column)),)
        return self._builder.add(first, ir.Constant(_I64, number)), ir.Constant(_I64, column)

    def address(self, indices):
        """Of an element."""
        return cgutils.get_item_pointer(
            self._context, self._builder, self._kind, self._array, indices
        )

    def load(self, indices):
        """`WIDTH` elements from there on, as numbers of single precision."""
        builder, element = self._builder, self._kind.dtype
        stored = {types.uint16: _I16, types.int16: _F16, types.float32: _F32}[element]
        kind = ir.VectorType(stored, WIDTH)
        if self._kind.layout == "C":
            start = builder.bitcast(self.address(indices), kind.as_pointer())
            own = builder.load(start, align=element.bitwidth // 8)
        else:
            own, (*outer, last) = ir.Constant(kind, ir.Undefined), indices
            for lane in range(WIDTH):
                address = self.address((*outer, builder.add(last, ir.Constant(_I64, lane))))
                one = builder.load(builder.bitcast(address, stored.as_pointer()))
                own = builder.insert_element(own, one, ir.Constant(_I32, lane))
        if element == types.float32:
            return own
        if element == types.int16:
            return builder.fpext(own, _SINGLES)
        wide = ir.VectorType(_I32, WIDTH)
        bits = builder.shl(builder.zext(own, wide), ir.Constant(wide, [16] * WIDTH))
        return builder.bitcast(bits, _SINGLES)


def _lanes(numbers):
    return ir.Constant(ir.VectorType(_I32, len(numbers)), [*numbers])


def _joined(builder, vectors):
    """One vector of all lanes of a power of two of them."""
    while len(vectors) > 1:
        both = _lanes(range(2 * vectors[0].type.count))
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.shuffle_vector(a, b, both) for a, b in pairs]
    return vectors[0]


def _added_up(builder, vectors):
    """A vector whose lane i is the sum of ``vectors[i]``, for at most `WIDTH` of them.

    Halves of vectors are added pair by pair, so that every step adds whole vectors.
    """
    lanes = WIDTH
    while lanes > 1:
        half = lanes // 2
        low = [start + i for start in range(0, 2 * WIDTH, lanes) for i in range(half)]
        high = [i + half for i in low]
        pairs = zip(vectors[::2], vectors[1::2] + vectors[-1:], strict=False)
        vectors = [
            builder.fadd(
                builder.shuffle_vector(a, b, _lanes(low)),
                builder.shuffle_vector(a, b, _lanes(high)),
            )
            for a, b in pairs
        ]
        lanes = half
    return vectors[0]
