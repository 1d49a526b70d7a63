"""A Llama sharded by FSDP2 over two processes, pushed as FP8 into engines in other processes, over shared memory and gloo."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

TRAINED = {"kind": "llama", "tied": False, "seed": 3}
BLOCK = (16, 32)
LEFT_OUT = ("lm_head", "model.layers.0.self_attn.o_proj")
CONFIG = {
    "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK), "modules_to_not_convert": list(LEFT_OUT),
}  # fmt: skip
ENGINE = {"kind": "quantized", "of": {**TRAINED, "seed": 4}, "config": CONFIG}
MODES = [("shm", "staged"), ("shm", "mapped"), ("gloo", "streamed")]


def blockwise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, block by block."""
    rows, columns = BLOCK
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[place].abs().max().clamp(min=1e-12) / 448.0
            codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


@pytest.mark.parametrize(("transport", "landing"), MODES)
async def test_an_fp8_engine_gets_codes_and_scales(cluster, tmp_path: Path, transport: str, landing: str) -> None:
    movable = landing == "mapped"
    source, engine, plain = await asyncio.gather(
        cluster.source(2, build={"model": TRAINED, "layout": "fsdp", "offload": landing == "staged"}),
        cluster.target("fp8", build={"model": ENGINE, "movable": movable}),
        cluster.target("plain", build={"model": {**TRAINED, "seed": 5}, "movable": movable}),
    )
    config = {"transport": transport, "landing": landing, "max_tmp_bytes": "64KiB", "bucket_bytes": "4KiB"}
    await cluster.connect(source, [engine, plain], **config, wire_format="fp8_e4m3:16x32", modules_to_not_convert=LEFT_OUT)
    for version in (1, 2):
        report = await source.push(version)
        assert report["ok"], report["text"]
        assert 0 < report["peak_tmp_bytes"] <= 64 * 1024 or landing != "streamed"
    await asyncio.gather(
        *(t.leader.call("save_state", out=str(tmp_path / name)) for t, name in ((engine, "fp8"), (plain, "plain")))
    )
    held, trained = load_file(tmp_path / "fp8"), load_file(tmp_path / "plain")
    quantized = {name for name, tensor in held.items() if tensor.dtype is torch.float8_e4m3fn}
    assert len(quantized) == 13  # 7 in each of 2 layers, less what is left out
    for name, weight in trained.items():
        if name not in quantized:
            assert torch.equal(held.pop(name), weight), name
            continue
        codes, scales = blockwise(weight)
        assert torch.equal(held.pop(name).view(torch.uint8), codes.view(torch.uint8)), name
        assert torch.equal(held.pop(f"{name}_scale_inv"), scales), name
    assert not held
    await source.all("close")
    await asyncio.gather(*(target.leader.call("close") for target in (engine, plain)))
