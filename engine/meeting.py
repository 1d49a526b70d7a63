"""How the ranks of a source meet once, at `connect`: rank 0 leaves in the trainer's group's store where it listens.

No collective of the trainer's is used, and no group is made: those take their names from counters of the process, so that
a second engine on the same ranks would look for addresses of the first one's. What a store still holds from an engine of
before is recognised by that engine's hub being gone, or letting nobody in any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from syncline.stages.workers import call_in_thread

from .coordination import Coordination, Hub, Solo, Spoke
from .errors import SourceRankLost, SynclineError

T = TypeVar("T")

_KEY = "syncline/rank-0"
_LOOK_EVERY_S = 0.02
_ANSWER_S = 1.0
"""A store gets so long to answer, however little is left: that it hangs is not said of one that does not."""


class Card(msgspec.Struct, kw_only=True):
    """What rank 0 tells the others."""

    address: str
    token: str


async def meet(group: dist.ProcessGroup | None, rank: int, world_size: int, host: str, timeout_s: float) -> Coordination:
    """Connect all ranks to rank 0. ``group`` is the trainer's group (None for a single rank), of which all ranks call."""
    if world_size == 1:
        return Solo()
    if group is None:
        raise SourceRankLost(f"the source says it has {world_size} ranks but no process group through which they can meet")
    store = group.get_group_store()
    if rank != 0:
        return await _find_rank_0(store, rank, world_size, timeout_s)
    hub = Hub(world_size)
    try:
        card = Card(address=await hub.start(host), token=hub.token)
        await _asked(partial(store.set, _KEY, msgspec.json.encode(card).decode()), timeout_s)
        await hub.joined(timeout_s)
    except BaseException:
        await hub.close()
        raise
    return hub


async def _find_rank_0(store: c10d.Store, rank: int, world_size: int, timeout_s: float) -> Spoke:
    """Follow the newest card that there is, until one leads to a rank 0 that waits for its ranks."""
    until = time.monotonic() + timeout_s
    followed, reason = b"", "rank 0 did not come to connect"
    while (left := until - time.monotonic()) > 0:
        payload = await _asked(partial(_read, store), max(left, _ANSWER_S))
        if payload != followed:
            card = msgspec.json.decode(payload, type=Card)
            spoke = Spoke(rank, world_size)
            try:
                await spoke.start(card.address, card.token, left)
            except SynclineError as error:
                followed, reason = payload, str(error)
            else:
                return spoke
        await asyncio.sleep(_LOOK_EVERY_S)
    raise SourceRankLost(f"source rank {rank} did not meet rank 0 within {timeout_s:g} s: {reason}")


async def _asked(call: Callable[[], T], timeout_s: float) -> T:
    """Ask a store, which may hang with whoever keeps it: nothing waits for that beyond ``timeout_s`` seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call_in_thread(call, name="syncline-meet")
    except TimeoutError:
        raise SourceRankLost(f"the store of the trainer's group gave no answer within {timeout_s:.3g} s") from None


def _read(store: c10d.Store) -> bytes:
    return bytes(store.get(_KEY)) if store.check([_KEY]) else b""
