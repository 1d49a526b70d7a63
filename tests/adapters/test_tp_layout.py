"""`tp_layout`: the boxes of fused and sharded modules are what an engine's own loader loads and its forward pass needs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.engines.tp_layout import Local, Parallel, Rule, tp_layout
from syncline.adapters.named_box import NamedBox, named_box, padding_box
from syncline.adapters.trainers import ModuleSource
from syncline.engine.errors import ConfigError
from syncline.engine.loader import Landed
from syncline.scheduler.errors import PlanError
from syncline.scheduler.plan import PlanOptions, build_plan

IDS = [3, 11, 36, 7, 20]
CASES = [
    (kind, size, ep)
    for kind in ("llama", "llama-tied", "qwen2", "qwen3-moe", "mixtral")
    for size in (1, 2, 4, 8)
    for ep in (False, True)
    if not ep or (("moe" in kind or kind == "mixtral") and 1 < size <= 4)
]


def checkpoint(model: nn.Module) -> dict[str, torch.Tensor]:
    """Checkpoint tensors of a transformers model, whole."""
    source = ModuleSource(model)
    manifest, buffers = source.manifest(), source.buffers()
    found = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest.tensors}
    for piece in manifest.pieces:
        region = tuple(slice(at, at + n) for at, n in zip(piece.box.start, piece.box.shape, strict=True))
        buffer = buffers[piece.buffer]
        view = buffer.as_strided(piece.box.shape, piece.strides, buffer.storage_offset() + piece.offset)
        found[manifest.tensors[piece.tensor].name][region] = view
    return found


def land(loader: ModuleLoader, tensors: dict[str, torch.Tensor]) -> None:
    """Give a loader every box that its manifest asks for."""
    manifest = loader.manifest(rank=0, world_size=1, host="here")
    parts = []
    for index, piece in enumerate(manifest.pieces):
        region = tuple(slice(at, at + n) for at, n in zip(piece.box.start, piece.box.shape, strict=True))
        parts.append(Landed(index, piece.box, tensors[manifest.tensors[piece.tensor].name][region].contiguous()))
    loader.install(parts)


def engines_of(tiny_engine, kind: str, size: int, ep: bool):
    config, together = tiny_engine.config_of(kind), tiny_engine.Together(size)
    engines = [tiny_engine.TinyEngine(config, r, size, reduce=together.reduce, ep=ep) for r in range(size)]
    return config, together, engines


def layout_of(config, engine: nn.Module, rank: int, size: int, ep: bool) -> dict[str, list[NamedBox]]:
    parallel = Parallel(tp_rank=rank, tp_size=size, ep_rank=rank if ep else 0, ep_size=size if ep else 1)
    return tp_layout(config, engine, parallel)


@pytest.mark.parametrize(("kind", "size", "ep"), CASES)
def test_the_layout_is_what_the_engine_loads_and_computes_with(tiny_engine, kind: str, size: int, ep: bool) -> None:
    """Bit by bit as the engine's own loader does it; then a sharded forward pass equals the unsharded one."""
    model = tiny_engine.reference(kind)
    tensors = checkpoint(model)
    config, together, engines = engines_of(tiny_engine, kind, size, ep)
    for rank, engine in enumerate(engines):
        loaded = tiny_engine.TinyEngine(config, rank, size, ep=ep)
        loaded.load_weights(iter(tensors.items()))
        land(ModuleLoader(engine, layout=layout_of(config, engine, rank, size, ep)), tensors)
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(engine.state_dict()[name], tensor), (rank, name)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    for logits in together.run(engines, IDS):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)  # routers of transformers compute in float32


@pytest.mark.parametrize(
    ("what", "size"),
    [("o_proj", 2), ("down_proj", 2), ("gate_up_proj", 2), ("qkv_proj", 2), ("experts", 2), ("embed_tokens", 2)],
)
def test_a_forward_pass_finds_seeded_faults(tiny_engine, what: str, size: int) -> None:
    """A wrong split that is consistent with itself: the ranks' order reversed, gate and up swapped, experts permuted."""
    kind, size = "qwen3-moe" if what == "experts" else "llama", 2
    model = tiny_engine.reference(kind)
    config, together, engines = engines_of(tiny_engine, kind, size, False)
    for rank, engine in enumerate(engines):
        layout = layout_of(config, engine, rank, size, False)
        other = layout_of(config, engine, size - 1 - rank, size, False)
        for name in [name for name in layout if what in name]:
            layout[name] = _faulty(what, layout[name], other[name])
        land(ModuleLoader(engine, layout=layout), checkpoint(model))
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    assert (together.run(engines, IDS)[0] - expected).abs().max() > 1e-3


def _faulty(what: str, boxes: list[NamedBox], reversed_ranks: list[NamedBox]) -> list[NamedBox]:
    def moved(box: NamedBox, to: NamedBox) -> NamedBox:
        return NamedBox(
            name=box.name, shape=box.shape, start=box.start, size=box.size, local_start=to.local_start, axes=box.axes
        )

    if what in ("gate_up_proj", "experts"):  # both have pairs of equal size
        return [moved(box, to) for box, to in zip(boxes, [*boxes[1:], boxes[0]], strict=True)]
    if what == "qkv_proj":  # keys and values swapped
        return [boxes[0], moved(boxes[1], boxes[2]), moved(boxes[2], boxes[1])]
    return reversed_ranks


