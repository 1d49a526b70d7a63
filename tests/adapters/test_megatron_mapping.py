"""Tables and mapping on modules that look like Megatron's, without Megatron: numbering, groups, ties, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from syncline.adapters.trainers import MegatronSource
from syncline.adapters.trainers.families import DEEPSEEK_V2, DEEPSEEK_V3, FAMILIES, LLAMA, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3_MOE
from syncline.adapters.trainers.megatron_mapping import EXPERT, check_configs, map_model
from syncline.adapters.trainers.megatron_model import Place, Places, layer_numbers, unwrapped
from syncline.adapters.trainers.megatron_tables import Dims, Family, Gated, Row, Same
from syncline.engine.errors import ConfigError
from syncline.scheduler.errors import PlanError

HIDDEN, HEADS, GROUPS, HEAD_DIM = 8, 4, 2, 2


def config(**changes: Any) -> SimpleNamespace:
    numbers = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": HEAD_DIM, "hidden_size": HIDDEN}
    return SimpleNamespace(**{**numbers, "num_layers": 4, "num_moe_experts": None, "gated_linear_unit": True, **changes})


def places(
    tensor: tuple[int, int] = (0, 1), expert_tensor: tuple[int, int] = (0, 1), expert: tuple[int, int] = (0, 1)
) -> Places:
    return Places(tensor=Place(*tensor), expert_tensor=Place(*expert_tensor), expert=Place(*expert))


def module(**tensors: torch.Tensor) -> nn.Module:
    """A module with parameters; names with dots make modules."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        holder = root
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, nn.Module())
            holder = getattr(holder, part)
        parameter = nn.Parameter(tensor.clone(), requires_grad=False)
        for mark, value in vars(tensor).items():
            setattr(parameter, mark, value)
        holder.register_parameter(last, parameter)
    return root


def marked(*shape: int, axis: int = 0, stride: int = 1, **marks: Any) -> torch.Tensor:
    """A shard as Megatron marks it."""
    tensor = torch.zeros(shape)
    for name, value in {"tensor_model_parallel": True, "partition_dim": axis, "partition_stride": stride, **marks}.items():
        setattr(tensor, name, value)
    return tensor


