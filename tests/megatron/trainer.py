"""Megatron models for the tests: built from a Hugging Face config, filled with given weights, and run on a CPU.

How weights are laid in is written here a second time, from the published rules of Megatron's layout, in plain torch: whole
Megatron tensors are put together and cut by ``chunk``. Nothing of the adapter is used, so that a mistake of the adapter's
cannot cancel out here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import nn

PADDED_TO = 16
"""The vocabulary is padded to a multiple of this for each tensor-parallel rank."""


def padded(vocabulary: int, ranks: int) -> int:
    step = PADDED_TO * ranks
    return -(-vocabulary // step) * step


# ---- building


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Megatron asks for the current device where it makes buffers and moves weights, and for random states of it: here it is
    the CPU, and nothing is random. Without Transformer Engine it trips over a class that is None and a name that is missing,
    and its norm refuses sequence parallelism."""
    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.Tensor, "cuda", lambda tensor, *_args, **_options: tensor),
            (CudaRNGStatesTracker, "fork", lambda *_args: contextlib.nullcontext()),
            (multi_latent_attention, "HAVE_TE", False),
            (moe_utils, "te_general_gemm", None),
            (WrappedTorchNorm, "__new__", _norm),
        ):
            stack.enter_context(mock.patch.object(place, name, value, create=name == "te_general_gemm"))
        yield


def _norm(_kind: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_options: Any) -> nn.Module:
    """The same norm, with the mark that Megatron's fused norms set."""
    norm = nn.RMSNorm(hidden_size, eps=eps)
    norm.weight.sequence_parallel = config.sequence_parallel
    return norm


