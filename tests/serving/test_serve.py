"""``syncline serve`` as a process: options, addresses, answers, a graceful end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import aiohttp
import pytest
import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM

from syncline.adapters.engines.byte_tokenizer import ByteTokenizer
from syncline.adapters.trainers import ModuleSource
from syncline.bench.serve import ServeOptions
from syncline.engine import RemoteTarget, TransferEngine
from syncline.engine.errors import ConfigError

RUN = "import sys, tyro; from syncline.bench.serve import ServeOptions, main; sys.exit(main(tyro.cli(ServeOptions)))"


def test_options_from_the_command_line(tmp_path):
    line = "--model m --random-weights 3 --dtype bfloat16 --http [::1]:80 --listen unix:/x --movable --initial-version 0"
    options = tyro.cli(ServeOptions, args=[*line.split(), "--ready-file", str(tmp_path / "r")])
    assert (options.random_weights, options.movable, options.initial_version) == (3, True, 0)
    assert options.http_address == ("::1", 80)
    assert options.secret is None


def test_every_wrong_option_is_listed():
    with pytest.raises(ConfigError) as caught:
        ServeOptions(model="m", http="nowhere", max_batch=0, max_waiting=0, max_length=1, timeout_s=0, threads=0)
    for name in ("http", "max_batch", "max_waiting", "max_length", "timeout_s", "threads"):
        assert name in str(caught.value)


def test_the_secret_comes_from_a_file(tmp_path):
    path = tmp_path / "secret"
    options = ServeOptions(model="m", secret_file=path)
    with pytest.raises(ConfigError, match="cannot be read"):
        _ = options.secret
    path.write_text(" \n")
    with pytest.raises(ConfigError, match="empty"):
        _ = options.secret
    path.write_text("open sesame\n")
    assert options.secret == "open sesame"


@pytest.fixture
async def started(tmp_path, tiny):
    """``await started(...)``: a server process for a tiny model, its addresses, its ready file."""
    processes = []

    async def start(*options: str):
        folder = tmp_path / "model"
        model = tiny("qwen3").config
        model.vocab_size = ByteTokenizer.vocab_size
        model.save_pretrained(folder)
        ByteTokenizer().save(folder)
        ready = tmp_path / "ready.json"
        command = [sys.executable, "-c", RUN, "--model", str(folder), "--random-weights", "1", "--threads", "1"]
        command += ["--listen", f"unix:{tmp_path}/control.sock", "--ready-file", str(ready), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
        processes.append(process)
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        assert json.loads(line) == json.loads(ready.read_text())
        return process, json.loads(line), ready

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_it_serves_and_ends_gracefully(started, tmp_path):
    process, addresses, ready = await started("--initial-version", "4", "--two-phase")
    assert addresses["control"] == f"unix:{tmp_path}/control.sock"
    assert addresses["pid"] == process.pid
    async with aiohttp.ClientSession(addresses["http"]) as client:
        async with client.post("/generate", json={"prompt": "Hello", "max_new_tokens": 5}) as response:
            assert (await response.json())["versions"] == [{"version": 4, "start": 0, "end": 5}]
        async with client.get("/version") as response:
            assert await response.json() == {"version": 4, "state": "COMMITTED"}
        async with client.get("/ready") as response:
            assert (response.status, (await response.json())["state"]) == (200, "SERVING")
        async with client.post("/complete_weights_update", json={"group_name": "g"}) as response:
            assert (await response.json())["message"] == "Process group not initialized"
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        assert await process.wait() == 0
    assert not ready.exists()
    assert not (tmp_path / "control.sock").exists()


async def test_its_metrics_can_be_scraped(started, tmp_path, tiny):
    """Before a push into it, and after."""
    process, addresses, _ = await started("--initial-version", "4", "--metrics-port", "0")
    control = addresses["control"]
    assert await metric(addresses["metrics"], f'syncline_receiver_version{{receiver="{control}"}}') == 4.0
    config = AutoConfig.from_pretrained(tmp_path / "model")
    source = ModuleSource(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    async with TransferEngine(source=source, targets=[RemoteTarget(control)]) as engine:
        report = await engine.push(5)
    assert report.ok, str(report)
    async with asyncio.timeout(20):
        while await metric(addresses["metrics"], f'syncline_receiver_bytes_total{{receiver="{control}"}}') != report.bytes:
            await asyncio.sleep(0.01)
    assert await metric(addresses["metrics"], f'syncline_receiver_version{{receiver="{control}"}}') == 5.0
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        assert await process.wait() == 0


async def metric(url: str, name: str) -> float | None:
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        lines = (await response.text()).splitlines()
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), None)
