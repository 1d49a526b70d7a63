"""NCCL, device memory to device memory, within a host and between hosts. See `two_sided` for how it works.

Between two ranks NCCL moves messages in the order in which both sides issue them. The source issues buckets in the plan's
order (`plan_order`, told to the `Issuer` when a push begins); receivers take what each source sent, and pass it on, in that
order. All communicators of a device share one issuer: a gather among source ranks and sends to several targets never overtake
each other differently on different ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from syncline.scheduler.programs import ReceiverId, SourceProgram, SourceTask

from ..communicator import Rendezvous
from ..frames import frames
from ..issuing import Key
from ..nccl_communicator import Issuer, NcclCommunicator

GATHER = "gather"
"""Label of the communicator among the source ranks."""


class NcclNetwork:
    """Implements `syncline.stages.transports.two_sided.Network`.

    Args:
        issuer: the one of the device.
        device: where memory lies.
    """

    kind = "nccl"

    def __init__(self, issuer: Issuer, device: torch.device) -> None:
        self.device = device
        self._issuer = issuer

    async def meet(
        self, rendezvous: Rendezvous, *, name: str, label: str, rank: int, members: Sequence[str], timeout_s: float,
        one_way: bool,
    ) -> NcclCommunicator:  # fmt: skip
        return await NcclCommunicator.create(
            rendezvous, issuer=self._issuer, name=name, label=label, rank=rank, size=len(members), timeout_s=timeout_s,
            device=self.device, one_way=one_way,
        )  # fmt: skip


def plan_order(
    program: SourceProgram, ranks: Mapping[int, Sequence[int]], live: Collection[ReceiverId], *, gather: bool
) -> Iterator[tuple[Key, ...]]:
    """The messages of a push on one source rank, as groups in the order in which they are to be issued.

    Task by task: what it gathers, then what it sends, target by target. A group waits for those before it only, all of
    which are of earlier tasks or stages: no two ranks can wait for each other.

    Args:
        program: what the source rank does.
        ranks: linked ranks of each target that is served over NCCL, in the order of its communicator.
        live: receivers that the push goes to.
        gather: messages between source ranks go over NCCL.
    """
    order, going = {target: place for place, target in enumerate(ranks)}, frozenset(live)
    for task in program.tasks:
        exchanged = tuple(Key(GATHER, False, m.peer, m.tag) for m in task.receives)
        exchanged += tuple(Key(GATHER, True, m.peer, m.tag) for m in task.sends)
        if exchanged and gather:
            yield exchanged
        by_target = _sends(task, ranks, going) if frames(task.segments, task.nbytes) else {}
        for target in sorted(by_target, key=order.__getitem__):
            yield tuple(by_target[target])


def _sends(task: SourceTask, ranks: Mapping[int, Sequence[int]], live: frozenset[ReceiverId]) -> dict[int, list[Key]]:
    """What a task sends over NCCL, by target. This runs on the loop, for every receiver of every task."""
    found: defaultdict[int, list[Key]] = defaultdict(list)
    relayed = frozenset(task.relayed)
    for receiver in task.receivers:
        members = ranks.get(receiver.target)
        if members is not None and receiver in live and receiver not in relayed:
            key = Key(f"target-{receiver.target}", True, 1 + members.index(receiver.rank), task.index)
            found[receiver.target].append(key)
    return found
