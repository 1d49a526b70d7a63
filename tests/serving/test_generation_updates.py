"""What an update finds and leaves: drain, abort, keep, the fence, the queue."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from syncline.adapters.engines.generation import GenerationEngine
from syncline.adapters.engines.replay import Replayer
from syncline.adapters.engines.requests import (
    ForwardFailed,
    QueueFull,
    RequestAborted,
    RequestCancelled,
    RequestTimeout,
    Span,
    TargetFenced,
)
from syncline.engine.errors import ClosedError, NotServing
from syncline.engine.loader import Serving

MODES = ["keep", "drain", "abort"]


@pytest.fixture
def two(tiny, weights_of):
    """A model, and two sets of weights for it: odd versions are the first set, even ones the second."""
    model = tiny("qwen3")
    sets = [weights_of(tiny("qwen3", seed=1)), weights_of(model)]
    return model, lambda version: sets[version % 2]


@pytest.fixture
def engine(two):
    return GenerationEngine(two[0], max_batch=3, max_waiting=4, eos_ids=(), version=1, timeout_s=20.0)


async def begun(engine, request):
    """A request that has its first token."""
    generation = engine.submit(request)
    await anext(generation)
    return generation


def is_serving(serving: Serving) -> bool:
    return isinstance(serving, Serving)


async def test_keep_goes_on_with_new_weights_on_old_keys_and_values(engine, two, swap, ask, tiny):
    model, weights = two
    swap(model, weights(1))
    assert is_serving(engine)
    async with engine:
        generation = await begun(engine, ask((9, 8, 7), 40))
        await engine.pause("keep")
        had = len(generation.tokens)
        assert engine.state == "UPDATING"
        swap(model, weights(2))
        await engine.resume(2)
        answer = await generation.answer()
    assert 0 < had < 40
    assert answer.versions == [Span(version=1, start=0, end=had), Span(version=2, start=had, end=40)]
    replayer = Replayer(tiny("qwen3"), weights)
    assert replayer.check((9, 8, 7), answer.token_ids, answer.versions).ok
    # the proof is able to fail: other versions, other borders
    for wrong in (
        [Span(version=1, start=0, end=40)],
        [Span(version=2, start=0, end=40)],
        [Span(version=2, start=0, end=had), Span(version=1, start=had, end=40)],
    ):
        assert not replayer.check((9, 8, 7), answer.token_ids, wrong).ok


async def test_drain_ends_what_runs_and_admits_nothing(engine, two, swap, ask):
    model, weights = two
    async with engine:
        running = [await begun(engine, ask((9, 8, 7 + i), 25)) for i in range(2)]
        pausing = asyncio.create_task(engine.pause("drain"))
        await asyncio.sleep(0)
        late = engine.submit(ask((11, 12), 5))
        await pausing
        assert all(generation.finish_reason == "length" for generation in running)
        assert not late.tokens
        swap(model, weights(2))
        await engine.resume(2)
        answers = [await generation.answer() for generation in (*running, late)]
    assert [answer.versions for answer in answers] == [
        [Span(version=1, start=0, end=25)],
        [Span(version=1, start=0, end=25)],
        [Span(version=2, start=0, end=5)],
    ]


async def test_abort_gives_what_there_was_and_the_request_can_be_asked_again(engine, ask, alone, two):
    async with engine:
        generation = await begun(engine, ask((9, 8, 7), 40))
        await engine.pause("abort")
        with pytest.raises(RequestAborted, match="ask again") as caught:
            await generation.answer()
        again = engine.submit(ask((9, 8, 7), 40))
        await engine.resume(2)
        answer = await again.answer()
    error = caught.value
    assert error.retryable
    assert 0 < len(error.token_ids) < 40
    assert error.versions == (Span(version=1, start=0, end=len(error.token_ids)),)
    assert list(error.token_ids) == answer.token_ids[: len(error.token_ids)]  # the weights were the same here


async def test_a_stream_gets_its_tokens_before_the_error(engine, ask):
    async with engine:
        generation = await begun(engine, ask((9, 8, 7), 40))
        await engine.pause("abort")
        got = []
        with pytest.raises(RequestAborted) as caught:
            async for token in generation:
                got.append(token.id)
    assert got == list(caught.value.token_ids[1:])


async def test_fenced_from_the_start_until_the_first_commit(two, ask):
    async with GenerationEngine(two[0]) as engine:
        assert (engine.state, engine.version) == ("FENCED", None)
        with pytest.raises(TargetFenced, match="no version has been pushed yet"):
            engine.submit(ask((9, 8)))
        with pytest.raises(NotServing):
            await engine.logits((9, 8))
        patient = engine.submit(ask((9, 8), 3, wait=True))
        logits = asyncio.create_task(engine.logits((9, 8), wait=True))
        await asyncio.sleep(0)
        await engine.pause("keep")
        await engine.resume(5)
        answer = await patient.answer()
        assert (await logits)[1] == 5
    assert answer.versions == [Span(version=5, start=0, end=3)]


async def test_a_fence_ends_what_runs_and_what_waits(engine, ask):
    async with engine:
        running = [await begun(engine, ask((9, 8, i), 60)) for i in range(6, 9)]  # every place is taken
        waiting, patient = engine.submit(ask((9, 8))), engine.submit(ask((9, 8), 2, wait=True))
        await engine.fence("the push failed at bucket 3")
        for generation in running:
            with pytest.raises(RequestAborted):
                await generation.answer()
        with pytest.raises(TargetFenced, match="bucket 3"):
            await waiting.answer()
        with pytest.raises(TargetFenced, match="bucket 3"):
            engine.submit(ask((9, 8)))
        assert engine.state == "FENCED"
        await engine.pause("keep")
        await engine.resume(2)
        assert (await patient.answer()).versions == [Span(version=2, start=0, end=2)]


@pytest.mark.parametrize("mode", MODES)
async def test_a_full_queue_neither_blocks_a_pause_nor_is_lost(engine, ask, mode):
    async with engine:
        running = [await begun(engine, ask((9, 8, i), 30)) for i in range(6, 9)]
        waiting = [engine.submit(ask((7, i), 4)) for i in range(6, 10)]
        with pytest.raises(QueueFull, match="max_waiting is 4"):
            engine.submit(ask((7, 7)))
        async with asyncio.timeout(20):
            await engine.pause(mode)
        assert engine.status().waiting == 4
        await engine.resume(2)
        answers = [await generation.answer() for generation in waiting]
        assert all(answer.versions == [Span(version=2, start=0, end=4)] for answer in answers)
        assert all(generation.done or mode == "keep" for generation in running)
        for generation in running if mode == "keep" else ():
            assert (await generation.answer()).versions[-1].version == 2


async def test_what_waits_too_long_is_told_so(engine, ask):
    async with engine:
        held = await begun(engine, ask((9, 8, 7), 60, timeout_s=0.3))
        await engine.pause("keep")
        late = engine.submit(ask((9, 8), timeout_s=0.05))
        with pytest.raises(RequestTimeout, match="UPDATING"):
            await engine.logits((9, 8), timeout_s=0.05)
        for generation in (late, held):
            with pytest.raises(RequestTimeout, match="no token for"):
                await generation.answer()
        assert held.error.token_ids
        await engine.resume(2)
        assert len((await engine.generate(ask((9, 8), 3))).token_ids) == 3


async def test_cancelling_frees_the_place(engine, ask):
    async with engine:
        running = [await begun(engine, ask((9, 8, i), 100)) for i in range(6, 9)]
        waiting = engine.submit(ask((7, 7), 2))
        task = asyncio.create_task(running[0].answer())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await waiting.answer()).token_ids) == 2  # it got the place while the others go on
        assert not running[1].done
        async with running[1]:
            pass
        with pytest.raises(RequestCancelled):
            await running[1].answer()
        assert engine.status().failed == 2


async def test_cancelling_works_while_paused(engine, ask):
    async with engine:
        held = await begun(engine, ask((9, 8, 7), 60))
        await engine.pause("keep")
        held.cancel()
        waiting = engine.submit(ask((7, 7), 2))
        waiting.cancel()
        assert (engine.status().running, engine.status().waiting) == (0, 0)
        await engine.resume(2)
        assert len((await engine.generate(ask((9, 8), 3))).token_ids) == 3


async def test_an_operators_hold_and_an_update_are_apart(engine, ask):
    async with engine:
        generation = await begun(engine, ask((9, 8, 7), 40))
        await engine.hold("keep")
        had = len(generation.tokens)
        assert engine.state == "HELD"
        async with asyncio.timeout(20):
            await engine.pause("drain")  # nothing can be drained: the operator holds it back
        await engine.resume(2)
        assert (engine.state, len(generation.tokens)) == ("HELD", had)
        await engine.release()
        answer = await generation.answer()
    assert answer.versions == [Span(version=1, start=0, end=had), Span(version=2, start=had, end=40)]


async def test_an_operators_drain_waits_for_an_update_that_keeps(engine, ask):
    async with engine:
        generation = await begun(engine, ask((9, 8, 7), 40))
        await engine.pause("keep")
        await engine.hold("drain")  # at rest already: the update holds everything
        await engine.resume(2)
        await generation.answer()
        late = engine.submit(ask((9, 8), 3))
        await engine.hold("drain")
        assert not late.tokens
        await engine.release()
        await late.answer()


async def test_a_release_does_not_open_a_fence(two, ask):
    async with GenerationEngine(two[0]) as engine:
        await engine.hold("keep")
        await engine.release()
        with pytest.raises(TargetFenced):
            engine.submit(ask((9, 8)))


async def test_a_model_that_raises_fails_its_requests_and_nothing_else(engine, two, ask):
    model, _ = two
    calls = itertools.count()

    def fail_sometimes(*_):
        if next(calls) in (2, 5):
            raise RuntimeError("out of luck")

    async with engine:
        handle = model.model.register_forward_pre_hook(fail_sometimes)
        results = await asyncio.gather(*[engine.generate(ask((9, 8, i), 8)) for i in range(6, 13)], return_exceptions=True)
        handle.remove()
        answer = await engine.generate(ask((9, 8), 3))
    failed = [result for result in results if isinstance(result, ForwardFailed)]
    assert failed
    assert all("RuntimeError: out of luck" in str(error) and not error.retryable for error in failed)
    assert len(answer.token_ids) == 3
    assert engine.status().cache_bytes == 0


async def test_no_pass_runs_while_weights_change(engine, two, swap, ask):
    model, weights = two
    inside = []
    model.register_forward_pre_hook(lambda *_: inside.append(1))
    model.register_forward_hook(lambda *_: inside.clear())
    async with engine:
        running = [await begun(engine, ask((9, 8, i), 110)) for i in range(6, 9)]
        for version in range(2, 22):
            had = [len(generation.tokens) for generation in running]
            await engine.pause("keep")
            assert not inside
            await asyncio.to_thread(swap, model, weights(version), rebind=version % 3 == 0)
            assert not inside
            await engine.resume(version)
            while [len(generation.tokens) for generation in running] == had:
                await anext(running[0])
    assert engine.version == 21


async def test_an_update_without_a_pause_is_found_out(engine, two, swap, ask, tiny):
    """The control of the tests here: were the engine not at rest during updates, they would fail."""
    model, weights = two
    swap(model, weights(1))
    async with engine:
        generation = await begun(engine, ask((9, 8, 7), 100))
        swap(model, weights(2))
        answer = await generation.answer()
    assert answer.versions == [Span(version=1, start=0, end=100)]
    assert not Replayer(tiny("qwen3"), weights).check((9, 8, 7), answer.token_ids, answer.versions).ok


async def test_close_ends_everything(two, ask):
    engine = GenerationEngine(two[0], max_batch=1, version=1, eos_ids=())
    with pytest.raises(ClosedError, match="start"):
        engine.submit(ask((9, 8)))
    await engine.start()
    running = await begun(engine, ask((9, 8, 7), 100))
    waiting = engine.submit(ask((9, 8)))
    logits = asyncio.create_task(engine.logits((9, 8)))
    await asyncio.sleep(0)
    await engine.pause("keep")
    await engine.close()
    for generation in (running, waiting):
        with pytest.raises(RequestAborted, match="closing"):
            await generation.answer()
    with pytest.raises(RequestAborted, match="closing"):
        await logits
    with pytest.raises(ClosedError):
        engine.submit(ask((9, 8)))
    await engine.close()


async def test_a_pause_that_is_given_up_leaves_the_engine_paused(engine, ask):
    async with engine:
        generation = await begun(engine, ask((9, 8, 7), 100))
        pausing = asyncio.create_task(engine.pause("drain"))
        await asyncio.sleep(0)
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        late = engine.submit(ask((9, 8), 2))
        await generation.answer()
        assert (engine.state, late.tokens) == ("UPDATING", [])
        await engine.resume(1)
        await late.answer()


@pytest.fixture
async def under_updates(two, swap, ask, prompts):
    """``under_updates(rebind)``: what 8 clients got while the weights changed 20 times."""
    model, weights = two

    async def run(rebind: bool):
        swap(model, weights(1))
        answers, stop = [], asyncio.Event()

        async def client(prompt, new):
            while not stop.is_set():
                answers.append((prompt, await engine.generate(ask(prompt, new))))

        async with GenerationEngine(model, max_batch=5, eos_ids=(), version=1) as engine, asyncio.TaskGroup() as group:
            for number, prompt in enumerate(prompts(8)):
                group.create_task(client(prompt, 10 + 3 * number))
            for version in range(2, 22):
                goal = engine.status().tokens + 40
                async with engine.submit(ask((7, 7), 100)) as pace:
                    async for _ in pace:
                        if engine.status().tokens >= goal:
                            break
                await engine.pause("keep")
                await asyncio.to_thread(swap, model, weights(version), rebind=rebind)
                await engine.resume(version)
            stop.set()
        return answers

    return run


@pytest.mark.parametrize("rebind", [False, True], ids=["in place", "rebound"])
async def test_every_answer_under_twenty_updates_is_what_its_versions_give(under_updates, two, tiny, rebind):
    answers = await under_updates(rebind)
    replayer = Replayer(tiny("qwen3"), two[1])
    reports = [replayer.check(prompt, answer.token_ids, answer.versions) for prompt, answer in answers]
    assert [report.problem for report in reports if not report.ok] == []
    assert {span.version for _, answer in answers for span in answer.versions} == set(range(1, 22))
    assert sum(len(answer.versions) > 1 for _, answer in answers) >= 20
    for prompt, answer in answers[:10]:  # under the other weights they do not pass
        other = [Span(version=span.version + 1, start=span.start, end=span.end) for span in answer.versions]
        assert not replayer.check(prompt, answer.token_ids, other).ok
