"""`SGLangReceiver`: stands in for an SGLang server as a target. It receives, verifies and votes; then it updates the server.

    source ranks ═══ buckets ═══▶ SGLangReceiver ─── begin, buckets, end, version, flush ───▶ SGLang (all its ranks)
                                   (CPU memory)        HTTP, and one broadcast a bucket

With landing ``staged`` a whole push lies here, verified and voted for, before the server's first tensor changes. What then can
go wrong is the server's own; it stays paused until a whole push has gone in.

Run it beside the server, in a process of its own, and it outlives the sources: one that dies leaves the server serving what it
had. A source that starts it itself (`SGLangTarget`) takes it along when it dies; if that happens in the middle of a commit, the
server stays paused until the next source comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from syncline.engine import Receiver
from syncline.engine.config import parse_size
from syncline.engine.errors import (
    AuthError,
    BusyError,
    ClosedError,
    ConfigError,
    LoaderError,
    ProtocolError,
    SynclineError,
    TargetUnreachable,
)
from syncline.engine.messages import State
from syncline.scheduler.layout import Layout
from syncline.stages.closing import Closing, in_turn

from ..checkpoint_manifest import checkpoint_tensors
from ..unfinished import UNFINISHED
from .front import MemoryTag, ServerInfo, SGLangFront
from .hold import Hold
from .loader import SGLangLoader
from .options import SGLangOptions
from .serving import ServerState, SGLangServing
from .ways import DiskWay, DistributedWay, TensorWay, Way

log = logging.getLogger("syncline.engine")

_STARTING_S = 120.0
_LOOK_AGAIN_S = 0.2
_OTHERS_S = 5.0
"""So long another one's update is waited for at the start."""
_GIVE_BACK_S = 10.0
_LAST_S = 2.0
_CLOSED = "this SGLangReceiver is closed; make a new one"
_UNKNOWN = "unknown"
"""Digest of a version that somebody else has committed: nothing that is pushed under it counts as the same."""


class _Starting(TargetUnreachable):
    """The server is warming up."""


