"""`TwoPhaseTarget`: pushes into a server that speaks only the two-phase document.

    source ranks ═══ buckets ═══▶ a Receiver at rank 0 ─── prepare, broadcasts, complete ───▶ the server (all its ranks)
                                  (verifies and votes)

The receiver stands in for the server: it runs in the process of source rank 0 and has no weights of its own. With landing
``staged`` a whole push lies there, verified and voted for, before the server gets its first byte; then all of it is announced,
broadcast and completed. The server itself keeps it apart until complete, and goes on with what it has if that never comes.

The document has no way to ask what a server holds. So whatever fails once it was told to prepare leaves the target ``FENCED``
in our eyes: it may serve the old version or the new one. The next push that succeeds ends that.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from syncline.engine import LeaderAddress, Receiver, TransferConfig
from syncline.engine.errors import ClosedError, LoaderError, SynclineError
from syncline.engine.linking import transports
from syncline.engine.loader import Landed
from syncline.engine.messages import BucketMetadata, Landing
from syncline.scheduler.dtypes import ITEMSIZE
from syncline.scheduler.layout import Index, Manifest, Tensor
from syncline.scheduler.programs import TargetProgram
from syncline.stages.transports.base import ReceivingHalf
from syncline.stages.workers import Workers

from .checkpoint_manifest import CheckpointTensors, checkpoint_tensors
from .two_phase_client import TwoPhaseClient
from .update_group import Backend
from .urls import problem_of, without_userinfo

T = TypeVar("T")

_MARGIN_S = 5.0


class TwoPhaseTarget:
    """A server that speaks only the document, as a target (`syncline.engine.Target`).

    Args:
        url: of the server, ``http://host:port``.
        model: what the server takes: a checkpoint folder (no weights are read), a transformers config, or name -> (shape,
            dtype) in checkpoint names. The document has no way to ask the server.
        dtype: of the server's floating-point weights, where ``model`` is a folder or a config.
        members: ranks that the server has in the group (its tensor-parallel size, for servers of which every rank joins).
        group_name: of the group.
        backend: ``gloo``, or ``nccl`` from GPU to GPU.
        master: host and port at which the group meets, as the server reaches this machine; port 0 takes a free one.
        flush_cache: have the server drop its cached keys and values at every push.
        timeout_s: longest time for the group to meet, for one broadcast, and for complete, in seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        model: Any,
        dtype: str | torch.dtype = "bfloat16",
        members: int = 1,
        group_name: str = "weight_sync_group",
        backend: Backend = "gloo",
        master: tuple[str, int] = ("127.0.0.1", 0),
        flush_cache: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        self._url, self._model, self._dtype = url, model, dtype
        self._members, self._flush_cache, self._timeout_s = members, flush_cache, timeout_s
        host, port = master
        self._make_client = partial(
            TwoPhaseClient, url, group_name=group_name, members=members, backend=backend, host=host, port=port,
            timeout_s=timeout_s,
        )  # fmt: skip
        self._client: TwoPhaseClient | None = None
        self._receiver: Receiver | None = None
        self._secret = secrets.token_hex(16)
        self._closed = False

    @property
    def address(self) -> str:
        """The server's URL."""
        return without_userinfo(self._url)

    def problems(self, config: TransferConfig) -> Sequence[str]:
        """What is wrong with how it is described."""
        wrong = problem_of(self._url, prefix=True)
        problems = [] if wrong is None else [f"target {wrong}"]
        if self._members < 1:
            problems.append(
                f"target {self.address!r}: members is {self._members}; the server has one rank or more in the group"
            )
        if not 0 < self._timeout_s < float("inf"):
            problems.append(f"target {self.address!r}: timeout_s is {self._timeout_s!r}; it must be a finite number above 0")
        if config.landing == "mapped":
            problems.append(f"target {self.address!r} cannot map memory of ours; use landing 'staged' or 'streamed'")
        if isinstance(self._model, Mapping):
            unknown = sorted({dtype for _, dtype in _wanted(self._model)} - set(ITEMSIZE))
            problems += [f"target {self.address!r}: dtype {dtype!r} in model cannot travel" for dtype in unknown]
        return problems

    async def locate(self, config: TransferConfig) -> LeaderAddress:
        """Meet the server in its group, and start what stands in for it.

        Raises:
            TargetUnreachable: nothing answers at the URL.
            SynclineError: the server does not join the group, or the tensors of its model are not known.
        """
        if self._closed:
            raise ClosedError(f"the target {self._url} is closed; make a new one")
        if self._client is None:
            self._client = self._make_client()
        await self._client.meet()
        if self._receiver is None:
            self._receiver = await self._stand_in(self._client, config)
        return LeaderAddress(self._receiver.address, self._secret)

    async def close(self) -> None:
        """End what stands in for the server, and leave its group. Idempotent."""
        self._closed = True
        receiver, self._receiver = self._receiver, None
        client, self._client = self._client, None
        if receiver is not None:
            await receiver.close()
        if client is not None:
            await client.close()

    async def _stand_in(self, client: TwoPhaseClient, config: TransferConfig) -> Receiver:
        tensors = await asyncio.to_thread(self._tensors)
        loop = asyncio.get_running_loop()
        loader = ForwardingLoader(client, tensors, loop, flush_cache=self._flush_cache, timeout_s=self._timeout_s)
        receiver = Receiver(
            loader=loader, listen="tcp://127.0.0.1:0", secret=self._secret, half_factory=loader.half_factory(config.bind_host)
        )
        await receiver.start()
        return receiver

    def _tensors(self) -> CheckpointTensors:
        if not isinstance(self._model, Mapping):
            return checkpoint_tensors(self._model, dtype=self._dtype)
        wanted = zip(self._model, _wanted(self._model), strict=True)
        return CheckpointTensors(
            tensors=tuple(Tensor(name=name, shape=shape, dtype=dtype) for name, (shape, dtype) in wanted), aliases={}
        )