def test_padding_rows_are_declared_and_nothing_is_sent_for_them(tiny_engine) -> None:
    config = tiny_engine.config_of("llama")
    manifests = []
    for rank in range(4):  # 37 rows over 4 ranks of 16: the third has 5, the fourth none
        engine = tiny_engine.TinyEngine(config, rank, 4)
        manifests.append(
            ModuleLoader(engine, layout=layout_of(config, engine, rank, 4, False)).manifest(rank=rank, world_size=4, host="x")
        )
    source = ModuleSource(tiny_engine.reference("llama")).manifest()
    plan = build_plan([source], [manifests], PlanOptions(bucket_bytes=2**20, max_tmp_bytes=2**24))
    rows = [
        sum(
            landing.segment.box.shape[0]
            for task in plan.target_program(0, rank).tasks
            for landing in task.landings
            if landing.segment.name == "lm_head.weight"
        )
        for rank in range(4)
    ]
    assert rows == [16, 16, 5, 0]
    padding = {b.name: b.padding for b in manifests[2].buffers}
    assert padding["lm_head.weight"] == 11 * 32 * 8


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize(
    ("rows", "size", "fits"),
    [
        (16_384, 2, True), (16_064, 2, True), (8192, 4, True), (128, 256, True),
        (32_000, 2, False), (32_768, 2, False), (32_000, 8, False), (16_000, 4, False), (8000, 8, False),
    ],
)  # fmt: skip
def test_a_vocabulary_that_is_not_dealt_out_to_all_ranks_is_no_padding(name: str, rows: int, size: int, fits: bool) -> None:
    """What is whole on every rank, or shared by fewer, would never be updated on the last ones."""
    config = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32_000}
    shapes = {name: (rows, 8)}
    for rank in range(size):
        place = Parallel(tp_rank=rank, tp_size=size)
        if fits:
            (held, *_) = tp_layout(config, shapes, place)[name]
            assert held.size[0] == min(rows, max(0, 32_000 - rank * rows)) or not held.name
        else:
            with pytest.raises(PlanError, match=f"{name} .*not dealt out to all of them"):
                tp_layout(config, shapes, place)


def test_padding_that_is_not_declared_is_refused() -> None:
    model = nn.Linear(4, 8, bias=False)
    held = named_box("w", (5, 4), size=(5, 4))
    manifest = ModuleLoader(model, layout={"weight": held}).manifest(rank=0, world_size=1, host="x")
    source = ModuleSource({"w": torch.zeros(5, 4)}).manifest()
    options = PlanOptions(bucket_bytes=2**20, max_tmp_bytes=2**24)
    with pytest.raises(PlanError, match=r"pieces write 80 bytes of buffer weight, which has 128 and declares 0 as padding"):
        build_plan([source], [[manifest]], options)
    padded = [held, padding_box((3, 4), local_start=(5, 0))]
    manifest = ModuleLoader(model, layout={"weight": padded}).manifest(rank=0, world_size=1, host="x")
    assert build_plan([source], [[manifest]], options).nbytes == 80
    over = [held, padding_box((3, 4), local_start=(4, 0))]
    with pytest.raises(ValueError, match=r"its padding at .4, 0. overlaps what it holds"):
        ModuleLoader(model, layout={"weight": over}).manifest(rank=0, world_size=1, host="x")


def test_what_does_not_divide_is_said_all_at_once(tiny_engine) -> None:
    config = tiny_engine.config_of("llama", hidden_size=24, num_attention_heads=6, num_key_value_heads=3)
    shapes = {"a.qkv_proj.weight": (8, 24), "b.gate_up_proj.weight": (7, 32), "lm_head.weight": (4, 32), "norm.weight": (32,)}
    with pytest.raises(PlanError) as caught:
        tp_layout(config, shapes, Parallel(tp_rank=1, tp_size=4))
    text = str(caught.value)
    assert "6 heads and 3 KV heads do not divide among 4 ranks" in text
    assert "rows do not divide by 2" in text
    assert "4 ranks of 4 rows do not hold a vocabulary of 37" in text


def test_rules_of_ones_own_go_first(tiny_engine) -> None:
    def halves(local: Local) -> list[NamedBox]:
        rows = local.shape[0]
        return [named_box(local.name("mixer"), (rows * 2, 4), start=(rows * local.parallel.tp_rank, 0), size=local.shape)]

    config = tiny_engine.config_of("llama")
    layout = tp_layout(
        config, {"x.in_proj.weight": (6, 4)}, Parallel(tp_rank=1, tp_size=2), rules=[Rule(r"(.*\.)(in_proj)\.weight", halves)]
    )
    assert layout == {"x.in_proj.weight": [named_box("x.mixer.weight", (12, 4), start=(6, 0), size=(6, 4))]}


def test_a_config_may_be_a_dict(tiny_engine) -> None:
    config, parallel = tiny_engine.config_of("llama"), Parallel(tp_rank=1, tp_size=2)
    shapes = {"lm_head.weight": (20, config.hidden_size), "a.o_proj.weight": (config.hidden_size, 4)}
    wanted = tp_layout(config, shapes, parallel)
    assert tp_layout(config.to_dict(), shapes, parallel) == wanted
    assert tp_layout({"text_config": config.to_dict(), "vision_config": {}}, shapes, parallel) == wanted


@pytest.mark.parametrize("config", [None, "meta-llama/x", {}, nn.Linear(1, 1)], ids=str)
def test_what_is_no_config_is_refused(config) -> None:
    with pytest.raises(ConfigError, match=r"^1 problem.*\n  - config"):
        tp_layout(config, {}, Parallel())


def test_a_place_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="ranks go from 0 to size - 1"):
        Parallel(tp_rank=2, tp_size=2)
