"""What a stand-in does when its server refuses, is slow or goes away, asked of a server that only records its calls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from syncline.adapters.engines import reconciler
from syncline.adapters.engines.sglang import SGLangOptions, SGLangReceiver, SGLangTarget, ways
from syncline.adapters.engines.sglang.hold import Hold
from syncline.engine import TransferConfig
from syncline.engine.errors import BusyError, ClosedError, ConfigError, LoaderError, SynclineError, TargetUnreachable
from syncline.scheduler.layout import Box, Buffer, BufferTable, Layout, Piece, PieceTable, Tensor, TensorTable

LAYOUT = Layout(
    tensors=TensorTable.of([Tensor(name="w", shape=(2,), dtype="float32")]),
    pieces=PieceTable.of([Piece(tensor=0, box=Box(start=(0,), shape=(2,)), buffer=0, offset=0, strides=(1,), dtype="float32")]),
    buffers=BufferTable.of([Buffer(name="w", nbytes=8)]),
    whole_tensors=True,
)


def stand_in(server: Any, **options: Any) -> SGLangReceiver:
    return SGLangReceiver(server.url, options=SGLangOptions(layout=LAYOUT, **{"watch_s": 60, "timeout_s": 10, **options}))


async def until(holds: Any, what: str) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)
    assert holds(), what


async def is_free(receiver: SGLangReceiver) -> bool:
    """Whether another source may change the server."""
    other = Hold(receiver.front, life=(await receiver.front.info()).life, patience_s=60)
    try:
        await other.take()
    except BusyError:
        return False
    other.release()
    return True


class Gate:
    """Where a call waits: ``came`` is set when it has come there, and it goes on once ``open`` is."""

    def __init__(self) -> None:
        self.came, self.open = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.came.set()
        await self.open.wait()


def no_threads() -> bool:
    """Not of ours: one that is on its way out may take a moment."""
    return not any(thread.name.startswith("syncline-") for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "_AGAIN_S", 0.01)


def resumed(server: Any) -> bool:
    """The last word of those that stop and start it."""
    words = [path for path, _ in server.calls if path in ("pause_generation", "continue_generation")]
    return words[-1:] == ["continue_generation"] and not any(server.failing.values())


@pytest.mark.parametrize("call", ["continue_generation", "model_info", "update_weight_version"])
async def test_it_is_asked_to_resume_until_it_has(scripted, call: str) -> None:
    """Nobody else would: the receiver has long said that it holds the version. The receiver waits for the first try only."""
    async with stand_in(scripted) as receiver:
        assert resumed(scripted)
        state = receiver._serving
        await state.pause("keep")
        scripted.paths()
        scripted.failing[call] = 3
        await receiver._receiver._rank._switch.resume(3)
        assert scripted.failing[call] == 2
        await until(lambda: resumed(scripted) and state._state.paused is None, "it serves again")
        assert scripted.version == "3"
        assert not state.hold.held


async def test_it_is_resumed_before_all_is_closed(scripted) -> None:
    async with stand_in(scripted) as receiver:
        await receiver._serving.pause("keep")
        scripted.paths()
        scripted.failing["continue_generation"] = 2
        await receiver._receiver._rank._switch.resume(3)
        assert not resumed(scripted)
    assert resumed(scripted) and scripted.version == "3"


async def test_what_is_wanted_next_ends_the_asking(scripted) -> None:
    async with stand_in(scripted) as receiver:
        state = receiver._serving
        await state.pause("keep")
        scripted.failing["continue_generation"] = 10**9
        await state.resume(3)
        await until(lambda: scripted.failing["continue_generation"] < 10**9 - 2, "it is asked again and again")
        await state.fence("a test")
        scripted.failing.clear()
        assert scripted.version == "syncline-unfinished" and state._state.paused is not None
        scripted.paths()
        await asyncio.sleep(0.05)
        assert "continue_generation" not in scripted.paths()


async def test_another_ones_weights_are_not_resumed(scripted) -> None:
    async with stand_in(scripted) as receiver:
        state = receiver._serving
        await state.pause("keep")
        scripted.answers["model_info"] = (200, {"weight_version": "another"})
        scripted.paths()
        await state.resume(3)  # ends
        assert "continue_generation" not in scripted.paths()
        assert not state.hold.held


@pytest.mark.parametrize("how", ["refused", "cancelled"])
async def test_a_server_that_cannot_be_taken_over_goes_on(scripted, how: str) -> None:
    """It was paused to drop what may be cached, and that fails, or the source goes away meanwhile."""
    receiver = stand_in(scripted)
    if how == "refused":
        scripted.answers["flush_cache"] = (400, {"message": "no"})
        with pytest.raises(LoaderError):
            await receiver.start()
    else:
        scripted.stuck["flush_cache"] = asyncio.Event()
        starting = asyncio.create_task(receiver.start())
        await scripted.stuck["flush_cache"].wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert resumed(scripted) and scripted.version == "3"
    await receiver.close()


async def test_memory_is_released_and_resumed_by_tag(scripted) -> None:
    async with stand_in(scripted) as receiver:
        assert (receiver.state, receiver.version) == ("COMMITTED", 3)
        scripted.paths()
        await receiver.release_memory(["kv_cache"])
        assert scripted.calls[-1] == ("release_memory_occupation", {"tags": ["kv_cache"]})
        assert [path for path in scripted.paths() if "pause" in path or "continue" in path] == ["pause_generation"]
        with pytest.raises(ConfigError, match="released already"):
            await receiver.release_memory(["kv_cache"])
        with pytest.raises(ConfigError, match="'weights' is not released"):
            await receiver.resume_memory(["weights"])
        await receiver.resume_memory()
        assert scripted.paths() == ["resume_memory_occupation", "continue_generation"]
        assert receiver.state == "COMMITTED"

        await receiver.release_memory(["weights", "kv_cache"])
        assert (receiver.state, receiver.version) == ("FENCED", None)  # nothing is left to serve
        assert scripted.version == "syncline-unfinished"
        scripted.paths()
        await receiver.resume_memory(["weights"])
        await receiver.resume_memory(["kv_cache"])
        assert scripted.paths() == ["resume_memory_occupation", "resume_memory_occupation"]  # it waits for a push


async def test_resuming_nothing_asks_for_nothing(scripted) -> None:
    """SGLang takes no tags for all of them, and its scheduler dies of one that is not released."""
    async with stand_in(scripted) as receiver:
        scripted.paths()
        await receiver.resume_memory()
        await receiver.resume_memory([])
        assert scripted.paths() == []
        await receiver.release_memory(["kv_cache", "kv_cache"])
        assert scripted.calls[-1] == ("release_memory_occupation", {"tags": ["kv_cache"]})
        both = [receiver.resume_memory(["kv_cache"]) for _ in range(2)]
        found = await asyncio.gather(*both, return_exceptions=True)
        assert [type(each) for each in found] == [type(None), ConfigError]
        assert scripted.paths().count("resume_memory_occupation") == 1


@pytest.mark.parametrize("call", ["pause_generation", "flush_cache", "release_memory_occupation"])
async def test_memory_that_is_not_released_is_served_from(scripted, call: str) -> None:
    async with stand_in(scripted) as receiver:
        scripted.paths()
        scripted.failing[call] = 2 if call == "flush_cache" else 1
        with pytest.raises(LoaderError):
            await receiver.release_memory(["kv_cache"])
        assert resumed(scripted) and receiver.state == "COMMITTED"
        assert not receiver._hold.ours
        await receiver.release_memory(["kv_cache"])
        await receiver.resume_memory()
        assert resumed(scripted)


@pytest.mark.parametrize("how", ["failing", "broken"])
async def test_weights_that_may_be_gone_are_none(scripted, how: str) -> None:
    """They are marked before they go, so that whoever comes next does not serve what was there."""
    async with stand_in(scripted) as receiver:
        if how == "failing":
            scripted.failing["release_memory_occupation"] = 1
        else:
            scripted.broken.add("release_memory_occupation")
        with pytest.raises(LoaderError if how == "failing" else TargetUnreachable):
            await receiver.release_memory(["weights"])
        assert receiver.state == "FENCED" and scripted.version == "syncline-unfinished"
        assert scripted.saw["release_memory_occupation"] == "syncline-unfinished"
        assert receiver._released == (set() if how == "failing" else {"weights"})
        scripted.broken.clear()
        await receiver.attach()
        await receiver.resume_memory()
        assert not resumed(scripted) and receiver.state == "FENCED"


def flushes_slowly(receiver: SGLangReceiver, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """As one does whose requests end one after the other."""
    gate, flush = Gate(), receiver.front.flush_cache

    async def slowly(*how: Any) -> bool:
        await gate()
        return await flush(*how)

    monkeypatch.setattr(receiver.front, "flush_cache", slowly)
    return gate


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
@pytest.mark.parametrize("pauses", [False, True])
async def test_a_push_that_begins_before_memory_goes_keeps_it(scripted, monkeypatch, tag: str, pauses: bool) -> None:
    async with stand_in(scripted) as receiver:
        flushes = flushes_slowly(receiver, monkeypatch)
        before = receiver._receiver
        releasing = asyncio.create_task(receiver.release_memory([tag]))
        await flushes.came.wait()
        with monkeypatch.context() as pushing:
            pushing.setattr(receiver, "_busy", lambda: True)
            if pauses:
                await receiver._serving.pause("keep")
            flushes.open.set()
            with pytest.raises(BusyError, match="a push into"):
                await releasing
            assert resumed(scripted) != pauses
        if pauses:
            await receiver._serving.hold.confirm()
            await receiver._serving.resume(3)
        assert "release_memory_occupation" not in scripted.paths()
        assert receiver._receiver is before and scripted.version == "3"
        assert receiver._state.paused is None and await is_free(receiver)


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
async def test_a_push_that_came_and_went_before_memory_goes_resumes_nothing(scripted, monkeypatch, tag: str) -> None:
    """Requests would run where memory is taken away."""
    async with stand_in(scripted) as receiver:
        scripted.paths()
        flushes = flushes_slowly(receiver, monkeypatch)
        releasing = asyncio.create_task(receiver.release_memory([tag]))
        await flushes.came.wait()
        await receiver._serving.pause("keep")
        await receiver._serving.resume(3)
        flushes.open.set()
        await releasing
        assert "continue_generation" not in scripted.paths()
        await receiver.resume_memory()
        assert resumed(scripted) == (tag == "kv_cache") and receiver.state == ("FENCED" if tag == "weights" else "COMMITTED")
        assert await is_free(receiver)


async def test_a_push_that_is_given_up_where_weights_go_resumes_nothing(scripted, monkeypatch) -> None:
    """It has paused the server while that was told that its weights are none, and ends with the receiver that it came to."""
    async with stand_in(scripted) as receiver:
        scripted.paths()
        close = receiver._receiver.close

        async def gives_up() -> None:
            await receiver._serving.resume(3)
            await close()

        monkeypatch.setattr(receiver._receiver, "close", gives_up)
        await receiver.release_memory(["weights"])
        assert "continue_generation" not in scripted.paths()
        assert receiver.state == "FENCED" and scripted.version == "syncline-unfinished"


async def test_weights_that_are_none_are_not_resumed(scripted) -> None:
    scripted.answers["model_info"] = (200, {"weight_version": "syncline-unfinished"})
    async with stand_in(scripted) as receiver:
        await receiver._serving.hold.take()
        await receiver._serving.resume(3)
        assert "continue_generation" not in scripted.paths()
        assert await is_free(receiver)


async def test_a_server_that_was_started_anew_has_released_nothing(scripted) -> None:
    async with stand_in(scripted) as receiver:
        await receiver.release_memory(["kv_cache"])
        info = scripted.answers["server_info"][1]
        scripted.answers["server_info"] = (200, {**info, "startup_time": {"process": 7}})
        scripted.answers["model_info"] = (200, {"weight_version": "4"})
        await receiver.attach()
        assert (receiver.state, receiver.version) == ("COMMITTED", 4)
        with pytest.raises(ConfigError, match="'kv_cache' is not released"):
            await receiver.resume_memory(["kv_cache"])


@pytest.mark.parametrize("by", ["a look", "the watch"])
async def test_what_cannot_be_closed_keeps_no_new_life_out(scripted, caplog, by: str) -> None:
    async def stays() -> None:
        raise OSError("its folder stays")

    async with stand_in(scripted, watch_s=0.01 if by == "the watch" else 60) as receiver:
        for life in range(1, 4):
            receiver._way.close = stays
            info = scripted.answers["server_info"][1]
            scripted.answers["server_info"] = (200, {**info, "startup_time": {"process": life}})
            scripted.answers["model_info"] = (200, {"weight_version": str(3 + life)})
            if by == "a look":
                await receiver.attach()
            await until(lambda life=life: receiver.version == 3 + life, "it stands in for the new one")
        assert caplog.text.count("its folder stays") == 3


async def test_who_closes_it_is_told_what_could_not_be_closed(scripted) -> None:
    receiver = stand_in(scripted)
    await receiver.start()

    async def stays() -> None:
        raise OSError("its folder stays")

    receiver._way.close = stays
    with pytest.raises(OSError, match="its folder stays"):
        await receiver.close()
    assert not receiver.attached and receiver.front._session is None
    await receiver.close()


async def test_the_watch_outlives_what_the_system_refuses(scripted, monkeypatch) -> None:
    receiver = stand_in(scripted, watch_s=0.01)
    refused = asyncio.Event()

    async def refuses() -> Any:
        refused.set()
        raise OSError("too many open files")

    async with receiver:
        with monkeypatch.context() as full:
            full.setattr(receiver.front, "info", refuses)
            scripted.answers["model_info"] = (200, {"weight_version": "4"})  # by another source
            await refused.wait()
        await until(lambda: receiver.version == 4, "it looks again")


async def test_it_is_started_once(scripted) -> None:
    receiver = stand_in(scripted)
    found = await asyncio.gather(receiver.start(), receiver.start(), return_exceptions=True)
    assert [type(each) for each in found] == [type(None), ClosedError] and "runs already" in str(found[1])
    assert receiver.attached
    await receiver.close()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "syncline-sglang-watch"]


class Kept:
    """A way with something to let go of."""

    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed = True


async def test_whoever_stops_it_between_two_lives_leaves_nothing(scripted, cancelled_at) -> None:
    """Cancelled wherever it waits while it takes another one's weights over, as its own watch is when it is closed."""
    number, came_to_it = 0, True
    while came_to_it:
        number += 1
        async with stand_in(scripted) as receiver:
            kept = receiver._way = Kept()
            scripted.answers["model_info"] = (200, {"weight_version": str(4 + number)})  # by another source
            came_to_it = await cancelled_at(receiver.attach(), number)
        assert kept.closed, f"cancelled where it waits for the {number}th time"
        await until(no_threads, "no thread is left")
    assert number > 20


