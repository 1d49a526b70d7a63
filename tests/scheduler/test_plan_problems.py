"""Everything that is wrong with a set of manifests is reported at once, by name, before a byte moves."""

from __future__ import annotations

import pytest

from syncline.scheduler.errors import PlanError
from syncline.scheduler.layout import Box, Buffer, Manifest, Piece, Tensor
from syncline.scheduler.plan import PlanOptions, build_plan

OPTIONS = PlanOptions(bucket_bytes=1 << 20, max_tmp_bytes=1 << 22)
W, N = ((8, 4), "float32"), ((8,), "float32")


def problems(sources: list[Manifest], targets: list[list[Manifest]], options: PlanOptions = OPTIONS) -> str:
    with pytest.raises(PlanError) as caught:
        build_plan(sources, targets, options)
    assert "no byte was moved" in str(caught.value)
    return "\n".join(caught.value.problems)


def count(text: str) -> int:
    return len(text.splitlines())


def test_a_missing_name_is_listed_by_name(sim) -> None:
    source = sim.manifest(tensors={"a": W})
    target = sim.manifest(tensors={"a": W, "frozen.b": W, "frozen.c": N})
    text = problems([source], [[target]])
    assert "frozen.b" in text
    assert "frozen.c" in text
    assert "optional" in text


def test_an_extra_source_name_is_listed_by_name(sim) -> None:
    text = problems([sim.manifest(tensors={"a": W, "spare": N})], [[sim.manifest(tensors={"a": W})]])
    assert "spare" in text
    assert count(text) == 1


def test_optional_names_may_be_absent_on_either_side(sim) -> None:
    source = sim.manifest(tensors={"a": W, "spare": N}, optional={"spare"})
    target = sim.manifest(tensors={"a": W, "inv_freq": N}, optional={"inv_freq"})
    plan = build_plan([source], [[target]], OPTIONS)
    assert {name for task in plan.tasks for name in task.names} == {"a"}
    program = plan.target_program(0, 0)
    assert [landing.pieces for task in program.tasks for landing in task.landings] == [(0,)]


def test_one_renamed_prefix_is_one_problem_that_pairs_all_names(sim) -> None:
    shapes = {"q.weight": W, "k.weight": W, "norm.weight": N}
    source = sim.manifest(
        tensors={"kept": W} | {f"model.language.layers.{i}.{n}": s for i in range(3) for n, s in shapes.items()}
    )
    target = sim.manifest(tensors={"kept": W} | {f"model.layers.{i}.{n}": s for i in range(3) for n, s in shapes.items()})
    text = problems([source], [[target]])
    assert count(text) == 1
    assert "did you mean to leave out 'language'" in text
    for i in range(3):
        for name in shapes:
            assert f"model.language.layers.{i}.{name}" in text
            assert f"model.layers.{i}.{name}" in text


@pytest.mark.parametrize(("there", "here"), [("a.w", "module.a.w"), ("x.a.w", "x._orig_mod.a.w"), ("a.w", "a.base.w")])
def test_wrappers_on_either_side_are_seen_through(sim, there, here) -> None:
    text = problems([sim.manifest(tensors={here: W})], [[sim.manifest(tensors={there: W})]])
    assert f"did you mean to leave out {set(here.split('.')).difference(there.split('.')).pop()!r}" in text
    text = problems([sim.manifest(tensors={there: W})], [[sim.manifest(tensors={here: W})]])
    assert "did you mean to put in" in text


def test_a_renamed_module_is_told_from_names_that_are_really_missing(sim) -> None:
    source = sim.manifest(tensors={f"layers.{i}.block_sparse_moe.gate.weight": W for i in range(4)} | {"odd": N})
    target = sim.manifest(tensors={f"layers.{i}.mlp.gate.weight": W for i in range(4)} | {"lost": ((3,), "float32")})
    text = problems([source], [[target]])
    assert "rename 'block_sparse_moe' to 'mlp'" in text
    assert any(line.startswith("missing in the source, expected by target 0: lost") for line in text.splitlines())
    assert any("under odd" in line for line in text.splitlines())
    assert "share no tensor name" in text


