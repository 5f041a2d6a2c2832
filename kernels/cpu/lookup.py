"""Table lookups for 64 tokens at once, by instructions that permute bytes.

AVX-512 has one that reads 64 entries. That of AVX2 reads 16: the entry is chosen among four.
"""

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
_HALF = ir.VectorType(_I8, 32)


def permuting_bits():
    """Bits of the registers whose bytes code that is compiled here may permute: 512, 256 or 0."""
    if config.CPU_NAME or config.CPU_FEATURES:  # Compiled for another processor than this one.
        return 0
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512vbmi") and features.get("avx512bw"):
        return 512
    return 256 if features.get("avx2") else 0


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


def _finders(builder, words, bits, registers):
    """What reads the entries of 64 codes from a table at an address: a function for each register.

    words: address of `bits` words that hold one bit each of the codes.
    """
    if registers == 512:
        permute = _declare(builder, "llvm.x86.avx512.permvar.qi.512", [_BYTES, _BYTES])
        codes = _codes(builder, words, bits)
        return [lambda table: builder.call(permute, [_load(builder, table, 0, _BYTES), codes])]
    return [_half_finder(builder, words, bits, half) for half in range(2)]


def _half_finder(builder, words, bits, half):
    """`_finders` for 32 of the codes, in AVX2."""
    permute = _declare(builder, "llvm.x86.avx2.pshuf.b", [_HALF, _HALF])
    blend = _declare(builder, "llvm.x86.avx2.pblendvb", [_HALF, _HALF, _HALF])
    flags = []
    for bit in range(bits):
        word = _load(builder, words, bit * 8 + half * 4, _I32)
        flags.append(builder.sext(builder.bitcast(word, ir.VectorType(_I1, 32)), _HALF))
    codes = _splat(_HALF, 0)
    for bit, flag in enumerate(flags[:4]):
        codes = builder.or_(codes, builder.and_(flag, _splat(_HALF, 1 << bit)))

    def find(table):
        found = []
        for first in range(0, 1 << bits, 16):
            some = _load(builder, table, first, ir.VectorType(_I8, 16))
            twice = ir.Constant(ir.VectorType(_I32, 32), [*range(16)] * 2)
            found.append(builder.call(permute, [builder.shuffle_vector(some, some, twice), codes]))
        for flag in flags[4:]:
            pairs = zip(found[::2], found[1::2], strict=True)
            found = [builder.call(blend, [*pair, flag]) for pair in pairs]
        return found[0]

    return find


def _declare(builder, name, arguments):
    return builder.module.declare_intrinsic(name, (), ir.FunctionType(arguments[0], arguments))


@intrinsic(prefer_literal=True)
def sum_of_lookups(
    typingctx, codes, tables, steps, lows, out, stride, group, parts, bits, registers
):
    """For 64 tokens and `group` queries, ``out = sums of table entries * step + low``.

    Addresses (intp): codes int64 [parts, bits]; tables uint8 [group, parts, 64]; steps, lows
    float32 [group]; out float32 [group, 64], rows `stride` bytes apart. Sums are of 16 bits: at
    most 257 parts. group, parts, bits (at most 6) and registers (512 or 256, see
    `permuting_bits`) are constants.
    """
    heads, count, width, size = (n.literal_value for n in (group, parts, bits, registers))
    pairs = ir.VectorType(_I16, size // 16)
    pieces = range(512 // size)

    def codegen(context, builder, signature, args):
        even = [[_splat(pairs, 0) for _ in pieces] for _ in range(heads)]
        odd = [[_splat(pairs, 0) for _ in pieces] for _ in range(heads)]
        for part in range(count):
            words = builder.add(args[0], ir.Constant(_I64, part * width * 8))
            finders = _finders(builder, words, width, size)
            for head in range(heads):
                table = builder.add(args[1], ir.Constant(_I64, (head * count + part) * 64))
                for piece, find in enumerate(finders):
                    found = builder.bitcast(find(table), pairs)
                    low = builder.and_(found, _splat(pairs, 255))
                    high = builder.lshr(found, _splat(pairs, 8))
                    even[head][piece] = builder.add(even[head][piece], low)
                    odd[head][piece] = builder.add(odd[head][piece], high)
        for head in range(heads):
            _store(builder, args, head, _joined(builder, even[head]), _joined(builder, odd[head]))
        return context.get_dummy_value()

    arguments = codes, tables, steps, lows, out, stride, group, parts, bits, registers
    return types.none(*arguments), codegen


def _joined(builder, pieces):
    if len(pieces) == 1:
        return pieces[0]
    order = ir.Constant(ir.VectorType(_I32, 32), [*range(32)])
    return builder.shuffle_vector(*pieces, order)


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
