"""What of the vLLM adapter needs no vLLM: versions, the hand-over to the main thread, the meeting, addresses and secrets.

The endpoints of releases that cannot be run here are looked at from the calls that a recording server gets.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from aiohttp import web

from syncline.adapters.engines import VLLMTarget
from syncline.adapters.engines.checkpoint_manifest import CheckpointTensors
from syncline.adapters.engines.vllm.front import Front
from syncline.adapters.engines.vllm.info import InitInfo
from syncline.adapters.engines.vllm.loader import VLLMLoader, side_by_side
from syncline.adapters.engines.vllm.main_thread import MainThread
from syncline.adapters.engines.vllm.rendezvous import Rendezvous
from syncline.adapters.engines.vllm.serving import LeaderServing
from syncline.adapters.engines.vllm.versions import interfaces
from syncline.engine import TransferConfig
from syncline.engine.errors import ConfigError, LoaderError, ProtocolError, PushAborted, PushTimeout, TargetUnreachable
from syncline.engine.loader import Landed
from syncline.scheduler.layout import Box, Tensor

# release: body of start, the backend opens the bracket itself, finish takes the version
RELEASES = {
    "0.21.0": ({"is_checkpoint_format": True}, False, False),
    "0.22.1": ({"is_checkpoint_format": False}, True, False),
    "0.24.0": ({"is_checkpoint_format": False}, True, False),
    "0.25.0": (None, True, False),
    "0.26.0": (None, True, False),
    "0.27.0": (None, True, True),
    "0.30.2": (None, True, True),
    "0.31.0": (None, True, True),
    "0.32.0": (None, True, True),
    "0.33.1.dev4+g12ab": (None, True, True),
}


@pytest.mark.parametrize("release", RELEASES)
def test_interfaces_by_release(release) -> None:
    found = interfaces(release)
    assert (found.start_body, found.engine_brackets, found.finish_takes_version) == RELEASES[release]
    assert found.version == release


@pytest.mark.parametrize(
    ("release", "says"),
    [("0.20.4", "0.21 or newer"), ("0.17", "0.21 or newer"), ("0.34.0", "newer"), ("1.0", "newer"), ("?", "none")],
)
def test_other_releases_are_refused(release, says) -> None:
    with pytest.raises(ConfigError, match=says):
        interfaces(release)


class Recorder:
    """Answers like vLLM's endpoints and keeps what it was asked."""

    def __init__(self, release: str, *, world_size: int = 1) -> None:
        self.asked: list[tuple[str, str, object]] = []
        self.main = MainThread()
        self.fail: dict[str, int] = {}
        self.why = "no"
        self.paused: bool | None = None
        self._answers = {"version": {"version": release}, "get_world_size": {"world_size": world_size}}
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        path = request.match_info["path"]
        body = await request.json() if request.can_read_body else None
        if path != "is_paused":  # a question, which changes nothing
            self.asked.append((path, request.query_string, body))
        if path in self.fail:
            return web.json_response({"error": self.why}, status=self.fail[path])
        if path in {"start_weight_update", "finish_weight_update"}:
            self.main.updating = path.startswith("start")  # as the backend does it in the worker
        if path == "update_weights":
            await asyncio.to_thread(self.main.serve)
        if path == "is_paused" and self.paused is not None:
            return web.json_response({"is_paused": self.paused})
        return web.json_response(self._answers.get(path, {"success": True}))

    @property
    def paths(self) -> list[str]:
        return [f"{path}?{query}" if query else path for path, query, _ in self.asked]

    def body(self, path: str) -> object:
        return next(body for name, _, body in reversed(self.asked) if name == path)


class NoReload:
    """Takes note of what it is asked to load."""

    def __init__(self) -> None:
        self.loaded: list[list[tuple[str, torch.Tensor]]] = []

    def open(self) -> None:
        self.loaded.append([])

    def load(self, tensors) -> None:
        self.loaded[-1] += [(name, tensor.clone()) for name, tensor in tensors]

    def close(self) -> None:
        pass


