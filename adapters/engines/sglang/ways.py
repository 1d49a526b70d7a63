"""How the buckets of a push reach an SGLang server: by broadcasts, through a checkpoint folder, or in the calls themselves."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle  # noqa: TID251 - one endpoint of SGLang wants to be sent one; see `TensorWay`
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from syncline.engine.errors import ClosedError, SynclineError, TargetLost, TargetUnreachable, TransportError
from syncline.stages.completions import Signal
from syncline.stages.copies import torch_dtype
from syncline.stages.workers import call_in_thread

from ..update_group import Backend, HostedStore, Place, UpdateGroup, with_theirs
from .buckets import Bucket, Slot
from .front import Selector, ServerInfo, SGLangFront

_GROUP_S = 60.0
_LAST_WORD_S = 5.0
"""After our side has failed, the server is given so long to say how it saw that."""
_REMOVED_S = 15.0
"""So long folders are waited for that are to be removed: a large one takes a while, and a process that ends leaves the rest."""
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})


class Way(Protocol):
    """How buckets reach the server. Lives on the event loop; after an error `drop` has to follow."""

    async def begin(self, info: ServerInfo, selector: Selector) -> None:
        """A push begins; what it needs is made."""
        ...

    async def send(self, bucket: Bucket, data: torch.Tensor, version: str | None) -> None:
        """Bring one bucket into the model. ``data``: its bytes (uint8). ``version``: given with the last bucket."""
        ...

    async def end(self) -> None:
        """All buckets were sent."""
        ...

    async def drop(self) -> None:
        """Throw away what may be of no use after an error."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...


class DistributedWay:
    """Implements `Way` by broadcasts in a process group of our own, of which this process is rank 0.

    The group is made once and used push after push; after any error it is thrown away, and the next push makes another.

    Args:
        front: the server.
        backend: ``gloo`` goes from CPU memory to any server, ``nccl`` from this process's GPU to the server's.
        host: address of this machine, as the server reaches it. Whoever else reaches it could join instead of the server.
        timeout_s: longest time for one bucket, in seconds.
    """

    def __init__(self, front: SGLangFront, *, backend: Backend, host: str, timeout_s: float) -> None:
        self._front, self._backend, self._host, self._timeout_s = front, backend, host, timeout_s
        self._info: ServerInfo | None = None
        self._selector: Selector = "target"
        self._store: HostedStore | None = None
        self._group: UpdateGroup | None = None
        self._made = 0
        self._closed = False

    async def begin(self, info: ServerInfo, selector: Selector) -> None:
        if self._group is None or not self._group.usable or self._info is None or self._info.life != info.life:
            await self.drop()
            await self._meet(info)
        self._info, self._selector = info, selector
        await self._front.begin(info.dialect, selector)

    async def _meet(self, info: ServerInfo) -> None:
        """Make the group: both sides have to enter at the same time."""
        self._made += 1
        self._store = store = await HostedStore.listen(self._host)
        place = Place(
            name=f"syncline-{store.port}-{self._made}",
            host=store.host,
            port=store.port,
            rank=0,
            world_size=1 + info.tp_size,
            backend=self._backend,
        )
        invite = self._front.init_group(
            host=place.host,
            port=place.port,
            world_size=place.world_size,
            name=place.name,
            backend=place.backend,
            timeout_s=_GROUP_S,
        )
        self._group = await with_theirs(UpdateGroup.join(place, timeout_s=_GROUP_S), invite, last_word_s=_LAST_WORD_S)
        if self._closed:  # meanwhile, and whoever did that found no group
            await self.drop()
            raise ClosedError(f"the way to {self._front.url} was closed while its group was made")

    async def send(self, bucket: Bucket, data: torch.Tensor, version: str | None) -> None:
        group, info = self._group, self._info
        assert group is not None
        assert info is not None
        update = self._front.update_from_distributed(
            info.dialect,
            names=[slot.name for slot in bucket.slots],
            dtypes=[slot.dtype for slot in bucket.slots],
            shapes=[slot.shape for slot in bucket.slots],
            group=group.place.name,
            version=version,
            selector=self._selector,
            timeout_s=self._timeout_s,
        )
        try:
            await with_theirs(_broadcast(group, data, self._timeout_s), update, last_word_s=_LAST_WORD_S)
        except (TransportError, TargetUnreachable) as error:
            if await self._front.is_alive():
                raise
            raise TargetLost(
                f"the SGLang server at {self._front.url} is gone or stuck: a broadcast to it broke and it answers no more "
                f"({error}); restart it, and the next push brings it up to date"
            ) from error

    async def end(self) -> None:
        assert self._info is not None
        await self._front.end(self._info.dialect)

    async def drop(self) -> None:
        group, self._group = self._group, None
        store, self._store = self._store, None
        try:
            if group is not None:
                await group.close()
                with contextlib.suppress(SynclineError, TimeoutError):  # it may be gone, or have thrown the group away itself
                    async with asyncio.timeout(_LAST_WORD_S):
                        await self._front.destroy_group(group.place.name)
        finally:  # also for who is cancelled
            if store is not None:
                store.close()

    async def close(self) -> None:
        self._closed = True
        await self.drop()


