"""How the ranks of a source meet once, at `connect`: rank 0 says, through the trainer's group, where it listens.

The trainer's process group carries one broadcast of a few bytes and is never used again: everything else runs over
syncline's own connections and communicators, so that a push cannot mix with the trainer's collectives.
"""

from __future__ import annotations

import asyncio
import datetime

import msgspec
import torch
import torch.distributed as dist

from .coordination import Coordination, Hub, Solo, Spoke
from .errors import SourceRankLost, SynclineError

_CARD_BYTES = 1024


class Card(msgspec.Struct, kw_only=True):
    """What rank 0 tells the others."""

    address: str
    token: str


async def meet(group: dist.ProcessGroup | None, rank: int, world_size: int, host: str, timeout_s: float) -> Coordination:
    """Connect all ranks to rank 0. ``group`` is the trainer's group (None for a single rank); collective over it."""
    if world_size == 1:
        return Solo()
    if group is None:
        raise SourceRankLost(f"the source says it has {world_size} ranks but no process group through which they can meet")
    if rank != 0:
        card = msgspec.msgpack.decode(await _broadcast(group, b"", timeout_s), type=Card)
        spoke = Spoke(rank, world_size)
        await spoke.start(card.address, card.token, timeout_s)
        return spoke
    hub = Hub(world_size)
    try:
        card = Card(address=await hub.start(host), token=hub.token)
        await _broadcast(group, msgspec.msgpack.encode(card), timeout_s)
        await hub.joined(timeout_s)
    except BaseException:
        await hub.close()
        raise
    return hub


async def _broadcast(group: dist.ProcessGroup, payload: bytes, timeout_s: float) -> bytes:
    """Broadcast a small message from the group's first rank over a gloo group made for it."""
    try:
        async with asyncio.timeout(timeout_s + 5.0):  # gloo's own timeout should speak first: it says more
            return await asyncio.to_thread(_broadcast_blocking, group, payload, timeout_s)
    except SynclineError:
        raise
    except (RuntimeError, TimeoutError) as error:
        raise SourceRankLost(f"the source ranks did not meet within {timeout_s:g} s: {error}") from error


def _broadcast_blocking(group: dist.ProcessGroup, payload: bytes, timeout_s: float) -> bytes:
    ranks = dist.get_process_group_ranks(group)
    own = dist.new_group(ranks, backend="gloo", timeout=datetime.timedelta(seconds=timeout_s), use_local_synchronization=True)
    try:
        card = torch.zeros(_CARD_BYTES, dtype=torch.uint8)
        if payload:
            card[0], card[1] = len(payload) // 256, len(payload) % 256
            card[2 : 2 + len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(card, src=ranks[0], group=own)
        size = int(card[0]) * 256 + int(card[1])
        return bytes(card[2 : 2 + size].tolist())
    finally:
        dist.destroy_process_group(own)
