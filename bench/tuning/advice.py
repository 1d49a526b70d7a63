"""``syncline bench recommend``: the knobs for a given memory limit, from a sweep or from the simulator."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.bench.measure.bed import Bed, bed
from syncline.bench.measure.errors import BenchError
from syncline.bench.measure.provenance import Machine
from syncline.bench.simulation.hardware import find
from syncline.bench.simulation.setups import scenario
from syncline.bench.simulation.wire import WireName
from syncline.engine.config import TransferConfig, Transport, parse_size
from syncline.engine.messages import Landing

from .imagined import Imagined
from .journal import Origin, read, setup_of
from .measuring import measure
from .noise import LEAST_BLOCKS, Batch, difference, fit
from .recommend import Advice, Limit, advise
from .records import Record, Request
from .space import Configuration
from .sweep import ROWS, parse_duration
from .view import advice_text, difference_text

_WORSE = 0.10  # than the best seen, to fail --verify
_PUSHES = 6
_MOST_ROUNDS = 1000


@dataclass(frozen=True, kw_only=True)
class RecommendArgs:
    """The knobs for a given memory limit, as a ready TransferConfig(...), and what they gain over the default.

    From a sweep: syncline bench recommend --sweep sweep --memory 128MiB --verify.
    From the simulator: syncline bench recommend --simulate qwen3-8b --source fsdp:8 --target tp:4 --hardware h100-400g
    """

    sweep: Path = Path("sweep")
    """Folder or file that syncline bench sweep wrote."""
    transport: Transport | None = None
    """Only for this one; by default for each that was swept. With --simulate: of processes on one host."""
    landing: Landing | None = None
    """Only for this one; by default for each that was swept. With --simulate: staged by default."""
    memory: str | None = None
    """The most temporary bytes on one source rank, such as 512MiB."""
    with_landing: bool = False
    """Landing memory counts towards --memory too."""
    verify: bool = False
    """Push again with the recommended configuration, the best seen and the default, in turn; fails if it is worse after all."""
    rounds: int = 8
    """Of --verify; of fewer than four nothing is certain."""
    simulate: str | None = None
    """Ask the simulator instead: a model's name, a config.json, or its folder."""
    source: tuple[str, ...] = ()
    """With --simulate: forms as syncline plan takes them."""
    target: tuple[str, ...] = ()
    """With --simulate: forms as syncline plan takes them."""
    hardware: str = "h100-400g"
    """With --simulate: a preset, or a file that syncline bench calibrate wrote."""
    wire: WireName = "same"
    """With --simulate: as for syncline bench simulate."""
    offloaded: bool = False
    """With --simulate: the source's weights are in host memory (on clusters)."""
    colocated: bool = False
    """With --simulate: ranks of targets are on the hosts of the source's ranks (on clusters)."""
    ranks_per_host: int = 8
    """With --simulate: ranks of the forms that share a host (on clusters)."""
    budget: str = "60s"
    """With --simulate: time to search."""


def main(args: RecommendArgs) -> int:
    """Entry point of the command line. Raises `BenchError`, `NothingFits`, and what forms and models are refused with."""
    if not LEAST_BLOCKS <= args.rounds <= _MOST_ROUNDS:
        raise BenchError(f"rounds is {args.rounds}; give a number from {LEAST_BLOCKS} to {_MOST_ROUNDS}")
    if args.simulate is None and (args.source or args.target):
        raise BenchError("--source and --target are for --simulate; a sweep has those that it was made with")
    limit = Limit(nbytes=_size(args.memory), landing=args.with_landing)
    if args.simulate is not None:
        if args.verify:
            raise BenchError("--verify pushes on this machine: sweep it, and leave out --simulate")
        return _simulated(args, limit)
    path = args.sweep / ROWS if args.sweep.is_dir() else args.sweep
    records, origin = read(path)
    groups = _groups(records, args.transport, args.landing)
    if not groups or origin is None:
        raise BenchError(f"{path} has no measurement of what is asked for: sweep it first, or ask for another one")
    found = []
    for number, own in enumerate(groups):
        found.append(advise(own, limit=limit))
        print(("\n" if number else "") + advice_text(found[-1]))
    return _verified(found, origin, args.rounds) if args.verify else 0


