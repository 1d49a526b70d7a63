"""Constants and mixing steps of XXH3, as functions that kernels call."""

from __future__ import annotations

from .language import constant, jit, tl

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""XXH3's default secret, 192 bytes."""

ACCUMULATORS = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
"""What the accumulators begin with."""

P32_1 = constant(0x9E3779B1)
P32_2 = constant(0x85EBCA77)
P64_1 = constant(0x9E3779B185EBCA87)
P64_2 = constant(0xC2B2AE3D27D4EB4F)
P64_3 = constant(0x165667B19E3779F9)
P64_4 = constant(0x85EBCA77C2B2AE63)
MX1 = constant(0x165667919E3779F9)
MX2 = constant(0x9FB21C651E98DF25)
LOW = constant(0xFFFFFFFF)


@jit
def u64(value: tl.tensor) -> tl.tensor:
    """The bits of an int64."""
    return value.to(tl.uint64, bitcast=True)


@jit
def product(value: tl.tensor) -> tl.tensor:
    """The low half times the high half: one instruction, if the compiler sees that they are halves."""
    return value.to(tl.uint32).to(tl.uint64) * (value >> 32).to(tl.uint32).to(tl.uint64)


@jit
def high(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The upper 64 bits of a * b."""
    low = (a & LOW) * (b & LOW)
    cross = (a & LOW) * (b >> 32)
    other = (a >> 32) * (b & LOW)
    middle = (low >> 32) + (cross & LOW) + (other & LOW)
    return (a >> 32) * (b >> 32) + (cross >> 32) + (other >> 32) + (middle >> 32)


@jit
def fold(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Both halves of a * b, exclusive or."""
    return (a * b) ^ high(a, b)


@jit
def avalanche(value: tl.tensor) -> tl.tensor:
    """XXH3's last mixing."""
    value = (value ^ (value >> 37)) * MX1
    return value ^ (value >> 32)


@jit
def avalanche_64(value: tl.tensor) -> tl.tensor:
    """XXH64's last mixing, which XXH3 uses for the shortest."""
    value = (value ^ (value >> 33)) * P64_2
    value = (value ^ (value >> 29)) * P64_3
    return value ^ (value >> 32)


@jit
def key(secret: tl.tensor, word: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """A word of the secret that belongs to a seed."""
    return u64(tl.load(secret + word)) + tl.where(word % 2 == 0, seed, 0 - seed)


@jit
def key_at(secret: tl.tensor, word: tl.tensor, seed: tl.tensor, byte: tl.constexpr) -> tl.tensor:
    """Eight bytes of that secret from ``byte`` (1 to 7) bytes after a word on."""
    return (key(secret, word, seed) >> (8 * byte)) | (key(secret, word + 1, seed) << (64 - 8 * byte))