def wanted() -> CheckpointTensors:
    return CheckpointTensors(
        tensors=(Tensor(name="a", shape=(4, 2), dtype="float32"), Tensor(name="b", shape=(3,), dtype="float32")), aliases={}
    )


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("caching", [False, True])
async def test_a_push_as_the_endpoints_see_it(release, caching) -> None:
    recorder = Recorder(release)
    body, _, takes_version = RELEASES[release]
    async with recorder as url:
        front = Front(url)
        await front.discover()
        recorder.asked.clear()
        serving = LeaderServing(front, recorder.main, prefix_caching=caching)
        reload = NoReload()
        loader = VLLMLoader(wanted(), reload, recorder.main, serving.open_session)
        await serving.pause("keep")
        whole = torch.arange(8.0).view(4, 2)
        await asyncio.to_thread(loader.begin, 5)
        await asyncio.to_thread(loader.install, [Landed(0, Box(start=(2, 0), shape=(2, 2)), whole[2:])])
        await asyncio.to_thread(loader.install, [Landed(1, Box(start=(0,), shape=(3,)), torch.ones(3))])
        await asyncio.to_thread(loader.install, [Landed(0, Box(start=(0, 0), shape=(2, 2)), whole[:2])])
        await asyncio.to_thread(loader.finish, 5)
        await serving.resume(5)
        await serving.close()
    assert [name for name, _ in reload.loaded[0]] == ["b", "a"]
    assert torch.equal(reload.loaded[0][1][1], whole)
    assert recorder.paths == [
        f"pause?mode=keep&clear_cache={'true' if caching else 'false'}",
        *(["reset_prefix_cache?reset_running_requests=true"] if caching else []),
        *(["update_weight_version"] if takes_version else []),  # the weights are none from here on
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "resume",
    ]
    assert recorder.body("start_weight_update") == body
    assert recorder.body("finish_weight_update") == ({"weight_version": "5"} if takes_version else {})


@pytest.mark.parametrize(("in_flight", "caching"), [("keep", False), ("keep", True), ("drain", False)])
async def test_a_pause_drops_what_old_encoders_computed(in_flight, caching) -> None:
    recorder = Recorder("0.32.0")
    async with recorder as url:
        front = Front(url)
        await front.discover()
        serving = LeaderServing(front, recorder.main, prefix_caching=caching, media=True)
        recorder.asked.clear()
        await serving.pause(in_flight)
        assert recorder.paths[0].endswith("&clear_cache=true")
        recorder.paused = False  # somebody has resumed it: encoders computed with old weights again
        await asyncio.to_thread(serving.open_session, 1)
        assert [path for path in recorder.paths if path.startswith("pause")][1:] == ["pause?mode=keep&clear_cache=true"]
        await serving.fence("over")
        await serving.close()


async def test_requests_that_cannot_be_kept_are_refused_before_anything_is_paused() -> None:
    recorder = Recorder("0.32.0")
    async with recorder as url:
        front = Front(url)
        await front.discover()
        serving = LeaderServing(front, recorder.main, prefix_caching=True, media=True, no_keep="its cache is shared")
        recorder.asked.clear()
        with pytest.raises(LoaderError, match=r"in_flight 'keep'.*its cache is shared.*'drain' or 'abort'"):
            await serving.pause("keep")
        assert recorder.paths == []
        await serving.pause("drain")
        recorder.paused = False
        await asyncio.to_thread(serving.open_session, 1)
        assert [path for path in recorder.paths if path.startswith("pause")] == [
            "pause?mode=wait&clear_cache=true", "pause?mode=abort&clear_cache=true",
        ]  # fmt: skip
        await serving.fence("over")
        await serving.close()


def test_a_whole_push_at_once() -> None:
    """Parts that lie side by side are one tensor where they lie; others are put together."""
    landing = torch.arange(16.0)
    near = [
        Landed(0, Box(start=(2, 0), shape=(2, 2)), landing[4:8].view(2, 2)),
        Landed(1, Box(start=(0,), shape=(3,)), torch.ones(3)),
        Landed(0, Box(start=(0, 0), shape=(2, 2)), landing[:4].view(2, 2)),
    ]
    apart = [near[0]._replace(tensor=landing[8:12].view(2, 2)), *near[1:]]
    for parts, expected, joined in ((near, landing[:8], True), (apart, torch.cat([landing[:4], landing[8:12]]), False)):
        reload, main = NoReload(), MainThread()
        reload.open()
        loader = VLLMLoader(wanted(), reload, main, None)
        main.expect()
        thread = threading.Thread(target=main.serve)
        thread.start()
        loader.install_all(parts)
        main.release(committed=True)
        thread.join()
        found = dict(reload.loaded[0])
        assert torch.equal(found["a"], expected.view(4, 2)) and torch.equal(found["b"], torch.ones(3))
        assert (side_by_side([part for part in parts if part.piece == 0], (4, 2)) is not None) == joined
    assert side_by_side(near[:1], (4, 2)) is None  # not all of it


