"""The adaptive search: few pushes for every configuration, more for the better ones, most for the finalists. Pure.

`Search.next` says what to measure, `Search.tell` is told what came of it; nothing else goes in or out: no clock, no I/O,
and the same answers lead to the same questions, which is how a sweep goes on from its file.

For each transport and landing:

1. *map*: every bucket size with every watermark, all other knobs at their defaults, a few pushes each;
2. *halving*: the better half again, and again, until three are left;
3. *descent*: from the best, one step up or down along every knob, raced against it; the best becomes the new one, until
   nothing is better. Where several steps help, their combination is tried too;
4. *final*: the fastest, those that are fastest with less memory, and the default, in fresh measurements. Only these say who
   is best: the best of many noisy figures was lucky, and looks better than it is.

Every block of measurements is in random order and has the default in it (`syncline.bench.tuning.noise`).
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

from .noise import Fit, fit
from .records import Phase, Record, Request, Sample, active_axes, enough, peaks, spoiled, usable
from .space import Configuration, Space

Requests = Generator[Request, None, None]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured.

    Attributes:
        warm: least and most pushes of a batch, besides the first, cold one; as many as take as long as all else in it does.
        final_warm: the same in the finals, of twice as many.
        final_rounds: most batches of each finalist; the last third of the time is kept for them.
        finalists: at most, besides the default; fewer where there is no time for ``least_rounds`` batches of each.
        block: measurements that are compared with one another directly, besides the default.
        survivors: configurations that the halving leaves.
        z: standard errors by which a configuration must be slower to be dropped before its turn.
        map_share, search_share: share of a transport's time after which the map with its halving, and the descent, end.
    """

    warm: tuple[int, int] = (3, 6)
    final_warm: tuple[int, int] = (5, 10)
    final_rounds: int = 10
    finalists: int = 6
    least_rounds: int = 4
    block: int = 7
    survivors: int = 3
    z: float = 1.5
    map_share: float = 0.4
    search_share: float = 0.65


class Search:
    """A search over ``space`` from each of ``starts`` (a default configuration of one transport and landing each).

    Args:
        budget_s: what all measurements may cost together; may be lowered on the way. A measurement that would take it beyond
            that is not asked for.
        seed: of the order of measurements.
        first_block: number of the first block.
    """

    def __init__(
        self,
        space: Space,
        starts: Sequence[Configuration],
        *,
        budget_s: float,
        effort: Effort | None = None,
        seed: int = 0,
        first_block: int = 0,
    ) -> None:
        self.records: list[Record] = []
        self.spent_s = 0.0
        self.budget_s = budget_s
        self._pending: Request | None = None
        self._groups = [_Group(space, start, effort or Effort(), f"{seed} {start}") for start in starts]
        self._first_block = first_block
        self._current = 0
        self._requests = self._all()

    def next(self) -> Request | None:
        """What to measure now; None when the search has ended. Asked again without an answer, it says the same."""
        if self._pending is None:
            self._pending = next(self._requests, None)
        return self._pending

    def tell(self, sample: Sample) -> Record:
        """What came of the request that `next` gave last."""
        if self._pending is None:
            raise RuntimeError("nothing was asked for: call next() before tell()")
        record = Record(request=self._pending, sample=sample)
        self._pending = None
        self.spent_s += sample.elapsed_s
        self.records.append(record)
        self._groups[self._current].add(record)
        return record

    @property
    def left_s(self) -> float:
        """Roughly what is still to come: at most the budget, and less where the search will end by itself."""
        share = self._share()
        left = self._groups[self._current].expected_s(share)
        if left is None:
            return max(0.0, self.budget_s - self.spent_s)
        whole = max(group.spent_s for group in self._groups[: self._current + 1])  # what one group takes, as far as is known
        whole = max(whole, self._groups[self._current].spent_s + left)
        guess = left + (len(self._groups) - self._current - 1) * whole
        return max(0.0, min(self.budget_s - self.spent_s, guess))

    def _share(self) -> float:
        """What the current group may spend: what is left, evenly over the groups to come."""
        spent_before = sum(group.spent_s for group in self._groups[: self._current])
        return (self.budget_s - spent_before) / max(1, len(self._groups) - self._current)

    def _all(self) -> Requests:
        block = self._first_block
        for number, group in enumerate(self._groups):
            self._current = number
            block = yield from group.run(self._share, block)


