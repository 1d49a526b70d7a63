"""Bodies of the generation server's requests and replies (JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from syncline.engine.messages import InFlight, State

from .generation import EngineStatus
from .requests import FinishReason, Span


class Prompt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Text or token ids, one of them."""

    prompt: str | None = None
    prompt_ids: list[int] | None = None
    wait: bool = False
    timeout_s: float | None = None


class GenerateBody(Prompt, kw_only=True, forbid_unknown_fields=True):
    """``POST /generate``; see `GenerateRequest`."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False


class LogitsBody(Prompt, kw_only=True, forbid_unknown_fields=True):
    """``POST /logits``."""

    format: Literal["json", "raw"] = "json"


class PauseBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /pause``."""

    mode: InFlight = "keep"
    timeout_s: float = 60.0


class GenerateReply(msgspec.Struct, kw_only=True):
    """An answer. ``text`` is empty if the server has no tokenizer; ``token_ids`` has the end token, ``text`` has not."""

    text: str
    token_ids: list[int]
    versions: list[Span]
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int | None
    logprobs: list[float] | None


class TokenEvent(msgspec.Struct, kw_only=True):
    """One token of a stream. ``text`` is what it completes, so it may be empty."""

    token_id: int
    position: int
    version: int
    text: str
    logprob: float | None


class LogitsReply(msgspec.Struct, kw_only=True):
    """``logits``: one row a token, each of the vocabulary's size (``shape``). What is not finite becomes null."""

    version: int
    shape: tuple[int, int]
    logits: list[list[float]]


class ErrorReply(msgspec.Struct, kw_only=True):
    """What went wrong. ``error`` is the class name; the tokens are what the request had got."""

    error: str
    message: str
    retryable: bool
    token_ids: Sequence[int] = ()
    versions: Sequence[Span] = ()


class VersionReply(msgspec.Struct, kw_only=True):
    """``version`` is what is served; None while fenced. ``state`` is the receiver's, if the server hosts one."""

    version: int | None
    state: State


class StatusReply(msgspec.Struct, kw_only=True):
    """``GET /status``: the numbers most asked for, and all of the engine's."""

    state: State
    version: int | None
    running: int
    waiting: int
    answered: int
    engine: EngineStatus
    receiver: str | None
    """Control address of the receiver."""
