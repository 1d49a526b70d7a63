"""TorchRL's weight synchronization schemes, moving the tensors that `syncline bench run` moves: one source, several workers.

    python -m syncline.bench.measure.torchrl_peer '{"scheme": "shared", "workers": 2, "tensors": …, "rows": …, "repeat": …}'

The worker processes are started, and sent the scheme, by ``torch.multiprocessing``, as TorchRL's own collectors do. What is
timed is ``scheme.send(weights)``, which returns when all workers have acknowledged. Prints the seconds of each, and whether
every element is right at all workers at the end. TorchRL is not a dependency: it may live in an environment of its own.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from .shards import Shards
from .timing import times

SCHEMES = ("shared", "multiprocess", "distributed")
_WAIT_S = 300.0


class Context:
    """What a scheme finds its model in."""

    def __init__(self, model: Shards) -> None:
        self.policy = model


def _scheme(name: str) -> Any:
    from torchrl import weight_update

    kinds = {
        "shared": weight_update.SharedMemWeightSyncScheme,
        "multiprocess": weight_update.MultiProcessWeightSyncScheme,
        "distributed": weight_update.DistributedWeightSyncScheme,
    }
    return kinds[name]()


def _meet(args: dict[str, Any], rank: int) -> None:
    """The process group of the distributed scheme, on loopback."""
    if args["scheme"] == "distributed":
        size = args["workers"] + 1
        timeout = timedelta(seconds=_WAIT_S)
        dist.init_process_group("gloo", init_method=f"file://{args['store']}", rank=rank, world_size=size, timeout=timeout)


def work(scheme: Any, args: dict[str, Any], worker: int, ready: Any, done: Any) -> None:
    """One worker: takes what comes until ``done`` is set. Ends with exit code 0 if every element is right."""
    torch.set_num_threads(1)
    model = Shards(args["tensors"], args["rows"])
    _meet(args, worker + 1)
    # The distributed scheme counts its workers from 1, and wants to look the model up.
    distributed = args["scheme"] == "distributed"
    index = worker + 1 if distributed else worker
    how: dict[str, Any] = {"context": Context(model)} if distributed else {"model": model}
    scheme.init_on_receiver(model_id="policy", worker_idx=index, **how)
    scheme.connect(worker_idx=index)
    ready.wait(_WAIT_S)
    raise SystemExit(0 if done.wait(_WAIT_S) and model.is_stamped(args["repeat"]) else 1)


def _init(scheme: Any, args: dict[str, Any], context: Any) -> None:
    """The sender's half, with weights of its own to begin with: the trainer's are sent later."""
    from tensordict import TensorDict

    first = Shards(args["tensors"], args["rows"])
    workers = args["workers"]
    if args["scheme"] == "distributed":
        how: dict[str, Any] = {"model": first}
    else:
        how = {"weights": TensorDict.from_module(first), "devices": [torch.device("cpu")] * workers, "ctx": context}
    scheme.init_on_sender(model_id="policy", num_workers=workers, **how)


def main() -> None:
    """Entry point."""
    from tensordict import TensorDict

    args: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    trainer = Shards(args["tensors"], args["rows"])
    trainer.stamp(0)
    context = multiprocessing.get_context("spawn")
    scheme = _scheme(args["scheme"])
    _init(scheme, args, context)
    ready, done = context.Barrier(args["workers"] + 1), context.Event()
    started = [context.Process(target=work, args=(scheme, args, index, ready, done)) for index in range(args["workers"])]
    for process in started:
        process.start()
    _meet(args, 0)
    scheme.connect()
    ready.wait(_WAIT_S)
    weights = TensorDict.from_module(trainer).data
    seconds = []
    for version in range(1, args["repeat"] + 1):
        trainer.restamp(version)
        seconds += times(lambda: scheme.send(weights), 1)
    done.set()
    for process in started:
        process.join(_WAIT_S)
    sys.stdout.write(json.dumps({"seconds": seconds, "ok": all(process.exitcode == 0 for process in started)}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