async def test_a_push_that_is_given_up_leaves_the_server_paused_and_the_next_one_possible() -> None:
    recorder = Recorder("0.32.0")
    async with recorder as url:
        front = Front(url)
        await front.discover()
        serving = LeaderServing(front, recorder.main, prefix_caching=False)
        loader = VLLMLoader(wanted(), NoReload(), recorder.main, serving.open_session)
        for _ in range(2):
            recorder.asked.clear()
            await serving.pause("drain")
            await asyncio.to_thread(loader.begin, 5)
            await serving.fence("a bucket was torn")
            assert recorder.paths == [
                "pause?mode=wait&clear_cache=true", "update_weight_version", "start_weight_update", "update_weights",
                "finish_weight_update", "update_weight_version", "pause?mode=abort&clear_cache=true",
            ]  # fmt: skip
            assert recorder.body("finish_weight_update") == {}  # no version is named
        with pytest.raises(PushAborted):
            await asyncio.to_thread(loader.install, [Landed(1, Box(start=(0,), shape=(3,)), torch.ones(3))])
        await serving.close()


async def test_an_update_that_was_left_open_is_ended_first() -> None:
    """A start while one is open makes every worker of vLLM raise, and with several workers that mixes up their answers."""
    recorder = Recorder("0.32.0")
    async with recorder as url:
        front = Front(url)
        await front.discover()
        serving = LeaderServing(front, recorder.main, prefix_caching=False)
        recorder.main.updating = True
        await serving.pause("keep")
        await asyncio.to_thread(serving.open_session, 1)
        await serving.fence("over")
        await serving.close()
    assert recorder.paths[2:7] == [
        "finish_weight_update", "update_weight_version", "start_weight_update", "update_weights", "finish_weight_update"
    ]  # fmt: skip


async def test_a_server_that_does_not_resume_at_once_is_asked_again() -> None:
    recorder = Recorder("0.32.0")
    async with recorder as url:
        front = Front(url)
        await front.discover()
        serving = LeaderServing(front, recorder.main, prefix_caching=False)
        await serving.pause("keep")
        recorder.fail["resume"] = 500
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await serving.resume(3)  # the receiver does not wait for ever
        del recorder.fail["resume"]
        before = len(recorder.asked)
        async with asyncio.timeout(10):
            while recorder.paths[before:] != ["resume"]:
                await asyncio.sleep(0.05)
        await serving.close()


async def test_a_server_without_the_endpoints_says_what_is_missing() -> None:
    recorder = Recorder("0.32.0")
    recorder.fail["get_world_size"] = 404
    async with recorder as url:
        target = VLLMTarget(url)
        with pytest.raises(Exception, match="VLLM_SERVER_DEV_MODE=1"):
            await target.locate(TransferConfig(connect_timeout_s=5))
        await target.close()
    with pytest.raises(TargetUnreachable):
        await target.locate(TransferConfig(connect_timeout_s=5))
    await target.close()


async def test_a_server_without_the_backend_says_which_flag_it_needs() -> None:
    recorder = Recorder("0.32.0")
    recorder.fail["init_weight_transfer_engine"] = 500
    recorder.why = "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."  # vLLM's
    async with recorder as url:
        target = VLLMTarget(url)
        with pytest.raises(ProtocolError, match="start it with --weight-transfer-config"):
            await target.locate(TransferConfig(connect_timeout_s=5))
        await target.close()


async def test_the_server_starts_its_receivers_and_they_say_where_they_are() -> None:
    recorder = Recorder("0.32.0", world_size=2)
    async with recorder as url:
        target = VLLMTarget(url)
        located = asyncio.create_task(target.locate(TransferConfig(connect_timeout_s=10, secret="the config's")))
        async with asyncio.timeout(10):
            while "init_weight_transfer_engine" not in recorder.paths:
                await asyncio.sleep(0.01)
        info = InitInfo(**recorder.body("init_weight_transfer_engine")["init_info"])
        assert (info.url, info.version, info.control_port, info.secret) == (url, "0.32.0", 0, "")
        meeting = Rendezvous(info.rendezvous)
        assert Path(info.rendezvous).stat().st_mode & 0o777 == 0o700  # noqa: ASYNC240 - a test may block
        meeting.say(0, "unix:/tmp/leader", "")
        await asyncio.sleep(0.05)
        assert not located.done()  # until every rank is there
        meeting.say(1, "unix:/tmp/other", "")
        assert await located == ("unix:/tmp/leader", None)  # only this user reaches it: it shares no secret with anybody
        assert not Path(info.rendezvous).exists()  # noqa: ASYNC240

        located = asyncio.create_task(target.locate(TransferConfig(connect_timeout_s=10)))
        recorder.asked.clear()
        async with asyncio.timeout(10):
            while "init_weight_transfer_engine" not in recorder.paths:
                await asyncio.sleep(0.01)
        Rendezvous(recorder.body("init_weight_transfer_engine")["init_info"]["rendezvous"]).say(1, "", "no such model")
        with pytest.raises(Exception, match="rank 1: no such model"):
            await located
        with pytest.raises(TargetUnreachable, match="did not start within"):
            await target.locate(TransferConfig(connect_timeout_s=0.3))
        await target.close()