@pytest.mark.parametrize("what", ["start", "attach", "release_memory"])
async def test_closed_by_another_task_wherever_it_waits(scripted, cancelled_at, what: str) -> None:
    """What is under way is called off and says so; nothing is left, and a server whose version is whole goes on."""
    number, came_to_it = 0, True
    while came_to_it:
        number += 1
        scripted.answers["model_info"] = (200, {"weight_version": "3"})
        receiver, closing = stand_in(scripted), []

        async def run(number: int = number, receiver: SGLangReceiver = receiver, closing: list = closing) -> bool:
            if what != "start":
                await receiver.start()
            if what == "attach":
                scripted.answers["model_info"] = (200, {"weight_version": str(4 + number)})  # by another source
            work = receiver.release_memory(["kv_cache"]) if what == "release_memory" else getattr(receiver, what)()
            with contextlib.suppress(ClosedError):
                return await cancelled_at(work, number, lambda: closing.append(asyncio.create_task(receiver.close())))
            return True

        async with asyncio.timeout(60):
            came_to_it = await run()
            await asyncio.gather(*closing)
            await receiver.close()
        await until(no_threads, f"no thread is left, closed where it waits for the {number}th time")
        assert (receiver._receiver is None and receiver._hold is None) or not receiver._hold.ours
        assert receiver._watch is None or receiver._watch.done()
        if what != "release_memory":
            assert resumed(scripted) or "pause_generation" not in scripted.paths(), number
        scripted.calls.clear()
    assert number > 2


