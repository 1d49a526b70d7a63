"""Models of the workers: real ones from folders, tiny ones of transformers, and one whose numbers carry their version."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline.adapters.engines.checkpoints import load_model
from syncline.adapters.named_box import NamedBox, named_box
from syncline.scheduler.formats import QuantRules

FRACTIONS = 256
_TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # so that logits are far apart
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def build(spec: Mapping[str, Any]) -> nn.Module:
    """The model that ``spec["kind"]`` names."""
    kind = spec["kind"]
    if kind == "folder":
        return _from_folder(spec["folder"], getattr(torch, spec.get("dtype", "bfloat16")))
    if kind == "quantized":
        return _quantized(build(spec["of"]), spec["config"])
    if kind == "stamp":
        return StampNet(**{key: value for key, value in spec.items() if key != "kind"})
    return _tiny(kind, tied=spec["tied"], seed=spec["seed"])


def _from_folder(folder: str, dtype: torch.dtype) -> nn.Module:
    """In memory of its own: the loader of transformers leaves parameters in the mapped file."""
    model = load_model(Path(folder), dtype=dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _tiny(kind: str, *, tied: bool, seed: int) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

    common = {**_TINY, "tie_word_embeddings": tied}
    if kind == "qwen3-moe":
        config = Qwen3MoeConfig(**common, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)
    elif kind == "mixtral":
        config = MixtralConfig(**common, num_local_experts=5, num_experts_per_tok=2)
    else:
        config = LlamaConfig(**common)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def _quantized(model: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """The model as an FP8 engine holds it: codes and scales, for the weights that a ``quantization_config`` names. Empty."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name, (shape, dtype) in QuantRules.from_config(config).wire(shapes).items():
        owner, last = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        empty = torch.zeros(shape, dtype=getattr(torch, dtype))
        if last == "weight":
            owner.weight = nn.Parameter(empty, requires_grad=False)
        else:
            owner.register_buffer(last, empty)
    return model


class StampNet(nn.Module):
    """Tensors of many sizes, two of them tied, and a buffer. Element ``j`` of tensor ``i`` is ``version + fraction(i, j)``:
    what is read anywhere says which version it is of, and whether it is in its place.

    Args:
        tensors, width, rows: ``tensors`` parameters of up to ``rows`` rows of ``width`` float32.
        rank, ranks: hold a slice of every second tensor, by rows or by columns, as one of ``ranks`` ranks.
    """

    def __init__(self, *, tensors: int = 12, width: int = 32, rows: int = 96, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.boxes: dict[str, NamedBox] = {}
        self.fractions: dict[str, torch.Tensor] = {}
        for i in range(tensors):
            shape = (1 + (rows - 1) * (i * 5 % tensors) // max(1, tensors - 1), width)
            box = _slice(f"w{i}", shape, i, rank, ranks)
            self.register_parameter(f"w{i}", nn.Parameter(torch.zeros(box.size)))
            self._place(box, i)
        self.tied = self.w0
        self.register_buffer("steps", torch.zeros(5))
        self._place(named_box("steps", (5,)), tensors)

    def _place(self, box: NamedBox, number: int) -> None:
        whole = torch.arange(math.prod(box.shape)).mul(7).add(number * 13).remainder(FRACTIONS).div(FRACTIONS).view(box.shape)
        self.boxes[box.name] = box
        self.fractions[box.name] = whole[tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))].clone()

    def stamp(self, version: int) -> None:
        """As version ``version``; exact up to 2**15. Before the model is sharded."""
        with torch.no_grad():
            for name, tensor in self._held():
                tensor.copy_(self.fractions[name] + version)

    def versions(self) -> list[float]:
        """Every version that some element is of; -1 where an element is of none (out of its place, or not a number)."""
        found: set[float] = set()
        for name, tensor in self._held():
            values = tensor.detach() - self.fractions[name]
            whole = values.floor()
            found.update(torch.where(values == whole, whole, -1.0).unique().tolist())
        return sorted(found)

    def _held(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.named_parameters(), *self.named_buffers()]

    def layout(self) -> dict[str, NamedBox]:
        """For `ModuleLoader`: the slices that this rank holds."""
        return {name: box for name, box in self.boxes.items() if box.size != box.shape}


def _slice(name: str, shape: tuple[int, int], number: int, rank: int, ranks: int) -> NamedBox:
    axis = number // 2 % 2
    if ranks == 1 or number % 2 or shape[axis] < ranks:
        return named_box(name, shape)
    start, size = [0, 0], list(shape)
    first, end = (shape[axis] * at // ranks for at in (rank, rank + 1))
    start[axis], size[axis] = first, end - first
    return named_box(name, shape, start=start, size=size)


def advance(model: nn.Module, by: float) -> None:
    """Add to everything that this rank holds of a `StampNet`, sharded or not."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            local.add_(by)


def shard(model: nn.Module, layout: str, *, offload: bool) -> nn.Module:
    """FSDP2 over all ranks: ``fsdp`` (1-D), ``hsdp`` (2 replicas), ``fsdp_tp`` (2 x 2)."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    world = dist.get_world_size()
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif layout == "fsdp_tp":
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(model, both["tp"], attention=True)
        mesh = both["dp"]
    else:
        mesh = init_device_mesh("cpu", (world,))
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    for layer in getattr(getattr(model, "model", None), "layers", ()):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def tensor_parallel(model: nn.Module, mesh: Any, *, attention: bool) -> None:
    """Llama over a mesh: embedding by vocabulary, MLP by columns and rows. ``attention`` too: for storage only, since 9
    heads cannot be divided by 2."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    layers = model.model.layers
    for layer in layers:
        parallelize_module(layer.mlp, mesh, plan)
        if attention:
            columns = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
            parallelize_module(layer.self_attn, mesh, {**columns, "o_proj": RowwiseParallel()})
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    embedding = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, {"model.embed_tokens": embedding, "lm_head": ColwiseParallel(output_layouts=Replicate())})
    if tied:  # parallelize_module made two parameters of it
        model.lm_head.weight = model.model.embed_tokens.weight


def logits_of(model: nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """All logits of a prompt: (tokens, vocabulary)."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0]
    return logits.clone()


def greedy(model: nn.Module, ids: Sequence[int], count: int) -> list[int]:
    """Continue a prompt by ``count`` tokens, each the most likely one."""
    tokens = list(ids)
    for _ in range(count):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens[len(ids) :]
