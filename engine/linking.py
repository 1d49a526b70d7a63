"""How one rank of a target links up with a source: program proved, landing path built, transports linked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from syncline.scheduler.layout import Manifest
from syncline.scheduler.programs import TargetProgram
from syncline.scheduler.proof import check_target_program
from syncline.stages.cudart import CudaIpc
from syncline.stages.nccl import CudaNccl
from syncline.stages.nccl_communicator import Issuer
from syncline.stages.transports.base import ReceivingHalf
from syncline.stages.transports.cuda_ipc_receiver import CudaIpcHalf
from syncline.stages.transports.gloo import GlooHalf
from syncline.stages.transports.nccl import NcclNetwork
from syncline.stages.transports.shm_receiver import ShmHalf
from syncline.stages.transports.two_sided_receiver import TwoSidedHalf
from syncline.stages.workers import Workers

from .errors import PlanError, ProtocolError, SynclineError
from .landing import LandingPath, Route, make_path
from .landing_device import landing_device, make_device_path
from .loader_thread import LoaderThread
from .messages import ConnectRequest, InFlight, Landing, RankLinks

log = logging.getLogger("syncline.engine")

HalfFactory = Callable[[str, TargetProgram, Landing, Workers], ReceivingHalf]
"""Makes the receiving half of a transport: its kind (``shm``, ``gloo``, ``cuda_ipc``, ``nccl``), program, landing mode, worker
threads. What comes to device memory comes to the current CUDA device."""

_ORDERLY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """A rank's links with one source, for one plan."""

    plan_digest: str
    manifest_digest: str
    source: str
    generation: int
    landing: Landing
    in_flight: InFlight
    path: LandingPath


def transports(bind_host: str) -> HalfFactory:
    """The transports that syncline has. ``bind_host``: address that gloo's connections bind to."""

    def make(kind: str, program: TargetProgram, landing: Landing, workers: Workers) -> ReceivingHalf:
        if kind == "shm":
            return ShmHalf(program=program, landing=landing)
        if kind == "gloo":
            return GlooHalf(program=program, landing=landing, bind_host=bind_host, workers=workers)
        if kind == "cuda_ipc":
            return CudaIpcHalf(program=program, landing=landing, runtime=CudaIpc(torch.device("cuda")), workers=workers)
        if kind == "nccl":
            runtime = CudaNccl(torch.device("cuda"))
            network = NcclNetwork(_issuer(runtime), runtime.device)
            return TwoSidedHalf(network=network, program=program, landing=landing, workers=workers)
        raise ProtocolError(f"transport {kind!r} is not known here; it is one of shm, gloo, cuda_ipc, nccl")

    return make


_issuers: dict[torch.device, Issuer] = {}


def _issuer(runtime: CudaNccl) -> Issuer:
    """One thread makes all NCCL calls of a device, whatever receivers this process has."""
    if runtime.device not in _issuers:
        _issuers[runtime.device] = Issuer(runtime)
    return _issuers[runtime.device]


async def make_link(
    request: ConnectRequest, manifest: Manifest, *, loader: LoaderThread, workers: Workers, make_half: HalfFactory
) -> Link:
    """Prove the program against ``manifest``, build the landing path, link up. Cancellable; nothing is left behind.

    Raises:
        ProtocolError: the request has no program for this rank.
        PlanError: the program does not fit the manifest, or the landing mode cannot be had.
        TransportError: an owner could not be reached.
    """
    links = next((links for links in request.ranks if links.rank == manifest.rank), None)
    if links is None:
        raise ProtocolError(f"the connect request has nothing for rank {manifest.rank}")
    if request.manifest_digest != manifest.digest:
        raise PlanError([stale(manifest.rank, request.manifest_digest, manifest.digest)])
    program = await workers.submit(_checked_program, request, links, manifest)
    buffers = await loader.call(loader.loader.buffers)
    device = landing_device(links.transport, manifest, buffers)
    if device is not None:  # what a loader makes on "cuda" belongs beside its weights: a thread starts with device 0
        await loader.call(torch.cuda.set_device, device)
    with contextlib.nullcontext() if device is None else torch.cuda.device(device):
        half = make_half(links.transport, program, request.landing, workers)
    route = Route(
        program=program, manifest=manifest, half=half, loader=loader, workers=workers, verify=request.verify, device=device
    )
    make = make_path if device is None else make_device_path
    path = await workers.submit(make, request.landing, route, buffers)
    descriptors = {int(owner): descriptor for owner, descriptor in links.descriptors.items()}
    try:
        await half.link(descriptors, timeout_s=request.timeout_s)
        await path.linked()
    except BaseException:
        await close_path(path)
        raise
    return Link(
        plan_digest=request.plan_digest,
        manifest_digest=request.manifest_digest,
        source=request.source_incarnation,
        generation=request.generation,
        landing=request.landing,
        in_flight=request.in_flight,
        path=path,
    )


def _checked_program(request: ConnectRequest, links: RankLinks, manifest: Manifest) -> TargetProgram:
    try:
        program = TargetProgram.from_bytes(links.program)
    except ValueError as error:
        raise ProtocolError(f"rank {manifest.rank} got no program: {error}") from error
    if program.plan_digest != request.plan_digest:
        raise PlanError([f"rank {manifest.rank} got a program of plan {program.plan_digest}, not {request.plan_digest}"])
    check_target_program(program, manifest)
    return program


def stale(rank: int, planned: str, now: str) -> str:
    """The problem of a plan that was made from another manifest."""
    return (
        f"rank {rank} was planned from manifest {planned} and has manifest {now} now (it restarted, its memory was "
        "reallocated, or its shapes changed): plan anew"
    )


async def end_path(path: LandingPath, *, committed: bool) -> None:
    """End a push on a path, in bounded time."""
    try:
        async with asyncio.timeout(_ORDERLY_S):
            await path.end(committed=committed)
    except (TimeoutError, SynclineError):
        log.warning("a push could not be ended on its links in an orderly way", exc_info=True)


async def close_path(path: LandingPath) -> None:
    """Close a path's links, in bounded time."""
    try:
        async with asyncio.timeout(2 * _ORDERLY_S):
            await path.close()
    except (TimeoutError, SynclineError):
        log.warning("links could not be closed in an orderly way", exc_info=True)
