"""The demo's own model: a small Llama with a byte-level vocabulary, written as a Hugging Face checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import torch


def write_tiny_model(folder: Path, *, seed: int) -> None:
    """A Llama of about 3 million float32 parameters: grouped-query attention, tied embeddings, one token a byte."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from syncline.adapters.engines.byte_tokenizer import ByteTokenizer

    config = LlamaConfig(
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=ByteTokenizer.eos_token_id,
        pad_token_id=ByteTokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    ByteTokenizer().save(folder)


def model_dtype(name: str) -> torch.dtype:
    """float32 where it is small, bfloat16 for real models."""
    return torch.float32 if Path(name).is_dir() and _is_tiny(Path(name)) else torch.bfloat16


def _is_tiny(folder: Path) -> bool:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) < 2**26
