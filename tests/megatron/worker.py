"""A rank of the tests: one of a Megatron trainer, or an engine of transformers that takes its pushes.

Commands come as JSON lines, ``{"cmd": "push", "args": {"version": 1}}``, one after the other; each is answered by
``{"value": …}`` or ``{"error": {"kinds": …, "message": …, "traceback": …}}``.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import sabotage
import sharded
import tiny
import torch
import torch.distributed as dist
import trainer
import uvloop
from megatron.core import parallel_state
from transformers.core_model_loading import revert_weight_conversion

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.engines.tp_layout import Parallel as TensorParallel, tp_layout
from syncline.adapters.trainers import MegatronSource
from syncline.adapters.trainers.families import LLAMA
from syncline.adapters.trainers.megatron_tables import Family, Row, Same
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine
from syncline.stages.prepare import PrepareStage

OWN = Family(
    name="mine",
    rows=(
        Row("decoder.layers.{layer}.mlp.novelty", Same("model.layers.{layer}.mlp.novelty")),
        Row("decoder.layers.{layer}.calibration", Same("model.layers.{layer}.calibration")),
        *LLAMA.rows,
    ),
)
MEET_S = 60.0
Parallel = Mapping[str, Any]


class Worker:
    """Commands are the methods ``do_…``."""

    async def serve(self, control: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=control, limit=2**26)
        while line := await reader.readline():
            request = json.loads(line)
            try:
                value = getattr(self, f"do_{request['cmd']}")(**request["args"])
                reply = {"value": await value if asyncio.iscoroutine(value) else value}
            except BaseException as error:  # noqa: BLE001 (it travels to the test)
                kinds = [kind.__name__ for kind in type(error).__mro__]
                text = "".join(traceback.format_exception(error))
                reply = {"error": {"kinds": kinds, "message": str(error), "traceback": text}}
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        writer.close()


class Trainer(Worker):
    """One rank of a Megatron job."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.engine: TransferEngine | None = None
        self.parallel: Parallel = {}

    def do_join(self, rank: int, world_size: int, store: str, parallel: Parallel) -> None:
        """Join a job of ``world_size`` ranks, laid out by ``parallel``: ``tp``, ``pp``, ``vpp``, ``ep``, ``etp``."""
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        limit = timedelta(seconds=MEET_S)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.get("tp", 1),
            pipeline_model_parallel_size=parallel.get("pp", 1),
            virtual_pipeline_model_parallel_size=parallel.get("vpp"),
            expert_model_parallel_size=parallel.get("ep", 1),
            expert_tensor_parallel_size=parallel.get("etp"),
        )
        self.parallel = parallel

    def do_build(
        self,
        *,
        family: str,
        seed: int,
        dtype: str = "float32",
        hf: Mapping[str, Any] | None = None,
        megatron: Mapping[str, Any] | None = None,
        wrap: str = "",
        reshape: str = "",
    ) -> None:
        """A Megatron model with the weights of ``tiny.build(family, seed=seed)``; ``hf``, ``megatron``: changes of configs."""
        self.original = tiny.build(family, seed=seed, dtype=dtype, **(hf or {}))
        self.config = self.original.config
        options = {**(megatron or {}), "params_dtype": getattr(torch, dtype)}
        self.chunks = trainer.build(self.config, self.parallel, **options)
        if reshape:
            getattr(trainer, reshape)(self.chunks)
        self.lay_in()
        self.model = [getattr(trainer, wrap)(chunk) for chunk in self.chunks] if wrap else self.chunks

    def lay_in(self) -> None:
        state = {name: tensor for name, tensor in checkpoint(self.original).items() if isinstance(tensor, torch.Tensor)}
        if self.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        with torch.no_grad():
            trainer.lay_in(self.chunks, state, self.config.vocab_size)

    def do_step(self, seed: int, family: str, hf: Mapping[str, Any] | None = None) -> None:
        """Other weights in the same memory, as after a step of training."""
        self.original = tiny.build(family, seed=seed, **(hf or {}))
        self.lay_in()

    def do_logits(self, ids: Sequence[int]) -> float:
        """Largest difference between Megatron's logits and those of transformers; 0 on ranks that have no logits."""
        found = trainer.logits(self.chunks, ids, self.parallel, self.config.vocab_size)
        if found is None:
            return 0.0
        return float((found - tiny.logits_of(self.original, list(ids))).abs().max())

    def do_source(self, broken: str = "", told: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Make the source; ``broken`` names a bug to seed in the adapter, ``told`` changes the config that it is told of."""
        config = {**self.config.to_dict(), **(told or {})}
        self.undo = sabotage.Seeded(broken) if broken else None
        if self.undo is not None:
            options = {**options, **self.undo.options(self.config.model_type)}
        if options.get("family") == "own":
            options["family"] = OWN
        self.source = MegatronSource(self.model, hf_config=config, **options)

    def do_manifest(self) -> dict[str, Any]:
        """What this rank's manifest says."""
        manifest = self.source.manifest()
        elements: dict[str, int] = {}
        for piece in manifest.pieces:
            name = manifest.tensors[piece.tensor].name
            count = 1
            for extent in piece.box.shape:
                count *= extent
            elements[name] = elements.get(name, 0) + count
        return {
            "elements": elements,
            "groups": {tensor.name: tensor.group for tensor in manifest.tensors},
            "aliases": dict(manifest.aliases),
            "same": self.source.manifest() is manifest,
        }

    def do_late(self, seconds: float) -> None:
        """Once, start to prepare so much later than asked to."""
        start = PrepareStage.start

        def late(stage: PrepareStage, task: Any) -> Any:
            PrepareStage.start = start
            time.sleep(seconds)
            return start(stage, task)

        PrepareStage.start = late

    async def do_connect(self, addresses: Sequence[str], config: Mapping[str, Any]) -> None:
        targets = [RemoteTarget(address) for address in addresses]
        self.engine = TransferEngine(source=self.source, targets=targets, config=TransferConfig(**config))
        await self.engine.connect()

    async def do_push(self, version: int) -> dict[str, Any]:
        assert self.engine is not None and self.engine._session is not None
        report = await self.engine.push(version)
        plan = self.engine._session._wired().plan
        return {
            "ok": report.ok,
            "errors": [str(target.error) for target in report.targets.values() if target.error],
            "bytes": report.bytes,
            "tasks": [{"group": task.group, "owner": task.owner, "names": list(task.names)} for task in plan.tasks],
            "sent": list(plan.sent),
            "messages": report.routing.messages,
            "content": report.routing.direct_nbytes + report.routing.gathered_nbytes,
            "spans": [[[span.stage, span.task, span.start, span.end] for span in spans] for spans in report.trace.ranks]
            if report.trace
            else [],
            "clock_errors": [rank.clock_error_s for rank in report.trace.details] if report.trace else [],
        }

    async def do_close(self) -> None:
        if self.engine is not None:
            await self.engine.close()
        self.engine = None
        if getattr(self, "undo", None) is not None:
            self.undo.restore()
            self.undo = None


class Engine(Worker):
    """An engine that serves a transformers model."""

    def __init__(self) -> None:
        self.receivers: list[Receiver] = []

    async def do_serve(
        self, family: str, seed: int, listen: str, hf: Mapping[str, Any] | None = None, dtype: str = "float32"
    ) -> str:
        """Start with other weights than the trainer's; returns the address."""
        self.model = tiny.build(family, seed=seed, dtype=dtype, **(hf or {}))
        self.receivers.append(Receiver(loader=ModuleLoader(self.model), listen=listen))
        await self.receivers[0].start()
        return self.receivers[0].address

    def do_compare(
        self, family: str, seed: int, ids: Sequence[int], hf: Mapping[str, Any] | None = None, dtype: str = "float32"
    ) -> Any:
        """With the model of ``seed``: names of tensors that are not equal bit for bit, and whether logits are."""
        original = tiny.build(family, seed=seed, dtype=dtype, **(hf or {}))
        mine, theirs = self.model.state_dict(), original.state_dict()
        assert mine.keys() == theirs.keys()
        differ = [name for name in mine if not same_bits(mine[name], theirs[name])]
        logits = [tiny.logits_of(model, list(ids)) for model in (self.model, original)]
        return {"tensors": len(mine), "differ": differ, "logits": float((logits[0] - logits[1]).abs().max())}

    async def do_serve_shards(self, family: str, seed: int, listen: Sequence[str]) -> str:
        """An engine of two tensor-parallel ranks, both in this process, without content; returns the leader's address."""
        original = tiny.build(family, seed=seed)
        state = checkpoint(original)
        self.expected = [sharded.shards(state, rank, len(listen)) for rank in range(len(listen))]
        self.models = [sharded.module(tensors) for tensors in self.expected]
        for rank, model in enumerate(self.models):
            layout = tp_layout(original.config, model, TensorParallel(tp_rank=rank, tp_size=len(listen)))
            receiver = Receiver(
                loader=ModuleLoader(model, layout=layout),
                listen=listen[rank],
                rank=rank,
                world_size=len(listen),
                leader=self.receivers[0].address if rank else None,
            )
            self.receivers.append(receiver)
            await receiver.start()
        await asyncio.gather(*(receiver.joined() for receiver in self.receivers))
        return self.receivers[0].address

    def do_compare_shards(self) -> list[str]:
        """Parameters of either rank that are not what plain torch cuts from the checkpoint, padding included."""
        return [
            f"rank {rank}: {name}"
            for rank, model in enumerate(self.models)
            for name, tensor in model.state_dict().items()
            if not same_bits(tensor, self.expected[rank][name])
        ]

    def do_shard_bytes(self) -> int:
        """Bytes of all parameters of both ranks, without padding."""
        count = 0
        for tensors in self.expected:
            for tensor in tensors.values():
                rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]
                count += int((~(rows == sharded.PADDING).all(dim=1)).sum()) * rows.shape[1] * tensor.element_size()
        return count

    def do_equal(self, first: str, second: str) -> bool:
        """Whether two tensors of the engine's model are equal."""
        state = self.model.state_dict()
        return same_bits(state[first], state[second])

    def do_state(self) -> list[Any]:
        return [self.receivers[0].state, self.receivers[0].version]

    async def do_close(self) -> None:
        for receiver in self.receivers:
            await receiver.close()
        self.receivers.clear()


def checkpoint(model: Any) -> dict[str, torch.Tensor]:
    """The tensors that transformers would save, by its own conversion."""
    return dict(revert_weight_conversion(model, model.state_dict()))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def main(role: str, control: socket.socket) -> int:
    async def live() -> None:
        await (Trainer if role == "trainer" else Engine)().serve(control)

    uvloop.run(live())
    return 0
