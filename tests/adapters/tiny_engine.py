"""A small inference engine of our own, built as vLLM builds its models: fused and sharded parameters, each with a
``weight_loader``, and a ``load_weights`` that takes checkpoint tensors one by one. Written apart from the code under test.

The forward pass is a real tensor-parallel one: ``reduce`` sums over the ranks.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

Reduce = Callable[[torch.Tensor], torch.Tensor]
_SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KINDS = ("llama", "llama-tied", "qwen2", "qwen3-moe", "mixtral")


def config_of(kind: str, **changes: Any) -> Any:
    """The config of a tiny model."""
    sizes = {**_SIZES, **changes}
    if kind == "qwen2":
        sizes.pop("head_dim")
        return Qwen2Config(**sizes)
    if kind == "qwen3-moe":
        return Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
    if kind == "mixtral":
        return MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    return LlamaConfig(**sizes, tie_word_embeddings=kind.endswith("tied"))


def reference(kind: str, seed: int = 0, **changes: Any) -> nn.Module:
    """The transformers model, in float64, with weights far from zero."""
    torch.manual_seed(seed)
    config = config_of(kind, **changes)
    config._experts_implementation = "eager"  # the grouped kernel takes no float64
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.3)
    return model


class Together:
    """Sums over ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._parts: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def reduce(self, part: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._parts.append(part)
        self._barrier.wait()
        total = sum(sorted(self._parts, key=lambda p: float(p.sum())))
        if self._barrier.wait() == 0:
            self._parts.clear()
        self._barrier.wait()
        return total

    def run(self, engines: list[TinyEngine], ids: list[int]) -> list[torch.Tensor]:
        """Logits of every rank."""
        found: dict[int, torch.Tensor] = {}

        def forward(rank: int) -> None:
            with torch.no_grad():
                found[rank] = engines[rank](torch.tensor(ids))

        threads = [threading.Thread(target=forward, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in range(self.size)]


def _loader(param: nn.Parameter, loader: Callable[..., None]) -> nn.Parameter:
    param.weight_loader = loader
    return param


class Sharded(nn.Module):
    """A linear layer whose weight is shaped for this rank."""

    def __init__(self, rows: int, columns: int, loader: Callable[..., None], *, bias: bool = False) -> None:
        super().__init__()
        self.weight = _loader(nn.Parameter(torch.zeros(rows, columns, dtype=torch.float64)), loader)
        self.bias = _loader(nn.Parameter(torch.zeros(rows, dtype=torch.float64)), loader) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def whole(param: nn.Parameter, loaded: torch.Tensor) -> None:
    assert param.shape == loaded.shape
    param.data.copy_(loaded)


class Attention(nn.Module):
    def __init__(self, config: Any, rank: int, size: int, reduce: Reduce) -> None:
        super().__init__()
        self.config, self.rank, self.size, self.reduce = config, rank, size, reduce
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads = config.num_attention_heads // size
        self.kv_heads = max(1, config.num_key_value_heads // size)
        self.replicas = max(1, size // config.num_key_value_heads)
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv_proj = Sharded(rows, config.hidden_size, self.load_qkv, bias=config.model_type == "qwen2")
        self.o_proj = Sharded(config.hidden_size, self.heads * self.head_dim, self.load_o)
        if config.model_type.startswith("qwen3"):
            self.q_norm, self.k_norm = Norm(self.head_dim, config), Norm(self.head_dim, config)

    def load_qkv(self, param: nn.Parameter, loaded: torch.Tensor, shard: str) -> None:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        offset, length = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[shard]
        rank = self.rank if shard == "q" else self.rank // self.replicas
        param.data.narrow(0, offset, length).copy_(loaded.narrow(0, rank * length, length))

    def load_o(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        columns = param.shape[1]
        param.data.copy_(loaded.narrow(1, self.rank * columns, columns))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        rows = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (part.view(1, tokens, -1, self.head_dim) for part in self.qkv_proj(x).split(rows, dim=-1))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v.transpose(1, 2)))
        scores = q @ k.transpose(2, 3) / self.head_dim**0.5
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(tokens, -1)
        return self.reduce(self.o_proj(mixed))


class Norm(nn.Module):
    def __init__(self, width: int, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, dtype=torch.float64))
        self.eps = config.rms_norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Mlp(nn.Module):
    def __init__(self, config: Any, rank: int, size: int, reduce: Reduce) -> None:
        super().__init__()
        self.rank, self.reduce, self.inner = rank, reduce, config.intermediate_size // size
        self.gate_up_proj = Sharded(2 * self.inner, config.hidden_size, self.load_gate_up)
        self.down_proj = Sharded(config.hidden_size, self.inner, self.load_down)

    def load_gate_up(self, param: nn.Parameter, loaded: torch.Tensor, shard: int) -> None:
        mine = loaded.narrow(0, self.rank * self.inner, self.inner)
        param.data.narrow(0, shard * self.inner, self.inner).copy_(mine)

    def load_down(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        param.data.copy_(loaded.narrow(1, self.rank * self.inner, self.inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.reduce(self.down_proj(nn.functional.silu(gate) * up))


class Experts(nn.Module):
    """Stacked experts: a slice of each, or (``ep``) a run of whole ones."""

    def __init__(self, config: Any, rank: int, size: int, *, ep: bool) -> None:
        super().__init__()
        total = getattr(config, "num_local_experts", None) or config.num_experts
        inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        count = total // size if ep else total
        self.first, self.count = (rank * count, count) if ep else (0, total)
        self.inner, self.at = (inner, 0) if ep else (inner // size, rank * (inner // size))
        hidden = config.hidden_size
        shapes = {"w13_weight": (count, 2 * self.inner, hidden), "w2_weight": (count, hidden, self.inner)}
        for name, shape in shapes.items():
            self.register_parameter(name, _loader(nn.Parameter(torch.zeros(shape, dtype=torch.float64)), self.load))

    def load(self, param: nn.Parameter, loaded: torch.Tensor, expert: int, shard: str) -> None:
        if not self.first <= expert < self.first + self.count:
            return
        data = param.data[expert - self.first]
        if shard == "w2":
            data.copy_(loaded.narrow(1, self.at, self.inner))
        else:
            data.narrow(0, self.inner * (shard == "w3"), self.inner).copy_(loaded[self.at : self.at + self.inner])

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e in range(self.count):
            gate, up = (x @ self.w13_weight[e].T).chunk(2, dim=-1)
            share = (weights * (chosen == e + self.first)).sum(-1, keepdim=True)
            out = out + share * ((nn.functional.silu(gate) * up) @ self.w2_weight[e].T)
        return out


class Moe(nn.Module):
    def __init__(self, config: Any, rank: int, size: int, reduce: Reduce, *, ep: bool) -> None:
        super().__init__()
        self.reduce, self.top_k = reduce, config.num_experts_per_tok
        experts = getattr(config, "num_local_experts", None) or config.num_experts
        self.gate = Sharded(experts, config.hidden_size, whole)
        self.experts = Experts(config, rank, size, ep=ep)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(self.top_k, dim=-1)
        return self.reduce(self.experts(x, chosen, weights / weights.sum(-1, keepdim=True)))


class Layer(nn.Module):
    def __init__(self, config: Any, rank: int, size: int, reduce: Reduce, *, ep: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config)
        self.self_attn = Attention(config, rank, size, reduce)
        self.post_attention_layernorm = Norm(config.hidden_size, config)
        if config.model_type == "mixtral":
            self.block_sparse_moe = Moe(config, rank, size, reduce, ep=ep)
        else:
            moe = config.model_type == "qwen3_moe"
            self.mlp = Moe(config, rank, size, reduce, ep=ep) if moe else Mlp(config, rank, size, reduce)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        feed = self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp
        return x + feed(self.post_attention_layernorm(x))


class Vocab(nn.Module):
    """Rows of a vocabulary that is padded to a multiple of 8 times the ranks."""

    def __init__(self, config: Any, rank: int, size: int, reduce: Reduce) -> None:
        super().__init__()
        self.vocab, self.reduce = config.vocab_size, reduce
        padded = -(-self.vocab // (8 * size)) * 8 * size
        self.rows = padded // size
        self.first = rank * self.rows
        self.weight = _loader(nn.Parameter(torch.zeros(self.rows, config.hidden_size, dtype=torch.float64)), self.load)

    def load(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        mine = loaded[self.first : self.first + self.rows]
        param[: mine.shape[0]].data.copy_(mine)
        param[mine.shape[0] :].data.fill_(0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        here = (ids >= self.first) & (ids < self.first + self.rows)
        rows = self.weight[(ids - self.first).clamp(0, self.rows - 1)]
        return self.reduce(rows * here[:, None])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        every = torch.zeros(x.shape[0], max(self.vocab, self.first + self.rows), dtype=x.dtype)
        every[:, self.first : self.first + self.rows] = x @ self.weight.T
        return self.reduce(every[:, : self.vocab].contiguous())


class Body(nn.Module):
    def __init__(self, config: Any, rank: int, size: int, reduce: Reduce, *, ep: bool) -> None:
        super().__init__()
        self.embed_tokens = Vocab(config, rank, size, reduce)
        self.layers = nn.ModuleList(Layer(config, rank, size, reduce, ep=ep) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config)


class TinyEngine(nn.Module):
    """One rank."""

    stacked = (("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "v_proj", "v"),
               ("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1))  # fmt: skip
    expert_parts = (("w13_weight", ("gate_proj", "w1"), "w1"), ("w13_weight", ("up_proj", "w3"), "w3"),
                    ("w2_weight", ("down_proj", "w2"), "w2"))  # fmt: skip

    def __init__(self, config: Any, rank: int = 0, size: int = 1, *, reduce: Reduce = lambda x: x, ep: bool = False) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config, rank, size, reduce, ep=ep)
        self.lm_head = Vocab(config, rank, size, reduce)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rope = [LlamaRotaryEmbedding(config)]  # not a part of the state

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(ids)
        cos, sin = self.rope[0](x[None], torch.arange(len(ids))[None])
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.lm_head.logits(self.model.norm(x))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        params, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            if "rotary_emb" in name or (self.config.tie_word_embeddings and name.startswith("lm_head.")):
                continue
            param_name, arguments = self._place(name)
            param = params[param_name]
            getattr(param, "weight_loader", whole)(param, tensor, *arguments)
            loaded.add(param_name)
        return loaded

    def _place(self, name: str) -> tuple[str, tuple[Any, ...]]:
        found = re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)\.weight", name)
        if found:
            for stacked, parts, shard in self.expert_parts:
                if found[3] in parts:
                    return found[1] + stacked, (int(found[2]), shard)
        for fused, part, shard in self.stacked:
            if f".{part}." in name:
                return name.replace(part, fused), (shard,)
        return name, ()
