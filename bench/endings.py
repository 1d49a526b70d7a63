"""How the processes of a command end: with the command, however that ends.

A command that is told to end (SIGTERM, SIGHUP: what ``timeout``, Slurm and Kubernetes send) unwinds as for Ctrl-C, so that its
``finally`` blocks end what it started. A command that is killed runs nothing; therefore what it starts is `tied` to it: the
kernel kills it when the command is gone.

This file is also the launcher of tied processes, and as such imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_NOT_FOUND = 127  # as a shell says it


class Told:
    """Which signal has told the command to end; 0 for none."""

    number: int = 0


@contextlib.contextmanager
def unwinding() -> Iterator[Told]:
    """While this is entered, the first SIGTERM or SIGHUP does what Ctrl-C does: a running event loop cancels its main task, and
    `KeyboardInterrupt` is raised. Later ones change nothing, so that they do not interrupt the cleaning up: ``timeout`` sends
    its signal twice. A signal that is ignored (``nohup``) stays ignored.
    """
    told = Told()

    def end(number: int, frame: FrameType | None) -> None:
        if told.number:
            return
        told.number = number
        as_for_interrupt = signal.getsignal(signal.SIGINT)  # an event loop has put its own there
        if not callable(as_for_interrupt):  # SIGINT is ignored in what a script starts with &
            raise KeyboardInterrupt
        as_for_interrupt(signal.SIGINT, frame)

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield told
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    ours = [number for number in _SIGNALS if before[number] is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield told
    finally:
        for number in ours:
            signal.signal(number, before[number])


def tied(command: Sequence[str]) -> list[str]:
    """``command``, started so that it is killed when this process is gone. It keeps its process id, environment and files.

    Call it in the thread that starts the command, and let that be one that lives as long as the process (the main thread):
    Linux ties a process to the thread that started it. Elsewhere the command is returned as it is.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _launch(parent: int, command: list[str]) -> None:
    """Tie this process to its parent, and become ``command``."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before that
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - a list of words, as create_subprocess_exec takes it
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(_NOT_FOUND)


if __name__ == "__main__":
    _launch(int(sys.argv[1]), sys.argv[2:])
