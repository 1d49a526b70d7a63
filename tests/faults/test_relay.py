"""A source on another host, as far as the plan knows: ranks of a target pass buckets on to each other."""

import asyncio

import pytest

LANDINGS = ["staged", "streamed"]


def shapes(kit):
    return kit.stamped({f"layers.{i}.w": (64, 96) for i in range(24)} | {"embed": (700, 96), "norm": (96,)})


@pytest.fixture
def elsewhere(kit):
    """Sources of two ranks that say they are on another host."""

    def make(whole):
        sources = kit.row_shards(whole, 2)
        for source in sources:
            source.host = "elsewhere"
        return sources

    return make


@pytest.mark.parametrize("landing", LANDINGS)
async def test_every_rank_serves_what_was_sent_and_it_left_the_source_once(kit, start_target, connect, elsewhere, landing):
    whole = shapes(kit)
    models = [kit.Bag(kit.poisoned(whole)) for _ in range(3)]
    target = await start_target(*models)
    sent = {}
    for relay in (False, True):
        pusher = await connect(elsewhere(whole), [target], landing=landing, bucket_bytes="64KiB", relay=relay)
        for version in (1, 2) if not relay else (3, 4, 5):
            report = await pusher.push_well(version)
        sent[relay] = report.bytes
        for model in models:
            assert kit.differing(model, whole) == []
        await pusher.close()
    payload = sum(tensor.nbytes for tensor in whole.values())
    assert sent[False] >= 3 * payload
    assert payload <= sent[True] < 1.5 * payload


@pytest.mark.parametrize("landing", LANDINGS)
async def test_a_rank_that_goes_takes_its_target_with_it_and_no_other(kit, start_target, connect, elsewhere, landing):
    whole = shapes(kit)
    lost = await start_target(*(kit.Bag(kit.poisoned(whole)) for _ in range(3)))
    models = [kit.Bag(kit.poisoned(whole)) for _ in range(2)]
    stays = await start_target(*models)
    pusher = await connect(elsewhere(whole), [lost, stays], landing=landing, bucket_bytes="64KiB")
    await pusher.push_well(1)
    pushing = asyncio.create_task(pusher.push(2))
    await lost.receivers[2].close()
    report = await pushing
    assert report.targets[stays.address].ok
    report = await pusher.push(3)
    assert not report.targets[lost.address].ok
    assert report.targets[stays.address].ok
    for model in models:
        assert kit.differing(model, whole) == []
