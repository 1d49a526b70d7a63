"""The rows of ``syncline bench run --suites direct``: tensor-parallel shards to tensor-parallel shards over gloo.

Two source ranks, two ranks of one target, both sharded in the same way. Beside the direct route, in the same run: the same
push gathered by owners, the naive way (gather each tensor, broadcast it whole), and Awex's transport where that is installed.
Awex writes straight into the parameters, as ``streamed`` landing does, and computes no digests.
"""

from __future__ import annotations

from typing import NamedTuple

from .awex_row import awex_row
from .bed import bed
from .bench import Bench

_RANKS = 2


class Case(NamedTuple):
    """One way to push."""

    route: str
    landing: str
    verify: bool

    @property
    def name(self) -> str:
        digests = "digests" if self.verify else "no digests"
        return f"gloo {self.route}, {self.landing}, {digests}, TP{_RANKS} to TP{_RANKS}"


CASES = (
    Case("direct", "streamed", False),
    Case("direct", "streamed", True),
    Case("direct", "staged", False),
    Case("direct", "staged", True),
    Case("gather", "staged", True),
)


async def direct_rows(bench: Bench) -> None:
    """Measure and print all rows of this suite, each with its time over that of gather-and-broadcast, and over Awex's."""
    awex = await awex_row(bench)
    async with bed(bench.setup(source="tp", source_ranks=_RANKS, target_ranks=_RANKS)) as here:
        name = f"naive: all_gather and broadcast by rank 0, TP{_RANKS} to TP{_RANKS}"
        naive = await bench.naive_row(name, here)
        against = {"gather_and_broadcast": naive.seconds.median, **({"awex": awex.seconds.median} if awex else {})}
        for case in CASES:
            how = {"transport": "gloo", **case._asdict()}
            await bench.push_row(case.name, here, against=against, **how)
