"""Work that was launched on a device, with the memory that it uses: kept until the device was seen to be done.

Nothing that a stream still reads or writes may go back to an allocator, be unmapped or be lent again. So it is not the caller
that holds it, who may be cancelled, fail or be closed meanwhile, but the work itself, and the `Watch` that asks for its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .completions import Signal
from .digest import add_digests
from .errors import without_frames
from .issuing import Event
from .watch import Watch


class Launched(NamedTuple):
    """Work under way on the device.

    Attributes:
        event: whether it is done.
        result: its digest, to be asked for once, when ``event`` is done; raises what went wrong.
        used: everything that it reads and writes.
    """

    event: Event
    result: Callable[[], int]
    used: object


class _Done:
    """What runs at once is done when it returns."""

    def query(self) -> bool:
        return True


DONE = _Done()


def nothing() -> Launched:
    """Nothing, done at once."""
    return Launched(DONE, lambda: 0, None)


def failed(error: Exception) -> Launched:
    """Nothing was launched; the error is the result."""

    def result() -> int:
        raise error

    return Launched(DONE, result, None)


class _Both:
    def __init__(self, one: Event, other: Event) -> None:
        self._one, self._other = one, other

    def query(self) -> bool:
        return self._one.query() and self._other.query()


def both(one: Launched, other: Launched) -> Launched:
    """Two as one: the digests are added up."""

    def result() -> int:
        return add_digests((one.result(), other.result()))

    return Launched(_Both(one.event, other.event), result, (one.used, other.used))


def then(one: Launched, launch: Callable[[], Launched]) -> Launched:
    """``one``, and what is launched after it. If that cannot be, ``one`` is still under way: the error is told at its end."""
    try:
        other = launch()
    except Exception as error:  # noqa: BLE001 - raised by `result`
        other = failed(error)
    return both(one, other)


def follow(started: Signal[Launched], watch: Watch) -> Signal[int]:
    """Ends with the result of launched work when the device has done it, whoever waits for that."""
    whole: Signal[int] = Signal()

    def launched() -> None:
        if started.error is not None:
            whole.fail(started.error)
            return
        event, result, used = started.result
        done = watch.until(event.query, used)
        done.subscribe(lambda: _finish(result, done, whole))

    started.subscribe(launched)
    return whole


def _finish(result: Callable[[], int], done: Signal[None], whole: Signal[int]) -> None:
    try:
        done.poll()
        whole.set(result())
    except Exception as error:  # noqa: BLE001 - handed to whoever waits
        whole.fail(without_frames(error))  # its frames hold ``whole``, and what was worked on