def test_renames_need_equal_shapes(sim) -> None:
    text = problems([sim.manifest(tensors={"old.w": W})], [[sim.manifest(tensors={"new.w": N})]])
    assert "did you mean" not in text
    assert "old.w" in text
    assert "new.w" in text


@pytest.mark.parametrize(
    ("fused", "parts"),
    [
        ("mlp.gate_up_proj.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
        ("self_attn.qkv_proj.bias", [f"self_attn.{x}_proj.bias" for x in "qkv"]),
        ("mlp.experts.w13_weight", [f"mlp.experts.{i}.{x}_proj.weight" for i in range(3) for x in ("gate", "up")]),
        ("mlp.experts.w2_weight", [f"mlp.experts.{i}.down_proj.weight" for i in range(3)]),
    ],
)
def test_a_fused_parameter_without_a_layout_asks_for_a_layout_not_for_a_rename(sim, fused, parts) -> None:
    """Two shards of the fused parameter may have the shape of one of its parts."""
    source = sim.manifest(tensors={"kept": W} | {f"layers.{i}.{part}": W for i in range(2) for part in parts})
    target = sim.manifest(tensors={"kept": W} | {f"layers.{i}.{fused}": W for i in range(2)})
    text = problems([source], [[target]])
    assert count(text) == 1
    assert "layout=tp_layout(...)" in text
    assert "did you mean" not in text
    for name in [fused, *parts]:
        assert f"layers.1.{name}" in text


def test_a_fused_parameter_that_both_sides_fuse_is_a_rename_like_any_other(sim) -> None:
    source, target = (sim.manifest(tensors={f"{head}mlp.gate_up_proj.weight": W}) for head in ("model.", ""))
    assert "did you mean to leave out 'model'" in problems([source], [[target]])


@pytest.mark.parametrize(("shape", "shards"), [((4, 4), 2), ((8, 1), 4), ((3, 4), 0), ((16, 4), 0), ((4, 2), 0), ((8,), 0)])
def test_an_exact_fraction_of_a_shape_asks_for_a_layout(sim, shape, shards) -> None:
    text = problems([sim.manifest(tensors={"a": W})], [[sim.manifest(tensors={"a": (shape, "float32")})]])
    assert (f"if that is one of {shards} shards" in text) == ("tp_layout" in text) == bool(shards)
    assert "give both sides the checkpoint's shape" in text


def test_nothing_in_common_is_an_empty_plan(sim) -> None:
    text = problems([sim.manifest(tensors={"x.a": W})], [[sim.manifest(tensors={"y.b": N})]])
    assert "the plan is empty: source and targets share no tensor name" in text


@pytest.mark.parametrize("side", ["source", "target"])
def test_tied_weights_resolve_through_an_alias_of_either_side(sim, side) -> None:
    alias = {"lm_head.weight": "embed.weight"}
    source = sim.manifest(tensors={"embed.weight": W}, aliases=alias if side == "source" else {})
    target = sim.manifest(tensors={"embed.weight": W, "lm_head.weight": W}, aliases=alias if side == "target" else {})
    contents = {"embed.weight": sim.content("embed.weight", *W)}
    plan = build_plan([source], [[target]], OPTIONS)
    assert plan.nbytes == 8 * 4 * 4
    world = sim.World(plan, [source], [[target]], contents).run()
    (landing,) = [landing for task in world.receiving[0, 0].tasks for landing in task.landings]
    assert landing.pieces == (0, 1)
    for memory in world.targets[0, 0].memory:
        assert bytes(memory) == contents["embed.weight"].tobytes()


def test_a_source_may_hold_a_tied_tensor_under_its_alias_only(sim) -> None:
    source = sim.manifest(tensors={"lm_head.weight": W})
    target = sim.manifest(tensors={"embed.weight": W}, aliases={"lm_head.weight": "embed.weight"})
    assert build_plan([source], [[target]], OPTIONS).nbytes == 128


def test_an_alias_without_declaration_is_hinted_at(sim) -> None:
    target = sim.manifest(tensors={"embed.weight": W, "norm": N, "lm_head.weight": W})
    text = problems([sim.manifest(tensors={"embed.weight": W, "norm": N})], [[target]])
    assert "if it is tied to embed.weight, which has its shape, declare it an alias" in text


def test_tied_views_of_one_memory_are_written_once(sim) -> None:
    names = (Tensor(name="embed", shape=(8, 4), dtype="float32"), Tensor(name="head", shape=(8, 4), dtype="float32"))
    piece = Piece(tensor=0, box=Box.whole((8, 4)), buffer=0, offset=0, strides=(4, 1), dtype="float32")
    tied = Piece(tensor=1, box=piece.box, buffer=0, offset=0, strides=(4, 1), dtype="float32")
    target = Manifest(
        rank=0, world_size=1, host="t", tensors=names, pieces=(piece, tied), buffers=(Buffer(name="w", nbytes=128),),
        aliases={"head": "embed"},
    )  # fmt: skip
    plan = build_plan([sim.manifest(tensors={"embed": W})], [[target]], OPTIONS)
    (landing,) = plan.target_program(0, 0).tasks[0].landings
    assert landing.pieces == (0, 1)
    assert landing.dests[0] == landing.dests[1]


def test_a_target_that_ties_what_the_source_holds_apart_is_refused(sim) -> None:
    source = sim.manifest(tensors={"embed": W, "head": W})
    target = sim.manifest(tensors={"embed": W, "head": W}, aliases={"head": "embed"})
    text = problems([source], [[target]])
    assert "ties embed, head" in text
    assert "separate tensors" in text


def test_aliases_in_a_circle_are_refused(sim) -> None:
    source = sim.manifest(tensors={"a": W}, aliases={"a": "b", "b": "a"})
    assert "circle" in problems([source], [[sim.manifest(tensors={"a": W})]])


def test_an_alias_of_two_names_is_refused(sim) -> None:
    sources = [sim.manifest(r, 2, tensors={"a": W, "b": W}, aliases={"c": name}) for r, name in enumerate("ab")]
    assert "alias of both a and b" in problems(sources, [[sim.manifest(tensors={"a": W, "b": W})]])


def test_shapes_must_agree(sim) -> None:
    text = problems([sim.manifest(tensors={"a": W})], [[sim.manifest(tensors={"a": ((4, 8), "float32")})]])
    assert "a: the source has shape (8, 4), target 0 rank 0 expects (4, 8)" in text


def test_a_dimension_more_is_another_shape(sim) -> None:
    text = problems([sim.manifest(tensors={"a": W})], [[sim.manifest(tensors={"a": ((8, 4, 1), "float32")})]])
    assert "expects (8, 4, 1)" in text


def test_source_ranks_must_agree_about_shape_and_group(sim) -> None:
    sources = [sim.manifest(0, 2, tensors={"a": W, "b": W}), sim.manifest(1, 2, tensors={"a": N, "b": (*W, 3)})]
    text = problems(sources, [[sim.manifest(tensors={"a": W, "b": W})]])
    assert "a: source ranks disagree about its shape: source rank 0 says (8, 4), source rank 1 (8,)" in text
    assert "b: source ranks disagree about its mesh group" in text


@pytest.mark.parametrize(
    ("source", "target"),
    [("float32", "int32"), ("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16"), ("int8", "uint8")],
)
def test_types_that_no_rule_casts_are_refused(sim, source, target) -> None:
    text = problems([sim.manifest(tensors={"a": ((8,), source)})], [[sim.manifest(tensors={"a": ((8,), target)})]])
    assert f"a: the source has {source}, target 0 expects {target}" in text


def test_an_unknown_type_is_refused_by_name(sim) -> None:
    text = problems([sim.manifest(tensors={"a": ((8,), "complex256")})], [[sim.manifest(tensors={"a": ((8,), "float32")})]])
    assert "holds a as complex256, which cannot travel" in text


def test_packed_quantized_forms_are_refused(sim) -> None:
    source = sim.manifest(tensors={"a": ((8,), "float4_e2m1fn_x2"), "b.weight": W})
    target = sim.manifest(tensors={"a": ((8,), "float4_e2m1fn_x2"), "b.weight_packed": ((8,), "int32")})
    text = problems([source], [[target]])
    assert "packed quantized form" in text
    assert "b.weight_packed: target 0 holds it in packed quantized form" in text


def test_a_tensor_in_two_types_at_the_source_is_refused(sim) -> None:
    sources = [sim.manifest(0, 2, tensors={"a": W}), sim.manifest(1, 2, tensors={"a": ((8, 4), "bfloat16")})]
    assert "a: source ranks hold it as float32 and bfloat16" in problems(sources, [[sim.manifest(tensors={"a": W})]])


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale"])
def test_a_float8_weight_never_travels_without_its_scale(sim, scale) -> None:
    weight, scales = ((8, 4), "float8_e4m3fn"), ((1, 1), "float32")
    source = sim.manifest(tensors={"x.weight": weight})
    target = sim.manifest(tensors={"x.weight": weight, f"x.{scale}": scales}, optional={f"x.{scale}"})
    assert f"x.weight: target 0 would get it without its scale x.{scale}" in problems([source], [[target]])
    full = sim.manifest(tensors={"x.weight": weight, f"x.{scale}": scales})
    build_plan([full], [[target]], OPTIONS)
    narrow = PlanOptions(bucket_bytes=1024, max_tmp_bytes=4096, scope=frozenset({"x.weight"}))
    assert "without its scale" in problems([full], [[target]], narrow)


def test_the_meta_device_has_no_content(sim) -> None:
    text = problems([sim.manifest(tensors={"a": W}, device="meta")], [[sim.manifest(tensors={"a": W})]])
    assert "source rank 0: a is on the meta device" in text
    text = problems([sim.manifest(tensors={"a": W})], [[sim.manifest(tensors={"a": W}, device="meta")]])
    assert "target 0 rank 0: a is on the meta device" in text


def test_a_hole_in_the_source_is_named_with_its_box(sim) -> None:
    top, rest = Box(start=(0, 0), shape=(3, 4)), Box(start=(5, 0), shape=(3, 4))
    sources = [sim.manifest(r, 2, tensors={"a": (*W, 0, [box])}) for r, box in enumerate((top, rest))]
    text = problems(sources, [[sim.manifest(tensors={"a": W})]])
    assert text == "a: no source rank holds the box start (3, 0) shape (2, 4), which target 0 rank 0 expects"


def test_a_hole_that_no_target_needs_is_no_problem(sim) -> None:
    box = Box(start=(0, 0), shape=(3, 4))
    target = sim.manifest(tensors={"a": (*W, 0, [box])}, optional={"a"})
    build_plan([sim.manifest(tensors={"a": (*W, 0, [box])})], [[target]], OPTIONS)


def test_a_tensor_that_the_source_only_names_is_missing(sim) -> None:
    text = problems([sim.manifest(tensors={"a": (*W, 0, []), "b": N})], [[sim.manifest(tensors={"a": W, "b": N})]])
    assert "a: no source rank holds any element of it" in text


def test_a_region_of_a_target_buffer_that_nothing_writes_is_named(sim) -> None:
    target = sim.manifest(tensors={"a": W})
    hollow = Manifest(rank=0, world_size=1, host="t", layout=target.layout, buffers=[Buffer(name="poisoned", nbytes=160)])
    text = problems([sim.manifest(tensors={"a": W})], [[hollow]])
    assert "pieces write 128 bytes of buffer poisoned, which has 160 and declares 0 as padding" in text
    padded = Manifest(rank=0, world_size=1, host="t", layout=target.layout, buffers=[Buffer(name="p", nbytes=160, padding=32)])
    build_plan([sim.manifest(tensors={"a": W})], [[padded]], OPTIONS)


def two_pieces(first: Piece, second: Piece, nbytes: int) -> Manifest:
    tensors = (
        Tensor(name="a", shape=first.box.shape, dtype="float32"),
        Tensor(name="b", shape=second.box.shape, dtype="float32"),
    )
    return Manifest(
        rank=0, world_size=1, host="t", tensors=tensors, pieces=(first, second), buffers=(Buffer(name="fused", nbytes=nbytes),)
    )


def test_target_pieces_that_overlap_are_named(sim) -> None:
    a = Piece(tensor=0, box=Box.whole((4, 4)), buffer=0, offset=0, strides=(8, 1), dtype="float32")
    b = Piece(tensor=1, box=Box.whole((4, 4)), buffer=0, offset=3, strides=(8, 1), dtype="float32")
    source = sim.manifest(tensors={"a": ((4, 4), "float32"), "b": ((4, 4), "float32")})
    text = problems([source], [[two_pieces(a, b, 128)]])
    assert "the pieces of a and b in buffer fused overlap" in text
    apart = Piece(tensor=1, box=Box.whole((4, 4)), buffer=0, offset=4, strides=(8, 1), dtype="float32")
    build_plan([source], [[two_pieces(a, apart, 128)]], OPTIONS)


def test_a_target_view_that_folds_onto_itself_is_refused(sim) -> None:
    piece = Piece(tensor=0, box=Box.whole((4, 4)), buffer=0, offset=0, strides=(0, 1), dtype="float32")
    target = Manifest(
        rank=0, world_size=1, host="t", tensors=(Tensor(name="a", shape=(4, 4), dtype="float32"),), pieces=(piece,),
        buffers=(Buffer(name="row", nbytes=16),),
    )  # fmt: skip
    assert "overlap" in problems([sim.manifest(tensors={"a": ((4, 4), "float32")})], [[target]])
    folded = Manifest(rank=0, world_size=1, host="s", layout=target.layout)
    build_plan([folded], [[sim.manifest(tensors={"a": ((4, 4), "float32")})]], OPTIONS)  # a source may be an expanded view


def test_pieces_beyond_tensor_or_buffer_are_named(sim) -> None:
    beyond = sim.manifest(tensors={"a": (*W, 0, [Box(start=(4, 0), shape=(8, 4))])})
    text = problems([beyond], [[sim.manifest(tensors={"a": W})]])
    assert "a has a piece whose box reaches beyond the tensor's shape" in text
    short = Manifest(
        rank=0, world_size=1, host="s", layout=sim.manifest(tensors={"a": W}).layout, buffers=[Buffer(name="x", nbytes=8)]
    )
    assert "a has a piece that reaches beyond its buffer" in problems([short], [[sim.manifest(tensors={"a": W})]])


def test_rank_sets_are_checked(sim) -> None:
    a = {"a": W}
    good = [[sim.manifest(tensors=a)]]
    assert "there is no source rank" in problems([], good)
    assert "there is no target" in problems([sim.manifest(tensors=a)], [])
    assert "target 1 is an empty group" in problems([sim.manifest(tensors=a)], [*good, []])
    twice = problems([sim.manifest(0, 2, tensors=a), sim.manifest(0, 2, tensors=a)], good)
    assert "the source: rank 0 is given more than once" in twice
    assert "the source: rank 1 of world_size 2 is missing" in twice
    text = problems([sim.manifest(tensors=a)], [[sim.manifest(0, 2, tensors=a), sim.manifest(1, 3, tensors=a)]])
    assert "target 0: its ranks disagree about their number: world_size is 2, 3" in text
    assert "target 0: rank 2 of world_size 3 is missing" in text
    assert "rank 5 is not within world_size 2" in problems([sim.manifest(tensors=a)], [[sim.manifest(5, 2, tensors=a)]])


def test_mapped_landing_needs_movable_parameters(sim) -> None:
    options = PlanOptions(bucket_bytes=1024, max_tmp_bytes=4096, landing="mapped")
    text = problems([sim.manifest(tensors={"a": W})], [[sim.manifest(tensors={"a": W})]], options)
    assert "target 0 rank 0 does not declare its parameters movable" in text
    build_plan([sim.manifest(tensors={"a": W})], [[sim.manifest(tensors={"a": W}, movable=True)]], options)


def test_what_cannot_be_split_under_the_watermark_is_named_with_its_need_and_the_knob(sim) -> None:
    big, small = ((64, 1024), "float32"), ((8,), "float32")
    options = PlanOptions(bucket_bytes=4096, max_tmp_bytes=4096, leaf_bytes=65536)
    text = problems(
        [sim.manifest(tensors={"big": big, "tiny": small})], [[sim.manifest(tensors={"big": big, "tiny": small})]], options
    )
    assert "big: the smallest part takes 65536 temporary bytes on source rank 0" in text
    assert "above the watermark max_tmp_bytes of 4096" in text
    assert "below leaf_bytes, 65536" in text
    assert "tiny" not in text
    assert count(text) == 1


def test_a_scope_covers_what_it_names_and_nothing_else(sim) -> None:
    source = sim.manifest(tensors={"a": W, "b": N})
    target = sim.manifest(tensors={"b": N, "a": W, "head": W, "elsewhere": W}, aliases={"head": "a"})
    options = PlanOptions(bucket_bytes=1024, max_tmp_bytes=4096, scope=frozenset({"a"}))
    plan = build_plan([source], [[target]], options)
    program = plan.target_program(0, 0)
    assert [landing.pieces for task in program.tasks for landing in task.landings] == [(1, 2)]
    assert program.skipped == ("b", "elsewhere")
    unknown = PlanOptions(bucket_bytes=1024, max_tmp_bytes=4096, scope=frozenset({"a", "zzz"}))
    assert "the scope names tensors that neither side has: zzz" in problems([source], [[target]], unknown)


def test_all_problems_come_at_once(sim) -> None:
    hole = Box(start=(0, 0), shape=(2, 4))
    source = sim.manifest(tensors={"hole": (*W, 0, [hole]), "typed": ((8,), "int64"), "spare": W, "shape": W})
    target = sim.manifest(
        tensors={
            "hole": W,
            "typed": N,
            "missing": ((3, 3), "float32"),
            "shape": ((4, 8), "float32"),
            "big": ((9, 9), "float32"),
        }
    )
    text = problems([source], [[target]])
    for word in (
        "hole: no source rank",
        "typed: the source has int64",
        "spare",
        "missing",
        "shape: the source has shape",
        "big",
    ):
        assert word in text


def test_the_same_problem_of_very_many_tensors_is_one_readable_line(sim) -> None:
    names = [f"layers.{i}.experts.{j}.up.weight" for i in range(1, 40) for j in range(32)]
    source = sim.manifest(tensors=dict.fromkeys(names, ((2,), "int32")))
    target = sim.manifest(tensors=dict.fromkeys(names, ((2,), "float32")))
    text = problems([source], [[target]])
    assert count(text) == 1
    assert "1248 names: layers.{1-39}.experts.{0-31}.up.weight" in text


def test_a_second_target_is_checked_like_the_first(sim) -> None:
    good, bad = sim.manifest(tensors={"a": W}), sim.manifest(tensors={"a": W, "b": W})
    assert "expected by target 1: b" in problems([sim.manifest(tensors={"a": W})], [[good], [bad]])
