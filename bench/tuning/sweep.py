"""``syncline bench sweep``: search the knobs on this machine, within a given time."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from syncline.bench.measure.bed import Bed, Setup, bed, setup_of
from syncline.bench.measure.errors import BenchError
from syncline.bench.measure.provenance import Provenance
from syncline.bench.outputs import check_outputs, make_folder
from syncline.engine.config import Transport
from syncline.engine.messages import Landing

from .journal import Journal, Replay, alone
from .measuring import control, knobs_of, measure
from .plots import heat_maps, pareto
from .progress import Progress
from .recommend import NothingFits, advise
from .records import Record, spoiled
from .search import Search
from .space import Configuration, Space
from .view import advice_text, duration_text, table

ROWS = "rows.jsonl"
_OTHER_S = 40.0
"""Of the budget, at most a fifth: to start and end processes, to corrupt buckets on purpose, and to draw."""
_END_S = 15.0
"""Of these, at most half: what is still to do when the last measurement has been made."""
_LONGEST_S = 7 * 24 * 3600.0
_MOST = 64
_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class SweepArgs:
    """Find good knobs for this machine: few pushes for every configuration, more for the better ones.

    Started again with the same --out it goes on where it was.
    """

    source: str = "fsdp:2"
    """Who sends: module, module:N (replicas), fsdp:N, tp:N; N ranks."""
    target: str = "module"
    """Who receives: module, or tp:N for a tensor-parallel target of N ranks."""
    targets: int = 1
    """How many of it."""
    tensors: int = 40
    nbytes: int = 204_800_000
    """Bytes of each push, float32, in ``tensors`` tensors."""
    transports: tuple[Literal["shm", "gloo"], ...] = ("shm", "gloo")
    """Each is searched on its own."""
    landings: tuple[Landing, ...] = ("staged",)
    """Each is searched on its own; mapped over shm only."""
    budget: str = "9min"
    """Time for all of it: "9min", "90s", "1.5h"."""
    out: Path = Path("sweep")
    """Folder for rows.jsonl and the plots."""
    most: int = 4
    """Highest concurrency of a stage, and number of workers, to try."""
    seed: int = 0
    """Of the order of measurements."""


def main(args: SweepArgs) -> int:
    """Entry point of the command line. Raises `BenchError`."""
    _checked(args)
    starts, began = _starts(args), time.monotonic()
    budget_s = parse_duration(args.budget)
    other_s = min(_OTHER_S, budget_s / 5)
    deadline = began + budget_s - min(_END_S, other_s / 2)
    make_folder(args.out)
    check_outputs(args.out / ROWS, args.out / "heat.png", args.out / "pareto.png")
    setup = setup_of(
        args.source, args.target, targets=args.targets, tensors=args.tensors, nbytes=args.nbytes,
        movable="mapped" in args.landings,
    )  # fmt: skip
    space = Space.of(setup.moved_bytes, most=args.most)
    import uvloop

    with alone(args.out / ROWS):
        journal = Journal(args.out / ROWS, setup, Provenance.here())
        search = Search(space, starts, budget_s=budget_s - other_s, seed=args.seed, first_block=journal.next_block)
        uvloop.run(_sweep(search, journal, setup, deadline))
        return _report(search.records, starts, args.out, space)


async def _sweep(search: Search, journal: Journal, setup: Setup, deadline: float) -> None:
    """Answer the search's questions: from the file as far as it goes, and then from pushes."""
    replay = Replay(journal.records)
    with Progress(search) as progress:
        while (request := search.next()) is not None:
            sample = replay.take(request)
            if sample is None:
                break
            progress.show(search.tell(sample))
        else:
            return
        async with bed(setup) as here:
            await _measure(search, journal, replay, progress, here, deadline=deadline)


async def _measure(
    search: Search, journal: Journal, replay: Replay, progress: Progress, here: Bed, *, deadline: float
) -> None:  # fmt: skip
    timeout_s, least_s = min(60.0, max(10.0, search.budget_s / 20)), search.budget_s / 2
    controls: dict[tuple[Transport, Landing], str] = {}
    while (request := search.next()) is not None:
        where = _kind(request.configuration)
        if where not in controls:
            controls[where] = await control(here, Configuration.default(*where))
        # Where starting took longer than was set aside, the search gets less, but not less than half.
        search.budget_s = min(search.budget_s, max(least_s, search.spent_s + deadline - time.monotonic()))
        sample = replay.take(request)
        if sample is None:
            sample = await measure(here, request, timeout_s)
            knobs = knobs_of(request.configuration, timeout_s)
            journal.add(Record(request=request, sample=sample), control=controls[where], knobs=knobs)
        progress.show(search.tell(sample))
    for kind, said in controls.items():
        if said != "caught":
            raise BenchError(f"{' '.join(kind)}: a bucket that was corrupted on purpose was {said}: trust none of the rows")


def _checked(args: SweepArgs) -> None:
    """Raise `BenchError` for numbers that make no sense."""
    most = {"targets": _MOST, "tensors": args.nbytes // 4, "nbytes": 2**40, "most": _MOST}  # a tensor has an element
    wrong = [
        f"{name} is {value} (from 1 to {limit})"
        for name, limit in most.items()
        if not 1 <= (value := getattr(args, name)) <= limit
    ]
    if wrong:
        raise BenchError(", ".join(wrong))


def _kind(configuration: Configuration) -> tuple[Transport, Landing]:
    return configuration.transport, configuration.landing


def _starts(args: SweepArgs) -> list[Configuration]:
    """The default of each transport and landing that go together."""
    found = []
    for transport, landing in itertools.product(dict.fromkeys(args.transports), dict.fromkeys(args.landings)):
        if landing != "mapped" or transport != "gloo":
            found.append(Configuration.default(transport, landing))
    if not found:
        raise BenchError("nothing to search: landing mapped needs transport shm")
    return found


def parse_duration(text: str) -> float:
    """Seconds of ``"9min"``, ``"90s"``, ``"1.5h"``. Raises `BenchError` for anything else (all of them are a --budget)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text)
    seconds = float(match[1]) * _UNITS.get(match[2], 0.0) if match else 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise BenchError(f"--budget {text}: no time, or above a week; write a number with one of s, min, h, such as '9min'")
    return seconds


def _report(records: Sequence[Record], starts: Sequence[Configuration], out: Path, space: Space) -> int:
    """Tables, advice and plots; 1 if nothing can be recommended for one of the transports."""
    code = 0
    for start in starts:
        own = [record for record in records if _kind(record.configuration) == _kind(start)]
        print(f"\n{start.transport}, {start.landing}")
        for configuration, reason in spoiled(own).items():
            print(f"  left out: {configuration}: {reason.splitlines()[0]}")
        try:
            print(table(own))
            print(advice_text(advise(own)))
        except NothingFits as error:
            print(f"  {error}")
            code = 1
    began = time.perf_counter()
    for path in (heat_maps(records, out / "heat.png", space), pareto(records, out / "pareto.png")):
        print(f"wrote {path}")
    print(f"wrote {out / ROWS} ({len(records)} measurements; plots took {duration_text(time.perf_counter() - began)})")
    return code
