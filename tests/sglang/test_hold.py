"""Who may change a server: by a lock on this host, by the mark at the server beyond it."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from syncline.adapters.engines.sglang import SGLangTarget
from syncline.adapters.engines.sglang.hold import Hold
from syncline.engine import TransferConfig
from syncline.engine.errors import BusyError, ConfigError, LoaderError, ProtocolError, TargetUnreachable


class Front:
    """A server that only has a version."""

    def __init__(self, said: str = "3") -> None:
        self.url, self.said = "http://127.0.0.1:30000", said

    async def weight_version(self) -> str:
        return self.said


@pytest.fixture
def holds(tmp_path):
    """``holds(front, place)``: a hold of one who sees the lock files of that place only."""
    made: list[Hold] = []

    def make(front: Front, place: str = "here", patience_s: float = 60.0) -> Hold:
        folder = tmp_path / place
        folder.mkdir(mode=0o700, exist_ok=True)
        made.append(Hold(front, life="one", patience_s=patience_s, folder=folder))
        return made[-1]

    yield make
    for hold in made:
        hold.release()


async def test_one_at_a_time_on_one_host(holds) -> None:
    front = Front()
    mine, other = holds(front), holds(front)
    assert await mine.take() == "3" and await mine.take() == "3"
    with pytest.raises(BusyError, match="another source"):
        await other.take()
    front.said = mine.mark()
    with pytest.raises(BusyError):
        other.look(front.said)
    mine.release()
    assert not mine.held
    other.look(front.said)  # whose mark it is has gone
    assert await other.take() == front.said and other.held
    with pytest.raises(BusyError):
        await mine.take()


@pytest.mark.parametrize("how", ["fails", "cancelled"])
async def test_none_lets_go_of_what_another_of_the_same_stand_in_holds(holds, monkeypatch, how: str) -> None:
    front = Front()
    one, other = holds(front), holds(front)
    second = one.share()
    asked, answered = asyncio.Event(), asyncio.Event()

    async def slowly() -> str:
        asked.set()
        await answered.wait()
        raise TargetUnreachable("no answer in time")

    with monkeypatch.context() as asking:
        asking.setattr(front, "weight_version", slowly)
        taking = asyncio.create_task(one.take())
        await asked.wait()
    assert await second.take() == "3"
    if how == "fails":
        answered.set()
    else:
        taking.cancel()
    with pytest.raises(TargetUnreachable if how == "fails" else asyncio.CancelledError):
        await taking
    assert not one.held and second.held and one.ours
    one.release()
    front.said = second.mark()
    assert one.is_mine(front.said)
    await second.confirm()
    with pytest.raises(LoaderError):
        await one.confirm()
    with pytest.raises(BusyError):
        await other.take()
    assert await one.take() == front.said
    second.release()
    with pytest.raises(BusyError):
        await other.take()
    one.release()
    assert not one.ours
    await other.take()


async def test_the_mark_keeps_another_host_out_while_it_goes_on(holds) -> None:
    front = Front()
    mine, far = holds(front), holds(front, "there", patience_s=0.3)
    await mine.take()
    for _ in range(4):  # a bucket now and then
        front.said = mine.mark()
        with pytest.raises(BusyError, match="from another host"):
            await far.take()
        assert not far.held
        await mine.confirm()
    async with asyncio.timeout(20):
        while not far.held:
            try:
                await far.take()  # nothing has come of it for long: a dead one's
            except BusyError:
                await asyncio.sleep(0.05)
    front.said = far.mark()
    with pytest.raises(LoaderError, match="another process changes it, too"):
        await mine.confirm()


@pytest.mark.parametrize("said", ["syncline-unfinished", "default", "17"])
async def test_what_nobody_writes_is_free(holds, said: str) -> None:
    front = Front(said)
    assert await holds(front, "there").take() == said


@pytest.mark.parametrize("then", ["gone", "open to others", "a file", "no place for it"])
async def test_the_folder_of_the_locks_may_go_at_any_time(holds, tmp_path, then: str) -> None:
    """It is empty between pushes, and among temporary files, which others clean up."""
    folder, front = tmp_path / "here", Front()
    mine, other = holds(front), holds(front)
    shutil.rmtree(folder if then != "no place for it" else tmp_path)
    if then == "open to others":
        folder.mkdir()
        folder.chmod(0o755)
    elif then == "a file":
        folder.write_text("x")
    if then == "gone":
        assert await mine.take() == "3" and folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(BusyError):
            await other.take()
        return
    with pytest.raises(ConfigError if then == "open to others" else LoaderError, match=r"0700|TMPDIR"):
        await mine.take()
    assert not mine.held


async def test_a_lock_file_that_stays_keeps_nobody_out(holds, monkeypatch) -> None:
    mine, other = holds(Front()), holds(Front())

    def refuses(*_: object, **__: object) -> None:
        raise PermissionError("read-only now")

    await mine.take()
    with monkeypatch.context() as stays:
        stays.setattr(Path, "unlink", refuses)
        mine.release()
    assert await other.take() == "3"


@pytest.mark.parametrize("call", ["pwrite", "fstat"])
async def test_a_lock_that_the_system_refuses_is_no_lock(holds, monkeypatch, call: str) -> None:
    """As where the disk is full: whoever comes next must not find it locked by nobody."""
    mine, other = holds(Front()), holds(Front())

    def refuses(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, call, refuses)
        if call == "fstat":
            with pytest.raises(LoaderError, match="No space"):
                await mine.take()
        else:
            await mine.take()
    mine.release()
    assert await other.take() == "3"


async def test_a_lock_file_that_was_cleaned_away_takes_nobody_elses_with_it(holds) -> None:
    mine, other, third = holds(Front()), holds(Front()), holds(Front())
    await mine.take()
    mine._common._path.unlink()
    await other.take()
    mine.release()
    with pytest.raises(BusyError):
        await third.take()
    other.release()
    assert await third.take() == "3"


async def test_a_server_that_is_not_sglang(aiohttp_404) -> None:
    target = SGLangTarget(aiohttp_404)
    with pytest.raises(ProtocolError, match="is this an SGLang server"):
        await target.locate(TransferConfig(connect_timeout_s=10))
    await target.close()


async def test_a_server_that_never_answers() -> None:
    async def silent(reader, writer) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    target = SGLangTarget(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(TargetUnreachable, match="did not answer as an SGLang server does"):
        await target.locate(TransferConfig(connect_timeout_s=0.5))
    await target.close()
    server.close()
    await server.wait_closed()


@pytest.fixture
async def aiohttp_404():
    from aiohttp import web

    runner = web.AppRunner(web.Application(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()