async def test_a_server_that_does_not_let_a_group_go_holds_up_no_close(scripted, monkeypatch) -> None:
    monkeypatch.setattr(ways, "_LAST_WORD_S", 0.05)

    class Group:
        place = SimpleNamespace(name="a group")

        async def close(self) -> None:
            pass

    receiver = stand_in(scripted)
    await receiver.start()
    receiver._way._group = Group()
    scripted.stuck["destroy_weights_update_group"] = asyncio.Event()
    async with asyncio.timeout(20):
        await receiver.close()
    assert scripted.stuck["destroy_weights_update_group"].is_set()


@pytest.mark.parametrize("transport", ["distributed", "disk"])
async def test_a_target_is_closed_while_others_keep_all_threads_busy(scripted, busy_threads, transport: str) -> None:
    options = SGLangOptions(layout=LAYOUT, watch_s=60, timeout_s=10, transport=transport)
    target = SGLangTarget(scripted.url, options)
    await target.locate(TransferConfig())
    if transport == "disk":
        await target._standin._way.begin(target._standin.info, "target")
    async with busy_threads(), asyncio.timeout(30):
        await target.close()


def looks_at_another(
    scripted: Any, receiver: SGLangReceiver, monkeypatch: pytest.MonkeyPatch
) -> tuple[asyncio.Task[None], Gate]:
    """Its own watch has seen another one's update, and asks what server that is."""
    gate, info = Gate(), receiver.front.info

    async def slowly() -> Any:
        await gate()
        return await info()

    monkeypatch.setattr(receiver.front, "info", slowly)
    scripted.answers["model_info"] = (200, {"weight_version": "syncline-unfinished@elsewhere.1.1"})
    return asyncio.create_task(receiver.attach()), gate


