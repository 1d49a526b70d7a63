"""How source ranks find rank 0 through the trainer's store, also where earlier engines have left their cards."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from syncline.engine.coordination import LOST, Coordination
from syncline.engine.errors import SourceRankLost
from syncline.engine.meeting import meet


@pytest.fixture
def group() -> Any:
    """Of a process group, only the store is used."""
    store = dist.HashStore()
    return SimpleNamespace(get_group_store=lambda: store)


async def meet_all(group: Any, world_size: int = 3) -> list[Coordination]:
    return list(await asyncio.gather(*(meet(group, rank, world_size, "127.0.0.1", 20.0) for rank in range(world_size))))


async def ask(ranks: list[Coordination], step: str) -> list[bytes]:
    async def decide(parts: Any) -> bytes:
        return b"+".join(parts)

    return list(await asyncio.gather(*(rank.exchange(step, b"%d" % rank.rank, decide, 20.0) for rank in ranks)))


async def close(ranks: list[Coordination]) -> None:
    for rank in reversed(ranks):
        await rank.close()


async def test_a_second_engine_meets_where_the_first_one_did(group: Any) -> None:
    for attempt in range(3):
        ranks = await meet_all(group)
        assert await ask(ranks, f"{attempt}/step") == [b"0+1+2"] * 3
        await close(ranks)


async def test_a_second_engine_meets_beside_the_first_one(group: Any) -> None:
    first = await meet_all(group)
    early = asyncio.create_task(meet(group, 2, 3, "127.0.0.1", 20.0))  # the only card that there is leads to the first one
    rest = [asyncio.create_task(meet(group, rank, 3, "127.0.0.1", 20.0)) for rank in (0, 1)]
    second = [await task for task in (*rest, early)]
    assert await ask(second, "1/step") == [b"0+1+2"] * 3
    assert await ask(first, "1/step") == [b"0+1+2"] * 3
    await close(first)
    await close(second)


async def test_rank_0_does_not_come(group: Any) -> None:
    with pytest.raises(SourceRankLost, match="rank 0 did not come"):
        await meet(group, 1, 2, "127.0.0.1", 0.1)
    ranks = await meet_all(group, 2)
    await close(ranks)
    with pytest.raises(SourceRankLost, match="cannot reach rank 0"):  # the card of one that has gone
        await meet(group, 1, 2, "127.0.0.1", 0.1)


async def test_a_rank_does_not_come(group: Any) -> None:
    with pytest.raises(SourceRankLost, match=r"\[1, 2\] did not connect"):
        await meet(group, 0, 3, "127.0.0.1", 0.1)


@pytest.mark.parametrize("leaver", [0, 1, 2])
async def test_a_rank_that_closes_early_takes_nothing_from_those_that_still_finish(group: Any, leaver: int) -> None:
    """Every rank closes when its own push has returned, in whatever order: nobody may take that for a loss."""
    aborted: list[str] = []
    ranks = await meet_all(group)
    for rank in ranks:
        rank.watch(lambda attempt, _error: aborted.append(attempt), lambda _topic, _payload: None)
    await ask(ranks, "1/last")
    await ranks[leaver].close()
    left = [rank for rank in ranks if rank.rank != leaver]
    with pytest.raises(SourceRankLost, match=f"source rank {leaver} went away: it closed its engine"):
        await asyncio.gather(*(rank.exchange("2/first", b"", lambda _parts: asyncio.sleep(0, b""), 20.0) for rank in left))
    assert LOST not in aborted
    await close(left)
