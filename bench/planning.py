"""Planning at scale, as a process of its own: Kimi-K2's shapes, 256 source ranks to 4 targets of 32 ranks."""

from __future__ import annotations

import json
import resource
import sys
import time

from syncline.scheduler.options import PlanOptions
from syncline.scheduler.plan import build_plan

from .models import kimi_k2_manifests


def main() -> None:
    """Plan once; print seconds, peak memory of this process, and what came out, as JSON."""
    fleet = kimi_k2_manifests()
    began = time.process_time()
    plan = build_plan(fleet.sources, fleet.targets, PlanOptions(bucket_bytes=2**28, max_tmp_bytes=2**31))
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
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
