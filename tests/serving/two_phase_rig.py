"""An engine with the two-phase app in front of it, and a source that knows only the document. Loaded by the conftest."""

from __future__ import annotations

import asyncio
import itertools

import aiohttp
import torch
import uvicorn
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.engines.generation import GenerationEngine
from syncline.adapters.engines.two_phase_app import TwoPhaseApp
from syncline.engine import Receiver

GROUP = "weight_sync_group"
BUCKETS = 73
PROMPT = (9, 8, 7)
CONFIG = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 5,
    "pad_token_id": 0,
}  # fmt: skip


def model_of(seed, *, tied=False):
    config = LlamaConfig(**CONFIG, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def buckets_of(weights, count=BUCKETS):
    """All tensors in ``count`` buckets, in order."""
    names = list(weights)
    cuts = [len(names) * i // count for i in range(count + 1)]
    return [
        {
            "names": names[a:b],
            "dtypes": [str(weights[name].dtype).removeprefix("torch.") for name in names[a:b]],
            "shapes": [list(weights[name].shape) for name in names[a:b]],
        }
        for a, b in itertools.pairwise(cuts)
    ]


class FlushingEngine(GenerationEngine):
    """Remembers the versions for which it was told to drop its caches."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.flushed = []

    async def flush(self, version):
        self.flushed.append(version)


class Web:
    """An ASGI app under uvicorn. ``http``: host and port."""

    def __init__(self, app):
        self.uvicorn = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on", ws="none"))

    async def start(self):
        self.task = asyncio.create_task(self.uvicorn.serve())
        async with asyncio.timeout(20):
            while not self.uvicorn.started:
                await asyncio.sleep(0.005)
        self.http = list(self.uvicorn.servers[0].sockets[0].getsockname())

    async def close(self):
        self.uvicorn.should_exit = True
        await self.task


class Server:
    """An engine with a receiver, and the app in front of them under uvicorn."""

    def __init__(self, seed, *, version=1, loader=ModuleLoader, tied=False, flushing=False, secret=None, **options):
        self.model, self.tied = model_of(seed, tied=tied), tied
        self.engine = (FlushingEngine if flushing else GenerationEngine)(self.model, eos_ids=(), version=version)
        self.receiver = Receiver(
            loader=loader(self.model),
            listen="tcp://127.0.0.1:0",
            serving=self.engine,
            initial_version=version,
            secret=secret,
        )
        options["secret"] = secret
        self.app = TwoPhaseApp(lambda: self.receiver.address, **options)
        self.web = Web(self.app)

    async def start(self):
        await self.engine.start()
        await self.receiver.start()
        await self.web.start()
        self.http = self.web.http

    async def close(self):
        await self.web.close()
        await self.receiver.close()
        await self.engine.close()

    async def post(self, path, body=None, *, method="POST", **options):
        """From this process: for when the source is gone."""
        url = "http://{}:{}{}".format(*self.http, path)
        async with aiohttp.ClientSession() as session, session.request(method, url, json=body, **options) as response:
            return [response.status, await response.json()]

    async def logits(self):
        return await self.engine.logits(PROMPT)

    async def serves(self, seed, version):
        """What it answers is what transformers says for the model with this seed."""
        logits, served = await self.logits()
        with torch.no_grad():
            expected = model_of(seed, tied=self.tied)(torch.tensor([PROMPT])).logits[0]
        return served == version and torch.equal(logits, expected)


class Source:
    """The independent process, with the weights of a model."""

    def __init__(self, peer, server, tmp_path):
        self.peer, self.http, self.tmp_path = peer, server.http, tmp_path

    async def load(self, seed, *, dtype=torch.float32, tied=False):
        state = dict(model_of(seed, tied=tied).state_dict())
        if tied:
            del state["lm_head.weight"]
        self.weights = {name: tensor.to(dtype).contiguous() for name, tensor in state.items()}
        save_file(self.weights, self.tmp_path / "weights")
        await self.peer("load", file=str(self.tmp_path / "weights"))

    async def init(self, **changes):
        (answer,) = await self.peer("host", group=GROUP, world_size=2, https=[self.http], init=changes)
        return answer

    async def post(self, path, body=None, raw=None):
        return await self.peer("post", http=self.http, path=path, body=body, raw=raw)

    async def prepare(self, buckets=None, **changes):
        buckets = buckets_of(self.weights) if buckets is None else buckets
        body = {"num_buckets": len(buckets), "buckets": buckets, "group_name": GROUP} | changes
        return await self.post("/prepare_weights_update", body)

    async def send(self, names=None):
        return await self.peer("send", names=list(self.weights) if names is None else names)

    async def complete(self, **changes):
        return await self.post("/complete_weights_update", {"group_name": GROUP, "flush_cache": False} | changes)

    async def push(self):
        assert (await self.prepare())[1]["status"] == "ready"
        await self.send()
        return await self.complete()
