"""URLs that name no server of an engine, and servers that are something else: said alike for every engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from syncline.adapters.engines import SGLangTarget, TwoPhaseTarget, VLLMTarget
from syncline.adapters.engines.sglang import SGLangFront
from syncline.adapters.engines.vllm.front import Front
from syncline.engine import TransferConfig
from syncline.engine.errors import ProtocolError, SynclineError

ENGINES: dict[str, Callable[[str], Any]] = {"vllm": VLLMTarget, "sglang": SGLangTarget}
BAD = {
    "http://[::1": "no url",
    "http://": "no url",
    "127.0.0.1:8000": "no url",
    "ftp://h:1": "no url",
    "http://h:99999": "out of range",
    "http://h:port": "port",
    "http://h:0": "port 0",
    "http://h:8000/v1": "has a path; name the server alone: http://h:8000",
    "http://h:8000?x=1": "has a path",
    "http://user:hunter2@h:8000": "carries a user and a password",
    "http://user:hunter2@h:8000/v1": "carries a user and a password",
    "http://user:hunter2@[::1": "no url",
    "http://h\n:8000": "",
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("url", BAD)
def test_urls_that_name_no_server(engine: str, url: str) -> None:
    target = ENGINES[engine](url)
    (problem,) = target.problems(TransferConfig())
    assert BAD[url] in problem
    assert problem.isprintable()
    assert "hunter2" not in problem + target.address


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("url", ["http://h", "https://h:1/", "http://[::1]:8000", "http://127.0.0.1:65535"])
def test_urls_that_do(engine: str, url: str) -> None:
    assert not ENGINES[engine](url).problems(TransferConfig())


def test_a_two_phase_server_may_lie_under_a_prefix() -> None:
    assert not TwoPhaseTarget("http://h:1/engine", model={}).problems(TransferConfig())
    for url in ("http://h:99999/engine", "http://user:hunter2@h:1/engine", "http://[::1"):
        (problem,) = TwoPhaseTarget(url, model={}).problems(TransferConfig())
        assert "hunter2" not in problem


def test_the_url_for_the_workers_is_looked_at_too() -> None:
    (problem,) = VLLMTarget("http://h:1", worker_url="http://h:99999").problems(TransferConfig())
    assert "worker_url" in problem and "out of range" in problem


SOMETHING_ELSE: dict[str, Callable[[], web.Response]] = {
    "html": lambda: web.Response(text="<html>welcome</html>", content_type="text/html"),
    "a list": lambda: web.json_response([1]),
    "another object": lambda: web.json_response({"hello": "world"}),
    "a failure in no encoding": lambda: web.Response(status=500, body=b"\xff\xfe\x80", content_type="text/plain"),
    "a page in no encoding": lambda: web.Response(body=b"\xff\xfe\x80", content_type="text/plain"),
    "a redirect": lambda: web.Response(status=302, headers={"Location": "/elsewhere"}),
    "not found": lambda: web.Response(status=404),
}


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Callable[[], web.Response]], Awaitable[tuple[str, list[str]]]]]:
    """``await serve(answer)``: URL of a server that gives this answer to everything, and the paths that it was asked."""
    runners = []

    async def start(answer: Callable[[], web.Response]) -> tuple[str, list[str]]:
        asked: list[str] = []

        async def handle(request: web.Request) -> web.Response:
            asked.append(request.path)
            return answer()

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runners.append(web.AppRunner(app, access_log=None))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runners[-1].addresses[0][1]}", asked

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.mark.parametrize("kind", SOMETHING_ELSE)
@pytest.mark.parametrize("engine", ENGINES)
async def test_something_else_that_listens_is_named(serve: Any, engine: str, kind: str) -> None:
    url, asked = await serve(SOMETHING_ELSE[kind])
    target = ENGINES[engine](url)
    with pytest.raises(SynclineError if "failure" in kind else ProtocolError) as caught:
        await target.locate(TransferConfig(connect_timeout_s=10))
    await target.close()
    assert url in str(caught.value)
    assert "/elsewhere" not in asked


async def test_what_a_server_says_in_no_encoding_is_told_all_the_same(serve: Any) -> None:
    url, _ = await serve(lambda: web.Response(status=500, body=b"kaput \xff", content_type="text/plain"))
    fronts: list[tuple[Any, str]] = [(Front(url), "resume"), (SGLangFront(url), "abort_all")]
    for front, call in fronts:
        with pytest.raises(Exception, match="kaput"):
            await getattr(front, call)()
        await front.close()