@pytest.mark.parametrize("ends", [False, True])
async def test_a_push_that_begins_while_it_attaches_keeps_its_hold(scripted, monkeypatch, ends: bool) -> None:
    async with stand_in(scripted) as receiver:
        attaching, gate = looks_at_another(scripted, receiver, monkeypatch)
        before = receiver._receiver
        await gate.came.wait()
        scripted.answers["model_info"] = (200, {"weight_version": "4"})
        with monkeypatch.context() as pushing:
            pushing.setattr(receiver, "_busy", lambda: True)
            await receiver._serving.hold.take()
            gate.open.set()
            await attaching
            assert receiver._receiver is before and receiver._serving.hold.held
            receiver._serving.hold.release()
        assert await is_free(receiver)
        if ends:  # the next look takes the server over
            await receiver.attach()
            assert receiver._receiver is not before and receiver.version == 4


@pytest.mark.parametrize("pushing", [False, True])
async def test_what_another_one_gave_up_is_left_as_it_was(scripted, monkeypatch, pushing: bool) -> None:
    """Also where a push of our own has been prepared meanwhile, which holds nothing before it pauses, and may never do that."""
    async with stand_in(scripted) as receiver:
        attaching, gate = looks_at_another(scripted, receiver, monkeypatch)
        before = receiver._receiver
        await gate.came.wait()
        scripted.answers["model_info"] = (200, {"weight_version": "3"})
        with monkeypatch.context() as prepared:
            if pushing:
                prepared.setattr(receiver, "_busy", lambda: True)
            gate.open.set()
            await attaching
        assert receiver._receiver is before
        assert await is_free(receiver)


