"""HTTP in front of a `GenerationEngine`. JSON in, JSON out.

    POST /generate   {prompt | prompt_ids, max_new_tokens, temperature, top_p, seed, stream, logprobs, wait, timeout_s}
                     -> {text, token_ids, versions: [{version, start, end}], finish_reason, prompt_tokens, seed, logprobs}
                     with stream: server-sent events ``token`` (one each), then ``done`` (the same reply) or ``error``
    POST /logits     {prompt | prompt_ids, format: json | raw, wait, timeout_s} -> {version, shape, logits}; raw: float32
                     little-endian, row by row, with the headers X-Syncline-Version and X-Syncline-Shape
    POST /pause      {mode: keep | drain | abort, timeout_s}: an operator's pause, apart from updates
    POST /resume
    GET  /version, /status
    GET  /health     200 while the process is well, fenced or not: for liveness probes. A restart would not unfence it
    GET  /ready      503 with the state while nothing is served (fenced, held by an operator, closing): for readiness probes
                     and load balancers. During an update it stays 200: requests that come wait for its end
    POST /init_weights_update_group, /prepare_weights_update, /complete_weights_update, /destroy_weights_update_group
                     with ``two_phase``: updates from sources that speak only the two-phase document

Errors are {error, message, retryable, token_ids, versions}: 400 yours, 401 the secret, 429 the queue is full, 503 fenced,
aborted or closing, 504 too slow, 500 the model raised. `retryable` says whether asking again may help; what an aborted
request had got is in it. With a shared secret every call is signed (`syncline.engine.auth`), and so is every answer but a
stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, Self, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from syncline.engine.address import Address
from syncline.engine.errors import ClosedError, ConfigError
from syncline.engine.messages import State
from syncline.stages.workers import call_in_thread

from .answers import Generation
from .byte_tokenizer import TextStream, Tokenizer
from .generation import GenerationEngine
from .http_errors import error_reply, errors_as_json, json_reply
from .http_messages import (
    GenerateBody,
    GenerateReply,
    LogitsBody,
    LogitsReply,
    PauseBody,
    Prompt,
    StatusReply,
    TokenEvent,
    VersionReply,
)
from .requests import Answer, GenerateRequest, RequestError, RequestInvalid, RequestTimeout
from .two_phase_http import MOST_BYTES, PATHS, answer
from .two_phase_service import TwoPhaseService

T = TypeVar("T")
B = TypeVar("B", bound=msgspec.Struct)


class HostedReceiver(Protocol):
    """What the server tells of the `Receiver` in its process."""

    @property
    def address(self) -> str: ...

    @property
    def state(self) -> State: ...

    @property
    def version(self) -> int | None: ...


class GenerationServer:
    """Serves an engine over HTTP, on loopback unless there is a shared secret.

    Args:
        engine: started and closed by its owner.
        tokenizer: None takes and gives token ids only.
        host, port: where to listen; port 0 takes a free one.
        receiver: shown in `/status`.
        guard: see `secret_guard`. Needed beyond loopback.
        two_phase: also offer the endpoints of the two-phase document; closed with the server. With a guard they, too, take
            signed calls only.

    Raises:
        ConfigError: beyond loopback without a guard.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: Tokenizer | None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        receiver: HostedReceiver | None = None,
        guard: Middleware | None = None,
        two_phase: TwoPhaseService | None = None,
    ) -> None:
        if not Address(host=host).is_local and guard is None:
            raise ConfigError([f"http host {host!r} is beyond loopback and there is no secret; set one on both sides"])
        self._engine, self._tokenizer, self._receiver = engine, tokenizer, receiver
        self._host, self._port = host, port
        self._guard = guard
        self._two_phase = two_phase
        self._runner: web.AppRunner | None = None
        self._text_thread: ThreadPoolExecutor | None = None

    @property
    def url(self) -> str:
        """``http://host:port``. Raises `ClosedError` before `start`."""
        if self._runner is None or not self._runner.addresses:
            raise ClosedError("the server does not listen; call start() first")
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Listen. Raises `ConfigError` if the address cannot be had."""
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="syncline-text")
        self._runner = web.AppRunner(self.app(), handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self.close()
            raise ConfigError([f"cannot listen on http {self._host}:{self._port}: {error}"]) from error

    async def close(self) -> None:
        """Stop listening; answers under way get 5 seconds to end, then they are cancelled."""
        if self._two_phase is not None:
            await self._two_phase.close()
        runner, self._runner = self._runner, None
        thread, self._text_thread = self._text_thread, None
        if runner is not None:
            await runner.cleanup()
        if thread is not None:
            await call_in_thread(thread.shutdown, name="syncline-text-end")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def app(self) -> web.Application:
        """The aiohttp application, for those who serve it themselves."""
        limit = MOST_BYTES if self._two_phase is not None else 2**20
        app = web.Application(client_max_size=limit, middlewares=[*([self._guard] if self._guard else []), errors_as_json])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/logits", self._logits),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/version", self._version),
                web.get("/status", self._status),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
            ]
        )
        if self._two_phase is not None:
            app.add_routes([web.post(path, self._update) for path in PATHS])
        return app

    # ---- answers

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, GenerateBody)
        ids = await self._prompt_ids(body)
        asked = GenerateRequest(
            prompt_ids=tuple(ids),
            max_new_tokens=body.max_new_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            logprobs=body.logprobs,
            wait=body.wait,
            timeout_s=body.timeout_s,
        )
        async with self._engine.submit(asked) as generation:
            if body.stream:
                return await self._stream(request, generation)
            return json_reply(await self._reply(await generation.answer()))

    async def _stream(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        """Headers go out with the first token, so that what fails before it is a plain error with its own status."""
        text = TextStream(self._tokenizer) if self._tokenizer is not None else None
        response: web.StreamResponse | None = None
        try:
            async for token in generation:
                if response is None:
                    response = await _open_stream(request)
                event = TokenEvent(
                    token_id=token.id,
                    position=token.position,
                    version=token.version,
                    text=text.add(token.id) if text is not None else "",
                    logprob=token.logprob,
                )
                await _send(response, "token", event)
        except RequestError as error:
            if response is None:
                raise
            await _send(response, "error", error_reply(error))
        else:
            response = response or await _open_stream(request)
            await _send(response, "done", await self._reply(await generation.answer()))
        await response.write_eof()
        return response

    async def _logits(self, request: web.Request) -> web.Response:
        body = await _body(request, LogitsBody)
        ids = await self._prompt_ids(body)
        logits, version = await self._engine.logits(ids, wait=body.wait, timeout_s=body.timeout_s)
        tokens, vocab = logits.shape
        if body.format == "json":
            return await asyncio.to_thread(
                lambda: json_reply(LogitsReply(version=version, shape=(tokens, vocab), logits=logits.tolist()))
            )
        data = await asyncio.to_thread(lambda: logits.cpu().numpy().astype("<f4", copy=False).tobytes())
        headers = {"X-Syncline-Version": str(version), "X-Syncline-Shape": f"{tokens},{vocab}"}
        return web.Response(body=data, content_type="application/octet-stream", headers=headers)

    async def _prompt_ids(self, body: Prompt) -> list[int]:
        if (body.prompt is None) == (body.prompt_ids is None):
            raise RequestInvalid("give one of prompt (text) and prompt_ids (token ids)")
        if body.prompt_ids is not None:
            return body.prompt_ids
        if self._tokenizer is None:
            raise RequestInvalid("this model came without a tokenizer; give prompt_ids")
        tokenizer, prompt = self._tokenizer, body.prompt or ""
        return await self._in_text_thread(lambda: list(tokenizer.encode(prompt)))

    async def _reply(self, answer: Answer) -> GenerateReply:
        tokenizer, text = self._tokenizer, ""
        if tokenizer is not None:
            text = await self._in_text_thread(lambda: tokenizer.decode(answer.token_ids, skip_special_tokens=True))
        return GenerateReply(
            text=text,
            token_ids=answer.token_ids,
            versions=answer.versions,
            finish_reason=answer.finish_reason,
            prompt_tokens=answer.prompt_tokens,
            seed=answer.seed,
            logprobs=answer.logprobs,
        )

    async def _in_text_thread(self, work: Callable[[], T]) -> T:
        """Tokenizers are fast but not that fast, and not safe for several threads: one does it all."""
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, work)

    # ---- control

    async def _pause(self, request: web.Request) -> web.Response:
        body = await _body(request, PauseBody)
        try:
            async with asyncio.timeout(body.timeout_s):
                await self._engine.hold(body.mode)
        except TimeoutError as error:
            raise RequestTimeout(
                f"the engine did not come to rest within {body.timeout_s} s (mode {body.mode}); it stays paused: ask again, "
                "or resume it"
            ) from error
        return json_reply(self._engine.status())

    async def _resume(self, request: web.Request) -> web.Response:
        await self._engine.release()
        return json_reply(self._engine.status())

    async def _version(self, request: web.Request) -> web.Response:
        return json_reply(VersionReply(version=self._engine.version, state=self._state()))

    async def _status(self, request: web.Request) -> web.Response:
        status = self._engine.status()
        reply = StatusReply(
            state=self._state(),
            version=status.version,
            running=status.running,
            waiting=status.waiting,
            answered=status.answered,
            engine=status,
            receiver=None if self._receiver is None else self._receiver.address,
        )
        return json_reply(reply)

    async def _health(self, request: web.Request) -> web.Response:
        state = self._engine.state
        return web.json_response({"ok": state != "CLOSED", "state": state}, status=503 if state == "CLOSED" else 200)

    async def _ready(self, request: web.Request) -> web.Response:
        state = self._engine.state
        ready = state in ("SERVING", "UPDATING")
        reply = {"ready": ready, "state": state, "version": self._engine.version}
        return web.json_response(reply, status=200 if ready else 503)

    async def _update(self, request: web.Request) -> web.Response:
        """One of the two-phase document's paths."""
        assert self._two_phase is not None
        status, body = await answer(self._two_phase, request.path, await request.read())
        return web.Response(body=body, status=status, content_type="application/json")

    def _state(self) -> State:
        if self._receiver is not None:
            return self._receiver.state
        if self._engine.version is None:
            return "FENCED"
        return "UPDATING" if self._engine.state == "UPDATING" else "COMMITTED"


async def _body(request: web.Request, kind: type[B]) -> B:
    return msgspec.json.decode(await request.read() or b"{}", type=kind)


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    return response


async def _send(response: web.StreamResponse, event: str, data: msgspec.Struct) -> None:
    await response.write(b"event: " + event.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n")
