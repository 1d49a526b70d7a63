"""The command line, ``syncline COMMAND``: `COMMANDS` lists the commands.

A command's module is imported when the command is run, so that ``syncline --help`` is quick and works without any
optional package. A command is a function whose one argument is a dataclass, which tyro fills in, and which returns the exit
code.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from syncline.scheduler.errors import SynclineError

from .endings import Told, unwinding


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A subcommand: its function as ``module:name``, and the extra that brings the packages that it needs."""

    words: tuple[str, ...]
    entry: str
    summary: str
    extra: str = ""

    @property
    def name(self) -> str:
        """As it is typed: ``"bench run"``."""
        return " ".join(self.words)


COMMANDS: tuple[Command, ...] = (
    Command(
        words=("demo",),
        entry="syncline.bench.demo:main",
        summary="train a small model with FSDP2 and push every step into a server that keeps answering",
        extra="demo",
    ),
    Command(
        words=("serve",),
        entry="syncline.bench.serve:main",
        summary="serve a Hugging Face checkpoint and receive pushes into it",
        extra="serve",
    ),
    Command(
        words=("serve-sglang",),
        entry="syncline.bench.serve_sglang:main",
        summary="stand beside an SGLang server and take pushes for it",
        extra="serve",
    ),
    Command(words=("status",), entry="syncline.bench.status:main", summary="ask targets what version they serve"),
    Command(
        words=("doctor",),
        entry="syncline.bench.doctor:main",
        summary="what is there and usable on this machine, and what is missing for what",
    ),
    Command(
        words=("plan",),
        entry="syncline.bench.plan:main",
        summary="plan a push without making one: who sends what to whom, and how long links need for it",
    ),
    Command(
        words=("bench", "run"),
        entry="syncline.bench.measure.run:main",
        summary="measure pushes, beside floors and other people's ways; one JSON line a row",
    ),
    Command(
        words=("bench", "gpu"),
        entry="syncline.bench.gpu:main",
        summary="measure one GPU: floors, kernels, transports and whole pushes, each against what the device can do",
    ),
    Command(
        words=("bench", "compare"),
        entry="syncline.bench.measure.compare:main",
        summary="what changed between two result files, or two revisions, beyond noise",
        extra="bench",
    ),
    Command(
        words=("bench", "sweep"),
        entry="syncline.bench.tuning.sweep:main",
        summary="search the knobs on this machine, within a given time",
        extra="bench",
    ),
    Command(
        words=("bench", "recommend"),
        entry="syncline.bench.tuning.advice:main",
        summary="the knobs for a given memory limit, from a sweep or from the simulator",
        extra="bench",
    ),
    Command(
        words=("bench", "simulate"),
        entry="syncline.bench.simulation.command:main",
        summary="run a push in virtual time, on any cluster: how long, what it waits for, what each knob would change",
        extra="bench",
    ),
    Command(
        words=("bench", "calibrate"),
        entry="syncline.bench.simulation.command:calibrate_main",
        summary="make a cost model of this machine for bench simulate, and compare it with real pushes",
        extra="bench",
    ),
    Command(
        words=("bench", "trace"),
        entry="syncline.bench.tracing.record:main",
        summary="record the trace of a push on this machine, or merge traces; opens in Perfetto",
    ),
    Command(
        words=("bench", "explain"),
        entry="syncline.bench.tracing.explain:main",
        summary="say in words where the time of a push went, and which knob would help",
    ),
)

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "serve": ("transformers", "safetensors"),
    "demo": ("transformers", "safetensors", "rich", "matplotlib", "accelerate", "gguf"),
    "bench": ("matplotlib", "rich", "scipy"),
}
"""What each extra brings, by import name."""

# May be missing. The lack of anything else is a fault of ours, and its traceback is wanted.
_OPTIONAL = frozenset({"accelerate", "gguf", "tokenizers", *(name for names in EXTRAS.values() for name in names)})


def usage() -> str:
    """What ``syncline --help`` prints."""
    width = max(len(command.name) for command in COMMANDS)
    lines = [
        "usage: syncline COMMAND [options]",
        "",
        "Asynchronous pipelined weight transfer from trainers to inference engines.",
        "",
    ]
    lines += [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    lines += ["", "  syncline COMMAND --help says what a command takes; syncline --version says which one this is."]
    return "\n".join(lines)


def find(argv: Sequence[str]) -> Command | None:
    """The command that ``argv`` begins with."""
    for command in COMMANDS:
        if tuple(argv[: len(command.words)]) == command.words:
            return command
    return None


def missing(command: Command) -> list[str]:
    """Packages of the command's extra that are not installed: said at the start, not after minutes of work."""
    return [name for name in EXTRAS.get(command.extra, ()) if importlib.util.find_spec(name) is None]


def run(command: Command, argv: Sequence[str]) -> int:
    """Import the command's module, let tyro read ``argv`` (after the command's own words), and run it."""
    import tyro

    module, _, name = command.entry.partition(":")
    entry: Callable[[Any], int] = getattr(importlib.import_module(module), name)
    (options,) = (kind for name, kind in get_type_hints(entry).items() if name != "return")
    return entry(tyro.cli(options, args=list(argv), prog=f"syncline {command.name}"))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``syncline``. Returns the exit code: 0 well, 1 failed, 2 wrong usage or a missing extra, 128 and the
    signal's number where it was told to end (130 for Ctrl-C).
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            with unwinding() as told:
                return _main(args, told)
        finally:
            sys.stdout.flush()  # here, where a reader that has gone can still be caught
    except BrokenPipeError:  # whoever read the output has had enough
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 0


def _main(args: Sequence[str], told: Told) -> int:
    if not args or args[0] in {"-h", "--help", "help"}:
        print(usage())
        return 0 if args else 2
    if args[0] in {"-V", "--version"}:
        print(f"syncline {importlib.metadata.version('syncline')}")
        return 0
    command = find(args)
    if command is None:
        return _unknown(args)
    rest = args[len(command.words) :]
    lacks = missing(command)
    if lacks and not {"-h", "--help"} & set(rest):
        return _lacks(command, lacks)
    try:
        return run(command, rest)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _OPTIONAL:
            raise
        return _lacks(command, [name])
    except BrokenPipeError:
        raise
    except (SynclineError, OSError) as error:  # an OSError: of a file that the user has named, or of a full disk
        return _fail(f"syncline {command.name}: {type(error).__name__}: {error}", 1)
    except KeyboardInterrupt:
        return _fail(f"syncline {command.name}: stopped", 128 + (told.number or signal.SIGINT))


def _lacks(command: Command, names: Sequence[str]) -> int:
    remedy = f"pip install 'syncline[{command.extra}]'" if command.extra else f"pip install {' '.join(names)}"
    verb = "which is" if len(names) == 1 else "which are"
    return _fail(f"syncline {command.name} needs {', '.join(names)}, {verb} not installed: {remedy}", 2)


def _unknown(args: Sequence[str]) -> int:
    """A group's name alone lists its commands; anything else is unknown."""
    group = [command.name for command in COMMANDS if len(command.words) > 1 and command.words[0] == args[0]]
    if group:
        return _fail(f"syncline {args[0]} needs one of: {', '.join(group)}", 0 if args[1:2] in (["-h"], ["--help"]) else 2)
    return _fail(f"syncline: no command {args[0]!r}; one of: {', '.join(command.name for command in COMMANDS)}", 2)


def _fail(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