class DiskWay:
    """Implements `Way` by a checkpoint in a temporary folder, which the server reads: the last resort.

    The server takes the folder for its model's from then on, so it is kept until the next one is read, or until `close`. It is
    removed when no thread writes into it any more, which `drop` and `close` wait for, but not for ever.

    Args:
        front: the server, on this machine or one that sees the same folders.
        parent: where to make the folders; None takes the system's place for temporary files.
        timeout_s: longest time for reading, in seconds.
    """

    def __init__(self, front: SGLangFront, *, parent: str | None, timeout_s: float) -> None:
        self._front, self._parent, self._timeout_s = front, parent, timeout_s
        self._model = ""
        self._folder: _Folder | None = None
        self._read: _Folder | None = None
        self._files = 0
        self._version: str | None = None
        self._closed = False

    async def begin(self, info: ServerInfo, selector: Selector) -> None:
        await self.drop()
        if self._closed:
            raise self._was_closed()
        if self._read is None:
            self._model = info.model_path
        self._files, self._version = 0, None
        self._folder = _Folder(self._parent)
        await self._folder.fill(self._make)

    async def send(self, bucket: Bucket, data: torch.Tensor, version: str | None) -> None:
        folder = self._open()
        self._files += 1
        self._version = version
        path = folder.path / f"model-{self._files:05d}.safetensors"
        await folder.fill(lambda _: _write(path, bucket, data))

    async def end(self) -> None:
        folder = self._open()
        await self._front.update_from_disk(folder=str(folder.path), version=self._version, timeout_s=self._timeout_s)
        before, self._read, self._folder = self._read, self._open(), None
        await _remove(before)

    async def drop(self) -> None:
        folder, self._folder = self._folder, None
        await _remove(folder)

    async def close(self) -> None:
        self._closed = True
        folder, self._folder = self._folder, None
        read, self._read = self._read, None
        await _remove(folder, read)

    def _open(self) -> _Folder:
        """The folder that is being filled."""
        if self._folder is None:
            raise self._was_closed()
        return self._folder

    def _was_closed(self) -> ClosedError:
        return ClosedError(f"the way to {self._front.url} was closed")

    def _make(self, folder: Path) -> None:
        """With everything of the model but its weights."""
        folder.mkdir(mode=0o700)
        model = Path(self._model)
        if model.is_dir():
            for file in model.iterdir():
                if file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
                    shutil.copyfile(file, folder / file.name)


class TensorWay:
    """Implements `Way` by calls that carry the tensors: ``/update_weights_from_tensor``, which wants a pickle.

    We send one, since the user has asked for it, and to loopback only; nobody unpickles anything here. Each rank of the server
    gets every byte, in base64: slow, and of use where nothing else gets through.

    Args:
        front: the server.
        timeout_s: longest time for one bucket, in seconds.
    """

    def __init__(self, front: SGLangFront, *, timeout_s: float) -> None:
        self._front, self._timeout_s = front, timeout_s
        self._info: ServerInfo | None = None
        self._selector: Selector = "target"

    async def begin(self, info: ServerInfo, selector: Selector) -> None:
        self._info, self._selector = info, selector
        await self._front.begin(info.dialect, selector)

    async def send(self, bucket: Bucket, data: torch.Tensor, version: str | None) -> None:
        assert self._info is not None
        payload = await asyncio.to_thread(_pickled, bucket, data)
        await self._front.update_from_tensor(
            self._info.dialect,
            payloads=[payload] * self._info.tp_size,
            version=version,
            selector=self._selector,
            timeout_s=self._timeout_s,
        )

    async def end(self) -> None:
        assert self._info is not None
        await self._front.end(self._info.dialect)

    async def drop(self) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is kept."""


async def _broadcast(group: UpdateGroup, data: torch.Tensor, timeout_s: float) -> None:
    await group.broadcast(data, patience_s=timeout_s)


class _Folder:
    """A temporary folder that threads of its own fill and remove, one at a time.

    One of them may be stuck, where the folder is on a mount whose server is gone. Whoever waits may stop waiting then: what is
    to be removed goes when that thread has ended.
    """

    def __init__(self, parent: str | None) -> None:
        place = Path(tempfile.gettempdir() if parent is None else parent)
        self.path = place.absolute() / f"syncline-sglang-{secrets.token_hex(8)}"
        self._turn = threading.Lock()
        self._unwanted = False

    def fill(self, work: Callable[[Path], None]) -> Signal[None]:
        """Have ``work`` write into it, unless it is to be removed."""
        return self._in_turn(lambda: None if self._unwanted else work(self.path))

    def remove(self) -> Signal[None]:
        """When no thread writes into it any more."""
        self._unwanted = True
        return self._in_turn(lambda: shutil.rmtree(self.path, ignore_errors=True))

    def _in_turn(self, work: Callable[[], None]) -> Signal[None]:
        def run() -> None:
            with self._turn:
                work()

        return call_in_thread(run, name="syncline-folder")


async def _remove(*folders: _Folder | None) -> None:
    """Begun at once, also for who is cancelled."""
    removals = [folder.remove() for folder in folders if folder is not None]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REMOVED_S):
            for removal in removals:
                await removal


def _view(slot: Slot, data: torch.Tensor) -> torch.Tensor:
    return data[slot.offset : slot.offset + slot.nbytes].view(torch_dtype(slot.dtype)).view(slot.shape)


def _write(path: Path, bucket: Bucket, data: torch.Tensor) -> None:
    from safetensors.torch import save_file

    save_file({slot.name: _view(slot, data) for slot in bucket.slots}, path)


def _pickled(bucket: Bucket, data: torch.Tensor) -> str:
    """What SGLang's endpoint demands: pairs of name and tensor, each tensor with memory of its own."""
    pairs = [(slot.name, _view(slot, data).clone()) for slot in bucket.slots]
    return base64.b64encode(pickle.dumps(pairs)).decode("ascii")
