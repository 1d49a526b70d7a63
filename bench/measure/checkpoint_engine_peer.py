"""One rank of checkpoint-engine on CPUs, moving the tensors that `syncline bench run` moves: a parameter server and its worker.

    python -m syncline.bench.measure.checkpoint_engine_peer '{"rank": 0, "workers": 2, "port": …, "tensors": …, "rows": …, …}'

Rank 0 has the trainer's weights. A push is what a trainer has to do for each version: register the new weights (a copy into
the server's pool), gather the metadata, update; from a barrier to the end of ``update``, which ends with a barrier. Rank 0
prints the seconds of each, and every rank whether all elements are right at its worker. checkpoint-engine has no CPU mode: what
stands in for the GPU is in `syncline.bench.measure.checkpoint_engine_cpu`. It may live in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import torch

from syncline.bench.endings import tied

from .checkpoint_engine_cpu import install
from .shards import Shards

_NAME = "weights"


def serve(args: dict[str, Any]) -> None:
    """A parameter server's rank, with its worker in a process of its own."""
    rank = args["rank"]
    # checkpoint-engine takes its place, its port and the size of its buckets from the environment alone.
    bucket = {"PS_MAX_BUCKET_SIZE_GB": str(args["bucket_bytes"] / 2**30)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args["workers"]), "GLOO_SOCKET_IFNAME": "lo", **bucket}
    from checkpoint_engine.ps import ParameterServer

    server = ParameterServer(
        rank=rank, world_size=args["workers"], auto_pg=False, gpu_count=args["workers"], master_addr="127.0.0.1",
        master_port=args["port"],
    )  # fmt: skip
    server.init_process_group()
    trainer = Shards(args["tensors"], args["rows"]) if rank == 0 else None
    if trainer is not None:
        trainer.stamp(0)
    own = {**args, "worker": True}
    with subprocess.Popen(
        tied([sys.executable, "-m", __spec__.name, json.dumps(own)]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdout.readline()  # it is there

        def tell(handles: list[tuple[str, str]]) -> None:
            worker.stdin.write(json.dumps(dict(handles)[_identity(args)]) + "\n")  # type: ignore[union-attr]
            worker.stdin.flush()  # type: ignore[union-attr]
            worker.stdout.readline()  # type: ignore[union-attr]

        seconds = [_push(server, trainer, version, tell) for version in range(1, args["repeat"] + 1)]
        worker.stdin.close()
        ok = json.loads(worker.stdout.readline())
    sys.stdout.write(json.dumps({"seconds": seconds, "ok": ok}) + "\n")
    sys.stdout.flush()


def _push(server: Any, trainer: Shards | None, version: int, tell: Any) -> float:
    if trainer is not None:
        trainer.restamp(version)
    server.store_based_barrier()
    began = time.perf_counter()
    if trainer is not None:
        tensors = {name: param.detach() for name, param in trainer.named_parameters()}
        server.register_checkpoint(_NAME, named_tensors=tensors, use_shared_memory_pool=True)
    server.gather_metas(_NAME)
    server.update(_NAME, tell)
    seconds = time.perf_counter() - began
    if trainer is not None:
        server.unregister_checkpoint(_NAME)  # its pool stays, for the next version
    return seconds


def work(args: dict[str, Any]) -> None:
    """The worker of a rank: takes an update for each line that it reads; at the end it looks at every element."""
    import zmq
    from checkpoint_engine.worker import update_weights_from_ipc

    model = Shards(args["tensors"], args["rows"])
    params = {name: param.detach() for name, param in model.named_parameters()}
    context = zmq.Context()

    def load(weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            params[name].copy_(tensor)

    print("ready", flush=True)
    for line in sys.stdin:
        update_weights_from_ipc(context, json.loads(line), None, run=load)  # without a device
        print("updated", flush=True)
    print(json.dumps(model.is_stamped(args["repeat"])), flush=True)


def _identity(args: dict[str, Any]) -> str:
    return f"CPU-{args['token']}-{args['rank']}"


def main() -> None:
    """Entry point."""
    from loguru import logger

    args: dict[str, Any] = json.loads(sys.argv[1])
    logger.disable("checkpoint_engine")
    torch.set_num_threads(1)
    install(lambda: _identity(args))
    (work if args.get("worker") else serve)(args)


if __name__ == "__main__":
    main()