class Chunk(nn.Module):
    """A chunk with layers of given numbers (from 1), each with given tensors."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], numbers: tuple[int, ...] = (1,), tied: bool = False, **changes: Any
    ) -> None:
        super().__init__()
        self.config = config(**changes)
        self.share_embeddings_and_output_weights = tied
        layer = {name.removeprefix("layer."): tensor for name, tensor in tensors.items() if name.startswith("layer.")}
        whole = {name: tensor for name, tensor in tensors.items() if not name.startswith("layer.")}
        built = module(**whole)
        for name, child in built.named_children():
            self.add_module(name, child)
        if not hasattr(self, "decoder"):
            self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList()
        for number in numbers:
            one = module(**layer)
            one.layer_number = number
            self.decoder.layers.append(one)


def mapped(chunks, family=LLAMA, at=None, hf=None, **options):
    return map_model(nn.ModuleList(chunks), family=family, places=at or places(), hf_config=hf, **options)


def names(found):
    return {box.name for boxes in found.boxes.values() for box in boxes}


def problems(*args, **options):
    with pytest.raises(PlanError) as caught:
        mapped(*args, **options)
    return caught.value.problems


NORM = {"layer.input_layernorm.weight": torch.ones(HIDDEN)}


def test_layers_have_the_numbers_of_the_whole_model():
    """Two virtual stages of a pipeline rank: layers 2, 3 and 6 of the model, each the first of its chunk or the second."""
    found = mapped([Chunk(NORM, (3, 4)), Chunk(NORM, (7,))])
    assert names(found) == {f"model.layers.{i}.input_layernorm.weight" for i in (2, 3, 6)}
    assert found.boxes["1.decoder.layers.0.input_layernorm.weight"][0].name == "model.layers.6.input_layernorm.weight"


def test_wrappers_are_seen_through():
    """Data parallelism and mixed precision wrap the model, activation checkpointing a layer."""
    chunk = Chunk(NORM, (3, 4))
    inner = nn.Module()
    inner._checkpoint_wrapped_module = chunk.decoder.layers[1]
    chunk.decoder.layers[1] = inner
    wrapped = chunk
    for _ in range(2):
        outer = nn.Module()
        outer.module = wrapped
        wrapped = outer
    assert unwrapped(wrapped) is chunk
    assert layer_numbers(wrapped) == {"decoder.layers.0": 2, "decoder.layers.1": 3}
    assert names(mapped([wrapped])) == {f"model.layers.{i}.input_layernorm.weight" for i in (2, 3)}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("family", "parts"),
    [(QWEN3_MOE, ("mlp", "gate_proj", "up_proj", "down_proj")), (MIXTRAL, ("block_sparse_moe", "w1", "w3", "w2"))],
    ids=["qwen3_moe", "mixtral"],
)
def test_experts_have_the_numbers_of_the_whole_model(family, parts, grouped):
    """Expert-parallel rank 1 of 2, expert-tensor-parallel rank 1 of 2, eight experts: ours are 4 to 7."""
    block, gate, up, down = parts
    tensors = {}
    for i in range(4):
        name = (
            f"layer.mlp.experts.linear_{{}}.weight{i}" if grouped else f"layer.mlp.experts.local_experts.{i}.linear_{{}}.weight"
        )
        fc1, fc2 = name.format("fc1"), name.format("fc2")
        tensors[fc1] = marked(6, HIDDEN, stride=1 if grouped else 2, allreduce=False)
        tensors[fc2] = marked(HIDDEN, 3, axis=0 if grouped else 1, allreduce=False)  # grouped ones say 0, wrongly
    at = places(tensor=(0, 2), expert_tensor=(1, 2), expert=(1, 2))
    found = mapped([Chunk(tensors, num_moe_experts=8)], family=family, at=at)
    prefix = f"model.layers.0.{block}.experts."
    assert names(found) == {f"{prefix}{e}.{part}.weight" for e in range(4, 8) for part in (gate, up, down)}
    boxes = {box.name: box for held in found.boxes.values() for box in held}
    for part, shape, start in ((gate, (6, HIDDEN), (3, 0)), (up, (6, HIDDEN), (3, 0)), (down, (HIDDEN, 6), (0, 3))):
        assert (boxes[f"{prefix}5.{part}.weight"].shape, boxes[f"{prefix}5.{part}.weight"].start) == (shape, start)
    assert boxes[f"{prefix}5.{up}.weight"].local_start == (3, 0)
    assert set(found.groups.values()) == {EXPERT} and set(found.groups) == names(found)


def test_experts_are_no_group_of_their_own_where_they_live_with_the_rest():
    tensors = {"layer.mlp.experts.local_experts.0.linear_fc2.weight": marked(HIDDEN, 3, axis=1)}
    at = places(tensor=(1, 2), expert_tensor=(1, 2))
    assert mapped([Chunk(tensors, num_moe_experts=1)], family=QWEN3_MOE, at=at).groups == {}


def test_dense_parameters_are_sharded_by_the_tensor_parallel_group():
    tensors = {
        "layer.mlp.shared_experts.linear_fc2.weight": marked(HIDDEN, 3, axis=1),
        "layer.mlp.shared_experts.gate_weight": torch.zeros(1, HIDDEN),
        "layer.mlp.router.weight": torch.zeros(4, HIDDEN),
    }
    at = places(tensor=(1, 2), expert=(0, 2))
    found = mapped([Chunk(tensors, num_moe_experts=4)], family=QWEN2_MOE, at=at)
    boxes = {box.name: box for held in found.boxes.values() for box in held}
    assert boxes["model.layers.0.mlp.shared_expert.down_proj.weight"].start == (0, 3)
    assert boxes["model.layers.0.mlp.shared_expert_gate.weight"].size == (1, HIDDEN)
    assert boxes["model.layers.0.mlp.gate.weight"].size == (4, HIDDEN)
    assert found.groups == {}


@pytest.mark.parametrize("said", [{"parallel_mode": None, "tp_size": 1}, {"parallel_mode": "duplicated", "tp_size": 2}])
@pytest.mark.parametrize(
    ("ours", "theirs"), [("linear_kv_down_proj", "kv_a_proj_with_mqa"), ("linear_q_down_proj", "q_a_proj")]
)
def test_linears_that_are_duplicated_on_all_ranks(said: dict[str, Any], ours: str, theirs: str):
    """Transformer Engine marks them as sharded all the same. Megatron builds them without a mode, as for one rank."""
    chunk = Chunk({f"layer.self_attention.{ours}.weight": marked(6, HIDDEN)})
    vars(getattr(chunk.decoder.layers[0].self_attention, ours)).update(said)
    found = mapped([chunk], family=DEEPSEEK_V2, at=places(tensor=(1, 2)))
    ((box,),) = found.boxes.values()
    assert (box.name, box.shape) == (f"model.layers.0.self_attn.{theirs}.weight", (6, HIDDEN))


def test_linears_without_a_mode_that_are_sharded_all_the_same():
    """Experts whose communication Megatron does itself; shared experts that overlap theirs."""
    shared, expert = "layer.mlp.shared_experts.linear_fc2", "layer.mlp.experts.linear_fc2"
    chunk = Chunk({f"{shared}.weight": marked(HIDDEN, 3, axis=1), f"{expert}.weight0": marked(HIDDEN, 3)}, num_moe_experts=1)
    mlp = chunk.decoder.layers[0].mlp
    vars(mlp.shared_experts.linear_fc2).update(parallel_mode=None, tp_size=2)
    vars(mlp.experts.linear_fc2).update(parallel_mode=None, tp_size=1)
    found = mapped([chunk], family=QWEN2_MOE, at=places(tensor=(1, 2), expert_tensor=(1, 2)))
    starts = {box.name: box.start for held in found.boxes.values() for box in held}
    assert starts == {
        "model.layers.0.mlp.shared_expert.down_proj.weight": (0, 3),
        "model.layers.0.mlp.experts.0.down_proj.weight": (0, 3),
    }


def test_norms_fused_into_the_layers_behind_them():
    """As Transformer Engine's layers hold them."""
    norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    found = mapped([Chunk({f"layer.{name}": torch.zeros(HIDDEN) for name in norms})], at=places(tensor=(1, 2)))
    boxes = [(box.name, box.size) for held in found.boxes.values() for box in held]
    there = ("input_layernorm", "post_attention_layernorm")
    assert boxes == [(f"model.layers.0.{name}.weight", (HIDDEN,)) for name in there]


