"""The bed that measurements are made on: real processes, pushes of any config in turn, every element looked at."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
import pytest

from syncline.bench.measure.bed import Setup, bed, setup_of
from syncline.bench.measure.errors import BenchError

SMALL: dict[str, Any] = {"tensors": 3, "nbytes": 3 * 2**20}


async def test_any_config_in_turn_on_the_same_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bed(Setup(movable=True, **SMALL)) as here:
        for how in (
            {"transport": "shm", "landing": "mapped"},
            {"transport": "shm", "landing": "streamed", "bucket_bytes": 2**18},
            {"transport": "gloo", "landing": "staged", "verify": False},
        ):
            pushes = await here.push(how, repeat=3)
            assert pushes.ok and pushes.intact and pushes.errors == ()
            assert len(pushes.seconds) == 3 and min(pushes.seconds) > 0 and pushes.connect_s > 0
            assert pushes.sent_bytes == here.setup.moved_bytes == 3 * 2**20
            assert set(pushes.busy_s) == {"h2d", "prepare", "send", "barrier"}
            assert pushes.reports[0].spans == ()
        assert pushes.peak_tmp_bytes > 0 and pushes.tasks >= 1

        traced = await here.push({"trace": True}, repeat=1)
        assert {span.stage for span in traced.reports[0].spans[0]} >= {"prepare", "send"}

        refused = await here.push({"bucket_bytes": 8, "max_tmp_bytes": 4}, repeat=1)
        assert refused.error.startswith("ConfigError: ") and "watermark" in refused.error
        assert not refused.ok and refused.seconds == []
        impossible = await here.push({"landing": "mapped", "transport": "gloo"}, repeat=1)
        assert "mapped" in impossible.error

        assert await here.control({"transport": "shm", "landing": "mapped"}) == "caught"
        assert (await here.push({}, repeat=1)).intact

        push = here.push

        async def honest(config: Any, *, repeat: int, corrupt: bool = False) -> Any:
            return await push(config, repeat=repeat)

        # Pushes that claim to have been corrupted, and were not: a control can miss.
        monkeypatch.setattr(here, "push", honest)
        assert await here.control({}) == "missed by digests (committed)"
        assert await here.control({"verify": False}) == "missed by the look at every element"


@pytest.mark.parametrize(
    ("setup", "how"),
    [
        (Setup(source="fsdp", source_ranks=2, targets=2, **SMALL), {"transport": "gloo", "landing": "streamed"}),
        (Setup(source="tp", source_ranks=2, target_ranks=2, **SMALL), {"transport": "gloo", "route": "direct"}),
    ],
    ids=str,
)
async def test_a_corrupted_bucket_is_noticed_and_the_next_push_is_whole(setup: Setup, how: dict[str, Any]) -> None:
    async with bed(setup) as here:
        assert await here.control(how) == "caught"
        assert await here.control({**how, "verify": False}) == "caught"

        # What the control is made of, and that each half of it can fail.
        digested = await here.push(how, repeat=1, corrupt=True)
        assert not digested.ok and any(error.startswith("DigestMismatch") for error in digested.errors)
        assert not digested.intact
        blind = await here.push({**how, "verify": False}, repeat=1, corrupt=True)
        assert blind.ok and not blind.intact

        whole = await here.push(how, repeat=2)
        assert whole.ok and whole.intact

        seconds, intact = await here.naive(repeat=2)
        assert intact and len(seconds) == 2 and min(seconds) > 0


async def test_a_process_that_ends_is_an_error_and_leaves_none_behind() -> None:
    children = psutil.Process().children
    with pytest.raises(BenchError, match="measured process ended"):
        async with bed(Setup(**SMALL)) as here:
            started = [child.pid for child in children() if "measure.peer" in " ".join(child.cmdline())]
            assert len(started) == 2
            psutil.Process(started[0]).kill()  # the target
            async with asyncio.timeout(60):
                await here.push({"push_timeout_s": 5.0, "connect_timeout_s": 5.0}, repeat=1)
    assert not [pid for pid in started if psutil.pid_exists(pid)]


def test_sides_in_words() -> None:
    setup = setup_of("fsdp:4", "tp:2", targets=3, tensors=2, nbytes=2**20)
    assert (setup.source, setup.source_ranks, setup.targets, setup.target_ranks) == ("fsdp", 4, 3, 2)
    assert str(setup) == "fsdp:4 to 3 x tp:2"
    assert str(setup_of("module", "module", tensors=1, nbytes=1)) == "module:1 to module"


@pytest.mark.parametrize(
    ("source", "target", "targets", "said"),
    [
        ("ddp", "module", 1, "--source ddp: write KIND or KIND:RANKS"),
        ("tp:", "module", 1, "--source tp:"),
        ("tp:0", "module", 1, "--source tp:0"),
        ("tp:two", "module", 1, "--source tp:two"),
        ("module", "fsdp:2", 1, "--target fsdp:2"),
        ("module", "module:2", 1, "tensor-parallel (tp:2)"),
        ("module", "module", 0, "targets is 0"),
        ("fsdp:9999", "module", 1, "fsdp:9999 to module: 10000 processes"),
        ("module", "tp:9999", 1, "10000 processes"),
        ("module", "module", 9999, "10000 processes"),
    ],
)
def test_sides_that_are_none(source: str, target: str, targets: int, said: str) -> None:
    with pytest.raises(BenchError) as error:
        setup_of(source, target, targets=targets, tensors=1, nbytes=1)
    assert said in str(error.value)
