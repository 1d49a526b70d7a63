"""``syncline bench simulate`` and ``syncline bench calibrate``."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import uvloop

from syncline.bench.outputs import check_outputs
from syncline.bench.plan_view import folded
from syncline.engine.config import TransferConfig
from syncline.engine.messages import Landing
from syncline.scheduler.errors import PlanError, SynclineError
from syncline.scheduler.options import Route

from .bounds import bounds
from .export import trace_of
from .hardware import Cores, find, save
from .published import side_by_side
from .setups import scenario
from .simulate import Prediction, simulate
from .view import View
from .whatif import Effect, effects
from .wire import WireName
from .world import Disturbance

if TYPE_CHECKING:
    from .validate import Case, Row

_WHAT_IF_S = {"auto": 20.0, "all": math.inf, "none": 0.0}
_WITHIN = 0.15
_MOST_REPEAT = 10_000


@dataclass(frozen=True, kw_only=True)
class SimulateArgs:
    """Run a push in virtual time: how long it takes, what it waits for, and what each knob would change.

    For example: syncline bench simulate --model kimi-k2 --source fsdp:32,replicas=8 --target "4x tp:8,dp=4,ep=32" --wire fp8
    """

    model: str = ""
    """Shapes: a name such as kimi-k2 (an unknown one lists all), a config.json, or its folder."""
    source: tuple[str, ...] = ()
    """As for `syncline plan`: a form such as fsdp:8, or files with manifests."""
    target: tuple[str, ...] = ()
    """As for `syncline plan`: one or more of a form such as tp:4, a folder with manifests, a live address."""
    hardware: str = "h100-400g"
    """A preset (an unknown name lists all), or a file that `syncline bench calibrate` wrote. Clusters of accelerators have
    links and streams for each rank; one host without (cpu-2, calibrated files) has cores that all ranks share."""
    wire: WireName = "same"
    """What weights are when they travel: as the model holds them, bf16, or fp8 with a scale for each block of 128 x 128."""
    offloaded: bool = False
    """The source's weights are in host memory. On clusters only: on one host without accelerators all memory is that."""
    colocated: bool = False
    """Ranks of targets are on the hosts of the source's ranks. On clusters only: on one host all ranks are there."""
    ranks_per_host: int = 8
    """Ranks of the forms that share a host. On clusters only."""
    max_tmp_bytes: str = "256MiB"
    """As in TransferConfig; so are the others down to poll_interval_s."""
    bucket_bytes: str | None = None
    h2d_concurrency: int = 2
    prepare_concurrency: int = 2
    send_concurrency: int = 2
    landing: Landing = "staged"
    """As in TransferConfig; mapped on one host only, where targets of a form let their parameters move."""
    route: Route = "auto"
    transport: Literal["auto", "shm", "gloo"] = "auto"
    """On one host without accelerators only; clusters have NVLink and network cards."""
    verify: bool = True
    workers: int = 2
    """On one host without accelerators only: kernels do the work elsewhere."""
    poll_interval_s: float = 0.001
    jitter: float = 0.0
    """Spread of the time of each piece of work of a source rank (0.1: about ten percent)."""
    straggler: tuple[str, ...] = ()
    """Source ranks that are slower in everything, as RANK:FACTOR, each once; for example 3:2.5 5:4."""
    seed: int = 0
    """Of the jitter."""
    what_if: Literal["auto", "all", "none"] = "auto"
    """Halve and double every knob and rate; auto does as many of these as 20 seconds allow."""
    trace: Path | None = None
    """Write the simulated spans into this file, as a push does."""
    published: bool = False
    """Instead: figures that others have published, beside ours for the same set-ups."""
    json: bool = False
    """Print one JSON object."""


class UsageError(SynclineError):
    """Arguments that make no sense."""


def main(args: SimulateArgs) -> int:
    """Entry point of ``syncline bench simulate``. Raises `SynclineError`."""
    check_outputs(args.trace)
    view = View(sys.stdout)
    if args.published:
        rows = list(side_by_side())
        sys.stdout.write(json.dumps(msgspec.to_builtins(rows)) + "\n") if args.json else view.published(rows)
        return 0
    if not (args.source and args.target):
        raise UsageError("say what is simulated: --model, --source and --target (as for 'syncline plan'), or --published")
    laps = Laps()
    there = scenario(
        model=args.model, source=args.source, target=args.target, hardware=find(args.hardware), config=_config(args),
        wire=args.wire, offloaded=args.offloaded, colocated=args.colocated, ranks_per_host=args.ranks_per_host,
        disturbance=Disturbance(jitter=args.jitter, stragglers=_stragglers(args.straggler), seed=args.seed),
    )  # fmt: skip
    laps.end("manifests")
    try:
        there.plans.of(there.options)
    except PlanError as error:
        raise PlanError(folded(error.problems)) from error
    laps.end("plan")
    prediction = simulate(there)
    laps.end("simulation")
    terms = bounds(there)
    laps.end("bounds")
    found, missing = effects(there, _WHAT_IF_S[args.what_if])
    laps.end("what if")
    if args.trace is not None:
        trace_of(there, prediction).save(args.trace)
        laps.end("trace")
    if args.json:
        sys.stdout.write(json.dumps(_facts(prediction, terms, found, laps)) + "\n")
        return 0
    view.prediction(prediction, terms)
    if found:
        view.effects(prediction, found)
    if missing and args.what_if == "auto":
        view.say(f"what if: {missing} changes more with --what-if all")
    view.say(f"on {there.hardware.name}; this took {laps}")
    return 0


