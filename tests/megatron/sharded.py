"""A tensor-parallel engine's shards of a checkpoint, as vLLM and SGLang name and fuse them, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

PADDING = 7.0


def shards(state: Mapping[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """What rank ``rank`` of ``ranks`` holds. The vocabulary is padded to a multiple of 16 rows a rank."""
    mine: dict[str, torch.Tensor] = {}
    w13: dict[str, list[torch.Tensor]] = {}
    w2: dict[str, list[torch.Tensor]] = {}
    for name, whole in state.items():
        head, _, end = name.rpartition(".")
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = -(-len(whole) // (16 * ranks)) * 16 * ranks
            filler = torch.full((rows - len(whole), whole.shape[1]), PADDING)
            mine[name] = torch.cat([whole, filler]).chunk(ranks)[rank]
        elif head.endswith("q_proj"):
            parts = [state[f"{head[:-6]}{part}_proj.{end}"].chunk(ranks)[rank] for part in "qkv"]
            mine[f"{head[:-6]}qkv_proj.{end}"] = torch.cat(parts)
        elif ".experts." in head and head.endswith("gate_proj"):
            up = state[f"{head[:-9]}up_proj.{end}"]
            fused = torch.cat([whole.chunk(ranks)[rank], up.chunk(ranks)[rank]])
            w13.setdefault(head.split(".experts.")[0], []).append(fused)
        elif ".experts." in head and head.endswith("down_proj"):
            w2.setdefault(head.split(".experts.")[0], []).append(whole.chunk(ranks, dim=1)[rank])
        elif head.endswith("gate_proj"):
            up = state[f"{head[:-9]}up_proj.{end}"]
            mine[f"{head[:-9]}gate_up_proj.{end}"] = torch.cat([whole.chunk(ranks)[rank], up.chunk(ranks)[rank]])
        elif head.endswith(("o_proj", "down_proj")):
            mine[name] = whole.chunk(ranks, dim=1)[rank]
        elif not head.endswith(("k_proj", "v_proj", "up_proj")):
            mine[name] = whole
    for name, stacks in (("w13_weight", w13), ("w2_weight", w2)):
        mine.update({f"{block}.experts.{name}": torch.stack(stack) for block, stack in stacks.items()})
    return {name: tensor.contiguous() for name, tensor in mine.items()}


def module(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module whose parameters have these names and shapes, and no content but padding that must stay."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        holder = root
        for part in path:
            if part not in dict(holder.named_children()):
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.register_parameter(last, nn.Parameter(torch.full_like(tensor, torch.nan), requires_grad=False))
        if "embed_tokens" in name or "lm_head" in name:
            holder.get_parameter(last)[(tensor == PADDING).all(dim=1)] = PADDING
    return root
