"""Errors that are kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from syncline.stages.errors import TransportError, without_frames


def load(memory):
    if memory.numel():
        raise ValueError("no such layer")


def guarded(memory):
    try:
        load(memory)
    except ValueError as error:
        raise TransportError("the loader raised") from error


def suppressing(memory):
    try:
        load(memory)
    except ValueError:
        raise TransportError("it failed") from None


@pytest.mark.parametrize("work", [load, guarded, suppressing])
def test_an_error_without_frames_holds_nothing_of_what_was_worked_on(work):
    def keep():
        memory = torch.zeros(4)
        try:
            work(memory)
        except (ValueError, TransportError) as error:
            return without_frames(error), weakref.ref(memory)

    gc.disable()
    try:
        error, memory = keep()
        assert memory() is None
    finally:
        gc.enable()
    if work is load:  # an error that is not ours says where it arose
        assert "in load" in "".join(error.__notes__)
    else:
        assert not hasattr(error, "__notes__")