class SGLangReceiver:
    """A target for one SGLang server (``async with``, or `start` and `close`).

        async with SGLangReceiver("http://127.0.0.1:30000", listen="unix:/run/syncline/sglang.sock") as receiver:
            await asyncio.Event().wait()
        …
        engine = TransferEngine(source=…, targets=[RemoteTarget("unix:/run/syncline/sglang.sock")])

    A server that was started with ``--load-format dummy`` is paused from the first contact until a push has gone in. One that
    says a whole number as its weights' version serves that version; any other serves version 0. A server that was killed and
    started anew is another target: it has nothing, and gets the next push.

    Args:
        url: the server, ``http://host:port``.
        listen: control address for sources: ``unix:/path`` or ``tcp://host:port``.
        options: see `SGLangOptions`.
        secret: shared by sources and this process; needed beyond loopback.
        bind_host: address that data connections of sources come to; None takes that of ``listen``.
    """

    def __init__(
        self,
        url: str,
        *,
        listen: str = "tcp://127.0.0.1:0",
        options: SGLangOptions | None = None,
        secret: str | None = None,
        bind_host: str | None = None,
    ) -> None:
        self.options = options or SGLangOptions()
        self.front = SGLangFront(url, api_key=self.options.api_key)
        problems = self.options.problems(url)
        if problems:
            raise ConfigError(problems)
        self._listen, self._secret, self._bind_host = listen, secret, bind_host
        self._bucket_bytes = parse_size(self.options.bucket_bytes)
        self._receiver: Receiver | None = None
        self._state: ServerState | None = None
        self._serving: SGLangServing | None = None
        self._way: Way | None = None
        self._layout: Layout | None = self.options.layout
        self._started = False
        self._watch: asyncio.Task[None] | None = None
        self._hold: Hold | None = None
        self._changing = asyncio.Lock()
        self._changer: asyncio.Task[Any] | None = None
        self._called_off: asyncio.Task[Any] | None = None
        self._released: set[MemoryTag] = set()
        self._closing = Closing(self._close, "syncline-sglang-close")

    async def start(self) -> None:
        """Look at the server, fence it if it has nothing to serve, and listen.

        Raises:
            TargetUnreachable: nothing answers at the URL.
            ConfigError: it is of a version, or run in a way, that cannot be updated; lists every problem.
            PlanError: the tensors of its model are not known.
            BusyError: another source is updating it, and goes on with that.
        """
        if self._closing.begun or self._started:
            raise ClosedError(_CLOSED if self._closing.begun else "it runs already")
        self._closing.here()
        self._started = True
        try:
            async with asyncio.timeout(_STARTING_S):
                await self._attach_when_up()
        except TimeoutError:
            await self.close()
            raise TargetUnreachable(f"{self.front.url} is still starting after {_STARTING_S:g} s") from None
        except BaseException:
            await self.close()
            raise
        if self._closing.begun:
            raise ClosedError(_CLOSED)
        self._watch = asyncio.create_task(self._watch_it(), name="syncline-sglang-watch")

    async def _attach_when_up(self) -> None:
        give_up = asyncio.get_running_loop().time() + _OTHERS_S
        while True:
            try:
                return await self.attach()
            except _Starting:
                pass
            except BusyError:
                if asyncio.get_running_loop().time() > give_up:
                    raise
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def attach(self) -> None:
        """Make sure that the receiver there is belongs to the server that answers now; make another one if it does not.

        Raises:
            BusyError: another source is updating the server. Nothing has changed here.
        """
        async with self._alone():
            await self._look()

    @property
    def address(self) -> str:
        """Control address for sources."""
        return self._running().address

    @property
    def attached(self) -> bool:
        """A server is there."""
        return self._receiver is not None

    @property
    def state(self) -> State:
        """``COMMITTED``, ``UPDATING`` or ``FENCED``. A server that does not answer any more is ``FENCED``."""
        return "FENCED" if self._receiver is None else self._receiver.state

    @property
    def version(self) -> int | None:
        """The version that the server got last, served or not."""
        return None if self._receiver is None else self._receiver.version

    @property
    def info(self) -> ServerInfo:
        """What the server says about itself."""
        self._running()
        assert self._state is not None
        return self._state.info

    async def release_memory(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> None:
        """Pause the server and have it give memory back. It serves again after `resume_memory` and, if weights went, a push.

        A call that fails half-way leaves the server as it was, or fenced with what it may have released counted as such.

        Raises:
            ConfigError: it was started without ``--enable-memory-saver``; or a tag is released already.
            BusyError: a push into it is under way.
        """
        tags = list(dict.fromkeys(tags))
        async with self._alone():
            problems = [] if self.info.memory_saver else ["the server was started without --enable-memory-saver"]
            problems += [f"{tag!r} is released already" for tag in tags if tag in self._released]
            if problems:
                raise ConfigError(problems)
            assert self._serving is not None
            assert self._hold is not None
            try:
                said = await self._hold.take()  # for as long as memory is released: nobody else knows of that
                self._require_no_push()
                self._serving.expect(said)
                await self._release(tags, self._serving)
            finally:
                if not self._released:
                    self._hold.release()

    async def _release(self, tags: Sequence[MemoryTag], serving: SGLangServing) -> None:
        """Weights are none before they go; and whatever ends the call but the server's word, the memory counts as gone."""
        assert self._state is not None
        state = self._state
        state.releasing = True
        try:
            await self._release_halted(tags, serving, state)
        except BaseException:
            state.releasing = False
            if not self._released and self._receiver is not None:
                await self._give_back(serving, self._receiver.serving_version)
            raise
        state.releasing = False
        if "weights" in tags:
            await self._attach()

    async def _release_halted(self, tags: Sequence[MemoryTag], serving: SGLangServing, state: ServerState) -> None:
        await serving.halt("abort")
        await serving.drop_cache()
        self._require_no_push()  # one may have begun: the server has taken the time that it likes
        if "weights" in tags:
            await self.front.set_weight_version(UNFINISHED)
            state.weight_version = UNFINISHED
            await self._detach()  # what believes in them
        self._released.update(tags)
        try:
            await self.front.release_memory(tags)
        except (AuthError, LoaderError, ProtocolError):
            self._released.difference_update(tags)
            raise

    def _require_no_push(self) -> None:
        if self._busy():
            raise BusyError(f"a push into {self.front.url} is under way; release its memory when that has ended")

    async def resume_memory(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Have the server take memory again: what was released, or a part of it. Without a push it serves again if its weights
        were not among it.

        Raises:
            ConfigError: a tag was not released. SGLang would die of it.
        """
        async with self._alone():
            wanted = set(self._released if tags is None else tags)
            if wanted - self._released:
                raise ConfigError([f"{tag!r} is not released" for tag in sorted(wanted - self._released)])
            if not wanted:
                return  # SGLang takes none for all, and dies of those that are there
            await self.front.resume_memory(sorted(wanted))
            self._released -= wanted
            if self._released:
                return
            assert self._hold is not None
            try:
                serving = None if self._receiver is None else self._receiver.serving_version
                if serving is not None and self._serving is not None:
                    await self._serving.go_on(serving)
            finally:
                self._hold.release()

    async def close(self) -> None:
        """Stop listening, in bounded time. The server goes on with what it serves; a fenced one stays paused.

        Once begun it is done, also where its caller is cancelled meanwhile. If a part of it fails the rest is closed all the
        same, and then that is raised.
        """
        await self._closing()

    async def _close(self) -> None:
        await in_turn(self._end_changes, self._end_life, self.front.close)

    async def _end_changes(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._changer is not None and self._changer is not self._called_off:
            self._called_off = self._changer
            self._changer.cancel()

    async def _end_life(self) -> None:
        async with self._changing:
            try:
                await self._end_receiver(_LAST_S)
            finally:
                if self._hold is not None:
                    self._hold.release()

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """One change at a time, and none once it is closed; one that is under way then is called off.

        Raises:
            ClosedError: it is closed, or was meanwhile.
        """
        async with self._changing:
            if self._closing.begun:
                raise ClosedError(_CLOSED)
            self._changer = task = asyncio.current_task()
            assert task is not None
            before = task.cancelling()
            try:
                yield
            except asyncio.CancelledError:
                if self._called_off is task and task.cancelling() == before + 1:  # by that alone
                    raise ClosedError(_CLOSED) from None
                raise
            finally:
                self._changer = None
                if self._called_off is task:
                    task.uncancel()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # one life of the server

    async def _is_ours(self) -> bool:
        """Whether the server that answers is the one that the receiver was made for, unchanged by others."""
        assert self._state is not None
        assert self._serving is not None
        expected = self._state.weight_version
        said = await self.front.weight_version()
        # A push may have begun, or ended, while the answer was under way: then it says nothing.
        now = self._state.weight_version
        return said == expected or self._serving.hold.is_mine(said) or now is None or now != expected

    async def _look(self) -> None:
        """`attach`, by whoever is alone."""
        if self._receiver is None or not (self._busy() or await self._is_ours()):
            await self._attach()

    async def _attach(self) -> None:
        info = await self.front.info()
        problems = info.problems()
        if problems:
            raise ConfigError(problems)
        if self._layout is None:
            self._layout = await asyncio.to_thread(self._find_layout, info)
        if self._hold is None or self._hold.life != info.life:
            if self._hold is not None:
                self._hold.release()
                self._released = set()  # it was started anew, and has all of it
            self._hold = Hold(self.front, life=info.life, patience_s=self.options.timeout_s)
        hold = self._hold.share()
        said = await hold.take()
        try:
            if self._receiver is None or not await self._goes_on(info.life):
                await self._detach()
                await self._attach_held(info, self._hold.share(), self._layout, said)
        finally:
            hold.release()

    async def _goes_on(self, life: str) -> bool:
        """Whether the receiver stays: meanwhile a push of its own has begun, or ended, or another source has given up."""
        assert self._state is not None
        ours = self._state.info.life == life and await self._is_ours()
        return self._busy() or ours

    async def _attach_held(self, info: ServerInfo, hold: Hold, layout: Layout, said: str) -> None:
        version = _held(said, info)
        if not _is_ours(said) and await self.front.is_starting():
            raise _Starting(f"{self.front.url} is still starting; try again later")
        held = said if version is not None else None
        self._state = state = ServerState(info=info, weight_version=held, released=self._released)
        self._serving = serving = SGLangServing(self.front, state, hold)
        try:
            await self._settle(serving, version)
            await self._receive(info, layout, said, version)
        except BaseException:
            await self._give_back(serving, version)
            await serving.close(_LAST_S)
            raise

    async def _give_back(self, serving: SGLangServing, version: int | None) -> None:
        """What could not be taken over goes on with the whole version that it has."""
        if version is None or self._state is None or self._state.paused is None:
            return
        try:
            async with asyncio.timeout(_GIVE_BACK_S):
                await serving.go_on(version)
        except TimeoutError:
            log.warning("SGLang at %s was paused and does not answer: it stays paused", self.front.url)

    async def _receive(self, info: ServerInfo, layout: Layout, said: str, version: int | None) -> None:
        """Begin to listen, for this life of the server."""
        state, serving = self._state, self._serving
        assert state is not None
        assert serving is not None
        self._way = way = self._make_way()
        receiver = Receiver(
            loader=SGLangLoader(
                front=self.front,
                state=state,
                serving=serving,
                way=way,
                layout=layout,
                bucket_bytes=self._bucket_bytes,
                selector=self.options.selector,
                loop=asyncio.get_running_loop(),
            ),
            listen=self._listen,
            secret=self._secret,
            serving=serving,
            initial_version=version,
            initial_digest=_UNKNOWN if said == str(version) else "",
            bind_host=self._bind_host,
        )
        await receiver.start()
        self._receiver, self._listen = receiver, receiver.address
        log.info("SGLang %s at %s is %s, version %s", info.dialect.version, self.front.url, receiver.state, version)

    async def _settle(self, serving: SGLangServing, version: int | None) -> None:
        """An earlier stand-in may have died at any point: what it left open or cached does not go on with its version."""
        assert self._state is not None
        if version is None or self._state.weight_version != str(version):
            return
        await serving.halt("keep")
        await self.front.end(self._state.info.dialect, if_open=True)
        await serving.drop_cache()

    async def _detach(self) -> None:
        """`_end_receiver`, for the sake of the next: that does not fail over a part of this one that could not be closed."""
        try:
            await self._end_receiver(0.0)
        except Exception as error:  # noqa: BLE001 - whatever could not be closed
            log.warning("SGLang at %s: something that was made for it could not be closed: %r", self.front.url, error)

    async def _end_receiver(self, patience_s: float) -> None:
        """Let go of what was made for one life of the server. All of it, also where the caller is cancelled."""
        receiver, self._receiver = self._receiver, None
        way, self._way = self._way, None
        closes: list[Callable[[], Awaitable[None]]] = []
        if receiver is not None:
            closes.append(receiver.close)
        if self._serving is not None:
            closes.append(partial(self._serving.close, patience_s))
        if way is not None:
            closes.append(way.close)
        await Closing(lambda: in_turn(*closes), "syncline-sglang-detach")()

    def _find_layout(self, info: ServerInfo) -> Layout:
        """Reads files and builds a model without memory: off the event loop."""
        model = info.model_path if self.options.model is None else self.options.model
        dtype = self.options.dtype or info.dtype
        if dtype == "auto":
            dtype = _checkpoint_dtype(model)
        return checkpoint_tensors(model, dtype=dtype).layout

    def _make_way(self) -> Way:
        options = self.options
        if options.transport == "disk":
            return DiskWay(self.front, parent=options.folder, timeout_s=options.timeout_s)
        if options.transport == "tensor":
            return TensorWay(self.front, timeout_s=options.timeout_s)
        return DistributedWay(self.front, backend=options.backend, host=options.host, timeout_s=options.timeout_s)

    def _running(self) -> Receiver:
        if self._receiver is None:
            raise TargetUnreachable(f"the SGLang server at {self.front.url} is not there")
        return self._receiver

    async def _watch_it(self) -> None:
        """Notice that the server died, or is another one, and begin anew with that one."""
        while True:
            await asyncio.sleep(self.options.watch_s)
            try:
                async with self._alone():
                    await self._look_or_lose()
            except ClosedError:
                return

    async def _look_or_lose(self) -> None:
        """By whoever is alone until all has been done: only a push can come between, and that is asked for last."""
        try:
            await self._look()
        except BusyError as error:
            log.debug("SGLang at %s: %s", self.front.url, error)
        except (SynclineError, OSError, ValueError, TypeError) as error:  # the last two: an answer that is none of SGLang's
            log.debug("SGLang at %s: %s", self.front.url, error)
            if self._receiver is not None and not self._busy():
                log.warning("SGLang at %s is lost: %s", self.front.url, error)
                await self._detach()

    def _busy(self) -> bool:
        """While a push is under way its own calls notice what is wrong."""
        return self._receiver is not None and self._receiver.state == "UPDATING"


def _is_ours(said: str) -> bool:
    """A weight version of the kind that stand-ins set."""
    return said.startswith(UNFINISHED) or (said.isascii() and said.isdigit())


def _held(said: str, info: ServerInfo) -> int | None:
    """The version that a server holds whole, as far as it can be told from what it says."""
    if said.startswith(UNFINISHED):
        return None
    if said.isascii() and said.isdigit():
        return int(said)
    return None if info.load_format == "dummy" else 0


def _checkpoint_dtype(model: Any) -> str:
    from ..checkpoints import Checkpoint

    config = Checkpoint.find(model).config() if isinstance(model, str) else model
    found = getattr(config, "dtype", None)
    if found is None:
        with contextlib.suppress(AttributeError):
            found = config.torch_dtype
    return str(found).removeprefix("torch.") if found is not None else "bfloat16"
