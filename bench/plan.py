"""``syncline plan``: plan a push without making one, and say what it would do."""

from __future__ import annotations

import difflib
import json
import math
import time
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import tyro

from syncline.engine.config import TransferConfig
from syncline.engine.messages import Landing
from syncline.engine.transports import plan_options, transport_kinds
from syncline.scheduler.errors import PlanError
from syncline.scheduler.options import Route
from syncline.scheduler.plan import Plan, build_plan

from .layouts import Model
from .models import find
from .plan_view import explanation, folded, overview
from .specs import SpecError, read_source, read_targets, save


@dataclass(frozen=True, kw_only=True)
class PlanArgs:
    """Plan a push without making one: who sends what to whom, how evenly, what is gathered, and how long links need for it.

    For example: syncline plan --model qwen3-8b --source fsdp:8 --target tp:4
    """

    source: tuple[str, ...]
    """A form such as fsdp:8 or megatron:tp=2,pp=2,ep=2,dp=2, or files with manifests of all ranks. An unknown one lists all."""
    target: tuple[str, ...]
    """One or more of: a form such as tp:4 or "4x tp:8,dp=4,ep=32", a folder with manifests of all ranks, a live address."""
    model: str = ""
    """Shapes for the forms: a name such as qwen3-8b or kimi-k2 (an unknown one lists all), a config.json, or its folder."""
    route: Route = "auto"
    """As TransferConfig.route."""
    landing: Landing = "staged"
    """As TransferConfig.landing."""
    max_tmp_bytes: str = "256MiB"
    """As TransferConfig.max_tmp_bytes."""
    bucket_bytes: str | None = None
    """As TransferConfig.bucket_bytes."""
    ranks_per_host: int = 8
    """Ranks of the forms that share a host."""
    link_gbps: float = 400.0
    """Gigabits a second of each rank's link to other hosts, each way."""
    host_gbps: float | None = None
    """The same between ranks of one host; as link_gbps unless given."""
    explain: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Say of one tensor, or of those that a pattern with * matches, which boxes come from where and go where, in which task."""
    save: Path | None = None
    """Write the manifests of all ranks into this folder; its subfolders can be given as source and target again."""
    timeout: float = 10.0
    """Seconds to wait for a live target's answer."""
    json: bool = False
    """Print one JSON object."""


def main(args: PlanArgs) -> int:
    """Entry point of ``syncline plan``. Raises `SpecError`, `ModelError`, `ConfigError`, `PlanError`."""
    config = TransferConfig(
        max_tmp_bytes=args.max_tmp_bytes, bucket_bytes=args.bucket_bytes, route=args.route, landing=args.landing
    )
    rates = {name: getattr(args, name) for name in ("ranks_per_host", "link_gbps", "host_gbps", "timeout")}
    # NaN is neither above 0 nor finite.
    if wrong := [f"{name} is {rate}" for name, rate in rates.items() if rate is not None and not 0 < rate < math.inf]:
        raise SpecError(f"{', '.join(wrong)}; it must be a finite number above 0")
    model = Model.of(find(args.model)) if args.model else None
    sources = read_source(args.source, model, args.ranks_per_host)
    targets = read_targets(args.target, model, args.ranks_per_host, args.timeout, movable=args.landing == "mapped")
    for folder in save(args.save, sources, targets) if args.save else ():
        print(f"wrote {folder}")
    began = time.perf_counter()
    try:
        plan = build_plan(sources, targets, plan_options(targets, config, transport_kinds(sources, targets, config)))
    except PlanError as error:
        raise PlanError(folded(error.problems)) from error
    seconds = time.perf_counter() - began
    if args.explain is not None:
        print(_explained(plan, args.explain))
    elif args.json:
        print(json.dumps(_facts(plan, args, seconds)))
    else:
        print(overview(plan, link_gbps=args.link_gbps, host_gbps=args.host_gbps or args.link_gbps))
        print(f"\nplanned in {seconds:.2f} s")
    return 0


_EXPLAINED = 20
"""Tensors that a pattern explains, at most."""


def _explained(plan: Plan, name: str) -> str:
    known = plan.routes.names
    found = [name] if name in known or "*" not in name else [one for one in known if fnmatchcase(one, name)]
    try:
        texts = [explanation(plan, plan.explain(one)) for one in (found or [name])[:_EXPLAINED]]
        more = [f"and {len(found) - _EXPLAINED} more that match {name!r}"] if len(found) > _EXPLAINED else []
        return "\n\n".join([*texts, *more])
    except KeyError:
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or list(known[:3])
        raise SpecError(f"the plan moves no tensor {name!r}; did you mean {' or '.join(close)}?") from None


def _facts(plan: Plan, args: PlanArgs, seconds: float) -> dict[str, object]:
    """What a program may want to know."""
    traffic = plan.traffic
    busiest = traffic.busiest(args.link_gbps * 1e9 / 8, (args.host_gbps or args.link_gbps) * 1e9 / 8)
    return {
        "digest": plan.digest,
        "source_ranks": plan.world_size,
        "receivers": len(plan.receivers),
        "tasks": plan.total_tasks,
        "needed_bytes": traffic.needed,
        "padding_bytes": traffic.padding,
        "sent_bytes": traffic.sent.tolist(),
        "received_bytes": traffic.received.tolist(),
        "sent_max_to_mean": plan.balance,
        "routing": asdict(plan.routing),
        "critical": asdict(busiest[0]),
        "seconds": seconds,
    }
