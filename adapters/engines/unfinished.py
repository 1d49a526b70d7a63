"""What an engine is made to say as its weights' version while they are none."""

from __future__ import annotations

UNFINISHED = "syncline-unfinished"
"""Weights that were changed in part, released, or never pushed. With a suffix after ``@``: an update is being written.

It is kept at the engine, so that whoever comes next, perhaps after a crash of who has set it, knows not to let it serve.
"""
