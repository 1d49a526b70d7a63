"""Canonical names: what ``save_pretrained`` writes is what we call it, tensor by tensor, element by element."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, conversion_mapping, core_model_loading
from transformers.core_model_loading import (
    Concatenate,
    PermuteForRope,
    Transpose,
    WeightConverter,
    WeightRenaming,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from syncline.adapters import names_transformers
from syncline.adapters.names import NameTable, Rename, Unpack, canonical_boxes, named_box, strip_wrappers, table_for
from syncline.scheduler.errors import PlanError

TINY = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {
    "num_experts": 3,
    "num_local_experts": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}


@pytest.fixture(autouse=True, scope="module")
def no_progress_bars():
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def tiny(model_type: str, **options) -> nn.Module:
    config = {**TINY, **options}
    if "moe" in model_type or model_type in {"mixtral", "deepseek_v3", "nemotron_h", "minimax_m2"}:
        config |= EXPERTS
    if model_type == "deepseek_v3":
        config |= LATENT
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**config))
    with torch.no_grad():
        for at, tensor in enumerate([*model.parameters(), *model.buffers()]):
            if tensor.is_floating_point():  # numbers that no two elements of a model share
                tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 10_000 * at)
    return model


def shapes_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def assemble(tensors: dict[str, torch.Tensor], boxes) -> dict[str, torch.Tensor]:
    """Canonical tensors, put together by the letter of the boxes; elements that none writes are -1."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        assert sum(torch.Size(box.size).numel() for box in boxes[name]) == tensor.numel()
        for box in boxes[name]:
            part = tensor[tuple(slice(at, at + n) for at, n in zip(box.local_start, box.local_size(), strict=True))]
            kept = [axis for axis in box.axes if axis >= 0]
            part = part.permute(*kept, *(axis for axis in range(part.ndim) if axis not in kept)).reshape(box.size)
            whole = found.setdefault(box.name, torch.full(box.shape, -1, dtype=tensor.dtype))
            region = tuple(slice(at, at + n) for at, n in zip(box.start, box.size, strict=True))
            assert (whole[region] == -1).all()
            whole[region] = part
    return found


def untied(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict without the second name of tied tensors, as a checkpoint has it."""
    first: dict[int, str] = {}
    return {name: t for name, t in model.state_dict().items() if first.setdefault(t.data_ptr(), name) == name}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "tie_word_embeddings": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "tie_word_embeddings": True},
        {"model_type": "qwen2_moe"},
        {"model_type": "qwen3_moe"},
        {"model_type": "qwen3_moe", "tie_word_embeddings": True},
        {"model_type": "mixtral"},
        {"model_type": "mixtral", "tie_word_embeddings": True},
        {"model_type": "deepseek_v3"},
        {"model_type": "minimax_m2"},
        {"model_type": "nemotron_h"},
        {"model_type": "gpt_oss", "num_local_experts": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"model_type": "gemma2"},
    ],
    ids=lambda options: options["model_type"] + ("-tied" if options.get("tie_word_embeddings") else ""),
)
def test_names_and_content_are_those_of_save_pretrained(options, tmp_path):
    model = tiny(**options)
    model.save_pretrained(tmp_path)
    tensors = untied(model)
    boxes = canonical_boxes(shapes_of(tensors), root=model)
    same(assemble(tensors, boxes), load_file(tmp_path / "model.safetensors"))


def test_names_do_not_depend_on_the_file_that_was_loaded(tmp_path):
    """Loaded from packed experts, transformers itself would save packed ones; both sides of a push must agree."""
    model = tiny("mixtral")
    model.save_pretrained(tmp_path, save_original_format=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    boxes = canonical_boxes(shapes_of(untied(loaded)), root=loaded)
    assert boxes == canonical_boxes(shapes_of(untied(model)), root=model)
    assert boxes["model.layers.0.mlp.experts.down_proj"][2].name == "model.layers.0.block_sparse_moe.experts.2.w2.weight"


@pytest.mark.parametrize("model_type", ["mixtral", "minimax_m2", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_tables_by_model_type_say_the_same(model_type):
    model = tiny(model_type)
    shapes = shapes_of(model.state_dict())
    table = table_for(model_type)
    by_table, by_model = canonical_boxes(shapes, names=table), canonical_boxes(shapes, root=model)
    for name in shapes:
        assert sorted(by_table[name], key=str) == sorted(by_model[name], key=str)


def test_table_steps_in_where_the_conversion_cannot_be_had(monkeypatch):
    model = tiny("mixtral")
    shapes = shapes_of(model.state_dict())
    wanted = canonical_boxes(shapes, root=model)
    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", lambda *_: 1 / 0)
    assert names_transformers.conversion_boxes(model, shapes) is None
    found = canonical_boxes(shapes, root=model)
    assert {box.name for boxes in found.values() for box in boxes} == {box.name for boxes in wanted.values() for box in boxes}


def test_a_wrong_table_is_seen(tmp_path):
    """The comparison above must be able to fail: gate and up swapped, and an expert's slice not transposed."""
    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path)
    tensors = untied(model)
    table = NameTable(
        [
            Unpack(r"(.*\.experts)\.gate_up_proj", (r"\1.{e}.up_proj.weight", r"\1.{e}.gate_proj.weight")),
            Unpack(r"(.*\.experts)\.down_proj", (r"\1.{e}.down_proj.weight",)),
        ]
    )
    with pytest.raises(AssertionError, match="gate_proj"):
        same(assemble(tensors, canonical_boxes(shapes_of(tensors), names=table)), load_file(tmp_path / "model.safetensors"))


