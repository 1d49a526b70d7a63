"""A receiver beside a vLLM worker: a thread with an event loop of its own.

The ranks of one vLLM server find each other, and the source finds the leader, through a directory of the source that every
rank writes a file into (one host), or at a port that the source chose (beyond one host).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.engine.errors import ConfigError, SynclineError, TargetUnreachable
from syncline.engine.receiver import Receiver

from ..checkpoint_manifest import CheckpointTensors
from .front import Front, is_loopback
from .info import InitInfo
from .loader import Reload, VLLMLoader
from .main_thread import MainThread
from .rendezvous import Rendezvous
from .serving import LeaderServing, MemberServing
from .versions import interfaces

log = logging.getLogger("syncline.vllm")

_CLOSE_S = 8.0
_ASK_S = 2.5
_LOOK_AGAIN_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker's place in its server, and what the server does.

    Attributes:
        rank, world_size: over all workers: data parallel, pipeline and tensor parallel.
        prefix_caching: vLLM keeps keys and values for requests to come.
        media: the model takes images and the like.
        no_keep: why requests in flight cannot be kept over a push; empty: they can.
    """

    rank: int
    world_size: int
    prefix_caching: bool
    media: bool = False
    no_keep: str = ""


class Agent:
    """Runs the receiver of one worker.

    Args:
        info: where the others are.
        place: of this worker.
        wanted: what a checkpoint of the served model holds.
        reload: vLLM's reload of this worker's model.
        main: its main thread.
        initial_version: of the weights that vLLM has loaded itself; None: they are random, and nothing is served.
        initial_digest: of their content, where an agent before has learnt it.
    """

    def __init__(
        self,
        info: InitInfo,
        *,
        place: Place,
        wanted: CheckpointTensors,
        reload: Reload,
        main: MainThread,
        initial_version: int | None,
        initial_digest: str = "",
    ) -> None:
        self.info = info
        self._place, self._wanted, self._reload, self._main = place, wanted, reload, main
        self._initial_version = initial_version
        self._held: tuple[int | None, str] = (initial_version, initial_digest)
        self._secret = info.shared_secret()
        self._stop = asyncio.Event()
        self._receiver: Receiver | None = None
        self._failure = ""
        self._announced: list[InitInfo] = []
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._living: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=f"syncline-vllm-{place.rank}", daemon=True)

    @property
    def alive(self) -> bool:
        """The receiver runs, or is about to."""
        return self._thread.is_alive()

    @property
    def version(self) -> int | None:
        """The version that is served; None: fenced."""
        receiver = self._receiver
        return self._initial_version if receiver is None else receiver.serving_version

    @property
    def digest(self) -> str:
        """Of the content of `version`, once this has been closed; empty: unknown."""
        version, digest = self._held
        return digest if version is not None and version == self.version else ""

    def start(self) -> None:
        """Begin. What goes wrong later is said at the rendezvous."""
        self.announce(self.info)
        self._thread.start()

    def announce(self, info: InitInfo) -> None:
        """Say at a rendezvous where the leader listens, once it does."""
        with self._lock:
            self._announced.append(info)
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has just ended
                    self._loop.call_soon_threadsafe(self._say)

    def close(self) -> None:
        """End the receiver, in bounded time. Weights stay as they are, served or not as before."""
        with self._lock:
            loop = self._loop
            if loop is None:
                self._stop.set()  # nobody waits for it yet, or any more
        if loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._end)
        if self._thread.is_alive():
            self._main.release(committed=False)
            self._thread.join(_CLOSE_S)

    # on the agent's thread

    def _run(self) -> None:
        import uvloop

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._live())
        except asyncio.CancelledError:
            pass  # closed before it had started
        except Exception as error:
            self._failure = str(error)
            log.exception("the receiver of rank %d ended", self._place.rank)
            self._say()
        finally:
            with self._lock:
                self._loop = None

    def _end(self) -> None:
        self._stop.set()
        if self._receiver is None and self._living is not None:
            self._living.cancel()  # it may look for its leader for long

    async def _live(self) -> None:
        with self._lock:
            self._loop, self._living = asyncio.get_running_loop(), asyncio.current_task()
        if self._stop.is_set():
            return
        with _own_directory() as folder:
            receiver, serving = await self._make(folder)
            try:
                await receiver.start()
                if self._place.rank:
                    await receiver.joined()
                self._receiver = receiver
                self._say()
                await self._stop.wait()
                self._held = await _held(receiver)
            finally:
                await receiver.close()
                if isinstance(serving, LeaderServing):
                    await serving.close()

    async def _make(self, folder: Path) -> tuple[Receiver, LeaderServing | MemberServing]:
        info, place = self.info, self._place
        if place.rank == 0:
            front = Front(info.url, known=interfaces(info.version))
            no_keep = "" if info.idles else place.no_keep  # none is in flight that would have to be kept
            serving: LeaderServing | MemberServing = LeaderServing(
                front, self._main, prefix_caching=place.prefix_caching, media=place.media, no_keep=no_keep
            )
        else:
            serving = MemberServing(self._main)
        opened = serving.open_session if isinstance(serving, LeaderServing) else None
        options: dict[str, Any] = {
            "rank": place.rank,
            "world_size": place.world_size,
            "leader": await self._leader() if place.rank else None,
            "secret": self._secret,
            "serving": serving,
            "initial_version": self._initial_version,
            "initial_digest": self._held[1],
            **self._network(folder),
        }
        return Receiver(VLLMLoader(self._wanted, self._reload, self._main, opened), **options), serving

    def _network(self, folder: Path) -> dict[str, Any]:
        """Where this rank listens: on one host a unix socket that only this user reaches."""
        info, rank = self.info, self._place.rank
        if not info.control_port:
            return {"listen": f"unix:{folder}/control"}
        port = 0 if rank else info.control_port
        if is_loopback(f"http://{info.host}"):
            return {"listen": f"tcp://127.0.0.1:{port}", "bind_host": "127.0.0.1"}
        mine = _address_towards(info.host)
        return {"listen": f"tcp://0.0.0.0:{port}", "advertise": mine if rank else info.host, "bind_host": mine}

    async def _leader(self) -> str:
        """The leader's control address. Raises `TargetUnreachable` if it does not say where it is in time."""
        info = self.info
        if info.control_port:
            return f"tcp://{info.host}:{info.control_port}"
        meeting = Rendezvous(info.rendezvous)
        try:
            async with asyncio.timeout(info.patience_s):
                while not (leader := meeting.leader()):  # noqa: ASYNC110 - another process writes the file
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except TimeoutError:
            raise TargetUnreachable(
                f"rank {self._place.rank} of vLLM did not find its leader in {info.rendezvous} within {info.patience_s:g} s"
            ) from None
        return leader

    def _say(self) -> None:
        """Tell those who asked where we are, or why we are not."""
        receiver = self._receiver
        if receiver is None and not self._failure:
            return
        with self._lock:
            asked, self._announced = self._announced, []
        for info in asked:
            if info.rendezvous:
                with contextlib.suppress(OSError, SynclineError):  # nobody waits there any more
                    address = receiver.address if receiver is not None else ""
                    Rendezvous(info.rendezvous).say(self._place.rank, address, self._failure)


async def _held(receiver: Receiver) -> tuple[int | None, str]:
    """The version committed last, and the digest of its content: without it other content under that version would pass."""
    with contextlib.suppress(TimeoutError, SynclineError):
        async with asyncio.timeout(_ASK_S):
            status = await receiver.status()
        return status.version, status.digest
    return None, ""


@contextlib.contextmanager
def _own_directory() -> Iterator[Path]:
    """A 0700 directory for a socket; its name begins with the process that it belongs to."""
    folder = Path(tempfile.mkdtemp(prefix=f"syncline-vllm-{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _address_towards(host: str) -> str:
    """The address of this host's interface that leads to ``host``. Nothing is sent."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError([f"no interface of vLLM's host leads to {host!r}: {error}"]) from None
