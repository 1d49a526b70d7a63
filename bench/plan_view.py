"""A plan in words: what ``syncline plan`` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from syncline.scheduler.boxes import Box
from syncline.scheduler.explain import Explanation, Held, PartRoute
from syncline.scheduler.plan import Plan
from syncline.scheduler.problems import listed
from syncline.scheduler.programs import ReceiverId
from syncline.scheduler.routing import IN_WORDS, size
from syncline.scheduler.traffic import Busy, Pairs

_LISTED = 12
"""Rows of a list before the rest is only counted."""
_MATRIX = 16
"""Ranks on a side up to which every pair is shown."""


def overview(plan: Plan, *, link_gbps: float, host_gbps: float) -> str:
    """What there is, how it travels, who has most to do, and how long that takes at these rates (gigabits a second)."""
    sections = [_facts(plan), _routes(plan), _balance(plan, link_gbps, host_gbps), _pairs(plan), _tasks(plan)]
    return "\n\n".join("\n".join(section) for section in sections)


def _facts(plan: Plan) -> list[str]:
    traffic, sides = plan.traffic, plan.routes.sides
    tensors = len(np.unique(plan.routes.segments.tensor))
    return [
        f"plan       {plan.digest}",
        f"source     {plan.world_size} ranks, {len(sides.sources)} distinct layouts",
        f"targets    {len(sides.targets)} with {len(plan.receivers)} ranks, {len(sides.receiving)} distinct layouts",
        f"tensors    {tensors}, in {plan.total_tasks} tasks of {len(plan.groups)} mesh group(s)",
        f"delivered  {size(traffic.needed)}, every byte of which its receiver keeps; padding {size(traffic.padding)}",
        f"largest    task needs {size(plan.peak_task_tmp_bytes)} of the watermark {size(plan.options.max_tmp_bytes)} on a rank",
    ]


def _routes(plan: Plan) -> list[str]:
    routing = plan.routing
    lines = [f"route      {plan.options.route}", f"direct     {routing.direct_in_words}"]
    gathered = f"gathered   {routing.gathered_tensors} tensors, {size(routing.gathered_nbytes)}"
    if not routing.gathered_tensors:
        return [*lines, gathered]
    lines.append(f"{gathered}; for that {size(routing.moved_nbytes)} between source ranks in {routing.messages} messages")
    for why, rows in routing.why.items():
        lines.append(f"  because {IN_WORDS[why]}: {rows.tensors} tensors, {size(rows.nbytes)}: {_short(rows.names)}")
    return lines


def _balance(plan: Plan, link_gbps: float, host_gbps: float) -> list[str]:
    traffic = plan.traffic
    lines = []
    for label, nbytes in (("sent", traffic.sent), ("taken in", traffic.gathered), ("received", traffic.received)):
        if nbytes.any():
            mean = nbytes.mean()
            spread = f"max/mean {nbytes.max() / mean:.3f}, from {size(int(nbytes.min()))} to {size(int(nbytes.max()))}"
            lines.append(f"{label:<10} {size(mean)} a rank: {spread}")
    busiest = traffic.busiest(link_gbps * 1e9 / 8, host_gbps * 1e9 / 8)
    worst, *others = (_busy(plan, busy) for busy in busiest if busy.seconds or busy is busiest[0])
    rates = f"{link_gbps:g} Gb/s between hosts, {host_gbps:g} Gb/s within one"
    lines.append(f"critical   {worst} at {rates}: no push is faster over such links")
    return [*lines, *(f"           {busy}" for busy in others)]


def _busy(plan: Plan, busy: Busy) -> str:
    if busy.side == "receiver":
        return f"{_receiver(plan.receivers[busy.rank])} receives for {_seconds(busy.seconds)}"
    return f"source rank {busy.rank} {'sends' if busy.sends else 'gathers'} for {_seconds(busy.seconds)}"


def _pairs(plan: Plan) -> list[str]:
    traffic, receivers = plan.traffic, plan.receivers
    lines = _pair_lines("source rank to receiver", traffic.delivered, plan.world_size, [_receiver(r) for r in receivers])
    if len(traffic.moved.nbytes):
        names = [str(rank) for rank in range(plan.world_size)]
        lines += ["", *_pair_lines("source rank to source rank", traffic.moved, plan.world_size, names)]
    return lines


def _pair_lines(title: str, pairs: Pairs, senders: int, takers: Sequence[str]) -> list[str]:
    if senders > _MATRIX or len(takers) > _MATRIX:
        order = np.argsort(-pairs.nbytes, kind="stable")
        lines = [f"{title}: {len(pairs.nbytes)} pairs; the largest"]
        rows = [
            f"  {int(pairs.sender[i]):>5} -> {takers[pairs.taker[i]]:<8} {size(int(pairs.nbytes[i]))}" for i in order[:_LISTED]
        ]
        return [*lines, *rows]
    table = np.zeros((senders, len(takers)), np.int64)
    table[pairs.sender, pairs.taker] = pairs.nbytes
    cells = [[size(n) if n else "." for n in row] for row in table.tolist()]
    width = max(len(cell) for row in [*cells, list(takers)] for cell in row) + 2
    lines = [title, " " * 7 + "".join(f"{name:>{width}}" for name in takers)]
    return lines + [f"{rank:>7}" + "".join(f"{cell:>{width}}" for cell in row) for rank, row in enumerate(cells)]


def _tasks(plan: Plan) -> list[str]:
    lines = ["tasks, in plan order"]
    shown = plan.tasks[:_LISTED]
    for task in shown:
        to = _few([_receiver(r) for r in task.receivers], 4)
        lines.append(
            f"  {task.index:>5}  group {task.group}  rank {task.owner} -> {to}  {size(task.nbytes)}  {_few(task.names, 2)}"
        )
    rest = plan.total_tasks - len(shown)
    return lines + ([f"  and {rest} more"] if rest else [])


_TAKES = re.compile(r"takes (\d+) temporary bytes on source rank (\d+)")


def folded(problems: Sequence[str]) -> list[str]:
    """Problems, of those that say the same of many tensors one; of tasks above the watermark the one that needs most."""
    names: dict[str, list[str]] = {}
    worst: dict[str, tuple[int, str]] = {}
    for problem in problems:
        name, colon, rest = problem.partition(": ")
        key = _TAKES.sub("takes", rest) if colon else problem
        need = int(match[1]) if (match := _TAKES.search(rest)) else 0
        names.setdefault(key, []).extend(name.split(", ") if colon else [])
        worst[key] = max(worst.get(key, (-1, "")), (need, rest))
    return [f"{listed(found)}: {worst[key][1]}" if found else key for key, found in names.items()]


def explanation(plan: Plan, found: Explanation) -> str:
    """One tensor: who holds it, who needs what of it, and each part's way."""
    lines = [f"{found.name}  {_shape(found.shape)}", "held by"]
    lines += _cut(f"  {_box(h.box)}  {_ranks(h.ranks)}" for h in found.held)
    lines.append("needed by")
    lines += _cut(f"  {_box(h.box)}  {_needed_by(h)}" for h in found.wanted)
    lines.append("kept in")
    lines += _cut(_kept(plan, found.name))
    lines.append(f"sent in {len(found.parts)} part(s)")
    lines += _cut(_part(part) for part in sorted(found.parts, key=lambda part: (part.box.start, part.task)))
    return "\n".join(lines)


