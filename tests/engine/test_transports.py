"""Which transport serves which target, and what is said where one cannot."""

from __future__ import annotations

import types

import pytest
import torch

from syncline.engine import linking
from syncline.engine.config import TransferConfig
from syncline.engine.errors import ConfigError, PlanError, TransportError
from syncline.engine.transports import IN_PLACE, LENDING, Senders, transport_kinds
from syncline.scheduler.layout import Box, Buffer, Manifest, Piece, Tensor
from syncline.scheduler.programs import SourceProgram
from syncline.stages.transports.cuda_ipc import CudaIpcSender
from syncline.stages.transports.gloo import GlooSender
from syncline.stages.transports.shm import ShmSender
from syncline.stages.transports.two_sided import TwoSidedSender


def manifest(host, device, rank=0):
    return Manifest(
        rank=rank, world_size=1, host=host, tensors=[Tensor(name="w", shape=(4,), dtype="float32", group=0)],
        pieces=[Piece(tensor=0, box=Box(start=(0,), shape=(4,)), buffer=0, offset=0, strides=(1,), dtype="float32")],
        buffers=[Buffer(name="w", nbytes=16, device=device)],
    )  # fmt: skip


HERE, THERE = "here", "there"


@pytest.mark.parametrize("source_device", ["cpu", "cuda:0"])
@pytest.mark.parametrize(
    ("host", "device", "kind"),
    [(HERE, "cpu", "shm"), (THERE, "cpu", "gloo"), (HERE, "cuda:1", "cuda_ipc"), (THERE, "cuda:0", "nccl")],
)
def test_auto_goes_by_where_weights_are(source_device, host, device, kind):
    targets = [[manifest(host, device)], [manifest(HERE, "cpu"), manifest(THERE, "cpu", 1)]]
    kinds = transport_kinds([manifest(HERE, source_device)], targets, TransferConfig())
    assert kinds == {0: kind, 1: "gloo"}


@pytest.mark.parametrize(
    ("transport", "host", "device", "why"),
    [
        ("cuda_ipc", HERE, "cpu", "moves GPU memory, and the target's weights are in CPU memory; choose 'auto'"),
        ("nccl", HERE, "cpu", "moves GPU memory"),
        ("shm", HERE, "cuda:0", "moves CPU memory, and the target's weights are on a GPU; choose 'auto'"),
        ("gloo", THERE, "cuda:0", "moves CPU memory"),
        ("cuda_ipc", THERE, "cuda:0", "one host; choose 'auto' or 'nccl'"),
        ("shm", THERE, "cpu", "one Linux host; choose 'auto' or 'gloo'"),
    ],
)
def test_what_cannot_serve_a_target_is_a_problem_of_the_plan(transport, host, device, why):
    targets = [[manifest(HERE, "cpu" if transport in {"shm", "gloo"} else "cuda:0")], [manifest(host, device)]]
    with pytest.raises(PlanError) as raised:
        transport_kinds([manifest(HERE, "cpu")], targets, TransferConfig(transport=transport))
    (problem,) = raised.value.problems
    assert problem.startswith("target 1: ")
    assert why in problem


def test_mapped_is_for_cpu_memory():
    for transport in ("cuda_ipc", "nccl"):
        with pytest.raises(ConfigError, match=f"transport '{transport}' has none"):
            TransferConfig(transport=transport, landing="mapped")
    with pytest.raises(PlanError, match="weights in CPU memory"):
        transport_kinds([manifest(HERE, "cpu")], [[manifest(HERE, "cuda:0")]], TransferConfig(landing="mapped"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("kind", ["cuda_ipc", "nccl"])
def test_without_a_gpu_the_error_says_so(kind):
    program = SourceProgram(plan_digest="", rank=0, world_size=1, tasks=(), landing_nbytes=0, groups=(), total_tasks=0)
    with pytest.raises(TransportError, match=rf"transport '{kind}' needs a CUDA device, and .*choose transport 'auto'"):
        Senders({kind}, program=program, config=TransferConfig(), workers=None, on_lost=lambda *_: None)


def test_senders_are_what_their_kinds_are_said_to_be():
    kinds = {"shm": ShmSender, "gloo": GlooSender, "cuda_ipc": CudaIpcSender, "nccl": TwoSidedSender}
    assert {kind for kind, sender in kinds.items() if sender.in_place} == IN_PLACE
    assert {kind for kind, sender in kinds.items() if sender.lends} == LENDING


def test_receivers_of_a_process_share_the_thread_that_makes_a_devices_nccl_calls(monkeypatch):
    monkeypatch.setattr(linking, "_issuers", {})
    runtimes = [types.SimpleNamespace(device=torch.device("cuda", index)) for index in (0, 0, 1)]
    issuers = [linking._issuer(runtime) for runtime in runtimes]
    assert issuers[0] is issuers[1]
    assert issuers[2] is not issuers[0]
