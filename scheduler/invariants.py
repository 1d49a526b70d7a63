"""The rules of the pipeline, checked from the bare records.

Nothing here calls the machine's own guards: what was admitted, started and released is worked out again from each task's
record, so that a guard that is wrong shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .events import STAGES, ReleaseBuffers, StageName, StartStage, TaskSpec
from .records import Phase, PushRecord, TaskRecord, TaskState

if TYPE_CHECKING:
    from .machine import PipelineMachine


def broken_rules(machine: PipelineMachine) -> list[str]:
    """One line for every rule that the machine's state breaks; empty if all hold. Linear in the number of tasks."""
    problems = [*_bytes(machine), *_slots(machine), *_abandoned(machine), *_batch(machine)]
    push = machine.push
    if push is not None:
        problems += [*_admission(machine, push), *_source(machine, push), *_ends(machine, push)]
        if machine.phase is not Phase.FAILED:
            problems += [*_order(push), *_barriers(push), *_idle(machine, push)]
    return problems


def _records(machine: PipelineMachine) -> list[TaskRecord]:
    active = list(machine.push.active.values()) if machine.push else []
    return active + list(machine.late.values())


def _started(push: PushRecord, spec: TaskSpec) -> tuple[StageName, ...]:
    """The stages of a task that were started in this push and still count.

    Of a done task all, but for a send that nobody wants: it may have been skipped. Of a dropped task none.
    """
    if spec.index in push.done:
        return spec.stages if push.wanted(spec) else tuple(stage for stage in spec.stages if stage != "send")
    record = push.active.get(spec.index)
    if record is None:
        return ()
    return spec.stages[: record.ended + (record.state is TaskState.RUNNING)]


def _bytes(machine: PipelineMachine) -> Iterator[str]:
    """Rule 1: bytes are those of the tasks in flight, and never above the watermark."""
    budget = machine.budget
    expected = {record.key: record.spec.tmp_bytes for record in _records(machine)}
    if budget.held != expected:
        yield f"rule 1: the budget holds {budget.held}, the tasks in flight {expected}"
    if budget.in_use != sum(expected.values()):
        yield f"rule 1: {budget.in_use} bytes are counted as in use, the tasks in flight hold {sum(expected.values())}"
    if max(budget.in_use, sum(expected.values())) > machine.limits.max_tmp_bytes:
        yield f"rule 1: {budget.in_use} temporary bytes are above the watermark of {machine.limits.max_tmp_bytes}"


def _admission(machine: PipelineMachine, push: PushRecord) -> Iterator[str]:
    """Rule 1: what was admitted is a prefix of the plan."""
    late = {task for push_id, task in machine.late if push_id == push.push_id}
    dropped = {record.spec.index for record in push.recent if record.state is TaskState.DROPPED}
    known = push.active.keys() | push.done | late | dropped
    prefix = {spec.index for spec in push.schedule.tasks[: push.admitted]}
    if known - prefix or (machine.phase is not Phase.FAILED and known != prefix):
        yield f"rule 1: the tasks admitted are {sorted(known)}, the first {push.admitted} of the plan are {sorted(prefix)}"


def _order(push: PushRecord) -> Iterator[str]:
    """Rule 2: in every stage, the tasks that were started are a prefix of the tasks that have the stage."""
    for stage in STAGES:
        behind: TaskSpec | None = None
        for spec in push.schedule.queues[stage]:
            if stage in _started(push, spec):
                if behind is not None:
                    yield f"rule 2: {stage} of task {spec.index} was started before that of task {behind.index}"
                    break
            elif behind is None and not (stage == "send" and not push.wanted(spec)):
                behind = spec


def _batch(machine: PipelineMachine) -> Iterator[str]:
    """Rule 3: within one answer, nothing that waited to be sent comes after a task that was admitted.

    Rule 1: no buffers are released twice, and none that are still in use.
    """
    push = machine.push
    first = {spec.index: spec.stages[0] for spec in push.schedule.tasks} if push else {}
    admitted: int | None = None
    for order in machine.batch:
        if isinstance(order, StartStage) and order.stage == first.get(order.task):
            admitted = order.task
        elif isinstance(order, StartStage) and order.stage == "send" and admitted is not None:
            yield f"rule 3: task {admitted} was admitted before task {order.task} was sent"
    released = [(order.push_id, order.task) for order in machine.batch if isinstance(order, ReleaseBuffers)]
    held = machine.budget.held
    for key in released:
        if released.count(key) > 1 or key in held:
            yield f"rule 1: the buffers of task {key[1]} of push {key[0]} were released {released.count(key)} times or too soon"


def _barriers(push: PushRecord) -> Iterator[str]:
    """Rule 4: a barrier only after its group's last prepare; collectives only after the barriers of all earlier groups."""
    groups = push.schedule.groups
    entered = set(groups[: push.gate])
    if push.barrier is not None:
        entered.add(push.barrier)
        if push.barrier != groups[push.gate]:
            yield f"rule 4: the barrier of group {push.barrier} was started out of order"
    for spec in push.schedule.tasks:
        started = _started(push, spec)
        if ("prepare" in started or "send" in started) and push.schedule.position[spec.group] > push.gate:
            yield f"rule 4: task {spec.index} of group {spec.group} was started before the barrier of an earlier group was done"
        if spec.group in entered and "prepare" in spec.stages and not _prepared(push, spec):
            yield f"rule 4: the barrier of group {spec.group} was started before the prepare of task {spec.index} was done"


