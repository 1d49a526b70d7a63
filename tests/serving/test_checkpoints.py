"""Checkpoint folders, GGUF files, and the tokenizer of bytes."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from syncline.adapters.engines.byte_tokenizer import ByteTokenizer, TextStream
from syncline.adapters.engines.checkpoints import Checkpoint, load_model, load_tokenizer
from syncline.engine.errors import ConfigError


@given(st.text())
def test_bytes_there_and_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert all(0 <= token < 256 for token in ids)
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_left_out_or_named():
    tokenizer = ByteTokenizer()
    ids = [*b"ab", tokenizer.eos_token_id, 0xC3, tokenizer.pad_token_id, *"é".encode()]
    assert tokenizer.decode(ids) == "ab\ufffdé"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<eos>\ufffd<pad>é"


@given(st.text(), st.lists(st.integers(0, 257)))
def test_streamed_text_adds_up(text, tail):
    tokenizer = ByteTokenizer()
    ids = [*tokenizer.encode(text), *tail]
    stream = TextStream(tokenizer)
    parts = [stream.add(token) for token in ids]
    assert "".join(parts) + stream.end() == tokenizer.decode(ids)
    assert not any(part.endswith("\ufffd") for part in parts)


def test_a_folder_with_weights_and_one_without(tmp_path, tiny, capfd):
    model = tiny("qwen3", seed=3)
    model.config.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert load_model(str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        load_model(tmp_path)


def test_random_weights_follow_their_seed_and_leave_torchs_alone(tmp_path, tiny):
    tiny("llama").config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    one, same, other = (load_model(tmp_path, random_weights=seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_tokenizers(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Other"}))
    assert not ByteTokenizer.is_marked(tmp_path)
    ByteTokenizer().save(tmp_path)
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="0 GGUF files and no"):
        load_model(tmp_path)
    (tmp_path / "a.gguf").touch()
    assert Checkpoint.find(tmp_path) == Checkpoint.find(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match="2 GGUF files"):
        load_model(tmp_path)


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(alone, capfd):
    model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
    assert capfd.readouterr() == ("", "")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer.decode(alone(model, tuple(tokenizer.encode("The capital of France is")), 2)).strip() == "Paris."