def test_latent_attention_fused_with_its_norms():
    """As Transformer Engine's layers hold it."""
    prefix = "layer.self_attention."
    tensors = {
        f"{prefix}linear_q_down_proj.weight": torch.zeros(6, HIDDEN),
        f"{prefix}linear_q_up_proj.weight": marked(4, 6),
        f"{prefix}linear_q_up_proj.layer_norm_weight": torch.zeros(6),
        f"{prefix}linear_kv_up_proj.layer_norm_weight": torch.zeros(5),
    }
    found = mapped([Chunk(tensors)], family=DEEPSEEK_V3, at=places(tensor=(1, 2)))
    there = "model.layers.0.self_attn."
    assert names(found) == {f"{there}{name}.weight" for name in ("q_a_proj", "q_b_proj", "q_a_layernorm", "kv_a_layernorm")}


def test_tied_embeddings_are_one_tensor_and_an_alias():
    rows = {"output_layer.weight": marked(3, HIDDEN)}
    found = mapped([Chunk(rows, (), tied=True)], at=places(tensor=(1, 2)), vocabulary=5)
    ((box,),) = found.boxes.values()
    assert (box.name, box.shape, box.start, box.size) == ("model.embed_tokens.weight", (5, HIDDEN), (3, 0), (2, HIDDEN))
    assert found.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    untied = mapped([Chunk(rows, ())], at=places(tensor=(1, 2)), vocabulary=5)
    assert names(untied) == {"lm_head.weight"} and untied.aliases == {}


def test_a_second_copy_of_tied_embeddings_on_one_rank():
    """A pipeline layout may put the first and the last chunk on one rank: one of the copies counts."""
    rows = torch.zeros(4, HIDDEN)
    chunks = [Chunk({name: rows}, (), tied=True) for name in ("embedding.word_embeddings.weight", "output_layer.weight")]
    found = mapped(chunks, vocabulary=3)
    first, second = (held[0] for held in found.boxes.values())
    assert (first.name, first.size) == ("model.embed_tokens.weight", (3, HIDDEN))
    assert second.is_padding