def _wanted(model: Mapping[str, tuple[Sequence[int], str | torch.dtype]]) -> list[tuple[Index, str]]:
    return [(tuple(shape), str(dtype).removeprefix("torch.")) for shape, dtype in model.values()]


class ForwardingLoader:
    """Implements `syncline.engine.loader.Loader`: what is loaded goes on to a server. Its thread asks, the event loop talks.

    The document wants everything announced in the order in which it comes. That is the order in which the plan completes
    tensors, known from the program that this rank is linked with.
    """

    def __init__(
        self,
        client: TwoPhaseClient,
        tensors: CheckpointTensors,
        loop: asyncio.AbstractEventLoop,
        *,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        self._client, self._tensors, self._loop = client, tensors, loop
        self._flush_cache, self._timeout_s = flush_cache, timeout_s
        self._program: TargetProgram | None = None
        self._manifest: Manifest | None = None
        self._order: list[list[int]] = []
        self._parts: dict[int, tuple[torch.Tensor, int]] = {}
        self._open = False

    def half_factory(self, bind_host: str) -> Any:
        """Syncline's own transports; on the way it is noted what will come."""
        make = transports(bind_host)

        def noting(kind: str, program: TargetProgram, landing: Landing, workers: Workers) -> ReceivingHalf:
            self._program = program
            return make(kind, program, landing, workers)

        return noting

    def manifest(self, *, rank: int, world_size: int, host: str) -> Manifest:
        """Every tensor whole."""
        if self._manifest is None:
            self._manifest = self._tensors.manifest(rank=rank, world_size=world_size, host=host)
        return self._manifest

    def buffers(self) -> Sequence[torch.Tensor] | None:
        """None: the weights are in another process."""
        return None

    def begin(self, version: int | None) -> None:
        """Announce everything. An update that an earlier push left open is given up first."""
        self._parts = {}
        self._order = self._buckets()
        if self._open:
            self._run(self._client.part())
        self._open = True
        self._run(self._client.prepare([self._metadata(bucket) for bucket in self._order]))

    def install(self, landed: Sequence[Landed]) -> None:
        """Broadcast the tensors that are complete."""
        for part in landed:
            tensor = self._add(part)
            if tensor is not None:
                self._run(self._client.broadcast(tensor))

    def rebind(self, landed: Sequence[Landed]) -> NoReturn:
        """Never called: the manifest does not say ``movable``."""
        raise LoaderError("another process's weights cannot be pointed at memory of ours; use landing 'staged'")

    def finish(self, version: int | None) -> None:
        """Broadcast what has no elements; complete."""
        for index in self._empty():
            tensor = self._tensors.tensors[index]
            self._run(self._client.broadcast(torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))))
        if self._parts:
            names = [self._tensors.tensors[index].name for index in self._parts]
            raise LoaderError(f"tensors of which only a part came: {', '.join(names)}")
        self._run(self._client.complete(len(self._order), flush_cache=self._flush_cache))
        self._open = False

    def _buckets(self) -> list[list[int]]:
        """Tensors in the order in which they will be complete, as many in a bucket as a task completes."""
        assert self._program is not None
        missing = [math.prod(tensor.shape) for tensor in self._tensors.tensors]
        buckets = []
        for task in self._program.tasks:
            done = []
            for landing in task.landings:
                for piece in landing.pieces:
                    count = math.prod(landing.segment.box.shape)
                    missing[piece] -= count
                    if count and missing[piece] == 0:
                        done.append(piece)
            buckets.append(done)
        return [bucket for bucket in [*buckets, self._empty()] if bucket]

    def _empty(self) -> list[int]:
        return [index for index, tensor in enumerate(self._tensors.tensors) if math.prod(tensor.shape) == 0]

    def _metadata(self, bucket: Sequence[int]) -> BucketMetadata:
        tensors = [self._tensors.tensors[index] for index in bucket]
        return BucketMetadata(
            names=[tensor.name for tensor in tensors],
            dtypes=[tensor.dtype for tensor in tensors],
            shapes=[list(tensor.shape) for tensor in tensors],
        )

    def _add(self, part: Landed) -> torch.Tensor | None:
        """The whole tensor, once its last part is there."""
        shape = self._tensors.tensors[part.piece].shape
        count = part.tensor.numel()
        if count == 0:
            return None
        if part.box.shape == shape:
            return part.tensor
        whole, missing = self._parts.get(part.piece) or (torch.empty(shape, dtype=part.tensor.dtype), math.prod(shape))
        whole[tuple(slice(at, at + size) for at, size in zip(part.box.start, part.box.shape, strict=True))] = part.tensor
        self._parts[part.piece] = (whole, missing - count)
        if missing > count:
            return None
        del self._parts[part.piece]
        return whole

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """On the event loop. What takes longer than the client's own deadlines is a loop that runs no more."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(3 * self._timeout_s + _MARGIN_S)
        except TimeoutError:
            future.cancel()
            raise LoaderError("the event loop of the source gave no answer") from None
        except SynclineError as error:
            raise LoaderError(str(error)) from error
