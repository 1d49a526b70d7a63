"""Planning at scale, as a process of its own: Kimi-K2's shapes, 256 source ranks to 4 targets of 32 ranks."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from syncline.scheduler.options import PlanOptions
from syncline.scheduler.plan import build_plan

from .models import kimi_k2_manifests


def _peak_rss_bytes() -> int:
    """The kernel's high-water mark of this program's memory. (``ru_maxrss`` would count the parent's, from before exec.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """Plan once; print seconds, peak memory of this process, and what came out, as JSON."""
    fleet = kimi_k2_manifests()
    began = time.process_time()
    plan = build_plan(fleet.sources, fleet.targets, PlanOptions(bucket_bytes=2**28, max_tmp_bytes=2**31))
    seconds = time.process_time() - began
    peak = _peak_rss_bytes()
    result = {
        "seconds": seconds,
        "peak_rss_bytes": peak,
        "tasks": plan.total_tasks,
        "planned_bytes": plan.nbytes,
        "sent_max_to_mean": plan.balance,
        "digest": plan.digest,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
