"""The receiver's loader in a vLLM worker: whole checkpoint tensors into vLLM's own loading."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from syncline.engine.loader import Landed
from syncline.scheduler.layout import Index, Manifest, flat_offset, row_major

from ..checkpoint_manifest import CheckpointTensors
from .main_thread import MainThread

_PATIENCE_S = 30.0
"""How long a rank waits for its main thread: the leader has to have vLLM call it first."""


class Reload(Protocol):
    """What `bracket.Bracket` offers; runs on the worker's main thread."""

    def open(self) -> None: ...
    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None: ...
    def close(self) -> None: ...


class VLLMLoader:
    """Implements `syncline.engine.loader.Loader`, of the family that gets its content through `install`.

    Args:
        wanted: what a checkpoint of the served model holds.
        reload: vLLM's reload of this worker's model.
        main: the worker's main thread.
        open_session: on the leader rank: has vLLM bring every worker's main thread; raises if it does not.
    """

    def __init__(
        self, wanted: CheckpointTensors, reload: Reload, main: MainThread, open_session: Callable[[int | None], None] | None
    ) -> None:
        self._wanted = wanted
        self._reload = reload
        self._main = main
        self._open_session = open_session
        self._manifest: Manifest | None = None
        self._whole: dict[int, tuple[torch.Tensor, int]] = {}

    def manifest(self, *, rank: int, world_size: int, host: str) -> Manifest:
        """Every tensor of the checkpoint, whole. Where vLLM holds them does not matter, so it never changes."""
        if self._manifest is None:
            self._manifest = self._wanted.manifest(rank=rank, world_size=world_size, host=host)
        return self._manifest

    def buffers(self) -> None:
        """None: the parameters are fused, sharded, packed, and written by vLLM's own loading only."""

    def begin(self, version: int | None) -> None:
        """Open the bracket."""
        self._whole.clear()
        if self._open_session is not None:
            self._open_session(version)
        self._main.run(self._reload.open, patience_s=_PATIENCE_S)

    def install(self, landed: Sequence[Landed]) -> None:
        """Load what is whole; keep parts of larger tensors until they are."""
        tensors = [(self._wanted.names[part.piece], whole) for part in landed if (whole := self._made_whole(part)) is not None]
        if tensors:
            self._main.run(lambda: self._reload.load(tensors), patience_s=_PATIENCE_S)

    def install_all(self, landed: Sequence[Landed]) -> None:
        """Load everything at once (``staged``). Parts that lie side by side in landing memory are one tensor already."""
        parts: dict[int, list[Landed]] = {}
        for part in landed:
            parts.setdefault(part.piece, []).append(part)
        tensors = [(self._wanted.names[piece], self._joined(piece, found)) for piece, found in parts.items()]
        self._main.run(lambda: self._reload.load(tensors), patience_s=_PATIENCE_S)

    def _joined(self, piece: int, parts: Sequence[Landed]) -> torch.Tensor:
        whole = side_by_side(parts, self._wanted.tensors[piece].shape)
        for part in parts if whole is None else ():
            whole = self._made_whole(part)
        assert whole is not None, "the plan covers every tensor"
        return whole

    def finish(self, version: int | None) -> None:
        """Close the bracket."""
        self._main.run(self._reload.close, patience_s=_PATIENCE_S)

    def rebind(self, landed: Sequence[Landed]) -> None:
        """Landing ``mapped`` is refused by the manifest: these parameters never move."""
        raise NotImplementedError("vLLM's parameters cannot be pointed at other memory")

    def _made_whole(self, part: Landed) -> torch.Tensor | None:
        """The tensor that a part belongs to (piece i is all of tensor i), once all of it has come."""
        shape = self._wanted.tensors[part.piece].shape
        if part.box.shape == shape:
            return part.tensor
        known = self._whole.pop(part.piece, None)
        whole, missing = known or (torch.empty(shape, dtype=part.tensor.dtype), math.prod(shape))
        region = tuple(slice(at, at + n) for at, n in zip(part.box.start, part.box.shape, strict=True))
        whole[region].copy_(part.tensor)
        missing -= part.tensor.numel()
        if missing:
            self._whole[part.piece] = (whole, missing)
            return None
        return whole


def side_by_side(parts: Sequence[Landed], shape: Index) -> torch.Tensor | None:
    """The tensor that parts of it are, if they lie in one memory one behind the other; None if they do not."""
    first, *others = sorted(parts, key=lambda part: flat_offset(part.box.start, shape))
    at, memory = first.tensor.data_ptr() + first.tensor.nbytes, first.tensor.untyped_storage().data_ptr()
    for part in others:
        if part.tensor.data_ptr() != at or part.tensor.untyped_storage().data_ptr() != memory:
            return None
        at += part.tensor.nbytes
    if sum(part.tensor.numel() for part in parts) != math.prod(shape):
        return None
    return first.tensor.as_strided(shape, row_major(shape), first.tensor.storage_offset())
