"""How a group with a server is made, and what is left when it is not: members of it in this process, no server."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from syncline.adapters.engines.sglang import ways
from syncline.adapters.engines.sglang.ways import DiskWay, DistributedWay
from syncline.adapters.engines.update_group import Place, UpdateGroup
from syncline.engine.errors import ClosedError, LoaderError

ONE_RANK = SimpleNamespace(dialect=None, tp_size=1, life="one")


class Front:
    """A server that joins, and then ends its call in some way."""

    def __init__(self, then) -> None:
        self.then, self.joined = then, asyncio.Event()

    async def init_group(self, *, host, port, world_size, name, backend, timeout_s) -> None:
        place = Place(name=name, host=host, port=port, rank=1, world_size=world_size, backend=backend)
        self.member = await UpdateGroup.join(place, timeout_s=timeout_s)
        while len(members()) < 2:  # our own side has joined, too
            await asyncio.sleep(0.005)
        self.joined.set()
        await self.then()


def members():
    """Threads of groups that have not been closed."""
    return [thread for thread in threading.enumerate() if thread.name == "syncline-update-group"]


async def refuses():
    raise LoaderError("no such layer")


async def says_nothing():
    await asyncio.Event().wait()


@pytest.mark.parametrize("then", [refuses, says_nothing])
async def test_a_group_that_only_we_think_made_is_closed(then) -> None:
    assert not members()
    front = Front(then)
    way = DistributedWay(front, backend="gloo", host="127.0.0.1", timeout_s=10)
    meeting = asyncio.create_task(way.begin(ONE_RANK, "target"))
    async with asyncio.timeout(30):
        if then is refuses:
            with pytest.raises(LoaderError, match="no such layer"):  # the server's own words
                await meeting
        else:
            await front.joined.wait()
            meeting.cancel()  # by whoever has waited long enough
            with pytest.raises(asyncio.CancelledError):
                await meeting
        try:
            assert len(members()) == 1  # the server's
        finally:
            await front.member.close()
            await way.drop()
    assert not members()


@pytest.mark.parametrize("then", ["cancelled twice", "closed"])
async def test_nothing_is_left_of_a_group_whose_maker_goes_away(then: str) -> None:
    """Between the moment when our side has joined and the one at which somebody knows of the group."""
    assert not members()
    answered = asyncio.Event()
    front = Front(answered.wait)
    front.url = "http://somewhere"
    way = DistributedWay(front, backend="gloo", host="127.0.0.1", timeout_s=10)
    meeting = asyncio.create_task(way.begin(ONE_RANK, "target"))
    async with asyncio.timeout(30):
        await front.joined.wait()
        if then == "closed":
            await way.close()
            answered.set()
            front.destroy_group = answered_at_once
            with pytest.raises(ClosedError, match="was closed while its group was made"):
                await meeting
        else:
            meeting.cancel()
            await asyncio.sleep(0)  # it waits for what it has cancelled
            meeting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await meeting
        await front.member.close()
    assert not members()


@pytest.mark.parametrize("where", ["group.close", "destroy_group"])
async def test_a_drop_that_is_cancelled_still_closes_the_store(where: str) -> None:
    came = asyncio.Event()

    async def never(*_: object) -> None:
        came.set()
        await asyncio.Event().wait()

    way = DistributedWay(SimpleNamespace(destroy_group=never), backend="gloo", host="127.0.0.1", timeout_s=10)
    closed = []
    way._store = SimpleNamespace(close=lambda: closed.append(True))
    close = never if where == "group.close" else nothing
    way._group = SimpleNamespace(close=close, place=SimpleNamespace(name="a group"))
    dropping = asyncio.create_task(way.drop())
    await came.wait()
    dropping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropping
    assert closed


@pytest.fixture
def disk(tmp_path):
    """A way through a folder below ``parent``, for a model of some files."""
    model, parent = tmp_path / "model", tmp_path / "parent"
    model.mkdir()
    parent.mkdir()
    for number in range(3):
        (model / f"{number}.txt").write_text("x")
    front = SimpleNamespace(url="http://somewhere")
    return SimpleNamespace(
        way=DiskWay(front, parent=str(parent), timeout_s=5), info=SimpleNamespace(model_path=str(model)), parent=parent
    )


async def test_no_folder_is_made_after_the_close(disk) -> None:
    await disk.way.close()
    with pytest.raises(ClosedError, match="was closed"):
        await disk.way.begin(disk.info, "target")
    assert not list(disk.parent.iterdir())


@pytest.mark.parametrize("how", ["cancelled", "closed"])
@pytest.mark.parametrize("work", ["begin", "send"])
async def test_a_folder_is_removed_when_no_thread_writes_into_it(disk, monkeypatch, work: str, how: str) -> None:
    """Else the thread would leave a part of it behind."""
    writing, go_on, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def slowly(*where: object) -> None:
        (path,) = [path for path in where if str(path).startswith(str(disk.parent))]
        loop.call_soon_threadsafe(writing.set)
        assert go_on.wait(30)
        path.parent.mkdir(exist_ok=True)  # as if it had come between what the removal sees and its last step
        path.write_text("x")

    if work == "begin":
        monkeypatch.setattr(ways.shutil, "copyfile", slowly)
        working = asyncio.create_task(disk.way.begin(disk.info, "target"))
    else:
        monkeypatch.setattr(ways, "_write", slowly)
        await disk.way.begin(disk.info, "target")
        working = asyncio.create_task(disk.way.send(None, None, None))
    async with asyncio.timeout(30):
        await writing.wait()
        if how == "cancelled":
            working.cancel()
        ending = asyncio.create_task(disk.way.drop() if how == "cancelled" else disk.way.close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not ending.done()
        go_on.set()
        await asyncio.gather(working, return_exceptions=True)
        await ending
    assert not list(disk.parent.iterdir())
    if how == "closed":
        with pytest.raises(ClosedError):
            await disk.way.send(None, None, None)


@pytest.mark.parametrize("ends", ["drop", "close"])
async def test_a_thread_that_is_stuck_holds_nobody_up(disk, monkeypatch, ends: str) -> None:
    """As it is where the folder lies on a mount whose server is gone. The folder goes when the thread has ended."""
    monkeypatch.setattr(ways, "_REMOVED_S", 0.05)
    writing, go_on, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def stuck(path: Path, *_: object) -> None:
        loop.call_soon_threadsafe(writing.set)
        go_on.wait(60)
        path.write_text("x")

    await disk.way.begin(disk.info, "target")
    monkeypatch.setattr(ways, "_write", stuck)
    sending = asyncio.create_task(disk.way.send(None, None, None))
    try:
        async with asyncio.timeout(20):
            await writing.wait()
            await getattr(disk.way, ends)()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            if ends == "drop":  # the next push has a folder of its own
                await disk.way.begin(disk.info, "target")
                await disk.way.close()
        assert len(list(disk.parent.iterdir())) == 1
    finally:
        go_on.set()
    async with asyncio.timeout(20):
        while list(disk.parent.iterdir()):
            await asyncio.sleep(0.01)


async def test_a_thread_that_comes_after_the_removal_makes_nothing(disk) -> None:
    """Whoever started it was cancelled before it had run."""
    folder = ways._Folder(str(disk.parent))
    await folder.remove()
    await folder.fill(lambda path: path.mkdir())
    assert not list(disk.parent.iterdir())


async def test_only_the_user_sees_what_is_pushed(disk) -> None:
    await disk.way.begin(disk.info, "target")
    (folder,) = disk.parent.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700 and len(list(folder.iterdir())) == 3
    await disk.way.close()


async def nothing() -> None:
    pass


async def answered_at_once(_: str) -> None:
    pass