def test_a_rank_of_padding_holds_nothing():
    found = mapped([Chunk({"embedding.word_embeddings.weight": marked(3, HIDDEN)}, ())], at=places(tensor=(1, 2)), vocabulary=3)
    ((box,),) = found.boxes.values()
    assert box.is_padding and box.size == (3, HIDDEN)


def test_what_is_left_out_needs_no_row():
    tensors = {**NORM, "layer.mlp.novelty": torch.zeros(2), "mtp.layers.eh_proj.weight": torch.zeros(2, 2)}
    found = mapped([Chunk(tensors)], leave_out=["mtp.*", "decoder.layers.*.mlp.novelty"])
    assert names(found) == {"model.layers.0.input_layernorm.weight", ""}  # without a name: padding
    assert len(problems([Chunk(tensors)], leave_out=["mtp.*"])) == 1


def test_biases():
    tensors = {
        "layer.self_attention.linear_qkv.bias": marked((HEADS + 2 * GROUPS) * HEAD_DIM // 2),
        "layer.self_attention.linear_proj.bias": torch.zeros(HIDDEN),
        "layer.mlp.linear_fc1.bias": marked(6),
        "layer.mlp.linear_fc2.bias": torch.zeros(HIDDEN),
    }
    found = mapped([Chunk(tensors)], at=places(tensor=(1, 2)))
    boxes = {box.name.removeprefix("model.layers.0."): box for held in found.boxes.values() for box in held}
    assert (boxes["self_attn.q_proj.bias"].start, boxes["self_attn.q_proj.bias"].size) == ((4,), (4,))
    assert (boxes["self_attn.v_proj.bias"].start, boxes["self_attn.v_proj.bias"].local_start) == ((2,), (6,))
    assert (boxes["mlp.up_proj.bias"].shape, boxes["mlp.up_proj.bias"].start) == ((6,), (3,))
    assert boxes["self_attn.o_proj.bias"].size == boxes["mlp.down_proj.bias"].size == (HIDDEN,)


# ---- what is refused


def test_unmapped_parameters_are_named_with_the_family_and_a_remedy():
    (line,) = problems(
        [Chunk({"layer.mlp.novelty": torch.zeros(2), "layer.cross.weight": torch.zeros(2)}, (1, 2))], family=QWEN2
    )
    for i in range(2):
        assert f"decoder.layers.{i}.mlp.novelty" in line and f"decoder.layers.{i}.cross.weight" in line
    assert "family qwen2" in line and "Row(" in line and "QWEN2.rows" in line


def test_all_problems_at_once():
    tensors = {
        "layer.mlp.novelty": torch.zeros(2),
        "layer.self_attention.linear_qkv.weight": marked(10, HIDDEN),
        "layer.mlp.linear_fc1.weight": torch.zeros(7, HIDDEN),
        "layer.mlp.linear_fc2.weight": marked(HIDDEN, 4, axis=1, allreduce=False),
        "embedding.word_embeddings.weight": marked(6, HIDDEN),
    }
    hf = {"num_hidden_layers": 5, "hidden_size": HIDDEN, "num_attention_heads": 2, "tie_word_embeddings": True}
    lines = problems([Chunk(tensors, layernorm_zero_centered_gamma=True)], hf=hf, vocabulary=7)
    text = "\n".join(lines)
    for words in (
        "family llama has no row for decoder.layers.0.mlp.novelty",
        "linear_qkv.weight of shape (10, 8): it has 10 rows; 4 query heads and 2 x 2 KV heads of 2 make 16",
        "linear_fc1.weight of shape (7, 8): it has 7 rows, which are not two equal halves",
        "decoder.layers.0.mlp.linear_fc2.weight is an expert's parameter (allreduce=False)",
        "it has 6 rows (padding included) for a vocabulary of 7",
        "num_layers is 4, the Hugging Face config's num_hidden_layers is 5",
        "num_attention_heads is 4, the Hugging Face config's num_attention_heads is 2",
        "kv_channels is 2, the Hugging Face config's hidden_size // num_attention_heads is 4",
        "layernorm_zero_centered_gamma=True stores norms minus 1",
        "ties the embeddings",
    ):
        assert words in text, words


def test_a_block_without_a_gate():
    """Not with a row that says [gate; up]; with a row of its own it is a tensor like any other."""
    chunk = Chunk({"layer.mlp.linear_fc1.weight": torch.zeros(6, HIDDEN)}, gated_linear_unit=False)
    (line,) = problems([chunk])
    assert "linear_fc1.weight of shape (6, 8): Megatron's gated_linear_unit is False" in line
    row = Row("decoder.layers.{layer}.mlp.linear_fc1.weight", Same("model.layers.{layer}.mlp.up_proj.weight"))
    found = mapped([chunk], family=Family(name="plain", rows=(row, *LLAMA.rows)))
    assert names(found) == {"model.layers.0.mlp.up_proj.weight"}


def test_experts_that_cannot_be_dealt_out():
    (line,) = problems([Chunk(NORM, num_moe_experts=5)], family=QWEN3_MOE, at=places(expert=(0, 2)))
    assert "5 experts" in line and "2 expert-parallel ranks" in line


def test_a_layer_without_its_number():
    chunk = Chunk(NORM)
    del chunk.decoder.layers[0].layer_number
    (line,) = problems([chunk])
    assert "decoder.layers.0 has no layer_number" in line


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize(
    "knob", ["rotary_interleaved", "layernorm_zero_centered_gamma", "attention_output_gate", "qk_l2_norm", "no_rope_freq"]
)
def test_what_leaves_no_trace_is_refused_unless_the_family_allows_it(family, knob):
    (line,) = check_configs(config(**{knob: True}), None, family)
    assert line.startswith(f"Megatron's {knob}=True ") and line.endswith("it must not be set")
    assert check_configs(config(**{knob: True}), None, replace(family, allows=(knob,))) == []
    assert check_configs(config(**{knob: False}), None, family) == []


def test_an_activation_or_a_rotation_that_differs_is_refused():
    own = Family(name="own", rows=LLAMA.rows)
    (line,) = check_configs(config(activation_func=nn.functional.gelu), {"hidden_act": "silu"}, own)
    assert line == "Megatron's activation_func is gelu, the Hugging Face config's hidden_act is silu"
    for function in (nn.functional.silu, nn.SiLU(), lambda x: x):
        assert check_configs(config(activation_func=function), {"hidden_act": "silu"}, own) == []
    latent = config(multi_latent_attention=True)
    assert check_configs(latent, {"rope_interleave": True}, own) == check_configs(latent, {}, own) == []
    (line,) = check_configs(latent, {"rope_interleave": False}, own)
    assert "rope_interleave is False" in line


def test_a_gate_in_one_tensor_has_to_be_said_where_the_parameter_does_not():
    """As with perform_initialization=False, and with Transformer Engine's layers."""
    whole = "model.layers.{layer}.mlp.gate_up_proj.weight"
    silent, telling = ({"layer.mlp.linear_fc1.weight": marked(8, HIDDEN, stride=stride)} for stride in (1, 2))

    def family(rule):
        return Family(name="own", rows=(Row("decoder.layers.{layer}.mlp.linear_fc1.weight", rule),))

    (line,) = problems([Chunk(silent)], family=family(Same(whole)), at=places(tensor=(1, 2)))
    assert "Same(..., stride=2)" in line
    said = mapped([Chunk(silent)], family=family(Same(whole, stride=2)), at=places(tensor=(1, 2))).boxes
    assert said == mapped([Chunk(telling)], family=family(Same(whole)), at=places(tensor=(1, 2))).boxes
    assert [(box.start[0], box.size[0]) for boxes in said.values() for box in boxes] == [(4, 4), (12, 4)]
    mapped([Chunk(silent)], family=family(Same(whole)))  # on one rank there is nothing to mistake
    mapped([Chunk(silent, gated_linear_unit=False)], family=family(Same(whole)), at=places(tensor=(1, 2)))


def test_a_pattern_that_leaves_nothing_out_is_refused_where_all_stages_are():
    """Of a pipeline's stages only some may have what it means."""
    chunk = Chunk(NORM)
    mapped([chunk], leave_out=["mtp.*"])
    chunk.pre_process = chunk.post_process = True
    (line,) = problems([chunk], leave_out=["mtp.*", "*.input_layernorm.*"])
    assert line == "leave_out: 'mtp.*' matches no parameter of the model; mend or drop it"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_configs_that_agree(family):
    """The first Hugging Face name that is there counts; a config may be an object or a dict."""
    mine = {knob: 3 + i for i, knob in enumerate(family.numbers)}
    theirs = {names[0]: mine[knob] for knob, names in family.numbers.items()}
    for hf in (theirs, SimpleNamespace(**theirs)):
        assert check_configs(SimpleNamespace(**mine), hf, family) == []
    wrong = {name: value + 1 for name, value in theirs.items()}
    assert len(check_configs(SimpleNamespace(**mine), wrong, family)) == len(mine)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ([], {"family": "llama"}, "at least one chunk"),
        (nn.Linear(1, 1), {}, "neither hf_config nor family is given; known are llama, "),
        (nn.Linear(1, 1), {"family": "gpt5"}, "no family 'gpt5' is known"),
        (nn.Linear(1, 1), {"hf_config": {"model_type": "bert"}}, "no family 'bert' is known"),
        (nn.Linear(1, 1), {"family": LLAMA}, "torch.distributed"),
        (nn.Linear(1, 1), {"hf_config": "meta-llama/x"}, "give a config object or a dict"),
        (nn.Linear(1, 1), {"family": LLAMA, "vocab_size": 0}, "vocab_size is 0; it must be a whole number above 0"),
        (nn.Linear(1, 1), {"hf_config": {"model_type": "llama", "vocab_size": -1}}, "vocab_size is -1"),
        (nn.Linear(1, 1), {"family": LLAMA, "leave_out": "mtp.*"}, r"give a list of patterns: \['mtp.\*'\]"),
    ],
)
def test_what_a_source_is_not_made_of(model, options, words):
    with pytest.raises(ConfigError, match=words):
        MegatronSource(model, **options)