@pytest.mark.parametrize(
    ("target", "config", "says"),
    [
        (VLLMTarget("unix:/x"), {}, "no url"),
        (VLLMTarget("127.0.0.1:8000"), {}, "no url"),
        (VLLMTarget("http://127.0.0.1:8000"), {"landing": "mapped"}, "pointed at other memory"),
        (VLLMTarget("http://10.0.0.7:8000", control_port=9), {}, "no secret"),
        (VLLMTarget("http://10.0.0.7:8000", control_port=9, secret="s"), {}, "in the clear"),
        (VLLMTarget("http://127.0.0.1:8000/v1"), {}, "has a path; name the server alone: http://127.0.0.1:8000"),
        (VLLMTarget("http://127.0.0.1:8000", secret="s"), {}, "are for control_port, which is not set"),
        (VLLMTarget(object()), {}, "neither a url nor"),
    ],
)
def test_targets_that_cannot_be(target, config, says) -> None:
    (problem,) = target.problems(TransferConfig(**config))
    assert says in problem


@pytest.mark.parametrize(
    "target",
    [
        VLLMTarget("http://127.0.0.1:8000/"),
        VLLMTarget("http://localhost:8000", control_port=9),
        VLLMTarget("https://10.0.0.7", control_port=9, secret="s"),
        VLLMTarget("http://10.0.0.7:8000", control_port=9, secret="s", secret_file="/etc/secret"),
    ],
)
def test_targets_that_can_be(target) -> None:
    assert not target.problems(TransferConfig())


def test_secrets_of_receivers_that_run(tmp_path) -> None:
    info = InitInfo(url="http://h:1", version="0.32.0", control_port=9, secret="s")
    file = tmp_path / "secret"
    file.write_text("s\n")
    same = InitInfo(**{**asdict(info), "secret": "", "secret_file": str(file), "rendezvous": "/elsewhere", "patience_s": 3.0})
    assert info.same_place(same)
    assert not info.same_place(InitInfo(**{**asdict(info), "secret": "t"}))
    assert not info.same_place(InitInfo(**{**asdict(info), "url": "http://h:2"}))
    file.unlink()
    with pytest.raises(ConfigError, match="cannot read it"):
        same.shared_secret()


def test_a_meeting_place_is_the_users_own(tmp_path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="0700"):
        Rendezvous(open_to_all)
    with pytest.raises(ConfigError, match="control_port"):
        Rendezvous(tmp_path / "not there")


def test_calls_run_on_the_main_thread_until_the_push_is_over() -> None:
    main, seen = MainThread(), []
    main.expect()

    def loads() -> None:
        seen.append(main.run(threading.current_thread, patience_s=5))
        with pytest.raises(ValueError, match="bad weights"):
            main.run(lambda: (_ for _ in ()).throw(ValueError("bad weights")), patience_s=5)
        main.release(committed=True)

    worker = threading.Thread(target=loads)
    worker.start()
    assert main.serve() is True
    worker.join()
    assert seen == [threading.current_thread()]
    assert main.serve() is False  # nobody expects it any more
    with pytest.raises(PushAborted):
        main.run(list, patience_s=5)


def test_a_main_thread_that_does_not_come() -> None:
    main = MainThread()
    main.expect()
    with pytest.raises(PushTimeout):
        main.run(list, patience_s=0.01)


def test_a_push_that_is_given_up_while_the_main_thread_waits() -> None:
    main = MainThread()
    main.expect()
    served: list[bool] = []
    thread = threading.Thread(target=lambda: served.append(main.serve()))
    thread.start()
    main.run(list, patience_s=5)
    main.release(committed=False)
    thread.join(5)
    assert served == [False]
    assert main.until_outside(1)
