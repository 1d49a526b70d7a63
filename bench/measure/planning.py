"""Planning at scale, as a process of its own: Kimi-K2's shapes, 256 source ranks to 4 targets of 32 ranks."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from syncline.scheduler.options import PlanOptions, Route
from syncline.scheduler.plan import build_plan

from ..layouts import Model
from ..models import kimi_k2
from ..splits import Megatron, kimi_k2_manifests


def _peak_rss_bytes() -> int:
    """The kernel's high-water mark of this program's memory. (``ru_maxrss`` would count the parent's, from before exec.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def main(trainer: str = "fsdp", route: Route = "auto") -> None:
    """Plan once; print seconds, peak memory of this process, and what came out, as JSON.

    Args:
        trainer: ``fsdp`` (8 replicas of 32 shards) or ``megatron`` (TP 8, PP 8, EP 32).
        route: as `PlanOptions.route`.
    """
    sources, targets = kimi_k2_manifests()
    if trainer == "megatron":
        sources = Megatron(tp=8, pp=8, dp=4, ep=32).manifests(Model.of(kimi_k2()), 8)
    began = time.process_time()
    plan = build_plan(sources, targets, PlanOptions(bucket_bytes=2**28, max_tmp_bytes=2**31, route=route))
    seconds = time.process_time() - began
    peak = _peak_rss_bytes()
    result = {
        "seconds": seconds,
        "peak_rss_bytes": peak,
        "trainer": trainer,
        "route": route,
        "tasks": plan.total_tasks,
        "planned_bytes": plan.nbytes,
        "needed_bytes": plan.traffic.needed,
        "moved_bytes": plan.routing.moved_nbytes,
        "sent_max_to_mean": plan.balance,
        "digest": plan.digest,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