class Laps:
    """What the time of a command went to: seconds by step. They begin when it is made."""

    def __init__(self) -> None:
        self.took_s: dict[str, float] = {}
        self._began = self._at = time.perf_counter()

    def end(self, step: str) -> float:
        """``step`` ends now. Returns its seconds."""
        now = time.perf_counter()
        self.took_s[step], self._at = now - self._at, now
        return self.took_s[step]

    def __str__(self) -> str:
        steps = ", ".join(f"{step} {seconds:.1f} s" for step, seconds in self.took_s.items() if seconds >= 0.05)
        return f"{self._at - self._began:.1f} s ({steps}); processor time, starting up included, {time.process_time():.1f} s"


def _config(args: SimulateArgs) -> TransferConfig:
    names = (
        "max_tmp_bytes", "bucket_bytes", "h2d_concurrency", "prepare_concurrency", "send_concurrency", "landing", "route",
        "transport", "verify", "workers", "poll_interval_s",
    )  # fmt: skip
    return TransferConfig(**{name: getattr(args, name) for name in names})


def _stragglers(texts: Sequence[str]) -> dict[int, float]:
    found: dict[int, float] = {}
    for text in texts:
        first, _, second = text.partition(":")
        try:
            rank, factor = int(first), float(second)
        except ValueError:
            raise UsageError(f"straggler {text!r} is not RANK:FACTOR, for example 3:2.5") from None
        if rank in found:
            raise UsageError(f"straggler {text!r}: rank {rank} was given a factor before, {found[rank]:g}")
        found[rank] = factor
    return found


def _facts(there: Prediction, terms: Any, found: Sequence[Effect], laps: Laps) -> dict[str, object]:
    """What a program may want to know."""
    return {
        "seconds": there.seconds,
        "control_s": there.control_s,
        "commit_s": there.commit_s,
        "stages": dict(there.busy_s),
        "resources": dict(there.used_s),
        "bottleneck": there.bottleneck,
        "bound": dict(terms) or {"resources": there.bound_s},
        "peak_tmp_bytes": there.peak_tmp_bytes,
        "landing_bytes": there.landing_bytes,
        "sent_bytes": there.sent_bytes,
        "tasks": there.tasks,
        "critical": {
            "by_what": dict(there.critical.by_what),
            "by_where": dict(there.critical.by_where),
            "waits": dict(there.critical.by_why),
            "steps": [msgspec.to_builtins(step) for step in there.critical.steps],
        },
        "what_if": msgspec.to_builtins(found),
        "took_s": laps.took_s,
    }


@dataclass(frozen=True, kw_only=True)
class CalibrateArgs:
    """Measure what this machine does in isolation, and make a cost model of it for ``bench simulate --hardware``."""

    out: Path = Path("this-machine.json")
    """Where the cost model is written."""
    model: Path | None = None
    """Measure nothing: take the cost model that is in this file."""
    check: bool = False
    """Then push for real, in 16 configurations that the model has not seen, and print predicted and measured side by side."""
    repeat: int = 12
    """Measured pushes of each configuration, after two that warm up."""
    only: str = ""
    """Of the configurations those whose name contains this."""
    json: bool = False
    """Print one JSON object."""


def calibrate_main(args: CalibrateArgs) -> int:
    """Entry point of ``syncline bench calibrate``. Raises `SynclineError`."""
    from .calibrate import fitted, measure  # processes of a bed: a simulation needs none of that

    check_outputs(None if args.model else args.out)
    if not 1 <= args.repeat <= _MOST_REPEAT:
        raise UsageError(f"repeat is {args.repeat}; give a number of pushes from 1 to {_MOST_REPEAT}")
    chosen = _chosen(args.only) if args.check else []
    view = View(sys.stderr if args.json else sys.stdout)
    if args.model is not None:
        hardware = find(str(args.model))
        if not isinstance(hardware, Cores):
            raise UsageError(f"{args.model} is a cluster of accelerators; give what 'bench calibrate' wrote of this machine")
    else:
        hardware = fitted(uvloop.run(measure(tell=view.say)))
        save(hardware, args.out)
        view.say(f"wrote {args.out}")
    rows = _checked(chosen, hardware, args.repeat, view) if chosen else []
    if args.json:
        sys.stdout.write(json.dumps({"hardware": msgspec.to_builtins(hardware), "rows": [_row(row) for row in rows]}) + "\n")
    elif rows:
        view.validation(rows, _WITHIN)
    return 0


def _chosen(only: str) -> list[Case]:
    from .validate import cases

    chosen = [case for case in cases() if only in str(case)]
    if not chosen:
        raise UsageError(f"no configuration is called {only!r}: {'; '.join(map(str, cases()))}")
    return chosen


def _checked(chosen: Sequence[Case], hardware: Cores, repeat: int, view: View) -> list[Row]:
    from .validate import compare, measure

    return compare(chosen, uvloop.run(measure(chosen, repeat=repeat, tell=view.say)), hardware)


def _row(row: Row) -> dict[str, Any]:
    return {**msgspec.to_builtins(row), "error": row.error}
