"""Which transport serves which target, and a source rank's senders for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from syncline.scheduler.layout import Manifest
from syncline.scheduler.plan import PlanOptions
from syncline.scheduler.programs import SourceProgram
from syncline.stages.cudart import CudaIpc
from syncline.stages.nccl import CudaNccl
from syncline.stages.nccl_communicator import Issuer
from syncline.stages.transports import shared_memory
from syncline.stages.transports.base import OnLost, Sender
from syncline.stages.transports.cuda_ipc import CudaIpcSender, Lent
from syncline.stages.transports.gloo import GlooSender
from syncline.stages.transports.nccl import NcclNetwork
from syncline.stages.transports.shm import ShmSender
from syncline.stages.transports.two_sided import TwoSidedSender
from syncline.stages.workers import Workers

from .config import TransferConfig
from .devices import on_device
from .errors import PlanError

IN_PLACE = frozenset({"shm", "cuda_ipc"})
"""Transports that have buckets assembled in memory of theirs."""

ON_DEVICE = frozenset({"cuda_ipc", "nccl"})
"""Transports that move device memory."""

LENDING = frozenset({"gloo", "cuda_ipc", "nccl"})
"""Transports that send segments from where they lie (`Sender.lends`)."""

TWO_SIDED = frozenset({"gloo", "nccl"})
"""Transports whose ranks of a target can pass buckets on to each other."""

_ALONE_ON_HOST = frozenset({"shm", "cuda_ipc"})


def on_gpu(manifest: Manifest) -> bool:
    """Whether a rank holds weights on a GPU."""
    return any(device.startswith("cuda") for device in manifest.buffers.devices)


def transport_kinds(
    sources: Sequence[Manifest], targets: Sequence[Sequence[Manifest]], config: TransferConfig
) -> dict[int, str]:
    """Which transport serves each target. ``auto`` goes by where the target's weights are, and whether all are on one host.

    =============== ============ ====================================
    target's weights one host    several hosts
    =============== ============ ====================================
    in CPU memory   ``shm``      ``gloo``
    on GPUs         ``cuda_ipc`` ``nccl``
    =============== ============ ====================================

    Raises `PlanError` where the chosen transport cannot serve a target.
    """
    hosts = {manifest.host for manifest in sources}
    kinds: dict[int, str] = {}
    problems: list[str] = []
    for index, ranks in enumerate(targets):
        together = len(hosts | {manifest.host for manifest in ranks}) == 1
        gpu = any(on_gpu(manifest) for manifest in ranks)
        kinds[index] = _best(together=together, gpu=gpu) if config.transport == "auto" else config.transport
        why = _misfit(kinds[index], together=together, gpu=gpu, landing=config.landing)
        if why:
            problems.append(f"target {index}: {why}")
    if problems:
        raise PlanError(problems)
    return kinds


def _best(*, together: bool, gpu: bool) -> str:
    if gpu:
        return "cuda_ipc" if together else "nccl"
    return "shm" if together and shared_memory.is_available() else "gloo"


def _misfit(kind: str, *, together: bool, gpu: bool, landing: str) -> str:
    """Why a transport cannot serve a target; empty if it can."""
    if kind in ON_DEVICE and not gpu:
        return f"transport {kind!r} moves GPU memory, and the target's weights are in CPU memory; choose 'auto'"
    if kind not in ON_DEVICE and gpu:
        return f"transport {kind!r} moves CPU memory, and the target's weights are on a GPU; choose 'auto'"
    if kind == "shm" and not (together and shared_memory.is_available()):
        return "transport 'shm' needs source and target on one Linux host; choose 'auto' or 'gloo'"
    if kind in _ALONE_ON_HOST and not together:
        return f"transport {kind!r} needs source and target on one host; choose 'auto' or 'nccl'"
    if landing == "mapped" and gpu:
        return "landing 'mapped' needs weights in CPU memory; choose 'staged' or 'streamed'"
    if landing == "mapped" and kind == "gloo":
        return "landing 'mapped' needs source and target on one host; choose 'staged' or 'streamed'"
    return ""


class Senders:
    """The senders of one source rank, by kind.

    Args:
        kinds: transport of each target.
        device: where buckets for GPU targets are assembled; None on a rank without.
        lent: what may be sent straight from the rank's own memory.
        ring_nbytes: device memory for buckets of CUDA IPC; None takes the watermark.
        gather: ranks gather on GPUs, so there is an issuer whatever the transports.

    Raises:
        TransportError: a transport needs a GPU, and there is none.
    """

    def __init__(
        self, kinds: Collection[str], *, program: SourceProgram, config: TransferConfig, workers: Workers, on_lost: OnLost,
        device: torch.device | None = None, lent: Lent | None = None, gather: bool = False,
        ring_nbytes: int | None = None,
    ) -> None:  # fmt: skip
        self.by_kind: dict[str, Sender] = {}
        self.issuer: Issuer | None = None
        home = torch.device("cuda") if device is None else device
        if "shm" in kinds:
            self.by_kind["shm"] = ShmSender(
                program=program, landing=config.landing, ring_nbytes=config.watermark, workers=workers, on_lost=on_lost,
            )  # fmt: skip
        if "gloo" in kinds:
            self.by_kind["gloo"] = GlooSender(
                landing=config.landing, bind_host=config.bind_host, on_lost=on_lost,
                rendezvous_timeout_s=config.connect_timeout_s, program=program,
            )  # fmt: skip
        if "cuda_ipc" in kinds:
            self.by_kind["cuda_ipc"] = CudaIpcSender(
                program=program, landing=config.landing,
                ring_nbytes=config.watermark if ring_nbytes is None else ring_nbytes, runtime=CudaIpc(home), workers=workers,
                on_lost=on_lost, lent=lent,
            )  # fmt: skip
        if "nccl" in kinds or gather:
            runtime = CudaNccl(home)
            self.issuer = Issuer(runtime)
        if self.issuer is not None and "nccl" in kinds:
            self.by_kind["nccl"] = TwoSidedSender(
                network=NcclNetwork(self.issuer, home), landing=config.landing, bind_host=config.bind_host,
                on_lost=on_lost, rendezvous_timeout_s=config.connect_timeout_s, program=program,
            )  # fmt: skip


def in_place(kinds: Mapping[int, str]) -> frozenset[int]:
    """Targets whose buckets are assembled in memory of their transport."""
    return frozenset(target for target, kind in kinds.items() if kind in IN_PLACE)


def plan_options(targets: Sequence[Sequence[Manifest]], config: TransferConfig, kinds: Mapping[int, str]) -> PlanOptions:
    """What a plan has to know of ``config`` and of the transport of each target (`transport_kinds`)."""
    return PlanOptions(
        bucket_bytes=config.bucket,
        max_tmp_bytes=config.watermark,
        route=config.route,
        landing=config.landing,
        shared_landing=config.landing != "streamed" and all(kind == "shm" for kind in kinds.values()),
        wire_format=config.wire_format,
        modules_to_not_convert=tuple(config.modules_to_not_convert),
        stage_host=on_device(targets),
        relays=relaying(config, kinds),
    )


def relaying(config: TransferConfig, kinds: Mapping[int, str]) -> frozenset[int]:
    """Targets whose ranks pass buckets on to each other.

    Over NCCL only if that is asked for by name: ranks that pass on for several owners post receives ahead of what they pass on,
    and on a device that cannot run all of that at once two of them would wait for each other (`tests/stages/test_issuing.py`).
    """
    chosen = {True: {"gloo"}, False: set(), "nccl": TWO_SIDED}[config.relay]
    return frozenset(target for target, kind in kinds.items() if kind in chosen)
