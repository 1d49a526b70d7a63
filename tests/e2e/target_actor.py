"""One rank of a target, as a worker process: a model that serves through the receiver's gate while pushes come in."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import models
import msgspec
import torch
from actor import Actor, Points
from safetensors.torch import save_file
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.engines.checkpoints import load_model, load_tokenizer
from syncline.engine import Receiver
from syncline.engine.errors import NotServing
from syncline.engine.fence import Fence
from syncline.stages.transports.gloo import GlooHalf
from syncline.stages.transports.shm_receiver import ShmHalf

FORWARD_WAIT_S = 60.0
PEER_WAIT_S = 5.0
PACE_S = 0.001
HEARTBEAT_S = 0.5
PATIENCE_S = 2.0


class TargetActor(Actor):
    """Holds a model, a loader and a receiver."""

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module
        self.loader: HookedLoader
        self.receiver: Receiver
        self._probe: Probe | None = None
        self._peers: list[str] = []
        self._peeked_at = False
        hook_receiver(self.points)

    # ---- life

    def do_init(self, rank: int, world_size: int, store: str) -> None:
        """Join the target's own process group (for tensor parallelism)."""
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)

    def do_build(
        self, model: Mapping[str, Any], tensor_parallel: bool = False, movable: bool = False, via_install: bool = False
    ) -> None:
        self.model = models.build(model)
        layout = None
        if tensor_parallel:
            from torch.distributed.device_mesh import init_device_mesh

            models.tensor_parallel(self.model, init_device_mesh("cpu", (2,)), attention=False)
        if isinstance(self.model, models.StampNet):
            self.model.stamp(0)
            layout = self.model.layout()
        loader = ModuleLoader(self.model, movable=movable, layout=layout)
        self.loader = HookedLoader(loader, self.points, via_install=via_install)

    async def do_listen(
        self,
        listen: str,
        rank: int = 0,
        world_size: int = 1,
        leader: str | None = None,
        initial_version: int | None = None,
    ) -> str:
        """Start the receiver; returns its address."""
        self.receiver = Receiver(
            loader=self.loader,
            listen=listen,
            rank=rank,
            world_size=world_size,
            leader=leader,
            initial_version=initial_version,
            heartbeat_s=HEARTBEAT_S,
            patience_s=PATIENCE_S,
        )
        await self.receiver.start()
        return self.receiver.address

    async def do_close(self) -> None:
        self._stop_probe()
        await self.receiver.close()

    # ---- what it is and serves

    def do_state(self) -> dict[str, Any]:
        return {"state": self.receiver.state, "version": self.receiver.version}

    async def do_status(self) -> dict[str, Any]:
        """As ``GET /status`` answers."""
        return dict(msgspec.to_builtins(await self.receiver.status()))

    async def do_logits(self, ids: Sequence[int], out: str) -> int:
        """All logits of a prompt, into a file; returns the version."""

        def compute() -> int:
            with self._forward() as version:
                save_file({"logits": models.logits_of(self.model, ids)}, out)
            return version

        return await asyncio.to_thread(compute)

    async def do_greedy(self, ids: Sequence[int], count: int, gated: bool = True) -> list[int]:
        """Token ids. ``gated=False`` on ranks that compute along with the leader, or before the first push."""

        def compute() -> list[int]:
            if not gated:
                return models.greedy(self.model, ids, count)
            with self._forward():
                return models.greedy(self.model, ids, count)

        return await asyncio.to_thread(compute)

    def do_save_weights(self, out: str) -> None:
        """Every parameter whole (gathered over the target's ranks where sharded), into a file of rank 0."""
        state: dict[str, torch.Tensor] = {}
        for name, tensor in self.model.named_parameters(remove_duplicate=False):
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            state[name] = full.detach().clone()
        save_file(state, out)

    def do_save_state(self, out: str) -> None:
        """Everything that this rank holds, as it is, into a file."""
        save_file({name: _local(tensor).detach().clone() for name, tensor in self.model.state_dict().items()}, out)

    def do_checksum(self) -> dict[str, str]:
        """Digest of each live tensor, by name."""
        return {name: _digest(tensor) for name, tensor in self.model.state_dict().items()}

    def do_addresses(self) -> dict[str, int]:
        return {name: _local(tensor).data_ptr() for name, tensor in self.model.state_dict().items()}

    def do_poison(self) -> None:
        """Fill everything with what no push sends."""
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                _local(tensor).fill_(math.nan if tensor.is_floating_point() else 99)

    def do_versions(self) -> list[float]:
        """Of a `StampNet`: every version that is in live memory, served or not."""
        return self.model.versions()  # type: ignore[operator]

    def do_serve_once(self) -> dict[str, Any]:
        """One forward pass, now: which version it was told, and which it saw."""
        try:
            with self._forward(0.0) as version:
                return {"version": version, "saw": self._look()}
        except NotServing as error:
            return {"version": None, "error": str(error)}

    def _forward(self, timeout_s: float = FORWARD_WAIT_S) -> Any:
        return self.receiver.gate.forward(timeout_s)

    # ---- a rank that computes along with the leader

    def do_peek_at(self, path: str) -> None:
        """Let the leader look into this rank's live memory, as forward passes of a sharded engine do."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(path)
        listening.listen()
        self._peeked_at = True
        threading.Thread(target=self._be_peeked_at, args=(listening,), daemon=True).start()

    def _be_peeked_at(self, listening: socket.socket) -> None:
        while True:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):  # who asked may have lost patience
                connection.sendall(json.dumps(self.model.versions()).encode())  # type: ignore[operator]

    def do_is_peeked_at(self) -> bool:
        return self._peeked_at

    def do_peers(self, paths: list[str]) -> None:
        self._peers = paths

    def _look(self) -> list[float]:
        """Every version seen in one forward pass, on all ranks."""
        seen = set(self.model.versions())  # type: ignore[operator]
        for path in self._peers:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(PEER_WAIT_S)
                connection.connect(path)
                seen.update(json.loads(connection.makefile().read()))
        return sorted(seen)

    # ---- serving all the while

    def do_probe(self) -> None:
        """Start forward passes in a thread, one after the other."""
        self._probe = Probe(self._forward, self._look)

    def do_probed(self) -> dict[str, Any]:
        """What the passes saw so far."""
        assert self._probe is not None
        return self._probe.so_far()

    def do_stop_probe(self) -> dict[str, Any]:
        assert self._probe is not None
        probe = self._probe
        self._stop_probe()
        return probe.so_far()

    def _stop_probe(self) -> None:
        if self._probe is not None:
            self._probe.stop()
            self._probe = None

    # ---- once for all tests

    def do_convert(self, name: str, real: str, random: str, seed: int) -> list[int]:
        """Write a model's real and random weights as folders; returns the ids of a prompt."""
        model = load_model(name, dtype=torch.bfloat16)
        model.save_pretrained(real)
        load_model(real, dtype=torch.bfloat16, random_weights=seed).save_pretrained(random)
        tokenizer = load_tokenizer(name)
        tokenizer.save_pretrained(real)
        return list(tokenizer("The capital of France is")["input_ids"])

    def do_reference(self, folder: str, ids: Sequence[int], out: str) -> tuple[int, str]:
        """By transformers alone: logits into a file, and the likeliest next token with its text."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([list(ids)])).logits[0].clone()
        save_file({"logits": logits}, out)
        answer = int(logits[-1].argmax())
        return answer, str(AutoTokenizer.from_pretrained(folder).decode(answer))

    def do_reference_of_weights(self, folder: str, weights: str, ids: Sequence[int], out: str) -> None:
        """By transformers alone: logits of the weights in a file under a folder's config."""
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        model.load_state_dict(load_file(weights))
        with torch.inference_mode():
            save_file({"logits": model(input_ids=torch.tensor([list(ids)])).logits[0].clone()}, out)

    def do_tiny_reference(self, model: Mapping[str, Any], ids: Sequence[int], out: str) -> None:
        """Logits of a tiny model made from its seed, never sharded or pushed."""
        save_file({"logits": models.logits_of(models.build(model), ids)}, out)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(_local(tensor.detach()).contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def hook_receiver(points: Points) -> None:
    """Points ``fence.…`` (before the fence of this rank takes that step) and ``receive`` (before a bucket is taken)."""
    for name in ("prepare", "writing", "vote", "paused", "committing", "applied", "resumed"):
        setattr(Fence, name, points.before(getattr(Fence, name), f"fence.{name}"))
    for half in (GlooHalf, ShmHalf):
        half.receive = points.before(half.receive, "receive")  # type: ignore[method-assign]


class HookedLoader:
    """A loader with the points ``begin``, ``install``, ``rebind``, ``finish``.

    ``via_install`` hides the live memory, so that everything comes through `install`.
    """

    def __init__(self, loader: ModuleLoader, points: Points, *, via_install: bool) -> None:
        self._loader, self._points, self._via_install = loader, points, via_install

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def manifest(self, *, rank: int, world_size: int, host: str) -> Any:
        return self._loader.manifest(rank=rank, world_size=world_size, host=host)

    def buffers(self) -> Sequence[torch.Tensor] | None:
        return None if self._via_install else self._loader.buffers()

    def begin(self, version: int | None) -> None:
        self._points.hit("begin")
        self._loader.begin(version)

    def install(self, landed: Sequence[Any]) -> None:
        self._points.hit("install")
        self._loader.install(landed)

    def rebind(self, landed: Sequence[Any]) -> None:
        self._points.hit("rebind")
        self._loader.rebind(landed)

    def finish(self, version: int | None) -> None:
        self._points.hit("finish")
        self._loader.finish(version)


class Probe:
    """Forward passes in a thread. Each must see one version, and the one that the gate told."""

    def __init__(self, forward: Any, look: Any) -> None:
        self._forward, self._look = forward, look
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._passes = 0
        self._refused = 0
        self._failed: list[str] = []
        self._mixes: list[Any] = []
        self._served: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(PACE_S):
            try:
                with self._forward(1.0) as version:
                    saw = self._look()
            except NotServing:
                with self._lock:
                    self._refused += 1
                continue
            except OSError as error:  # a rank that the pass needed is gone: it gave no answer
                with self._lock:
                    self._failed = [repr(error)]
                continue
            with self._lock:
                self._passes += 1
                self._served.add(version)
                if saw != [version]:
                    self._mixes.append([version, saw])

    def so_far(self) -> dict[str, Any]:
        with self._lock:
            return {
                "passes": self._passes,
                "refused": self._refused,
                "failed": self._failed,
                "mixes": self._mixes[:10],
                "served": sorted(self._served),
            }

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(10)