def _kept(plan: Plan, name: str) -> Iterator[str]:
    """Where receivers keep the tensor's boxes: in which of their parameters, from which element on."""
    sides = plan.routes.sides
    for side in sides.receiving:
        layout = side.layout
        index = layout.tensors.names.index(name) if name in layout.tensors.names else -1
        for piece in np.flatnonzero(layout.pieces.tensor == index).tolist():
            to = _few([_receiver(sides.receivers[rank]) for rank in side.ranks], 8)
            place = layout.buffers.names[int(layout.pieces.buffer[piece])]
            yield f"  {_box(layout.pieces.box(piece))}  {to}: {place} from element {int(layout.pieces.offset[piece])} on"


def _ranks(ranks: Sequence[int]) -> str:
    return f"source rank{'s' if len(ranks) > 1 else ''} {_few([str(rank) for rank in ranks], 8)}"


def _needed_by(held: Held) -> str:
    return _few([_receiver(r) for r in held.receivers], 8)


def _part(part: PartRoute) -> str:
    to = _few([_receiver(r) for r in part.receivers], 4)
    line = f"  task {part.task}: {_box(part.box)}  rank {part.owner} -> {to}  {size(part.nbytes)} as {part.dtype}"
    away = [share for share in part.shares if share.message >= 0]
    if part.why is None:
        return f"{line}, out of its own memory"
    came = _few([f"{_box(share.box)} from rank {share.rank}" for share in away], 6)
    return f"{line}, gathered because {IN_WORDS[part.why]}: {came}"


def _receiver(receiver: ReceiverId) -> str:
    """``target:rank``."""
    return f"{receiver.target}:{receiver.rank}"


def _box(box: Box) -> str:
    """``[0:16, 8:24]``, as Python slices a tensor."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _few(rows: Sequence[str], most: int) -> str:
    return ", ".join(rows[:most]) + (f" and {len(rows) - most} more" if len(rows) > most else "")


def _cut(lines: Iterator[str]) -> list[str]:
    rows = list(lines)
    most = 4 * _LISTED
    return rows if len(rows) <= most else [*rows[:most], f"  and {len(rows) - most} more"]


def _short(names: str, most: int = 160) -> str:
    return names if len(names) <= most else names[:most].rsplit(",", 1)[0] + ", …"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
