"""Which calls are made to which version: asked of a server that only records them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncline.adapters.engines.sglang import SGLangFront, SGLangOptions, SGLangReceiver, SGLangTarget, front as front_module
from syncline.adapters.engines.sglang.front import CacheNotFlushed, ServerInfo
from syncline.adapters.engines.sglang.versions import dialect_of
from syncline.adapters.engines.sglang.ways import DistributedWay
from syncline.engine import TransferConfig
from syncline.engine.errors import ConfigError, LoaderError, ProtocolError, TargetLost, TransportError


@pytest.fixture
async def front(recorder):
    front = SGLangFront(recorder.url, timeout_s=10)
    yield front
    await front.close()


@pytest.mark.parametrize(
    ("version", "differs"),
    [
        ("0.5.23", {"sessions", "flush_waits", "keeps_memory"}),
        ("0.5.21", {"sessions", "flush_waits", "keeps_memory"}),
        ("0.5.20", {"flush_waits", "keeps_memory"}),
        ("0.5.10.post1", {"flush_waits"}),
        ("0.5.9", set()),
    ],
)
async def test_calls_by_version(recorder, front, version: str, differs: set[str]) -> None:
    sessions = "sessions" in differs
    dialect = dialect_of(version)
    await front.begin(dialect, "target")
    await front.update_from_distributed(
        dialect, names=["a"], dtypes=["float32"], shapes=[(2, 3)], group="g", version="7", selector="target", timeout_s=10
    )
    await front.end(dialect)
    await front.flush_cache(dialect, 2.0)
    await front.resume(dialect)
    calls = dict(recorder.calls)
    update = {
        "names": ["a"],
        "dtypes": ["float32"],
        "shapes": [[2, 3]],
        "group_name": "g",
        "load_format": "flattened_bucket",
        "flush_cache": False,
        "weight_version": "7",
    }
    session = ["begin_weight_update", "update_weights_from_distributed", "end_weight_update"]
    assert list(calls)[:-2] == (session if sessions else session[1:2])
    assert calls["update_weights_from_distributed"] == (update | {"selector": "target"} if sessions else update)
    assert ("flush_cache?timeout=2" in calls) == ("flush_waits" in differs)
    assert calls["continue_generation"] == ({"torch_empty_cache": False} if "keeps_memory" in differs else {})


@pytest.mark.parametrize("version", ["0.4.9", "0.5.8.post1", "0.6.0", "1.0.0", "nightly", ""])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"is not supported|is no version"):
        dialect_of(version)


async def test_a_version_without_drain_says_so(front) -> None:
    with pytest.raises(LoaderError, match="no way to drain"):
        await front.drain(dialect_of("0.5.20"))


async def test_a_session_that_was_left_open_is_ended_first(recorder, front) -> None:
    recorder.answers["begin_weight_update"] = (400, {"success": False, "message": "a weight-update session is already open"})
    with pytest.raises(LoaderError, match="already open"):  # this recorder says so for ever
        await front.begin(dialect_of("0.5.23"), "target")
    assert [path for path, _ in recorder.calls] == ["begin_weight_update", "end_weight_update", "begin_weight_update"]


async def test_what_answers_mean(recorder, front) -> None:
    dialect = dialect_of("0.5.23")
    recorder.answers["update_weights_from_tensor"] = (
        400,
        {"success": False, "message": "Weights were updated, but the cache was not flushed because requests are running."},
    )
    with pytest.raises(CacheNotFlushed):
        await front.update_from_tensor(dialect, payloads=["x"], version=None, selector="all", timeout_s=10)
    recorder.answers["update_weights_from_tensor"] = (400, {"success": False, "message": "Failed to update parameter online"})
    with pytest.raises(LoaderError, match="Failed to update parameter online") as raised:
        await front.update_from_tensor(dialect, payloads=["x"], version=None, selector="all", timeout_s=10)
    assert not isinstance(raised.value, CacheNotFlushed)
    recorder.answers["pause_generation"] = (404, {"detail": "Not Found"})
    with pytest.raises(ProtocolError, match="is this an SGLang server"):
        await front.pause("abort")


async def test_how_a_server_must_be_run(recorder) -> None:
    said = {"version": "0.5.23", "dp_size": 2, "pp_size": 2, "weight_cache_mode": "client", "load_format": "auto"}
    recorder.answers["server_info"] = (200, said)
    receiver = SGLangReceiver(recorder.url)
    with pytest.raises(ConfigError) as raised:
        await receiver.start()
    assert [word for word in ("dp_size", "pp_size", "weight-cache-mode") if word not in str(raised.value)] == []
    # Where keys, values or embeddings of old weights would outlive a push.
    recorder.answers["server_info"] = (200, {"version": "0.5.23", "hicache_storage_backend": "mooncake"})
    recorder.answers["model_info"] = (200, {"has_image_understanding": True})
    with pytest.raises(ConfigError, match=r"(?s)in mooncake, .*without --hicache-storage-backend.*takes images or audio"):
        await SGLangReceiver(recorder.url).start()
    recorder.answers["server_info"] = (200, {"version": "0.5.23", "enable_lmcache": True})
    with pytest.raises(ConfigError, match="in LMCache, "):
        await SGLangReceiver(recorder.url).start()
    recorder.answers["server_info"] = (200, {"version": "0.4.1"})
    receiver = SGLangReceiver(recorder.url)
    with pytest.raises(ConfigError, match=r"0\.4\.1 is not supported"):
        await receiver.start()


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("ftp://here", SGLangOptions(), "no url"),
        ("http://10.0.0.7:30000", SGLangOptions(transport="tensor"), "to loopback only"),
        ("http://127.0.0.1:1", SGLangOptions(transport="pigeon"), "transport is 'pigeon'"),
        ("http://127.0.0.1:1", SGLangOptions(bucket_bytes="many"), "bucket_bytes"),
        ("http://127.0.0.1:1", SGLangOptions(timeout_s=0), "timeout_s is 0"),
    ],
)
def test_bad_options_are_told(url: str, options: SGLangOptions, said: str) -> None:
    problems = SGLangTarget(url, options).problems(TransferConfig())
    assert any(said in problem for problem in problems)


def test_mapped_is_refused() -> None:
    problems = SGLangTarget("http://127.0.0.1:1").problems(TransferConfig(landing="mapped"))
    assert any("use landing 'staged' or 'streamed'" in problem for problem in problems)


@pytest.mark.parametrize(
    ("radix_cache", "overlap", "kept"), [(False, False, True), (True, False, False), (False, True, False), (True, True, False)]
)
def test_where_requests_keep_their_keys_and_values(radix_cache: bool, overlap: bool, kept: bool) -> None:
    info = ServerInfo(
        dialect=dialect_of("0.5.23"),
        model_path="",
        load_format="auto",
        dtype="float32",
        device="cpu",
        tp_size=1,
        dp_size=1,
        pp_size=1,
        radix_cache=radix_cache,
        overlap=overlap,
        memory_saver=False,
        weight_cache=False,
        life="",
    )
    assert info.keeps_in_place is kept


class BrokenGroup:
    """A group of which every broadcast breaks."""

    place = SimpleNamespace(name="g")

    async def broadcast(self, data: Any, *, patience_s: float) -> None:
        raise TransportError("Connection closed by peer")


@pytest.mark.parametrize("answers", ["server", "front only", "nothing"])
async def test_a_broadcast_that_breaks_with_a_server_that_is_gone(recorder, answers: str, monkeypatch) -> None:
    """Its scheduler may be dead while the process that takes in calls still answers some of them."""
    monkeypatch.setattr(front_module, "_AT_ONCE_S", 0.2)
    recorder.answers["server_info"] = (200, {}) if answers == "server" else (500, {})
    url = "http://127.0.0.1:1" if answers == "nothing" else recorder.url
    front = SGLangFront(url, timeout_s=10)
    way = DistributedWay(front, backend="gloo", host="127.0.0.1", timeout_s=10)
    way._group, way._info = BrokenGroup(), SimpleNamespace(dialect=dialect_of("0.5.23"))
    bucket = SimpleNamespace(slots=[])
    with pytest.raises(TransportError if answers == "server" else TargetLost) as caught:
        await way.send(bucket, torch.empty(0), "7")
    if answers == "server":
        assert "Connection closed by peer" in str(caught.value)
    else:
        assert f"the SGLang server at {url} is gone or stuck" in str(caught.value)
    await front.close()
