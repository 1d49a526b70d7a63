"""The negative control flips one bit, on the way out only. (That pushes notice it: test_bed.py.)"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncline.bench.measure.corruption import CorruptingSend, Flipping, corrupted
from syncline.engine import wiring
from syncline.stages.send import SendStage


class Recording:
    """A sender that keeps what it is given."""

    kind = "recording"

    def __init__(self) -> None:
        self.sent: list[tuple[torch.Tensor, dict[int, torch.Tensor]]] = []

    def send(self, task: Any, bucket: torch.Tensor, receivers: Any, lent: Any = None) -> dict[Any, Any]:
        self.sent.append((bucket.clone(), {offset: tensor.clone() for offset, tensor in (lent or {}).items()}))
        return {}


@pytest.fixture
def inner() -> Recording:
    return Recording()


def test_one_bit_of_one_bucket(inner: Recording) -> None:
    sender: Any = Flipping(inner)  # type: ignore[arg-type]
    assert sender.kind == "recording"
    for armed in (False, True, False):
        sender.armed = armed or sender.armed
        sender.send(SimpleNamespace(), torch.zeros(100, dtype=torch.uint8), [])
    assert [int(bucket.sum()) for bucket, _ in inner.sent] == [0, 1, 0]
    assert inner.sent[1][0][50] == 1


def test_memory_of_the_trainer_stays_as_it_is(inner: Recording) -> None:
    sender: Any = Flipping(inner)  # type: ignore[arg-type]
    sender.armed = True
    own = torch.zeros(10, dtype=torch.uint8)
    sender.send(SimpleNamespace(), torch.zeros(4, dtype=torch.uint8), [], {256: own})
    bucket, lent = inner.sent[0]
    assert not own.any() and not bucket.any()
    assert int(lent[256].sum()) == 1


def test_the_first_bucket_of_each_push(inner: Recording) -> None:
    bucket = torch.zeros(8, dtype=torch.uint8)
    memory = SimpleNamespace(bucket=lambda _key: bucket.clone())
    tasks = {index: SimpleNamespace(index=index, nbytes=8, receivers=["a", "b"]) for index in range(2)}
    routes: Any = {"a": inner, "b": inner}
    stage: Any = CorruptingSend(tasks=tasks, memory=memory, routes=routes, on_receiver_error=print)  # type: ignore[arg-type]
    for push in range(2):
        stage.begin(push, ["a", "b"])
        for task in tasks.values():
            stage._send(task, task.receivers)
    assert [int(sent.sum()) for sent, _ in inner.sent] == [1, 0, 1, 0]  # one send for both receivers, as without it


def test_it_ends_with_its_scope() -> None:
    with corrupted():
        assert wiring.SendStage is CorruptingSend
    assert wiring.SendStage is SendStage
