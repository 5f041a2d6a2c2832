"""Table lookups for 64 tokens at once: one byte-permute instruction reads 64 entries (AVX-512)."""

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic

_I1 = ir.IntType(1)
_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_BYTES = ir.VectorType(_I8, 64)
_PAIRS = ir.VectorType(_I16, 32)


def has_byte_permute():
    """Whether code compiled here may use the instruction: AVX-512 with VBMI."""
    if config.CPU_NAME or config.CPU_FEATURES:  # Compiled for another processor than this one.
        return False
    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("avx512vbmi")) and bool(features.get("avx512bw"))


def _splat(vector, value):
    return ir.Constant(vector, [value] * vector.count)


def _load(builder, address, offset, kind):
    where = builder.add(address, ir.Constant(_I64, offset))
    return builder.load(builder.inttoptr(where, kind.as_pointer()), align=1, typ=kind)


def _codes(builder, address, bits):
    """Codes of 64 tokens as bytes, from `bits` words that hold one bit of each."""
    codes = _splat(_BYTES, 0)
    for bit in range(bits):
        word = _load(builder, address, bit * 8, _I64)
        mask = builder.bitcast(word, ir.VectorType(_I1, 64))
        codes = builder.or_(
            codes, builder.select(mask, _splat(_BYTES, 1 << bit), _splat(_BYTES, 0))
        )
    return codes


@intrinsic(prefer_literal=True)
def split_codes(typingctx, codes, words, bits):
    """The words that hold one bit each of the codes of 64 tokens.

    Addresses (intp): codes uint8 [64]; words int64 [bits]. bits is a constant.
    """
    width = bits.literal_value

    def codegen(context, builder, signature, args):
        own = _load(builder, args[0], 0, _BYTES)
        for bit in range(width):
            chosen = builder.and_(own, _splat(_BYTES, 1 << bit))
            word = builder.bitcast(builder.icmp_unsigned("!=", chosen, _splat(_BYTES, 0)), _I64)
            where = builder.add(args[1], ir.Constant(_I64, bit * 8))
            builder.store(word, builder.inttoptr(where, _I64.as_pointer()))
        return context.get_dummy_value()

    return types.none(codes, words, bits), codegen


@intrinsic(prefer_literal=True)
def sum_of_lookups(typingctx, codes, tables, steps, lows, out, stride, group, parts, bits):
    """For 64 tokens and `group` queries, ``out = sums of table entries * step + low``.

    Addresses (intp): codes int64 [parts, bits]; tables uint8 [group, parts, 64]; steps, lows
    float32 [group]; out float32 [group, 64], rows `stride` bytes apart. Sums are of 16 bits: at
    most 257 parts. group, parts and bits (at most 6) are constants.
    """
    heads, count, width = (n.literal_value for n in (group, parts, bits))

    def codegen(context, builder, signature, args):
        permute = builder.module.declare_intrinsic(
            "llvm.x86.avx512.permvar.qi.512", (), ir.FunctionType(_BYTES, [_BYTES, _BYTES])
        )
        even = [_splat(_PAIRS, 0)] * heads
        odd = [_splat(_PAIRS, 0)] * heads
        for part in range(count):
            at = builder.add(args[0], ir.Constant(_I64, part * width * 8))
            chosen = _codes(builder, at, width)
            for head in range(heads):
                table = _load(builder, args[1], (head * count + part) * 64, _BYTES)
                found = builder.bitcast(builder.call(permute, [table, chosen]), _PAIRS)
                low = builder.and_(found, _splat(_PAIRS, 255))
                even[head] = builder.add(even[head], low)
                odd[head] = builder.add(odd[head], builder.lshr(found, _splat(_PAIRS, 8)))
        for head in range(heads):
            _store(builder, args, head, even[head], odd[head])
        return context.get_dummy_value()

    return types.none(codes, tables, steps, lows, out, stride, group, parts, bits), codegen


def _store(builder, args, head, even, odd):
    """Write the sums of one query as float32, its tokens in order again."""
    order = [lane // 2 + 32 * (lane % 2) for lane in range(64)]
    mask = ir.Constant(ir.VectorType(_I32, 64), order)
    wide = builder.zext(builder.shuffle_vector(even, odd, mask), ir.VectorType(_I32, 64))
    singles = ir.VectorType(_F32, 64)
    sums = builder.sitofp(wide, singles)
    step, low = (
        builder.shuffle_vector(
            builder.insert_element(
                ir.Constant(ir.VectorType(_F32, 1), ir.Undefined),
                _load(builder, args[i], head * 4, _F32),
                ir.Constant(_I32, 0),
            ),
            ir.Constant(ir.VectorType(_F32, 1), ir.Undefined),
            ir.Constant(ir.VectorType(_I32, 64), [0] * 64),
        )
        for i in (2, 3)
    )
    logits = builder.fadd(builder.fmul(sums, step), low)
    row = builder.add(args[4], builder.mul(args[5], ir.Constant(_I64, head)))
    builder.store(logits, builder.inttoptr(row, singles.as_pointer()), align=4)