def _simulated(args: RecommendArgs, limit: Limit) -> int:
    if not (args.simulate and args.source and args.target):
        raise BenchError("--simulate MODEL needs --source and --target; syncline plan --help lists their forms")
    budget_s = parse_duration(args.budget)
    start = Configuration.default(args.transport or "auto", args.landing or "staged")
    there = scenario(
        model=args.simulate, source=args.source, target=args.target, hardware=find(args.hardware),
        config=TransferConfig(**start.knobs()), wire=args.wire, offloaded=args.offloaded, colocated=args.colocated,
        ranks_per_host=args.ranks_per_host,
    )  # fmt: skip
    words = [args.wire if args.wire != "same" else "", *(name for name in ("offloaded", "colocated") if getattr(args, name))]
    what = [args.simulate, f"{' '.join(args.source)} to {', '.join(args.target)}", *filter(None, words)]
    imagined = Imagined(name=f"{', '.join(what)} on {args.hardware}", scenario=there)
    records = imagined.search(start, budget_s, limit)
    print(advice_text(advise(records, limit=limit)))
    print(f"  simulated: {imagined}, {len({r.configuration for r in records})} configurations; no push was made")
    return 0


def _size(text: str | None) -> int | None:
    try:
        nbytes = None if text is None else parse_size(text)
    except (ValueError, OverflowError) as error:
        raise BenchError(f"--memory: {error}") from error
    if nbytes == 0:
        raise BenchError("--memory is 0; give the bytes that a source rank may use, such as 512MiB")
    return nbytes


def _groups(records: Sequence[Record], transport: Transport | None, landing: Landing | None) -> list[list[Record]]:
    """By transport and landing, as far as asked for, in the order of the file."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        c = record.configuration
        if transport in {None, c.transport} and landing in {None, c.landing}:
            found.setdefault((c.transport, c.landing), []).append(record)
    return list(found.values())


def _verified(advices: Sequence[Advice], origin: Origin, rounds: int) -> int:
    """Measure again what is recommended, the best seen and the default; 1 if the first is worse than it was said to be."""
    if origin.machine != Machine.here():
        raise BenchError("the sweep is of another machine: sweep this one, or verify there")

    async def run() -> list[list[Batch[Configuration]]]:
        async with bed(setup_of(origin)) as here:
            return [await _again(here, _contenders(advice), rounds) for advice in advices]

    measured = asyncio.run(run())
    return max(_verdict(advice, batches) for advice, batches in zip(advices, measured, strict=True))


def _contenders(advice: Advice) -> list[Configuration]:
    default = [] if advice.default is None else [advice.default.configuration]
    return list(dict.fromkeys([advice.chosen.configuration, advice.fastest.configuration, *default]))


async def _again(here: Bed, contenders: Sequence[Configuration], rounds: int) -> list[Batch[Configuration]]:
    """Each configuration once a round, in random order."""
    rng, found = random.Random(0), []  # noqa: S311  # an order of measurements, no secret
    for block in range(rounds):
        for configuration in rng.sample(contenders, len(contenders)):
            request = Request(configuration=configuration, pushes=_PUSHES, phase="final", block=block)
            sample = await measure(here, request)
            if not sample.usable:
                raise BenchError(f"{configuration}: {sample.refused or sample.error or 'not every element arrived'}")
            found.append(Record(request=request, sample=sample).batch)
    return found


def _verdict(advice: Advice, batches: Sequence[Batch[Configuration]]) -> int:
    fitted = fit(batches)
    chosen, fastest = advice.chosen.configuration, advice.fastest.configuration
    names = {
        fastest: "best seen",
        **({advice.default.configuration: "default"} if advice.default else {}),
        chosen: "recommended",
    }
    print(f"\nverified: {chosen.transport}, {chosen.landing}")
    for configuration, name in names.items():
        print(f"  {name:<12} {fitted.seconds[configuration] * 1e3:8.1f} ms   {configuration}")
    worse = False
    for other, allowed in ((fastest, _WORSE), (advice.default.configuration if advice.default else chosen, 0.0)):
        if other != chosen:
            found = difference(batches, chosen, other)
            print(f"  against the {names[other]}: {difference_text(found)}")
            worse |= found.gain < -allowed and not found.within_noise
    return int(worse)