def megatron_config(hf: Any, parallel: Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """Megatron's config of a tiny model: what weights look like and how a forward pass goes."""
    kind = hf.model_type
    options: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": kind in ("qwen2", "qwen2_moe"),
        "qk_layernorm": kind in ("qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": parallel.get("tp", 1),
        "pipeline_model_parallel_size": parallel.get("pp", 1),
        "virtual_pipeline_model_parallel_size": parallel.get("vpp"),
        "expert_model_parallel_size": parallel.get("ep", 1),
        "expert_tensor_parallel_size": parallel.get("etp"),
        "pipeline_dtype": torch.float32,
        **_moe(hf),
    }
    latent = hasattr(hf, "kv_lora_rank")
    if latent:
        options |= {
            "multi_latent_attention": True,
            "q_lora_rank": hf.q_lora_rank,
            "kv_lora_rank": hf.kv_lora_rank,
            "qk_head_dim": hf.qk_nope_head_dim,
            "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
            "v_head_dim": hf.v_head_dim,
            "rope_type": "rope",
            "rotary_base": 10000,
        }
    else:
        options |= {
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        }
    return (MLATransformerConfig if latent else TransformerConfig)(**{**options, **changes})


def _moe(hf: Any) -> dict[str, Any]:
    experts = next((n for name in ("n_routed_experts", "num_local_experts", "num_experts") if (n := getattr(hf, name, 0))), 0)
    if not experts:
        return {}
    options: dict[str, Any] = {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": hf.model_type in ("qwen2_moe", "deepseek_v2"),
    }
    if hf.model_type == "qwen2_moe":
        options |= {"moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size, "moe_shared_expert_gate": True}
    if hf.model_type.startswith("deepseek"):
        options["moe_shared_expert_intermediate_size"] = hf.moe_intermediate_size * hf.n_shared_experts
        options["moe_layer_freq"] = [int(i >= hf.first_k_dense_replace) for i in range(hf.num_hidden_layers)]
        options["moe_router_topk_scaling_factor"] = hf.routed_scaling_factor
    if hf.model_type == "deepseek_v3":
        options |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return options


def build(hf: Any, parallel: Mapping[str, Any], **changes: Any) -> list[GPTModel]:
    """This rank's chunks of a tiny model. Megatron's parallel state is that of ``parallel``."""
    config = megatron_config(hf, parallel, **changes)
    stages = parallel.get("vpp") or 1
    rank, ranks = parallel_state.get_pipeline_model_parallel_rank(), parallel.get("pp", 1)
    chunks = []
    for stage in range(stages):
        vp_stage = stage if parallel.get("vpp") else None
        if config.num_moe_experts:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
            for layer in spec.layer_specs if config.multi_latent_attention else ():
                layer.submodules.self_attention.submodules.core_attention = LatentCoreAttention
        else:
            spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        with without_cuda():
            chunk = GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=padded(hf.vocab_size, parallel.get("tp", 1)),
                max_sequence_length=hf.max_position_embeddings,
                pre_process=rank == 0 and stage == 0,
                post_process=rank == ranks - 1 and stage == stages - 1,
                share_embeddings_and_output_weights=hf.tie_word_embeddings,
                position_embedding_type="rope",
                rotary_base=10000,
                vp_stage=vp_stage,
            )
        chunks.append(chunk.eval())
    return chunks


class LatentCoreAttention(nn.Module):
    """Attention of heads whose keys and values differ in size. It has no parameters: Megatron's own on a CPU knows one size
    only, and Transformer Engine's, which knows two, needs a GPU."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_options: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_rest: Any, **_options: Any
    ) -> torch.Tensor:
        """From (tokens, batch, heads, size) each to (tokens, batch, heads x size of values)."""
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        return mixed.permute(2, 0, 1, 3).flatten(2)


# ---- laying weights in


class Weights:
    """Checkpoint tensors, and this rank's part of what Megatron makes of them."""

    def __init__(self, state: Mapping[str, torch.Tensor], config: TransformerConfig, vocabulary: int) -> None:
        self.state, self.config, self.vocabulary = state, config, vocabulary
        self.tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
        self.etp = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
        self.ep = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_model_parallel_world_size()

    def columns(self, whole: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
        return whole.chunk(place[1], dim=0)[place[0]]

    def rows(self, whole: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
        return whole.chunk(place[1], dim=1)[place[0]]

    def gated(self, gate: torch.Tensor, up: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
        """``[gate; up]`` on each rank."""
        return torch.cat([self.columns(gate, place), self.columns(up, place)])

    def vocabulary_part(self, name: str) -> torch.Tensor:
        """With padding at the end that no checkpoint has."""
        whole = self.state[name]
        filler = torch.full((padded(self.vocabulary, self.tp[1]) - len(whole), whole.shape[1]), 1e9)
        return self.columns(torch.cat([whole, filler.to(whole.dtype)]), self.tp)

    def qkv(self, prefix: str, end: str) -> torch.Tensor:
        """Query heads, key head and value head of KV group 0, then those of group 1, and so on."""
        groups = self.config.num_query_groups
        parts = [self.state[f"{prefix}{part}_proj.{end}"] for part in "qkv"]
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return self.columns(torch.cat(grouped, dim=1).flatten(0, 1), self.tp)

    def of(self, name: str, layer: int) -> torch.Tensor:
        """What Megatron's parameter ``name`` (``layers.N.`` is taken off) of a layer must be."""
        state, there = self.state, f"model.layers.{layer}."
        attention, mlp = f"{there}self_attn.", f"{there}mlp."
        mixtral = f"{there}block_sparse_moe."
        head, _, end = name.rpartition(".")
        if name == "input_layernorm.weight":
            return state[f"{there}input_layernorm.weight"]
        if name == "pre_mlp_layernorm.weight":
            return state[f"{there}post_attention_layernorm.weight"]
        if head == "self_attention.linear_qkv":
            return self.qkv(attention, end)
        if head == "self_attention.linear_proj":
            return (
                self.rows(state[f"{attention}o_proj.weight"], self.tp) if end == "weight" else state[f"{attention}o_proj.bias"]
            )
        if name in _ATTENTION:
            to, split = _ATTENTION[name]
            whole = state[next(f"{attention}{one}" for one in to if f"{attention}{one}" in state)]
            return self.columns(whole, self.tp) if split else whole
        if name == "mlp.router.weight":
            return state[f"{mixtral}gate.weight" if f"{mixtral}gate.weight" in state else f"{mlp}gate.weight"]
        if name == "mlp.router.expert_bias":
            return state[f"{mlp}gate.e_score_correction_bias"]
        if name == "mlp.shared_experts.gate_weight":
            return state[f"{mlp}shared_expert_gate.weight"]
        if head.startswith("mlp.experts."):
            return self.expert(head, end, mlp, mixtral)
        if head.startswith("mlp.shared_experts."):
            mlp += "shared_expert." if f"{mlp}shared_expert.up_proj.weight" in state else "shared_experts."
        if head.endswith("linear_fc1"):
            return self.gated(state[f"{mlp}gate_proj.{end}"], state[f"{mlp}up_proj.{end}"], self.tp)
        if head.endswith("linear_fc2"):
            return self.rows(state[f"{mlp}down_proj.weight"], self.tp) if end == "weight" else state[f"{mlp}down_proj.bias"]
        raise KeyError(name)

    def expert(self, head: str, end: str, mlp: str, mixtral: str) -> torch.Tensor:
        """``mlp.experts.local_experts.E.linear_fcN.weight``, or grouped ``mlp.experts.linear_fcN.weightE``."""
        grouped = "local_experts" not in head
        local = int(end.removeprefix("weight")) if grouped else int(head.split(".")[3])
        number = self.ep[0] * (self.config.num_moe_experts // self.ep[1]) + local
        prefix, names = f"{mlp}experts.{number}.", ("gate_proj", "up_proj", "down_proj")
        if f"{mixtral}experts.{number}.w1.weight" in self.state:
            prefix, names = f"{mixtral}experts.{number}.", ("w1", "w3", "w2")
        gate, up, down = (self.state[f"{prefix}{name}.weight"] for name in names)
        return self.gated(gate, up, self.etp) if head.endswith("linear_fc1") else self.rows(down, self.etp)


_ATTENTION = {  # Megatron's name -> the checkpoint's (whichever is there), and whether its rows are split
    "self_attention.q_layernorm.weight": (("q_norm.weight", "q_a_layernorm.weight"), False),
    "self_attention.k_layernorm.weight": (("k_norm.weight",), False),
    "self_attention.kv_layernorm.weight": (("kv_a_layernorm.weight",), False),
    "self_attention.linear_q_proj.weight": (("q_proj.weight",), True),
    "self_attention.linear_q_down_proj.weight": (("q_a_proj.weight",), True),
    "self_attention.linear_q_up_proj.weight": (("q_b_proj.weight",), True),
    "self_attention.linear_kv_down_proj.weight": (("kv_a_proj_with_mqa.weight",), True),
    "self_attention.linear_kv_up_proj.weight": (("kv_b_proj.weight",), True),
}


def lay_in(chunks: Sequence[nn.Module], state: Mapping[str, torch.Tensor], vocabulary: int) -> None:
    """Fill this rank's chunks with its part of a checkpoint's tensors."""
    tied = "lm_head.weight" not in state
    weights = Weights(state, chunks[0].config, vocabulary)
    for chunk in chunks:
        first = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
        for name, tensor in chunk.state_dict().items():
            if not isinstance(tensor, torch.Tensor) or name.endswith(("novelty", "calibration")):
                continue
            if name == "embedding.word_embeddings.weight" or (name == "output_layer.weight" and tied):
                value = weights.vocabulary_part("model.embed_tokens.weight")
            elif name == "output_layer.weight":
                value = weights.vocabulary_part("lm_head.weight")
            elif name == "decoder.final_layernorm.weight":
                value = state["model.norm.weight"]
            else:
                _, _, number, rest = name.split(".", 3)
                value = weights.of(rest, first + int(number))
            assert tensor.shape == value.shape, (name, tensor.shape, value.shape)
            tensor.copy_(value)


# ---- forward passes


def logits(chunks: Sequence[GPTModel], ids: Sequence[int], parallel: Mapping[str, Any], vocabulary: int) -> torch.Tensor | None:
    """Logits of a prompt, (tokens, vocabulary), on the last pipeline stage's ranks; None on others."""
    tokens = torch.tensor([list(ids)])
    positions = torch.arange(len(ids))[None]
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)[None, None]  # True: not seen
    stages, ranks = parallel.get("vpp") or 1, parallel.get("pp", 1)
    group = parallel_state.get_pipeline_model_parallel_group()
    mine = parallel_state.get_pipeline_model_parallel_rank()
    found = None
    with torch.inference_mode(), without_cuda():
        for step in range(stages * ranks):
            stage, rank = divmod(step, ranks)
            if rank != mine:
                continue
            chunk = chunks[stage]
            if step:
                hidden = torch.empty(len(ids), 1, chunk.config.hidden_size)
                dist.recv(hidden, dist.get_global_rank(group, (step - 1) % ranks), group=group)
                chunk.set_input_tensor(hidden)
            found = chunk(tokens, positions, mask)
            if step < stages * ranks - 1:
                dist.send(found.contiguous(), dist.get_global_rank(group, (step + 1) % ranks), group=group)
                found = None
    if found is None:
        return None
    shards = [torch.empty_like(found) for _ in range(parallel.get("tp", 1))]
    dist.all_gather(shards, found.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(shards, dim=-1)[0, :, :vocabulary].clone()


# ---- what models are wrapped in, and other forms of them


def wrapped(chunk: nn.Module) -> nn.Module:
    """In Megatron's mixed precision and data parallelism with a distributed optimizer, which moves parameters into buffers
    of its own."""
    with without_cuda():
        inner = Float16Module(chunk.config, chunk)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
        return DistributedDataParallel(chunk.config, ddp, inner)


class GroupedExperts(nn.Module):
    """Parameters named and marked as those of Transformer Engine's grouped linear layer, which needs a GPU: one for each
    expert in one module, and ``partition_dim`` 0 on all of them."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for number, weight in enumerate(weights):
            parameter = nn.Parameter(weight.detach().clone())
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
            parameter.allreduce = False
            self.register_parameter(f"weight{number}", parameter)


def grouped(chunks: Sequence[nn.Module]) -> None:
    """Replace sequential experts by grouped ones. Such a model holds weights; it does not compute."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            experts = list(getattr(getattr(layer.mlp, "experts", None), "local_experts", ()))
            if experts:
                layer.mlp.experts = nn.Module()
                layer.mlp.experts.linear_fc1 = GroupedExperts([expert.linear_fc1.weight for expert in experts])
                layer.mlp.experts.linear_fc2 = GroupedExperts([expert.linear_fc2.weight for expert in experts])


def without_a_layer(chunks: Sequence[nn.Module]) -> None:
    """The second pipeline stage has lost its last layer."""
    if parallel_state.get_pipeline_model_parallel_rank() == 1:
        del chunks[-1].decoder.layers[-1]


def with_something_else(chunks: Sequence[nn.Module]) -> None:
    """A parameter and a buffer that no table knows."""
    chunks[0].decoder.layers[0].mlp.register_parameter("novelty", nn.Parameter(torch.zeros(3)))
    chunks[0].decoder.layers[0].register_buffer("calibration", torch.zeros(2))


def with_float8(chunks: Sequence[nn.Module]) -> None:
    """Weights in a type that takes scales, without scales."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            weight = layer.self_attention.linear_proj.weight
            weight.requires_grad = False
            weight.data = weight.data.to(torch.float8_e4m3fn)
