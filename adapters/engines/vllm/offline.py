"""vLLM's endpoints for an ``LLM`` or ``AsyncLLM`` of this process, on a unix socket that only this user reaches.

The receivers in vLLM's workers speak to vLLM by its endpoints, whoever runs it. For an object of one's own there are none, so
this offers those that they call, each of them a method of the object.

An ``AsyncLLM`` pauses and resumes itself, on the loop that it was made on. An ``LLM`` has no pause: it computes only while its
owner is inside ``generate``. So a push waits (``drain``) or fails while requests are unfinished, and while the target is fenced
the object refuses new ones: `NotServing`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from syncline.engine.errors import BusyError, NotServing
from syncline.stages.workers import call_in_thread

_START_S = 10.0
_DRAIN_S = 3600.0
_LOOK_AGAIN_S = 0.005
_MOST_BODY_BYTES = 2**20

Query = Mapping[str, str]


class Engine(Protocol):
    """What the endpoints ask of the object."""

    config: Any

    async def rpc(self, method: str, **arguments: Any) -> None: ...
    async def pause(self, mode: str, *, clear_cache: bool) -> None: ...
    async def resume(self) -> None: ...
    async def reset_prefix_cache(self) -> bool: ...
    async def name_version(self, version: str) -> None: ...
    def close(self) -> None: ...


def problems_of(engine: Any) -> list[str]:
    """Why an object cannot be a target; empty if it can."""
    if _is_async(engine) or _is_sync(engine):
        settings = _settings(engine)
        chosen = getattr(settings.weight_transfer_config, "backend", None)
        if chosen != "syncline":
            return [f"its weight transfer backend is {chosen!r}; make it with weight_transfer_config={{'backend': 'syncline'}}"]
        return []
    return [f"a {type(engine).__name__} is neither a url nor an LLM or AsyncLLM of vLLM"]


class Offline:
    """Offers the endpoints from `start` to `close`, on a thread of its own.

    Args:
        engine: an ``LLM`` or ``AsyncLLM``. An ``AsyncLLM`` has to live on a loop that keeps running.
        loop: the ``AsyncLLM``'s; None: that on which `start` is awaited.
    """

    def __init__(self, engine: Any, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._object, self._its_loop = engine, loop
        self._engine: Engine | None = None
        self._folder: Path | None = None
        self._thread: threading.Thread | None = None
        self._stop: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ready: asyncio.Future[None] | None = None

    async def start(self) -> str:
        """Listen. Returns the url: ``unix:/path``."""
        mine = asyncio.get_running_loop()
        self._engine = _Async(self._object, self._its_loop or mine) if _is_async(self._object) else _Sync(self._object)
        self._folder = Path(tempfile.mkdtemp(prefix="syncline-llm-"))
        self._ready = mine.create_future()
        self._thread = threading.Thread(target=self._run, args=(mine, self._ready), name="syncline-llm", daemon=True)
        self._thread.start()
        async with asyncio.timeout(_START_S):
            await self._ready
        return f"unix:{self._folder}/front"

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it has ended by itself
                self._stop.set_result(None)
            await call_in_thread(lambda: thread.join(_START_S), name="syncline-llm-stop")
        if self._engine is not None:
            self._engine.close()
        if (folder := self._folder) is not None:
            await call_in_thread(lambda: shutil.rmtree(folder, ignore_errors=True), name="syncline-remove")

    def _run(self, caller: asyncio.AbstractEventLoop, ready: asyncio.Future[None]) -> None:
        async def live() -> None:
            runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=0.5)
            await runner.setup()
            try:
                await web.UnixSite(runner, f"{self._folder}/front").start()
                caller.call_soon_threadsafe(_done, ready, None)
                await asyncio.wrap_future(self._stop)  # which may have been set before this thread came here
            finally:
                await runner.cleanup()

        try:
            asyncio.run(live())
        except Exception as error:  # noqa: BLE001 - told to who waits for the start
            with contextlib.suppress(RuntimeError):
                caller.call_soon_threadsafe(_done, ready, error)

    def _app(self) -> web.Application:
        engine = self._engine
        assert engine is not None
        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        parallel = engine.config.parallel_config

        async def finish(body: Mapping[str, Any]) -> None:
            await engine.rpc("finish_weight_update")
            if body.get("weight_version") is not None:
                await engine.name_version(body["weight_version"])

        async def init(body: Mapping[str, Any]) -> None:
            await engine.rpc("init_weight_transfer_engine", init_info={**body["init_info"], "idles": isinstance(engine, _Sync)})

        async def reset(*_: Any) -> dict[str, Any]:
            return {"success": await engine.reset_prefix_cache()}

        routes: dict[str, Callable[[Query, Mapping[str, Any]], Awaitable[Any]]] = {
            "init_weight_transfer_engine": lambda _, b: init(b),
            "start_weight_update": lambda _, b: engine.rpc("start_weight_update", **b),
            "update_weights": lambda _, b: engine.rpc("update_weights", update_info=b["update_info"]),
            "finish_weight_update": lambda _, b: finish(b),
            "update_weight_version": lambda _, b: engine.name_version(b["new_version"]),
            "pause": lambda q, _: engine.pause(q.get("mode", "abort"), clear_cache=q.get("clear_cache") != "false"),
            "resume": lambda *_: engine.resume(),
            "reset_prefix_cache": reset,
        }
        for name, handle in routes.items():
            app.router.add_post(f"/{name}", partial(_answer, handle))
        for name, what in {"version": {"version": _release()}, "get_world_size": {"world_size": _world_size(parallel)}}.items():
            app.router.add_get(f"/{name}", partial(_answer, lambda *_, what=what: _now(what)))
        return app


class _Async:
    """An ``AsyncLLM``, called on its own loop."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._its_loop = engine, loop
        self.config = _settings(engine)

    async def rpc(self, method: str, **arguments: Any) -> None:
        await self._there(lambda: self._engine.collective_rpc(method, kwargs=arguments))

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        await self._there(lambda: self._engine.pause_generation(mode=mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        await self._there(self._engine.resume_generation)

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._there(lambda: self._engine.reset_prefix_cache(True, False)))

    async def name_version(self, version: str) -> None:
        await self._there(lambda: self._engine.update_weight_version(version))

    def close(self) -> None:
        """It belongs to the caller."""

    async def _there(self, call: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return await call()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._its_loop))


