"""Every kernel compiles for the GPUs that it is for, without one at hand, and moves 16 bytes at a time where it should.

The interpreter takes much that the compiler does not (annotations, types of loop variables, shapes), and says nothing about
how memory is read.
"""

from __future__ import annotations

import itertools
import os

import pytest

triton = pytest.importorskip("triton", reason="this environment has no Triton")
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile"),
    # results do not depend on it: products that are added are products with powers of two
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),
]

WIDE_LOAD, WIDE_STORE = ("ld.global.v4.b32", "ld.global.v2.b64"), ("st.global.v4.b32", "st.global.v2.b64")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def ptx(kernel, capability: int, warps: int = 4, **constants) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {
        "leaves": "*i64", "unit_leaf": "*i32", "secret": "*i64", "sums": "*i64", "total": "*i64", "strips": "*i64",
        "strip_of": "*i32", "pieces": "*i64", "piece_of": "*i32", "absmax": "*i32", "base": "i64", "source": "i64",
        "dest": "i64",
    }  # fmt: skip
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(name),): value for name, value in constants.items()}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    assert len(compiled.asm["cubin"]) > 0
    assert ".ftz" not in compiled.asm["ptx"], "subnormals count: they are not flushed to zero"
    return compiled.asm["ptx"]


def wide(text: str, instructions: tuple[str, ...]) -> bool:
    return any(instruction in text for instruction in instructions)


TILE = {"ROWS": 32, "COLUMNS": 128}


def by_itself(capability: int) -> bool:
    from syncline.stages.kernels.launches import rounds_once

    return rounds_once(divmod(capability, 10))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("source", "to", "nbytes"), [(0, 1, 0), (1, 2, 0), (2, 0, 0), (0, 0, 1), (0, 0, 8)])
def test_copies(capability: int, source: int, to: int, nbytes: int) -> None:
    from syncline.stages.kernels import tiles

    text = ptx(tiles.copy_tiles, capability, FROM=source, TO=to, NBYTES=nbytes, VECTOR=True, **TILE)
    assert wide(text, WIDE_LOAD)
    assert wide(text, WIDE_STORE)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("source", "vector", "pow2"), [(0, True, False), (1, True, True), (2, False, False)])
def test_quantizing(capability: int, source: int, vector: bool, pow2: bool) -> None:
    from syncline.stages.kernels import tiles

    shared = {"FROM": source, "VECTOR": vector}
    for rows, columns, group, whole in ((128, 128, (128, 128), True), (32, 128, (1, 0), False), (32, 128, (0, 0), False)):
        groups = {"ROWS": rows, "COLUMNS": columns, "GROUP_ROWS": group[0], "GROUP_COLUMNS": group[1]}
        kind = {"WHOLE": whole, "POW2": pow2, "STEPS": 0 if pow2 else 2, "HARDWARE": by_itself(capability)}
        text = ptx(tiles.quantize_tiles, capability, rows * columns // 2048, **shared, **groups, **kind)
        assert wide(text, WIDE_LOAD) == vector
        assert ("st.global.b8" not in text) == vector, "several codes at a time"
        assert "div.rn.f32" in text, "division is IEEE's"
        if vector:
            assert text.count("div.rn.f32") < 16, "not one for each of a thread's elements"
        assert "div.full" not in text
        assert ("e4m3x2" in text) == (capability == 90), "only where the GPU's own conversion is asked for"
        if not whole:
            assert wide(ptx(tiles.absmax_tiles, capability, rows * columns // 2048, **shared, **groups), WIDE_LOAD) == vector


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
def test_codes_are_rounded_once(capability: int) -> None:
    """By one instruction that takes float32, or by our own steps. By way of float16 a tie is made where none was."""
    from syncline.stages.kernels import strips, tiles

    shared = {"FROM": 1, "ROWS": 128, "COLUMNS": 128, "POW2": False, "STEPS": 2, "HARDWARE": by_itself(capability)}
    groups = {"GROUP_ROWS": 128, "GROUP_COLUMNS": 128, "WHOLE": True, "VECTOR": True}
    for text in (
        ptx(tiles.quantize_tiles, capability, 8, **shared, **groups), ptx(strips.quantize_strips, capability, 8, **shared)
    ):  # fmt: skip
        assert ("e4m3x2.f32" in text) == by_itself(capability)
        assert "e4m3x2.f16" not in text
        assert "cvt.rz" not in text


@pytest.mark.parametrize(
    ("capability", "copied", "aligned", "strided"),
    [(80, False, True, False), (90, True, True, True), *itertools.product([90], [False, True], [False, True], [False])],
)
def test_block_sums(capability: int, copied: bool, aligned: bool, strided: bool) -> None:
    from syncline.stages.kernels import xxh3

    text = ptx(xxh3.block_sums, capability, UNIT=32, COPY=copied, ALIGNED=aligned, STRIDED=strided)
    wides = sum(text.count(instruction) for instruction in WIDE_LOAD)
    assert wides == 16 * ((aligned or copied) + (copied and aligned)), "all stripes, and all that is copied"
    assert wide(text, WIDE_STORE) == copied
    assert "shfl" not in text, "threads have nothing to tell each other"


@pytest.mark.parametrize(("capability", "source", "pow2"), [(80, 1, False), (90, 0, True), (90, 1, False), (90, 2, False)])
def test_strips(capability: int, source: int, pow2: bool) -> None:
    """Nothing is lost by doing both: as wide as the kernels that it is made of, and no more said between threads."""
    from syncline.stages.kernels import strips, tiles

    constants = {"FROM": source, "ROWS": 128, "COLUMNS": 128, "POW2": pow2, "STEPS": 0 if pow2 else 2}
    constants["HARDWARE"] = by_itself(capability)
    text = ptx(strips.quantize_strips, capability, 8, **constants)
    groups = {"GROUP_ROWS": 128, "GROUP_COLUMNS": 128, "WHOLE": True, "VECTOR": True}
    alone = ptx(tiles.quantize_tiles, capability, 8, **constants, **groups)
    for instruction in ("ld.global.v4.b32", "st.global.v4.b32", "shfl", "div.rn.f32"):
        assert text.count(instruction) == alone.count(instruction), instruction
    assert text.count("ld.global.v2.b64") == 16, "all stripes of a thread's hash block"
    assert "st.global.b8" not in text


@pytest.mark.parametrize("capability", [80, 90])
def test_ends_of_leaves(capability: int) -> None:
    from syncline.stages.kernels import xxh3, xxh3_short

    ptx(xxh3.finish_leaves, capability, 1, LEAVES=4)
    ptx(xxh3_short.short_leaves, capability, 1, LEAVES=32)