traced = names_transformers._Traced.parameter


def conversion(monkeypatch, *steps):
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: list(steps))


def test_conversions_that_are_boxes(monkeypatch):
    """Joined, stacked, transposed and renamed parameters."""
    model = tiny("llama")
    conversion(
        monkeypatch,
        WeightConverter("mlp.fused.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Concatenate(0).reverse_op]),
        WeightConverter("o_proj.kernel", "o_proj.weight", [Transpose(0, 1)]),
        WeightRenaming("model.trunk.", "model.layers."),
    )
    tensors = untied(model)
    found = assemble(tensors, canonical_boxes(shapes_of(tensors), root=model))
    layer = model.model.layers[1]
    fused = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
    assert torch.equal(found["model.trunk.1.mlp.fused.weight"], fused)
    assert torch.equal(found["model.trunk.1.self_attn.o_proj.kernel"], layer.self_attn.o_proj.weight.T)
    assert torch.equal(found["model.norm.weight"], model.model.norm.weight)


@pytest.mark.parametrize(
    "convert",
    [
        lambda a, b: {"stack": torch.stack([a, b], dim=1)},
        lambda a, b: {"cat": torch.cat([a.T, b.T[:, 1:]], 1).contiguous(), "rest": b[:1].clone()},
        lambda a, b: {f"row.{i}": row for i, row in enumerate([*a.unbind(0), *b.unsqueeze(1).split(1)])},
        lambda a, b: {"a": a[:, 1:], "first": a[:, 0], "b": b.permute(1, 0).unsqueeze(-1)},
    ],
)
def test_tracing(convert):
    """Operations on tensors without data come to the same as on tensors with data."""
    tensors = {"a": torch.arange(6).view(2, 3), "b": torch.arange(10, 16).view(2, 3)}
    shapes = shapes_of(tensors)
    boxes = names_transformers._decode(convert(*(traced(name, shape) for name, shape in shapes.items())), shapes)
    same(assemble(tensors, boxes), convert(*tensors.values()))


def test_conversions_that_are_not_boxes_keep_the_names(monkeypatch):
    """Rope permutation, and everything that is joined with it; the rest is still converted."""
    model = tiny("llama")
    conversion(
        monkeypatch,
        WeightConverter(
            "attn.qk.weight",
            ["self_attn.q_proj.weight", "self_attn.k_proj.weight"],
            [Concatenate(0).reverse_op, PermuteForRope(permute_layer_names=["q_proj"])],
        ),
        WeightRenaming("model.trunk.", "model.layers."),
    )
    boxes = canonical_boxes(shapes_of(untied(model)), root=model)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        assert [box.name for box in boxes[name]] == [name]
    assert boxes["model.layers.0.self_attn.v_proj.weight"][0].name == "model.trunk.0.self_attn.v_proj.weight"


class Actor(nn.Module):
    """A transformers model as a part of something else."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.value = nn.Linear(2, 1)


def test_a_transformers_model_inside_another_module():
    model = Actor(tiny("mixtral"))
    boxes = canonical_boxes(shapes_of(model.state_dict()), root=model)
    moe = "policy.model.layers.1.block_sparse_moe"
    assert boxes["value.weight"] == (named_box("value.weight", (1, 2)),)
    assert boxes["policy.model.layers.1.mlp.gate.weight"][0].name == f"{moe}.gate.weight"
    assert boxes["policy.model.layers.1.mlp.experts.down_proj"][1].name == f"{moe}.experts.1.w2.weight"


def test_compiled_and_data_parallel_wrappers_change_no_name():
    model = tiny("qwen3_moe")
    bare = canonical_boxes(shapes_of(model.state_dict()), root=model)
    holder = nn.Module()
    holder.module = model
    for wrapped in (torch.compile(model, backend="eager"), holder, torch.compile(holder, backend="eager")):
        boxes = canonical_boxes(shapes_of(wrapped.state_dict()), root=wrapped)
        assert list(boxes.values()) == list(bare.values())


def test_a_users_table_goes_first():
    model = tiny("qwen3_moe")
    unpack = Unpack(r"(.*)\.down_proj", (r"\1.{e}.w2",), transposed=True)
    table = NameTable([Rename(r"^lm_head\.", "output."), Rename(r"\.norm\.", ".final."), unpack])
    boxes = canonical_boxes(shapes_of(model.state_dict()), root=model, names=table)
    assert boxes["lm_head.weight"] == (named_box("output.weight", (31, 16)),)
    assert boxes["model.norm.weight"][0].name == "model.final.weight"
    assert boxes["model.layers.0.mlp.experts.down_proj"][1] == named_box(
        "model.layers.0.mlp.experts.1.w2", (12, 16), local_start=(1, 0, 0), axes=(2, 1)
    )
    assert boxes["model.layers.0.mlp.experts.gate_up_proj"][0].name.startswith("model.layers.0.mlp.experts.0.")


@pytest.mark.parametrize(("shape", "transposed"), [((2, 6, 3), False), ((2, 3, 6), True), ((2, 6), False)])
def test_unpack(shape, transposed):
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    rule = Unpack(r"x\.(\w+)", (r"\1.{e}.a", r"\1.{e}.b"), transposed=transposed)
    found = assemble({"x.y": tensor}, {"x.y": rule.boxes("x.y", shape)})
    for expert in range(2):
        whole = tensor[expert].T if transposed else tensor[expert]
        a, b = whole.chunk(2)
        assert torch.equal(found[f"y.{expert}.a"], a)
        assert torch.equal(found[f"y.{expert}.b"], b)
    assert rule.boxes("x.y.z", shape) is None


def test_unpack_that_does_not_fit():
    table = NameTable([Unpack(r"w", (r"{e}.a", r"{e}.b"))])
    with pytest.raises(PlanError, match=r"w of shape \(2, 5, 3\) has no 2 equal parts"):
        table.boxes({"w": (2, 5, 3)})
    with pytest.raises(PlanError, match="w of shape"):
        table.boxes({"w": (4,)})


@pytest.mark.parametrize(
    ("names", "clean"),
    [
        (["_orig_mod.a.w", "_orig_mod.b._checkpoint_wrapped_module.w"], ["a.w", "b.w"]),
        (["module.a.w", "module.b"], ["a.w", "b"]),
        (["module.a.w", "other"], ["module.a.w", "other"]),
        (["_orig_mod.module.base_model.model.a", "_orig_mod.module.base_model.model.b"], ["a", "b"]),
        (["_fsdp_wrapped_module.a._fsdp_wrapped_module.w"], ["a.w"]),
        (["a._orig_mod.w", "a.w", "b._orig_mod.w"], ["a._orig_mod.w", "a.w", "b.w"]),
        (["my_orig_mod.w", "encoder.module.w"], ["my_orig_mod.w", "encoder.module.w"]),
        ([], []),
    ],
)
def test_strip_wrappers(names, clean):
    assert list(strip_wrappers(names).values()) == clean


def test_named_box_checks():
    assert named_box("w", (8, 4), start=(4, 0), size=(4, 4)).local_start == (0, 0)
    for wrong in ({"start": (5, 0), "size": (4, 4)}, {"size": (4,)}, {"axes": (0, 0)}, {"axes": (0, 2)}):
        with pytest.raises(ValueError, match="w: "):
            named_box("w", (8, 4), **wrong)


def test_transformers_is_not_imported_by_importing_adapters():
    """Neither by making a source: it is asked only about models that are its own."""
    script = """
import sys, torch
import syncline.adapters.trainers, syncline.adapters.engines
syncline.adapters.trainers.ModuleSource(torch.nn.Linear(2, 2)).manifest()
print([name for name in sys.modules if name.startswith("transformers")])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