class _Group:
    """The search for one transport and landing."""

    def __init__(self, space: Space, default: Configuration, effort: Effort, seed: str) -> None:
        self.spent_s = 0.0
        self._space = space
        self._default = default
        self._effort = effort
        self._rng = random.Random(seed)  # noqa: S311  # an order of measurements, no secret
        self._records: list[Record] = []
        self._block = 0
        self._phase: Phase = "map"
        self._limit_s = 0.0
        self._queued = 0
        self._fitted: tuple[int, Fit[Configuration] | None] = (0, None)

    def add(self, record: Record) -> None:
        """A measurement that was made."""
        self._records.append(record)
        self.spent_s += record.sample.elapsed_s

    def run(self, budget_s: Callable[[], float], block: int) -> Generator[Request, None, int]:
        """All phases, within what ``budget_s`` says when each begins. Returns the number of the next block."""
        effort, self._block = self._effort, block
        phases = (
            (self._map, effort.map_share),
            (self._halve, effort.map_share),
            (self._descend, effort.search_share),
            (self._final, 1.0),
        )
        for phase, share in phases:
            self._limit_s = budget_s() * share
            yield from phase()
        return self._block

    def _map(self) -> Requests:
        self._phase = "map"
        cells = self._cells()
        yield from self._measure([])  # the default alone: it may say that many cells are alike
        while cells:
            alike = self._alike()
            cells = [cell for cell in cells if cell not in alike]
            block, cells = cells[: self._effort.block], cells[self._effort.block :]
            self._queued = len(cells)
            if block and not (yield from self._measure(block)):
                return

    def _cells(self) -> list[Configuration]:
        """The map but for the default, bucket sizes in turn: of each the highest watermark, then the lowest, then the others.

        After each bucket size's first, it is known down to which watermark the others would be the same.
        """
        columns: dict[int, list[Configuration]] = {}
        for cell in self._space.plane(self._default):
            if cell != self._default:
                columns.setdefault(cell.bucket_bytes, []).append(cell)
        ordered = []
        for cells in columns.values():
            middle = cells[1:-1]
            self._rng.shuffle(middle)
            ordered.append([*cells[-1:], *(cells[:1] if len(cells) > 1 else []), *middle])
        self._rng.shuffle(ordered)
        return [cell for cells in itertools.zip_longest(*ordered) for cell in cells if cell is not None]

    def _halve(self) -> Requests:
        self._phase = "halving"
        alive = self._order()
        while len(alive) > self._effort.survivors:
            alive = self._survivors(alive, max(self._effort.survivors, (len(alive) + 1) // 2))
            if not (yield from self._measure(alive)):
                return
            if len(alive) == self._effort.survivors:
                return

    def _descend(self) -> Requests:
        self._phase = "descent"
        joint: list[Configuration] = []
        raced: set[Configuration] = set()
        while self._order():
            best = self._order()[0]
            moves = self._moves(best)
            new = [c for c in dict.fromkeys([*joint, *(move for _, move in moves)]) if c not in raced or c in joint]
            raced.update(new, [best])
            if not new or not (yield from self._race([best, *new])):
                return
            joint = self._joint(best, moves, raced)
            if self._order()[0] == best and not joint:
                return

    def _final(self) -> Requests:
        self._phase = "final"
        finalists = self._finalists()
        for done in range(self._effort.final_rounds if finalists else 0):
            self._queued = (self._effort.final_rounds - done - 1) * (len(finalists) + 1)
            if not (yield from self._measure(finalists)):
                return

    def _race(self, candidates: list[Configuration]) -> Generator[Request, None, bool]:
        """Three rounds, of which each drops the worse half and whatever is clearly slower. False if time ran out."""
        alive = candidates
        for _ in range(3):
            if not (yield from self._measure(alive)):
                return False
            alive = self._survivors([c for c in self._order() if c in alive], max(2, (len(alive) + 1) // 2))
        return True

    def _pushes(self) -> int:
        """Of the next batches: links, control and the look at every element are paid for once a batch."""
        costs = [(record.sample.elapsed_s - sum(record.sample.seconds), statistics.median(record.sample.warm))
                 for record in usable(self._records)[:5]]  # fmt: skip
        ratio = statistics.median(other / max(each, 1e-9) for other, each in costs) if costs else 0.0
        final = self._phase == "final"
        least, most = self._effort.final_warm if final else self._effort.warm
        return 1 + min(max(round(2 * ratio if final else ratio), least), most)

    def _measure(self, candidates: Sequence[Configuration]) -> Generator[Request, None, bool]:
        """One batch of each candidate, in blocks, each with the default. False if time ran out on the way."""
        order, pushes = [c for c in candidates if c != self._default], self._pushes()
        self._rng.shuffle(order)
        for start in range(0, max(1, len(order)), self._effort.block):
            block = [*order[start : start + self._effort.block], self._default]
            self._rng.shuffle(block)
            for configuration in block:
                if configuration in spoiled(self._records):
                    continue
                if self.spent_s + self._cost(configuration, pushes) > self._limit_s:
                    self._block += 1
                    return False
                yield Request(configuration=configuration, pushes=pushes, phase=self._phase, block=self._block)
            self._block += 1
        return True

    def _cost(self, configuration: Configuration, pushes: int) -> float:
        """What a measurement will take, from the last of the same configuration, or else the dearest of the last few."""
        same = [record for record in self._records if record.configuration == configuration][-1:]
        costs = [
            record.sample.elapsed_s + (pushes - len(record.sample.seconds)) * statistics.median(record.sample.warm)
            for record in same or self._records[-5:]
            if record.sample.usable
        ]
        return max(costs, default=0.0)

    def _fit(self) -> Fit[Configuration] | None:
        if self._fitted[0] != len(self._records):
            records = usable(self._records)
            self._fitted = len(self._records), fit([record.batch for record in records]) if records else None
        return self._fitted[1]

    def _order(self) -> list[Configuration]:
        """What is known, fastest first."""
        fitted = self._fit()
        return fitted.order if fitted else []

    def _survivors(self, alive: Sequence[Configuration], most: int) -> list[Configuration]:
        """The best ``most`` of ``alive`` (fastest first) that are not clearly slower than the first."""
        fitted = self._fit()
        if fitted is None:
            return []
        return [c for c in alive[:most] if not fitted.worse(c, alive[0], self._effort.z)]

    def _alike(self) -> set[Configuration]:
        """Configurations that differ from a measured one in nothing but a watermark that neither of them reaches."""
        records = usable(self._records)
        measured = peaks(records)
        found: set[Configuration] = set()
        for configuration, peak in measured.items():
            least = enough(configuration, peak)
            if configuration.max_tmp_bytes >= least:
                others = (w for w in self._space.axes["max_tmp_bytes"] if w >= least)
                found.update(configuration.but(max_tmp_bytes=w) for w in others)
        return found - measured.keys()

    def _moves(self, best: Configuration) -> list[tuple[str, Configuration]]:
        """Steps from ``best`` that are not known to lead nowhere."""
        fitted, alike, bad = self._fit(), self._alike(), spoiled(self._records)
        axes = active_axes(self._space, usable(self._records))
        found = []
        for axis, move in self._space.moves(best, axes):
            known = fitted is not None and move in fitted.seconds and fitted.worse(move, best, self._effort.z)
            if move not in alike and move not in bad and not known:
                found.append((axis, move))
        return found

    def _joint(
        self, best: Configuration, moves: Iterable[tuple[str, Configuration]], raced: set[Configuration]
    ) -> list[Configuration]:
        """All steps that seem to help, taken together."""
        fitted = self._fit()
        if fitted is None or best not in fitted.seconds:
            return []
        helpful: dict[str, Configuration] = {}
        for axis, move in moves:
            seconds = fitted.seconds.get(move, float("inf"))
            if seconds < fitted.seconds[best] and (axis not in helpful or seconds < fitted.seconds[helpful[axis]]):
                helpful[axis] = move
        together = best.but(**{axis: getattr(move, axis) for axis, move in helpful.items()})
        return [together] if len(helpful) > 1 and together not in raced and self._space.allows(together) else []

    def _finalists(self) -> list[Configuration]:
        """The fastest few, and the fastest with at most half the memory of those, and so on."""
        order, peak, effort = self._order(), peaks(self._records), self._effort
        round_s = effort.least_rounds * self._cost(self._default, self._pushes())
        affordable = int((self._limit_s - self.spent_s) / round_s) - 1 if round_s > 0 else effort.finalists
        most = min(effort.finalists, max(2, affordable))
        chosen = [c for c in order if c != self._default][: most // 2]
        least = min((peak[c] for c in chosen), default=0)
        for configuration in order:
            if len(chosen) < most and configuration not in chosen and peak[configuration] * 2 <= least and least > 0:
                chosen.append(configuration)
                least = peak[configuration]
        chosen += [c for c in order if c not in chosen and c != self._default][: most - len(chosen)]
        return chosen

    def expected_s(self, budget_s: float) -> float | None:
        """Roughly what is still to come here; None before anything was measured."""
        if not self._records:
            return None
        each, effort = self.spent_s / len(self._records), self._effort
        final = each * 1.5 * (effort.finalists + 1) * effort.final_rounds
        descent = each * 4 * effort.block
        match self._phase:
            case "map":
                rest = (2 * self._queued + effort.block) * each + descent + final
            case "halving":
                rest = effort.block * each + descent + final
            case "descent":
                rest = descent / 2 + final
            case _:
                rest = self._queued * each
        return max(0.0, min(rest, budget_s - self.spent_s))
