"""`LearnedLoader`: pushes land directly in an engine's live parameters, wherever its own loader shows how."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from syncline.engine.errors import LoaderError
from syncline.engine.loader import Landed
from syncline.scheduler.boxes import Box, row_major
from syncline.scheduler.dtypes import ITEMSIZE
from syncline.scheduler.layout import Buffer, Manifest, Piece, Tensor
from syncline.stages.copies import torch_dtype

from .learned import LearnedLayout, LoadWeights, learn_layout
from .learned_check import check_layout
from .module import ModuleLoader

_log = logging.getLogger(__name__)


class LearnedLoader:
    """The weights of an engine that has a loader of its own (a `syncline.engine.loader.Loader`).

    When it is made it watches the engine's loader (`learn_layout`) and proves what it learned (`check_layout`). Tensors whose
    boxes are known then land in live parameters directly; the others are put together whole and given to the loader, under
    pause, one by one as they are complete. Addresses of live parameters never change.

    The parameters must be as the loader takes them: before any repacking, or of a kind that is not repacked.

    Args:
        model: the rank's live module.
        load_weights: the engine's loader, for any part of a checkpoint.
        tensors: what the source sends: names, full shapes, types (for example `CheckpointTensors.tensors`).
        check: prove the layout by one ordinary load of made-up content (parameters are restored).
        begin, end: called around a push, under pause, if anything goes through the loader.
        on_update: called with the version after all content is in place.
        optional: canonical names or patterns with ``*`` that the source may lack.

    Attributes:
        learned: which tensors go how (``str`` of it is for people).

    Raises:
        LoaderError: the engine's loader does not do what it seemed to do.
    """

    def __init__(
        self,
        model: nn.Module,
        load_weights: LoadWeights,
        tensors: Iterable[Tensor],
        *,
        check: bool = True,
        begin: Callable[[], Any] | None = None,
        end: Callable[[], Any] | None = None,
        on_update: Callable[[int | None], None] | None = None,
        optional: Iterable[str] = (),
    ) -> None:
        self.learned: LearnedLayout = learn_layout(model, load_weights, tensors)
        if check:
            check_layout(model, load_weights, self.learned)
        _log.info("%s", self.learned)
        self._direct = ModuleLoader(model, layout=self.learned.layout, on_update=on_update)
        names = [tensor.name for tensor in self.learned.tensors]
        allowed = {name for pattern in optional for name in names if fnmatchcase(name, pattern)}
        self._optional = frozenset(allowed.union(self.learned.unused))
        self._load, self._begin, self._end = load_weights, begin, end
        self._rest = tuple(tensor for tensor in self.learned.tensors if tensor.name in self.learned.through_loader)
        self._whole: dict[int, _Whole] = {}
        self._loaded: set[int] = set()
        self._manifest: Manifest | None = None
        self._direct_manifest: Manifest | None = None

    def manifest(self, *, rank: int, world_size: int, host: str) -> Manifest:
        """Boxes of live parameters, then whole tensors for what goes through the loader."""
        direct = self._direct.manifest(rank=rank, world_size=world_size, host=host)
        if self._manifest is None or direct is not self._direct_manifest:
            self._direct_manifest = direct
            self._manifest = self._with_rest(direct)
        return self._manifest

    def buffers(self) -> Sequence[torch.Tensor | None]:
        """Live tensors; None for what goes through the loader."""
        return [*self._direct.buffers(), *(None for _ in self._rest)]

    def begin(self, version: int | None) -> None:
        """Call ``begin`` if anything goes through the loader."""
        self._whole, self._loaded = {}, set()
        if self._rest and self._begin is not None:
            self._begin()

    def install(self, landed: Sequence[Landed]) -> None:
        """Give tensors that are complete to the engine's loader; put together the others."""
        first = self._first_piece()
        self._direct.install([part for part in landed if part.piece < first])
        for part in landed:
            if part.piece >= first:
                self._add(part.piece - first, part)

    def rebind(self, landed: Sequence[Landed]) -> None:
        """Engines keep addresses: always raises."""
        raise LoaderError("an engine's parameters must stay where they are; use landing 'staged' or 'streamed'")

    def finish(self, version: int | None) -> None:
        """Check that everything went in; call ``end``, then ``on_update``."""
        missing = [tensor.name for number, tensor in enumerate(self._rest) if number in self._whole]
        if missing:
            raise LoaderError(f"only parts have come of what goes through the loader: {', '.join(missing)}")
        if self._rest and self._end is not None:
            self._end()
        self._direct.finish(version)

    def _add(self, number: int, part: Landed) -> None:
        tensor = self._rest[number]
        if part.box.shape == tensor.shape:
            self._load([(tensor.name, part.tensor)])
            return
        whole = self._whole.setdefault(number, _Whole(tensor))
        if whole.add(part):
            self._load([(tensor.name, whole.content)])
            del self._whole[number]

    def _first_piece(self) -> int:
        if self._direct_manifest is None:
            raise LoaderError("nothing can be installed before the manifest was asked for")
        return len(self._direct_manifest.pieces)

    def _with_rest(self, direct: Manifest) -> Manifest:
        """The direct manifest with whole tensors behind it, and with names that this rank needs nothing of."""
        tensors, place = list(direct.tensors), {tensor.name: i for i, tensor in enumerate(direct.tensors)}
        for tensor in self.learned.tensors:
            if tensor.name not in place and tensor.name not in direct.aliases:
                place[tensor.name] = len(tensors)
                tensors.append(tensor)
        pieces, buffers = list(direct.pieces), list(direct.buffers)
        for tensor in self._rest:
            size = ITEMSIZE[tensor.dtype]
            box = Box.whole(tensor.shape)
            pieces.append(
                Piece(
                    tensor=place[tensor.name], box=box, buffer=len(buffers), offset=0, strides=row_major(tensor.shape),
                    dtype=tensor.dtype,
                )
            )  # fmt: skip
            buffers.append(Buffer(name=tensor.name, nbytes=box.volume * size))
        return Manifest(
            rank=direct.rank, world_size=direct.world_size, host=direct.host, fingerprint=direct.fingerprint,
            layout=direct.layout, tensors=tensors, pieces=pieces, buffers=buffers,
            optional=self._optional, uncut={tensor.name for tensor in self._rest},
        )  # fmt: skip


class _Whole:
    """A checkpoint tensor that comes in parts."""

    def __init__(self, tensor: Tensor) -> None:
        self.content = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
        self._left = self.content.numel()

    def add(self, part: Landed) -> bool:
        """Copy a part; True when it was the last."""
        places = tuple(slice(a, b) for a, b in zip(part.box.start, part.box.stop, strict=True))
        self.content[places].copy_(part.tensor)
        self._left -= part.box.volume
        return self._left == 0