async def test_a_new_life_is_none_of_a_push_into_the_old_one(scripted, monkeypatch) -> None:
    async with stand_in(scripted) as receiver:
        attaching, gate = looks_at_another(scripted, receiver, monkeypatch)
        await gate.came.wait()
        before, old = receiver._receiver, Hold(receiver.front, life=receiver.info.life, patience_s=60)
        scripted.answers["model_info"] = (200, {"weight_version": "3"})
        await receiver._serving.pause("keep")
        info = scripted.answers["server_info"][1]
        scripted.answers["server_info"] = (200, {**info, "startup_time": {"process": 7}})
        with monkeypatch.context() as pushing:
            pushing.setattr(receiver, "_busy", lambda: True)
            gate.open.set()
            await attaching
        assert receiver._receiver is before
        with pytest.raises(BusyError):
            await old.take()
        assert await is_free(receiver)  # the new one
        await receiver._serving.hold.confirm()
        await receiver._serving.resume(3)
        await old.take()
        old.release()


@pytest.mark.parametrize("how", ["fails", "cancelled"])
async def test_a_look_that_ends_badly_lets_go_of_no_push(scripted, monkeypatch, how: str) -> None:
    """It has locked the server, and asks for its version, when a push of its own pauses it."""
    async with stand_in(scripted) as receiver:
        attaching, gate = looks_at_another(scripted, receiver, monkeypatch)
        await gate.came.wait()
        scripted.answers["model_info"] = (200, {"weight_version": "3"})
        asks = Gate()

        async def fails() -> str:
            said.undo()
            await asks()
            raise TargetUnreachable("no answer in time")

        with monkeypatch.context() as said:
            said.setattr(receiver.front, "weight_version", fails)
            gate.open.set()
            await asks.came.wait()
        await receiver._serving.pause("keep")
        if how == "fails":
            asks.open.set()
            with pytest.raises(TargetUnreachable):
                await attaching
        else:
            attaching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await attaching
        assert receiver._serving.hold.held and not await is_free(receiver)
        await receiver._serving.hold.confirm()
        await receiver._serving.resume(3)
        assert resumed(scripted) and await is_free(receiver)


