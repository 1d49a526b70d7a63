"""What a target's engine has to offer: a `Loader` for its weights, and `Serving` for its forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from syncline.scheduler.layout import Box, Manifest

from .messages import InFlight


class Landed(NamedTuple):
    """A received part of a canonical tensor: which piece of the loader's manifest, which box, and its content.

    ``tensor`` has the box's shape and the wire dtype and is contiguous. It is valid only during the call.
    """

    piece: int
    box: Box
    tensor: torch.Tensor


@runtime_checkable
class Loader(Protocol):
    """The weights of one rank of a target. Called from one worker thread at a time, never from the event loop.

    What it launches on a GPU belongs on the current stream of the calling thread: then it is waited for.

    Two families. One whose live memory may be written from outside (any ``nn.Module``) returns it from `buffers`; the
    receiver then writes pieces straight into it and never calls `install`. The other (engines with a loader of their
    own) returns None and gets everything through `install`. A loader may be of both: where an entry of `buffers` is None,
    pieces of that buffer go through `install`.
    """

    def manifest(self, *, rank: int, world_size: int, host: str) -> Manifest:
        """What this rank must receive. Its ``fingerprint`` changes when live memory was reallocated."""
        ...

    def buffers(self) -> Sequence[torch.Tensor | None] | None:
        """Live tensors in the order of the manifest's buffers, None for those that `install` fills; or None for all."""
        ...

    def begin(self, version: int | None) -> None:
        """A whole push is about to be written (``streamed``: at the first byte; else at commit). Runs under pause."""
        ...

    def install(self, landed: Sequence[Landed]) -> None:
        """Load parts. Runs under pause, between `begin` and `finish`."""
        ...

    def rebind(self, landed: Sequence[Landed]) -> None:
        """``mapped``: point the parameters at these tensors (whole pieces; valid until the next `rebind` returned)."""
        ...

    def finish(self, version: int | None) -> None:
        """All content is in place: recompute what is derived from weights. Runs under pause."""
        ...


@runtime_checkable
class Serving(Protocol):
    """The forward passes of one rank of a target."""

    async def pause(self, in_flight: InFlight) -> None:
        """Returns once no forward pass runs and none will start.

        On a GPU that means: the device has done it. A pass whose call has returned may only be queued, and weights are written
        as soon as this returns, on streams that know nothing of the engine's: synchronize the device, or ask an event that was
        recorded behind the last pass. (vLLM's and SGLang's own pauses end with a drained device.)
        """
        ...

    async def resume(self, version: int) -> None:
        """Let forward passes run again, all on ``version``, from any stream: the device has written the weights by now.

        Prefix caches of older versions are dropped, too.
        """
        ...


@runtime_checkable
class Unmapping(Protocol):
    """A `Loader` with `Loader.rebind` may have this too: it can give live parameters memory of their own again."""

    def unmap(self) -> None:
        """Copy what `Loader.rebind` pointed at into own memory, with equal content, and let go of it."""
        ...


@runtime_checkable
class InstallingAll(Protocol):
    """A `Loader` that gets its content through `Loader.install` may have this too: it takes a whole push in one call."""

    def install_all(self, landed: Sequence[Landed]) -> None:
        """``staged``: in place of every `Loader.install`. All parts, in plan order; valid only during the call."""
        ...


@runtime_checkable
class Fencing(Protocol):
    """`Serving` may have this too: it is told when nothing may be served until the next `resume`."""

    async def fence(self, reason: str) -> None:
        """Returns once no forward pass runs; requests that come or wait get an error that says ``reason``."""
        ...


@runtime_checkable
class Flushing(Protocol):
    """`Serving` may have this too: it can drop every cached key and value, those of running requests with them."""

    async def flush(self, version: int) -> None:
        """Under pause, before `resume` with ``version``; only if the source asked for it (``flush_cache``)."""
        ...
