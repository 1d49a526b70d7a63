"""Hands calls to the main thread of a vLLM worker, where weights may be loaded.

vLLM runs a worker's model on its main thread, and loads want to run there, inside ``set_current_vllm_config``. So the leader
rank has vLLM call ``update_weights`` on every worker once a push is to become live (``streamed``: at the first byte); the
main thread then sits in `serve` and carries out what the receiver's loader hands over, until the push is over on this rank.

    loader's thread   ──── run(begin) ── run(install) … ── run(finish) ────────▶ waits for each
    main thread       serve: ▶ begin ▶ install … ▶ finish ▶ waits for the verdict ──▶ returns
    receiver's loop   expect ───────────────────────────────────────── release(committed)

`expect` comes before the leader may open the session and `release` after it, on every rank, however the push ends: that is what
the receiver promises of its pause and resume. A main thread that comes when nobody expects it (any more) leaves at once.

Nothing that vLLM calls in a worker ever raises: if one of several workers does, vLLM (0.32) leaves the answers of the others
unread, and takes them for the answers to its next calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from syncline.engine.errors import PushAborted, PushTimeout

T = TypeVar("T")


class _Job:
    """One call, its end, and what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.result = self.call()
        except Exception as error:  # noqa: BLE001 - raised again on the thread that asked
            self.error = error


class MainThread:
    """The worker's main thread as others see it. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expected = False
        self._inside = False
        self._committed = False
        self._job: _Job | None = None
        self.updating = False
        """Between vLLM's ``start_weight_update`` and ``finish_weight_update``. Set by the backend."""
        self.paused = False
        """vLLM was paused by us and has not been resumed. Set by the leader rank; outlives its receiver."""

    def expect(self) -> None:
        """A push may need the main thread from now on."""
        with self._changed:
            self._expected, self._committed = True, False

    def release(self, *, committed: bool) -> None:
        """The push is over on this rank: `serve` returns as soon as the call under way has ended."""
        with self._changed:
            self._expected, self._committed = False, committed
            self._changed.notify_all()

    def run(self, call: Callable[[], T], *, patience_s: float) -> T:
        """Run ``call`` on the main thread and wait for its end.

        Args:
            call: what to run. What it raises is raised here.
            patience_s: longest wait for the main thread to come, in seconds.

        Raises:
            PushAborted: the push was given up before the call began.
            PushTimeout: the main thread did not come.
        """
        job = _Job(call)
        with self._changed:
            if not self._changed.wait_for(lambda: self._inside or not self._expected, patience_s):
                raise PushTimeout(f"vLLM did not call update_weights on this worker within {patience_s:.3g} s")
            if not self._expected:
                raise PushAborted("the push was given up before its weights were loaded")
            self._job = job
            self._changed.notify_all()
            self._changed.wait_for(lambda: job.done or (self._job is not job and not job.done))
        if not job.done:
            raise PushAborted("the push was given up before its weights were loaded")
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[no-any-return]

    def serve(self) -> bool:
        """On the main thread: carry out calls until the push is over. Returns whether it committed."""
        with self._changed:
            if not self._expected:
                return False
            self._inside = True
            self._changed.notify_all()
        try:
            while (job := self._next()) is not None:
                job.run()
                with self._changed:
                    job.done, self._job = True, None
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._inside, self._job = False, None
                committed = self._committed
                self._changed.notify_all()
        return committed

    def until_outside(self, timeout_s: float) -> bool:
        """Wait until the main thread has left `serve`. True if it has."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, timeout_s)

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._job is not None or not self._expected)
            return self._job if self._expected else None
