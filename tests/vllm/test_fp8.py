"""A block-wise FP8 checkpoint: a weight without its scale is refused before a byte moves; with it, it is loaded, twice."""

from __future__ import annotations

import json

import pytest
import torch

from syncline.adapters.engines.checkpoint_manifest import checkpoint_tensors
from syncline.scheduler.errors import PlanError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM takes FP8 checkpoints on CPUs with AMX only"),
]

BLOCK = 128


@pytest.fixture(scope="module")
def served(servers, tiny, tmp_path_factory):
    """A server of a checkpoint whose linear layers are FP8, 128 x 128 to a scale."""
    folder = tmp_path_factory.mktemp("fp8")
    config = json.loads((tiny("qwen3").folder / "config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    plain = folder / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    arguments = ["--load-format", "dummy", "--skip-tokenizer-init", "--no-enable-prefix-caching", "--dtype", "bfloat16"]
    return folder, servers(folder, *arguments)


def quantized(folder, seed: int) -> dict[str, torch.Tensor]:
    """What the checkpoint holds."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    weights = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "plain"), dtype=torch.float32).state_dict()
    held: dict[str, torch.Tensor] = {}
    for tensor in checkpoint_tensors(folder, dtype=torch.bfloat16).tensors:
        if tensor.dtype == "float8_e4m3fn":
            blocks = weights[tensor.name].unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
            scale = blocks.abs().amax((1, 3)) / 448
            small = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            held[tensor.name], held[f"{tensor.name}_scale_inv"] = small.reshape(tensor.shape), scale
        elif tensor.name in weights:
            held[tensor.name] = weights[tensor.name].to(torch.bfloat16)
    return held


async def test_a_weight_without_its_scale_is_refused(served, source) -> None:
    folder, server = served
    held = quantized(folder, 1)
    scale = "model.layers.1.self_attn.k_proj.weight_scale_inv"
    with pytest.raises(PlanError, match=scale):
        await source({name: tensor for name, tensor in held.items() if name != scale}, server)
    status = await server.status()
    assert (status.state, status.version) == ("FENCED", None)
    assert await server.says_nothing()


async def test_weights_are_loaded_with_their_scales(served, source, well) -> None:
    """Twice. (Not computed with: the instructions for that are not to be had on every machine that says it has them.)"""
    folder, server = served
    seen = []
    for version, landing in ((1, "staged"), (2, "streamed"), (3, "staged")):
        engine = await source(quantized(folder, version % 2), server, landing=landing)
        well(await engine.push(version))
        await engine.close()
        status = await server.status()
        assert (status.state, status.version) == ("COMMITTED", version)
        seen.append((await server.call("POST", "weight_checker", {"action": "checksum"}))["checksums"])
    assert seen[0] == seen[2] != seen[1]
