"""Receivers in one process over a transport in memory: landing modes, two-phase errors, versions, failures, cleanup."""

from __future__ import annotations

import asyncio

import pytest

MODES = ["staged", "streamed", "mapped"]


@pytest.mark.parametrize("expose", [True, False])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("landing", MODES)
async def test_a_push_lands_and_is_served_by_all_ranks(targets, landing, world, expose):
    target = await targets(world=world, landing=landing, expose=expose)
    assert target.states() == [("FENCED", None)] * world
    result = await target.push(1)
    assert target.hold(1)
    assert target.states() == [("COMMITTED", 1)] * world
    assert result.state == "COMMITTED"
    assert result.version == 1
    assert result.votes == {str(rank): True for rank in range(world)}
    assert result.num_buckets_received > 1
    for receiver in target.receivers:
        with receiver.gate.forward() as version:
            assert version == 1
    await target.push(2)
    assert target.hold(2)
