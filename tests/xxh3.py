"""XXH3-128 of 17 to 128 bytes without a seed, from its specification: slow, and independent."""

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
)
PRIME_1 = 0x9E3779B185EBCA87
PRIME_2 = 0xC2B2AE3D27D4EB4F
PRIME_4 = 0x85EBCA77C2B2AE63
PRIME_MIX = 0x165667919E3779F9
MASK = (1 << 64) - 1


def word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def mix(data: bytes, at: int, secret: int) -> int:
    """Both halves of the product of 16 bytes with the secret, folded into one word."""
    low = word(data, at) ^ word(SECRET, secret)
    high = word(data, at + 8) ^ word(SECRET, secret + 8)
    product = low * high
    return (product & MASK) ^ (product >> 64)


def avalanche(value: int) -> int:
    value ^= value >> 37
    value = value * PRIME_MIX & MASK
    return value ^ (value >> 32)


def xxh3_128(data: bytes) -> bytes:
    """The digest in canonical byte order."""
    size = len(data)
    assert 17 <= size <= 128
    low, high = size * PRIME_1 & MASK, 0
    for i in reversed(range((size - 1) // 32 + 1)):
        front, back = 16 * i, size - 16 * (i + 1)
        low = (low + mix(data, front, 32 * i)) & MASK
        low ^= (word(data, back) + word(data, back + 8)) & MASK
        high = (high + mix(data, back, 32 * i + 16)) & MASK
        high ^= (word(data, front) + word(data, front + 8)) & MASK
    first = avalanche((low + high) & MASK)
    second = avalanche((low * PRIME_1 + high * PRIME_4 + size * PRIME_2) & MASK)
    return (-second & MASK).to_bytes(8, "big") + first.to_bytes(8, "big")
