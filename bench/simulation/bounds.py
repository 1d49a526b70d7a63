"""What no schedule can beat: bytes over rates, counted from the plan alone, without a simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from .hardware import Gpus
from .simulate import Scenario


def bounds(scenario: Scenario) -> Mapping[str, float]:
    """Seconds of each term of the bound, in words; the largest is the bound. Empty on a host without accelerators, where
    everything shares the cores: there the prediction's ``used_s`` are the bound.

    ``max(infer_bytes/nic, sent/(senders x nic), h2d/pcie, gather/link, install)``
    """
    hardware = scenario.hardware
    if not isinstance(hardware, Gpus):
        return {}
    _, load = scenario.plans.of(scenario.options)
    streamed = scenario.config.landing == "streamed"
    sent, received = 0.0, [[0.0, 0.0] for _ in load.receivers]
    took = [[0.0, 0.0] for _ in load.sources]
    for rank, shares in enumerate(load.sources):
        for share in shares:
            for receiver in share.receivers:
                far = load.source_hosts[rank] != load.receiver_hosts[receiver]
                received[receiver][far] += share.nbytes
                sent += share.nbytes * far
            for owner, nbytes in share.gives:
                took[owner][load.source_hosts[rank] != load.source_hosts[owner]] += nbytes
    cards = _cards(load.receiver_hosts, [far for _, far in received], hardware.ranks_per_nic)
    senders = len(_cards(load.source_hosts, [1.0] * len(load.sources), hardware.ranks_per_nic))
    own = max((sum(share.own for share in shares) for shares in load.sources), default=0)
    installed = max((near + far for near, far in received), default=0.0)
    passes = 2 / hardware.copy + (1 / hardware.digest if scenario.config.verify else 0.0)
    return {
        "infer_bytes / nic": max(cards, default=0.0) / hardware.nic,
        "infer_bytes / nvlink": max((near for near, _ in received), default=0.0) / hardware.nvlink,
        "sent / (senders x nic)": sent / (senders * hardware.nic),
        "h2d / pcie": own / hardware.h2d if scenario.offloaded else 0.0,
        "gather / link": max((near / hardware.nvlink + far / hardware.nic for near, far in took), default=0.0),
        "install": installed * (passes if streamed or scenario.config.landing == "staged" else 0.0),
    }


def _cards(hosts: Sequence[int], nbytes: Sequence[float], ranks_per_nic: int) -> list[float]:
    """Bytes of each network card."""
    seen: dict[int, int] = defaultdict(int)
    cards: dict[tuple[int, int], float] = defaultdict(float)
    for host, count in zip(hosts, nbytes, strict=True):
        cards[host, seen[host] // ranks_per_nic] += count
        seen[host] += 1
    return list(cards.values())