class _Guard:
    """Stands before an ``LLM``'s ``add_request``: one for each object, whoever of this process pushes into it.

    It outlives its users while the object is fenced: the next one finds it there, and lifts it.
    """

    _one_at_a_time = threading.Lock()

    def __init__(self, engine: Any) -> None:
        self._engine, self._add_request = engine, engine.add_request
        self.users: set[object] = set()
        self._changing = threading.Lock()
        self._fenced = False
        self._inside = 0
        engine.add_request = self._guarded

    @classmethod
    def enter(cls, engine: Any, user: object) -> _Guard:
        """The object's guard, which stays at least until its user leaves."""
        with cls._one_at_a_time:
            there = getattr(engine.add_request, "__self__", None)
            guard = there if isinstance(there, cls) else cls(engine)
            guard.users.add(user)
            return guard

    def leave(self, user: object) -> None:
        """May be called again."""
        with self._one_at_a_time:
            self.users.discard(user)
            if not self.users and not self._fenced and self._engine.add_request == self._guarded:
                self._engine.add_request = self._add_request

    def fence(self) -> bool:
        """Refuse requests from now on. Returns whether they were refused already."""
        with self._changing:
            was, self._fenced = self._fenced, True
            return was

    def lift(self) -> None:
        with self._changing:
            self._fenced = False

    def busy(self) -> bool:
        """Requests are unfinished, or about to be: vLLM counts one at the end of ``add_request``, so that is asked last."""
        with self._changing:
            inside = self._inside
        return inside > 0 or bool(self._engine.has_unfinished_requests())

    def _guarded(self, *arguments: Any, **named: Any) -> Any:
        with self._changing:
            if self._fenced:
                raise NotServing("this LLM is fenced, or a push is under way: it serves again once a whole push has committed")
            self._inside += 1
        try:
            return self._add_request(*arguments, **named)
        finally:
            with self._changing:
                self._inside -= 1


class _Sync:
    """An ``LLM``: its calls block, one at a time, on a thread of their own."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.config = _settings(llm)
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="syncline-llm-call")
        self._guard = _Guard.enter(llm.llm_engine, self)

    async def rpc(self, method: str, **arguments: Any) -> None:
        await self._call(lambda: self._llm.collective_rpc(method, kwargs=arguments))

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        was = self._guard.fence()
        give_up = time.monotonic() + (_DRAIN_S if mode == "wait" else 0.0)
        while (busy := self._guard.busy()) and time.monotonic() < give_up:  # noqa: ASYNC110 - another thread ends them
            await asyncio.sleep(_LOOK_AGAIN_S)
        if busy:
            if not was:
                self._guard.lift()
            raise BusyError(
                "this LLM has unfinished requests, and its owner is inside generate(): push between calls, or with "
                "in_flight='drain', which waits for them"
            )
        if clear_cache:
            await self.reset_prefix_cache()
            await self._call(self._drop_media)

    def _drop_media(self) -> None:
        """What encoders computed of images and the like; an ``AsyncLLM`` does that itself in its pause."""
        if not getattr(self.config.model_config, "is_multimodal_model", False):
            return
        for owner, name in ((self._llm, "reset_mm_cache"), (self._llm.llm_engine, "reset_encoder_cache")):
            if (drop := getattr(owner, name, None)) is not None:  # not in every release
                drop()

    async def resume(self) -> None:
        self._guard.lift()

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._call(self._llm.reset_prefix_cache))

    async def name_version(self, version: str) -> None:
        await self._call(lambda: self._llm.llm_engine.set_weight_version(version))

    def close(self) -> None:
        self._guard.leave(self)
        self._calls.shutdown(wait=False, cancel_futures=True)

    async def _call(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._calls, call)


async def _answer(handle: Callable[[Query, Mapping[str, Any]], Awaitable[Any]], request: web.Request) -> web.Response:
    try:
        body = await request.json() if request.can_read_body else {}
        found = await handle(request.query, body or {})
    except Exception as error:  # noqa: BLE001 - as vLLM's own server does it: whatever the engine raised is the answer
        return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)
    return web.json_response(found if isinstance(found, dict) else {})


async def _now(what: dict[str, Any]) -> dict[str, Any]:
    return what


def _done(future: asyncio.Future[None], error: Exception | None) -> None:
    if not future.done():
        future.set_result(None) if error is None else future.set_exception(error)


def _is_async(engine: Any) -> bool:
    return hasattr(engine, "pause_generation") and hasattr(engine, "collective_rpc")


def _is_sync(engine: Any) -> bool:
    return hasattr(engine, "llm_engine") and hasattr(engine, "collective_rpc")


def _settings(engine: Any) -> Any:
    """Its ``VllmConfig``."""
    return engine.vllm_config if _is_async(engine) else engine.llm_engine.vllm_config


def _world_size(parallel: Any) -> int:
    return int(getattr(parallel, "world_size_across_dp", parallel.world_size))


def _release() -> str:
    import vllm

    return str(vllm.__version__)
