"""One rank of the demo's trainer: FSDP2 over gloo, a push after every step, events as JSON lines on standard output."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import nn

from syncline.adapters.engines.checkpoints import load_model, load_tokenizer
from syncline.adapters.trainers import FSDPSource
from syncline.engine import PushReport, TransferConfig, TransferEngine
from syncline.engine.config import Transport
from syncline.engine.messages import Landing

from .demo_engines import Engine, target_of
from .demo_model import model_dtype

_REJOIN_S = 120.0


@dataclass(frozen=True, kw_only=True)
class TrainerArgs:
    """Arguments of one trainer rank."""

    rank: int
    world_size: int
    store: Path
    """File through which the ranks find each other."""
    model: str
    targets: tuple[str, ...]
    work_dir: Path
    engine: Engine = "syncline"
    steps: int = 8
    batch: int = 4
    context: int = 128
    learning_rate: float = 1e-3
    max_tmp_bytes: str = "64MiB"
    landing: Landing = "staged"
    transport: Transport = "auto"
    push_timeout_s: float = 60.0
    seed: int = 0


def corpus() -> str:
    """About 460 kB of English that every Python installation carries: the documentation of the language's topics."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[key] for key in sorted(topics.topics))


def batches(tokens: torch.Tensor, args: TrainerArgs) -> Any:
    """Endless batches of ``(batch, context + 1)`` token ids, other ones on every rank."""
    generator = torch.Generator().manual_seed(args.seed * 1000 + args.rank)
    while True:
        starts = torch.randint(0, len(tokens) - args.context - 1, (args.batch,), generator=generator)
        yield torch.stack([tokens[start : start + args.context + 1] for start in starts.tolist()])


def shard(model: nn.Module) -> None:
    """FSDP2: every decoder layer, then the root, over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def snapshot(model: nn.Module, path: Path, rank: int) -> None:
    """Rank 0 writes the full weights by torch's own gather, not through syncline: what the proof compares with."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        # Tied tensors come out as one storage under two names, which the file format refuses.
        save_file({name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}, path)


def emit(kind: str, **fields: Any) -> None:
    """One event for the demo's parent process."""
    print(json.dumps({"event": kind, "at": time.time(), **fields}), flush=True)


def report_fields(report: PushReport) -> dict[str, Any]:
    """A push report as JSON."""
    return {
        "ok": report.ok,
        "version": report.version,
        "seconds": report.seconds,
        "source_free_s": report.source_free_s,
        "bytes": report.bytes,
        "tasks": report.tasks,
        "peak_tmp_bytes": report.peak_tmp_bytes,
        "landing_bytes": report.landing_bytes,
        "digest": report.digest,
        "stages": {name: stage.busy_s for name, stage in report.stages.items()},
        "targets": {
            address: {
                "ok": target.ok,
                "state": target.state,
                "version": target.version,
                "pause_s": target.pause_s,
                "error": f"{type(target.error).__name__}: {target.error}" if target.error else "",
            }
            for address, target in report.targets.items()
        },
    }


async def train(args: TrainerArgs) -> None:
    """Train, push after every step, and leave snapshots, the last trace and events behind."""
    torch.manual_seed(args.seed)
    model = load_model(args.model, dtype=model_dtype(args.model)).train()
    tokenizer = load_tokenizer(args.model)
    if tokenizer is None:
        raise RuntimeError(f"{args.model} has no tokenizer")
    tokens = torch.tensor(tokenizer.encode(corpus()))
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    engine = TransferEngine(
        source=FSDPSource(model),
        targets=[target_of(args.engine, address) for address in args.targets],
        config=TransferConfig(
            max_tmp_bytes=args.max_tmp_bytes,
            landing=args.landing,
            transport=args.transport,
            push_timeout_s=args.push_timeout_s,
            target_timeout_s=args.push_timeout_s / 6,
        ),
    )
    await engine.connect()
    try:
        await loop(args, model, optimizer, engine, batches(tokens, args))
    finally:
        await engine.close()


async def loop(
    args: TrainerArgs, model: nn.Module, optimizer: torch.optim.Optimizer, engine: TransferEngine, data: Any
) -> None:
    """The training loop: forward, backward, step, push."""
    report: PushReport | None = None
    for step in range(1, args.steps + 1):
        began = time.perf_counter()
        tokens = next(data)
        logits = model(input_ids=tokens[:, :-1]).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.rank == 0:
            emit("step", step=step, loss=float(loss.detach()), seconds=time.perf_counter() - began)
        snapshot(model, args.work_dir / f"version-{step}.safetensors", args.rank)
        report = await push(args, engine, step)
    # An engine that comes back after the last step still gets the newest version: the same one is pushed again, and only
    # those apply it that do not hold it.
    async with asyncio.timeout(_REJOIN_S):
        while report is not None and not report.ok:
            await asyncio.sleep(0.5)
            report = await push(args, engine, args.steps)
    if args.rank == 0:
        emit("trained")


async def push(args: TrainerArgs, engine: TransferEngine, step: int) -> PushReport:
    """Push, and tell the demo what came of it."""
    report = await engine.push(version=step)
    if args.rank == 0:
        emit("push", step=step, **report_fields(report))
        if report.trace is not None and report.bytes:
            report.trace.save(args.work_dir / "trace.json")
    return report


def main() -> None:
    """Entry point of one rank (started by the demo, not by users)."""
    args = tyro.cli(TrainerArgs)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.world_size)
    try:
        asyncio.run(train(args))
    except Exception as error:
        emit("failed", rank=args.rank, error=f"{type(error).__name__}: {error}")
        raise
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
