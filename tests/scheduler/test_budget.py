from __future__ import annotations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from syncline.scheduler.budget import ByteBudget
from syncline.scheduler.errors import BudgetError

LIMIT = 100


class BudgetAgainstModel(RuleBasedStateMachine):
    """The budget beside a plain dict of what is held and the largest sum seen since the last reset."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = ByteBudget(LIMIT)
        self.model: dict[int, int] = {}
        self.peak = 0
        self.next_key = 0

    @rule(nbytes=st.integers(0, 60))
    def reserve(self, nbytes: int) -> None:
        total = sum(self.model.values()) + nbytes
        assert self.budget.fits(nbytes) == (total <= LIMIT)
        if total > LIMIT:
            with pytest.raises(BudgetError, match=f"{total - nbytes} of {LIMIT}"):
                self.budget.reserve(self.next_key, nbytes)
            return
        self.budget.reserve(self.next_key, nbytes)
        self.model[self.next_key] = nbytes
        self.peak = max(self.peak, total)
        self.next_key += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release_once_and_no_more(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        assert self.budget.release(key) == self.model.pop(key)
        with pytest.raises(BudgetError, match="released already"):
            self.budget.release(key)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def reserve_twice(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        with pytest.raises(BudgetError, match="already"):
            self.budget.reserve(key, 0)

    @rule()
    def begin_a_new_high_water_mark(self) -> None:
        self.budget.reset_peak()
        self.peak = sum(self.model.values())

    @invariant()
    def agrees(self) -> None:
        assert self.budget.held == self.model
        assert self.budget.in_use == sum(self.model.values()) <= LIMIT
        assert self.budget.peak == self.peak


BudgetAgainstModel.TestCase.settings = settings(deadline=None, max_examples=100, stateful_step_count=30)
TestBudgetAgainstModel = BudgetAgainstModel.TestCase


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="watermark is -1"):
        ByteBudget(-1)
    with pytest.raises(BudgetError, match="-5 bytes"):
        ByteBudget(10).reserve("a", -5)


def test_a_failed_reservation_leaves_no_trace() -> None:
    budget = ByteBudget(10)
    budget.reserve("a", 8)
    with pytest.raises(BudgetError):
        budget.reserve("b", 3)
    assert (budget.in_use, budget.peak, budget.held) == (8, 8, {"a": 8})
    budget.reserve("b", 2)
    assert budget.peak == 10