def _prepared(push: PushRecord, spec: TaskSpec) -> bool:
    record = push.active.get(spec.index)
    return spec.index in push.done or (record is not None and spec.stages.index("prepare") < record.ended)


def _slots(machine: PipelineMachine) -> Iterator[str]:
    """Rule 5: concurrency limits, abandoned work included."""
    for stage in STAGES:
        flying = sum(record.stage == stage for record in _records(machine) if record.state is not TaskState.WAITING)
        limit = getattr(machine.limits, stage)
        if machine.in_flight[stage] != flying:
            yield f"rule 5: {machine.in_flight[stage]} tasks are counted in {stage}, {flying} are there"
        if flying > limit:
            yield f"rule 5: {flying} tasks are in {stage}, its limit is {limit}"


def _abandoned(machine: PipelineMachine) -> Iterator[str]:
    """Rule 6: after a failure nothing is left but abandoned work, and each of it still has a stage in flight."""
    push = machine.push
    if push is not None and machine.phase is Phase.FAILED and (push.active or push.barrier is not None):
        yield f"rule 6: the push has failed, and tasks {sorted(push.active)} or barrier {push.barrier} were not abandoned"
    for record in machine.late.values():
        if record.state is not TaskState.ABANDONED or record.stage is None:
            yield f"rule 6: task {record.spec.index} is kept as abandoned work while it is {record.state.value}"
    for record in push.active.values() if push else ():
        if record.state not in (TaskState.RUNNING, TaskState.WAITING):
            yield f"rule 6: task {record.spec.index} is in the pipeline while it is {record.state.value}"


def _source(machine: PipelineMachine, push: PushRecord) -> Iterator[str]:
    """`SourceFree` is given out exactly when no started or pending task reads source storage."""
    late = {task: record for (push_id, task), record in machine.late.items() if push_id == push.push_id}
    pending = push.schedule.tasks[push.admitted :] if machine.phase is not Phase.FAILED else ()
    reading = [spec.index for spec in pending if spec.reads_source]
    for record in [*push.active.values(), *late.values()]:
        stages = record.spec.stages
        early = "prepare" in stages and not record.spec.lends
        last = stages.index("prepare") if early else len(stages) - 1
        if record.spec.reads_source and record.ended <= last:
            reading.append(record.spec.index)
    if push.source_free == bool(reading):
        yield f"source: free is {push.source_free} while tasks {reading} read source storage"


def _ends(machine: PipelineMachine, push: PushRecord) -> Iterator[str]:
    """Rule 7: nothing is finished early. A push whose targets are all lost fails."""
    if machine.phase in (Phase.VOTING, Phase.FINISHED):
        missing = [spec.index for spec in push.schedule.tasks if spec.index not in push.done]
        if missing or push.gate != len(push.schedule.groups) or push.barrier is not None:
            yield f"rule 7: the push is {machine.phase.value} while tasks {missing} or barriers are not done"
    if machine.phase is Phase.FINISHED and not push.voted:
        yield "rule 7: the push is finished and the targets did not vote"
    if machine.phase is not Phase.FAILED and push.targets <= push.lost.keys():
        yield f"rule 7: all targets are lost and the push is {machine.phase.value}"


def _idle(machine: PipelineMachine, push: PushRecord) -> Iterator[str]:
    """Nothing that may start is left waiting: a pipeline that keeps all other rules by standing still is no pipeline."""
    if machine.phase is not Phase.RUNNING:
        return
    for stage in STAGES:
        spec = next((spec for spec in push.schedule.queues[stage] if _unstarted(push, spec, stage)), None)
        if spec is not None and _could_start(machine, push, spec, stage):
            yield f"progress: {stage} of task {spec.index} could start and was not started"
    for record in push.active.values():
        if record.state is TaskState.WAITING and record.stage == "send" and not push.wanted(record.spec):
            yield f"progress: task {record.spec.index} waits for a send that nobody wants"
    groups = push.schedule.groups
    if push.barrier is None and push.gate < len(groups):
        todo = [spec for spec in push.schedule.tasks if spec.group == groups[push.gate] and "prepare" in spec.stages]
        if all(_prepared(push, spec) for spec in todo):
            yield f"progress: the barrier of group {groups[push.gate]} could start and was not started"


def _unstarted(push: PushRecord, spec: TaskSpec, stage: StageName) -> bool:
    return stage not in _started(push, spec) and (stage != "send" or push.wanted(spec))


def _could_start(machine: PipelineMachine, push: PushRecord, spec: TaskSpec, stage: StageName) -> bool:
    if machine.in_flight[stage] >= getattr(machine.limits, stage):
        return False
    if stage != "h2d" and push.schedule.position[spec.group] > push.gate:
        return False
    record = push.active.get(spec.index)
    if record is not None:
        return record.state is TaskState.WAITING and record.stage == stage
    head = push.admitted < len(push.schedule.tasks) and push.schedule.tasks[push.admitted] is spec
    fits = machine.budget.in_use + spec.tmp_bytes <= machine.limits.max_tmp_bytes
    return head and fits and spec.stages[0] == stage
