"""What a generation engine is asked and what it answers.

    SynclineError
    ├── UnsupportedModel          the model cannot be served; says why
    └── RequestError              one request failed; the engine goes on. `retryable` says whether asking again may help
        ├── RequestInvalid (ValueError)  yours: lists every problem
        ├── TargetFenced (NotServing)    nothing is served until a whole push commits
        ├── QueueFull             too many requests wait
        ├── RequestTimeout        no token for too long: the queue did not move, or an update took too long
        ├── RequestAborted        ended by an update or an operator (``in_flight="abort"``) or by the engine's close
        ├── RequestCancelled      the one who asked has gone
        └── ForwardFailed         the model raised

A `RequestError` carries the tokens that the request had got and the versions they came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import msgspec

from syncline.engine.errors import NotServing, SynclineError

FinishReason = Literal["stop", "length"]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens ``start <= i < end`` of an answer come from forward passes under ``version``.

    The keys and values of the prompt are those of the first token's version; a token's own keys and values are those of
    the next token's version, because the pass that reads a token gives the next one.
    """

    version: int
    start: int
    end: int


class Token(NamedTuple):
    """One token of an answer. ``logprob`` is of the model's own distribution (temperature 1), if it was asked for."""

    position: int
    id: int
    version: int
    logprob: float | None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. ``seed`` repeats the sampling; None for greedy decoding."""

    token_ids: list[int]
    versions: list[Span]
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int | None = None
    logprobs: list[float] | None = None


def spans_of(versions: Sequence[int]) -> list[Span]:
    """Runs of equal versions, in order: ``[3, 3, 4]`` is ``3: [0, 2), 4: [2, 3)``."""
    spans: list[Span] = []
    start = 0
    for end in range(1, len(versions) + 1):
        if end == len(versions) or versions[end] != versions[start]:
            spans.append(Span(version=versions[start], start=start, end=end))
            start = end
    return spans


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One request.

    Attributes:
        prompt_ids: at least one token id.
        max_new_tokens: at most so many tokens are added; fewer if the model's longest context is reached.
        temperature: 0 is greedy decoding.
        top_p: sample from the smallest set of tokens that holds this much probability.
        seed: of the sampling; None draws one, which the answer names.
        logprobs: give each token's log probability.
        wait: while the target is fenced, wait for its first commit instead of being refused.
        timeout_s: longest time without a new token, in seconds; None takes the engine's.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: bool = False
    wait: bool = False
    timeout_s: float | None = None

    def problems(self, *, vocab: int, max_length: int) -> list[str]:
        """Everything that is wrong with it."""
        found = prompt_problems(self.prompt_ids, vocab=vocab, max_length=max_length - 1)
        if self.max_new_tokens < 1:
            found.append(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            found.append(f"temperature is {self.temperature}; it must be a finite number of at least 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            found.append(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            found.append(f"seed is {self.seed}; it must be at least 0 and below 2**63")
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            found.append(f"timeout_s is {self.timeout_s}; it must be a finite number of seconds above 0")
        return found


def prompt_problems(ids: Sequence[int], *, vocab: int, max_length: int) -> list[str]:
    """What is wrong with a prompt of token ids."""
    found = []
    if not ids:
        found.append("the prompt is empty; give at least one token")
    if len(ids) > max_length:
        found.append(f"the prompt has {len(ids)} tokens; at most {max_length} fit")
    outside = [token for token in ids if not 0 <= token < vocab]
    if outside:
        found.append(f"token ids {outside[:5]} are outside the vocabulary (0 to {vocab - 1})")
    return found


class UnsupportedModel(SynclineError):
    """The model cannot be served."""


class RequestError(SynclineError):
    """One request failed; the engine goes on. Carries what the request had got."""

    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, token_ids: Sequence[int] = (), versions: Sequence[Span] = ()) -> None:
        self.token_ids: tuple[int, ...] = tuple(token_ids)
        self.versions: tuple[Span, ...] = tuple(versions)
        super().__init__(message)


class RequestInvalid(RequestError, ValueError):
    """Yours: the message lists every problem."""

    retryable = False


class TargetFenced(RequestError, NotServing):
    """Nothing is served until a whole push commits."""


class QueueFull(RequestError):
    """Too many requests wait already."""


class RequestTimeout(RequestError):
    """The request got no token for too long."""


class RequestAborted(RequestError):
    """Ended by an update, by an operator, or by the engine's close."""


class RequestCancelled(RequestError):
    """The one who asked has gone."""


class ForwardFailed(RequestError):
    """The model raised during this request's forward pass."""

    retryable = False