async def test_a_release_that_ends_badly_lets_go_of_no_push(scripted, monkeypatch) -> None:
    async with stand_in(scripted) as receiver:
        asks, weight_version = Gate(), receiver.front.weight_version

        async def fails() -> str:
            monkeypatch.setattr(receiver.front, "weight_version", weight_version)
            await asks()
            raise TargetUnreachable("no answer in time")

        monkeypatch.setattr(receiver.front, "weight_version", fails)
        releasing = asyncio.create_task(receiver.release_memory(["kv_cache"]))
        await asks.came.wait()
        await receiver._serving.pause("keep")
        asks.open.set()
        with pytest.raises(TargetUnreachable):
            await releasing
        await receiver._serving.hold.confirm()
        await receiver._serving.resume(3)
        assert resumed(scripted) and await is_free(receiver)


async def test_memory_that_is_resumed_under_a_push_resumes_nothing_else(scripted) -> None:
    """Requests would be answered from half of its weights."""
    async with stand_in(scripted) as receiver:
        await receiver.release_memory(["kv_cache"])
        await receiver._serving.pause("keep")
        scripted.paths()
        await receiver.resume_memory()
        assert scripted.paths() == ["resume_memory_occupation"]
        await receiver._serving.hold.confirm()
        await receiver._serving.resume(3)
        assert resumed(scripted) and scripted.version == "3" and await is_free(receiver)


async def test_a_look_that_failed_loses_no_receiver_that_has_begun_a_push(scripted, monkeypatch) -> None:
    """A source finds the server and pushes as soon as it is its turn: after the watch, whose look has just failed."""
    receiver = stand_in(scripted, watch_s=0.01)
    asks, weight_version, pushing = Gate(), receiver.front.weight_version, asyncio.Event()

    async def fails() -> str:
        monkeypatch.setattr(receiver.front, "weight_version", weight_version)
        await asks()
        raise TargetUnreachable("a hiccup")

    async def source() -> None:
        await receiver.attach()
        monkeypatch.setattr(receiver, "_busy", lambda: True)
        pushing.set()

    async with receiver:
        monkeypatch.setattr(receiver.front, "weight_version", fails)
        await asks.came.wait()
        begun = asyncio.create_task(source())
        await asyncio.sleep(0)  # it waits for its turn
        asks.open.set()
        await begun
        found, looks = receiver._receiver, len(scripted.calls)
        async with receiver._alone():  # whoever was before it is done
            pass
        assert pushing.is_set() and receiver._receiver is found is not None
        assert len(scripted.calls) == looks


async def test_closed_where_all_tasks_are_cancelled(scripted) -> None:
    """Whatever the loop's end cancels: it is closed then, and nobody is told of a cancellation that was not theirs."""
    for number in range(40):
        receiver = stand_in(scripted)
        await receiver.start()
        closing = asyncio.create_task(receiver.close())
        for _ in range(number):
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if "syncline" in task.get_name() or task is closing:
                task.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await receiver.close()
        assert receiver._receiver is None and not receiver._hold.ours
        assert receiver._watch.done() and receiver.front._session is None
        await until(no_threads, f"no thread is left, cancelled after {number} steps")


async def test_another_loop_cannot_close_it(scripted) -> None:
    async with stand_in(scripted) as receiver:
        with pytest.raises(SynclineError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(receiver.close()))
        assert receiver.attached and receiver.state == "COMMITTED"
    assert not receiver.attached
