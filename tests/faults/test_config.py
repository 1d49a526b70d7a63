"""Wrong configurations: each is refused at construction, and all that is wrong is said at once."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.trainers import ModuleSource
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine
from syncline.engine.errors import ConfigError, ProtocolError

BAD = [
    ({"max_tmp_bytes": 0}, "max_tmp_bytes is 0"),
    ({"max_tmp_bytes": "lots"}, "max_tmp_bytes: 'lots' is not a size"),
    ({"max_tmp_bytes": "-1MiB"}, "max_tmp_bytes: '-1MiB' is not a size"),
    ({"max_tmp_bytes": True}, "max_tmp_bytes: True is not a size"),
    ({"max_tmp_bytes": 1.5}, "max_tmp_bytes"),
    ({"max_tmp_bytes": None}, "max_tmp_bytes"),
    ({"bucket_bytes": 0}, "bucket_bytes is 0"),
    ({"bucket_bytes": "16 parsecs"}, "bucket_bytes: '16 parsecs' is not a size"),
    ({"bucket_bytes": "2MiB", "max_tmp_bytes": "1MiB"}, "is above the watermark max_tmp_bytes (1048576)"),
    ({"h2d_concurrency": 0}, "h2d_concurrency is 0"),
    ({"prepare_concurrency": -1}, "prepare_concurrency is -1"),
    ({"send_concurrency": 1.5}, "send_concurrency is 1.5"),
    ({"workers": True}, "workers is True"),
    ({"push_timeout_s": 0}, "push_timeout_s is 0"),
    ({"push_timeout_s": float("inf")}, "push_timeout_s is inf"),
    ({"push_timeout_s": float("nan")}, "push_timeout_s is nan"),
    ({"connect_timeout_s": "60"}, "connect_timeout_s is '60'"),
    ({"target_timeout_s": -1.0}, "target_timeout_s is -1.0"),
    ({"poll_interval_s": None}, "poll_interval_s is None"),
    ({"landing": "magic"}, "landing is 'magic'; choose one of staged, streamed, mapped"),
    ({"transport": "carrier pigeon"}, "transport is 'carrier pigeon'"),
    ({"route": "scenic"}, "route is 'scenic'; choose one of auto, gather, direct"),
    ({"landing": "mapped", "route": "direct"}, "route 'direct' has none"),
    ({"in_flight": "panic"}, "in_flight is 'panic'"),
    ({"wire_format": "fp4"}, "wire_format: 'fp4' is no wire format"),
    ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
    ({"landing": "mapped", "transport": "gloo"}, "landing 'mapped' needs shared memory"),
    ({"bind_host": "0.0.0.0"}, "beyond loopback and secret is not set"),
    ({"verify": "yes"}, "verify is 'yes'"),
    ({"trace": 1}, "trace is 1"),
    ({"relay": "no"}, "relay is 'no'"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD, ids=[message[:24] for _, message in BAD])
def test_each_wrong_value_is_named(wrong, message):
    with pytest.raises(ConfigError) as caught:
        TransferConfig(**wrong)
    (problem,) = caught.value.problems
    assert message in problem
    assert isinstance(caught.value, ValueError)


def test_all_that_is_wrong_is_said_at_once():
    single = [(wrong, message) for wrong, message in BAD if len(wrong) == 1]
    together = {name: value for wrong, _ in single for name, value in wrong.items()}
    with pytest.raises(ConfigError) as caught:
        TransferConfig(**together)
    assert len(caught.value.problems) == len(together)
    for name in together:
        assert sum(name in problem for problem in caught.value.problems) >= 1, name


def test_every_knob_is_in_the_table():
    """A knob that is added without a check would be missed."""
    checked = {name for wrong, _ in BAD for name in wrong}
    assert {field.name for field in dataclasses.fields(TransferConfig)} - checked == {"secret"}


def test_good_values_are_taken():
    config = TransferConfig(max_tmp_bytes="1.5 GB", bucket_bytes=None, bind_host="10.0.0.1", secret="s", target_timeout_s=None)
    assert (config.watermark, config.bucket) == (1_500_000_000, 32 * 2**20)
    assert config.target_timeout == config.push_timeout_s / 4
    assert TransferConfig(max_tmp_bytes=1).bucket == 1


def test_an_engine_names_all_wrong_targets_at_once():
    source = ModuleSource({"w": torch.ones(1)}, world_size=1)
    targets = ["a", "unix:relative", "tcp://127.0.0.1", "tcp://10.0.0.7:80", "tcp://10.0.0.8:80", "unix:/x", "unix:/x"]
    remotes = [RemoteTarget(t, secret="s" if "10.0.0.8" in t else None) for t in targets]
    with pytest.raises(ConfigError) as caught:
        TransferEngine(source=source, targets=remotes)
    text = "\n".join(caught.value.problems)
    for target in ("'a' is neither", "'unix:relative'", "'tcp://127.0.0.1' is neither", "'unix:/x' is listed more than once"):
        assert target in text
    assert "'tcp://10.0.0.7:80' is beyond loopback and no secret is set" in text
    assert len(caught.value.problems) == 5
    with pytest.raises(ConfigError, match="targets is empty"):
        TransferEngine(source=source, targets=[])
    with pytest.raises(ConfigError, match=r"targets\[0\] is 'unix:/x', not a target such as RemoteTarget"):
        TransferEngine(source=source, targets=["unix:/x"])


def test_a_receiver_names_all_that_is_wrong_at_once():
    with pytest.raises(ConfigError) as caught:
        Receiver(
            ModuleLoader(nn.Identity()), "tcp://0.0.0.0:0", rank=3, world_size=2, leader="nowhere", initial_version=-1,
            workers=0, heartbeat_s=0.0, patience_s=float("nan"),
        )  # fmt: skip
    text = "\n".join(caught.value.problems)
    words = ("world_size 2", "'nowhere'", "initial_version", "workers", "heartbeat_s", "patience_s", "secret is not set")
    for word in words:
        assert word in text
    assert len(caught.value.problems) == len(words)


@pytest.mark.parametrize("version", [-1, 1.5, "1", None, True, 2**63])
async def test_versions_that_are_none_are_refused(start_target, connect, kit, version):
    whole = kit.stamped({"w": (2,)})
    target = await start_target(kit.Bag(kit.poisoned(whole)))
    pusher = await connect(whole, [target])
    with pytest.raises(ConfigError, match="version is"):
        await pusher.push(version)
    await pusher.push_well(0)


async def test_ranks_that_are_configured_differently_are_refused_at_once(start_target, kit):
    whole = kit.stamped({"w": (4, 2)})
    target = await start_target(kit.Bag(kit.poisoned(whole)))
    sources = kit.row_shards(whole, 2)
    engines = [
        TransferEngine(source=source, targets=[RemoteTarget(target.address)], config=TransferConfig(bucket_bytes=size))
        for source, size in zip(sources, (1024, 2048), strict=True)
    ]
    try:
        results = await asyncio.gather(*(engine.connect() for engine in engines), return_exceptions=True)
        assert [type(result) for result in results] == [ProtocolError, ProtocolError]
        assert "different configs" in str(results[1])
    finally:
        for engine in engines:
            await engine.close()
