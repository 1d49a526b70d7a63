"""Faults of size and number: very many small tensors, tensors above the watermark, senders that carry all the load."""

from __future__ import annotations

import random

import pytest
import torch

from syncline.adapters.engines import ModuleLoader
from syncline.engine.errors import PlanError
from syncline.scheduler.plan import PlanOptions

LEAF = PlanOptions(bucket_bytes=1, max_tmp_bytes=1).leaf_bytes


# many small


@pytest.mark.parametrize(("carrier", "mode"), [("shm", "staged"), ("shm", "mapped"), ("gloo", "streamed")])
async def test_thousands_of_tensors_of_a_few_bytes(start_target, connect, kit, carrier, mode):
    """No deadlock, and what a push does is counted in buckets, not in tensors."""
    shapes = {f"layer.{i}.{part}": (1 + i % 4,) for i in range(1250) for part in "abcd"}
    whole = kit.stamped(shapes)
    model = kit.Bag(kit.poisoned(whole))
    target = await start_target(ModuleLoader(model, movable=mode == "mapped"))
    pusher = await connect(whole, [target], transport=carrier, landing=mode, bucket_bytes="256KiB")
    for version in (1, 2):
        whole["layer.7.a"] += 1
        report = await pusher.push_well(version)
        assert report.tasks <= 1 + 5000 * 256 // 2**18
        assert report.stages["send"].tasks == report.tasks
    assert kit.differing(model, whole) == []


# per-name cost


async def test_the_number_of_control_calls_does_not_depend_on_the_number_of_names(start_target, connect, kit, calls):
    made = {}
    for count in (20, 20_000):
        whole = dict.fromkeys((f"layer.{i}.w" for i in range(count)), torch.ones(2))
        source = {name: torch.full((2,), float(i)) for i, name in enumerate(whole)}
        model = kit.Bag(kit.poisoned(whole))
        target = await start_target(model)
        calls.clear()
        pusher = await connect(source, [target], bucket_bytes="1MiB", max_tmp_bytes="8MiB")
        connecting = dict(calls)
        calls.clear()
        for version in (1, 2):
            await pusher.push_well(version)
        made[count] = connecting, dict(calls)
        assert kit.differing(model, source) == []
        await pusher.close()
    assert made[20] == made[20_000]
    assert sum(made[20][0].values()) <= 6
    assert sum(made[20][1].values()) <= 2 * 4


# oversize


async def test_a_tensor_of_one_and_a_half_watermarks_is_split(start_target, connect, kit, transport, landing):
    watermark = 4 * LEAF
    whole = kit.stamped({"big": (6 * LEAF // 4 // 64, 64), "small": (3,)})
    assert whole["big"].nbytes == 1.5 * watermark
    model = kit.Bag(kit.poisoned(whole))
    target = await start_target(ModuleLoader(model, movable=landing == "mapped"))
    sources = kit.row_shards(whole, 2)
    pusher = await connect(sources, [target], transport=transport, landing=landing, max_tmp_bytes=watermark)
    report = await pusher.push_well(1)
    assert kit.differing(model, whole) == []
    assert report.peak_tmp_bytes <= watermark
    assert report.tasks > 2


async def test_what_cannot_be_split_is_refused_by_name_with_its_need_and_the_knob(start_target, engines, kit):
    """A watermark below one digest leaf: every such tensor is named, and none that fits."""
    whole = kit.stamped({"big.a": (2 * LEAF // 4,), "big.b": (LEAF // 4 + 1,), "tiny": (3,)})
    target = await start_target(kit.Bag(kit.poisoned(whole)))
    with pytest.raises(PlanError) as caught:
        await engines(kit.row_shards(whole, 2), [target], transport="gloo", max_tmp_bytes=4096, bucket_bytes=4096).connect()
    text = "\n".join(caught.value.problems)
    assert "big.a" in text
    assert "big.b" in text
    assert "tiny" not in text
    assert "max_tmp_bytes of 4096" in text
    assert str(LEAF) in text


# accounting


@pytest.mark.parametrize("transport", ["shm", "gloo"])
async def test_sizes_around_the_bucket_limit_stay_under_the_watermark(start_target, connect, kit, transport):
    """With a watermark of exactly two buckets, and of one: tensors just under, at and just above the limit, shuffled."""
    bucket = 4096
    sizes = [bucket + delta for delta in (-260, -256, -255, -4, 0, 4, 256, 260)] * 2 + [bucket // 2 - 4, bucket // 2, 4] * 2
    random.Random(3).shuffle(sizes)
    whole = kit.stamped({f"t{i}": (size // 4,) for i, size in enumerate(sizes)})
    for number, (watermark, landing) in enumerate(
        [(bucket * 2, "streamed"), (bucket + 512, "streamed"), (bucket * 2, "staged")]
    ):
        model = kit.Bag(kit.poisoned(whole))
        target = await start_target(model)
        settings = {"transport": transport, "landing": landing, "max_tmp_bytes": watermark, "bucket_bytes": bucket}
        pusher = await connect(kit.row_shards(whole, 2) if number == 2 else whole, [target], **settings)
        report = await pusher.push_well(1)
        assert report.peak_tmp_bytes <= watermark
        if landing == "streamed":
            assert report.peak_tmp_bytes >= min(bucket, watermark // 2)
        assert kit.differing(model, whole) == []


# funnel


async def test_four_source_ranks_send_about_the_same(start_target, connect, kit, transport, landing):
    """The embedding is more than one rank's share, and has to be split; ``mapped`` keeps a tensor in one piece, so there it
    is smaller."""
    layers = {f"layer.{i}.{part}": (64, 256) for i in range(12) for part in ("up", "down")}
    whole = kit.stamped({**layers, "embed": (256 if landing == "mapped" else 4096, 256), "norm": (256,)})
    models = [kit.Bag(kit.poisoned(whole)) for _ in range(2)]
    targets = [await start_target(ModuleLoader(model, movable=landing == "mapped")) for model in models]
    pusher = await connect(
        kit.row_shards(whole, 4), targets, transport=transport, landing=landing, bucket_bytes="128KiB", max_tmp_bytes="2MiB"
    )
    report = await pusher.push_well(1)
    assert [kit.differing(model, whole) for model in models] == [[], []]
    wirings = [engine._session._wiring for engine in pusher.engines]
    sent = [wiring.sent_bytes for wiring in wirings]
    assert sum(sent) == report.bytes
    assert max(sent) / (sum(sent) / 4) <= 1.2, sent
    assert wirings[0].plan.balance <= 1.2


async def test_a_single_owner_would_be_seen(start_target, connect, kit, monkeypatch):
    """So that the test above is known to be able to fail."""
    import numpy as np

    from syncline.scheduler import plan

    monkeypatch.setattr(plan, "choose_owners", lambda patterns, first, item, contributor, **more: np.zeros(len(item), np.int64))
    whole = kit.stamped({f"layer.{i}": (8, 32) for i in range(12)})
    model = kit.Bag(kit.poisoned(whole))
    pusher = await connect(kit.row_shards(whole, 4), [await start_target(model)], bucket_bytes=2048)
    await pusher.push_well(1)
    assert kit.differing(model, whole) == []
    sent = [engine._session._wiring.sent_bytes for engine in pusher.engines]
    assert max(sent) / (sum(sent) / 4) == 4