# ---- tables


def test_the_first_row_that_matches_wins():
    mine = Family(name="mine", rows=(Row("decoder.final_layernorm.weight", Same("norm")), *LLAMA.rows))
    match = mine.find("decoder.final_layernorm.weight")
    assert match is not None
    assert [segment.to for segment in match.row.rule.segments(4, Dims(heads=1, groups=1, head_dim=1))] == ["norm"]
    assert mine.find("decoder.final_layernormXweight") is None  # a dot is a dot
    assert mine.find("decoder.layers.x.input_layernorm.weight") is None


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tables_are_sound(family):
    """Every model type is one family's; no pattern twice; numbers of the pattern are in the name and the other way round."""
    assert sum(family.name == other.name for other in FAMILIES) == 1
    assert all(sum(kind in other.model_types for other in FAMILIES) == 1 for kind in family.model_types)
    patterns = [row.pattern for row in family.rows]
    assert len(patterns) == len(set(patterns))
    for row in family.rows:
        for segment in row.rule.segments(16, Dims(heads=4, groups=2, head_dim=2)):
            assert all((key in row.pattern) == (key in segment.to) for key in ("{layer}", "{expert}")), row


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row("a.{layer}.b.{layer}", Same("c.{layer}")), "more than once"),
        (Row("a.{layer}", Same("c")), r"\{layer\} in 'a.\{layer\}' is not in 'c'"),
        (Row("a.{layer}.{expert}", Same("c.{layer}")), r"\{expert\} .*is not in 'c"),
        (Row("a.{layer}", Gated("gate.{layer}", "up")), r"is not in 'up'"),
    ],
    ids=["twice", "no layer", "no expert", "one of two"],
)
def test_every_name_has_every_number_once(row, words):
    """A name that lacks one would be the same for layers of other stages or experts of other ranks, as of replicas."""
    with pytest.raises(ConfigError, match=words):
        Family(name="mine", rows=(row,))


@pytest.mark.parametrize(
    "name", ["", 7, Row("a.{layr}", Same("b")), Row("a.{layer}", Same("b.{layr}")), Row("a", "b")], ids=str
)
def test_a_table_with_something_else_in_it_is_refused(name):
    with pytest.raises(ConfigError, match=r"Family mine: .*(is no row: write Row|layr)"):
        Family(name="mine", rows=(name, *LLAMA.rows))
