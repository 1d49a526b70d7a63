"""The tensors of a module or dict as manifest entries: found, named, cut into pieces, and watched for changes.

Sources and module loaders share this. A `Holdings` is a snapshot; `unchanged` says in one to two microseconds a tensor
whether the module still holds the same memory, so that a push need not look at anything else.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from syncline.scheduler.errors import PlanError
from syncline.scheduler.layout import Box, Buffer, Index, Manifest, Piece, Tensor

from .dtensor import HeldBox, Local, local_of, local_tensor, same_locals
from .mapped_files import MappedFiles
from .modules import Entry, Root, Structure, entries, plain
from .named_box import NamedBox
from .names import NameMap, canonical_boxes

_LOOKS: tuple[Callable[[torch.Tensor], Any], ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    operator.attrgetter("shape"),
    operator.attrgetter("dtype"),
)


class _Memory:
    """Where tensors lie and how: addresses, shapes, strides, types.

    Compared column by column through iterators: nothing is kept, so that a big heap's garbage collector does not wake up.
    """

    def __init__(self, locals_: list[torch.Tensor]) -> None:
        self._locals = locals_
        self.remember()

    def unchanged(self) -> bool:
        """Whether every tensor lies where it lay. About 0.5 us a tensor."""
        return all(
            all(map(operator.eq, map(look, self._locals), column)) for look, column in zip(_LOOKS, self._columns, strict=True)
        )

    def remember(self) -> None:
        """Take the tensors as they are now."""
        self._columns = [list(map(look, self._locals)) for look in _LOOKS]

    def fingerprint(self) -> str:
        """Text that differs whenever a column does."""
        pointers, strides, shapes, dtypes = self._columns
        columns = (pointers, [tuple(shape) for shape in shapes], strides, [str(dtype) for dtype in dtypes])
        return hashlib.blake2b(repr(columns).encode(), digest_size=16).hexdigest()


class Holdings:
    """A snapshot of what a module or dict holds on this rank.

    Attributes:
        tensors: canonical tensors; the same list on every rank of a sharded model.
        pieces: the boxes that this rank holds of them.
        locals: one plain tensor for each buffer of the manifest, sharing memory with the module's.
        owners: for each buffer, the tensor objects of the module that hold it (several when tied by storage only).
        aliases: names that are other names of a canonical tensor.
        fingerprint: changes when addresses, shapes or types change.
    """

    def __init__(self, root: Root, *, names: NameMap | None = None, target: bool = False) -> None:
        """Take the snapshot. ``target`` also checks that the memory can be written.

        Raises:
            PlanError: tensors that cannot travel; lists all of them.
        """
        self._problems: list[str] = []
        self._target = target
        found = [entry for entry in entries(root) if self._is_plain(entry)]
        self._structure = Structure(root, found)
        located = [(entry.tensor, local_tensor(entry.tensor)) for entry in found]
        self._sharded = [(owner, local) for owner, local in located if owner is not local]
        self._memory = _Memory([local for _, local in located])
        self.tensors: list[Tensor] = []
        self.pieces: list[Piece] = []
        self.buffers: list[Buffer] = []
        self.locals: list[torch.Tensor] = []
        self.owners: list[list[torch.Tensor]] = []
        self.aliases: dict[str, str] = {}
        self._build(found, root, names)
        if self._problems:
            raise PlanError(self._problems)
        self.fingerprint = self._memory.fingerprint()

    def unchanged(self) -> bool:
        """Whether the module still has the same tensors at the same addresses, with the same shapes and types."""
        return self._structure.unchanged() and same_locals(self._sharded) and self._memory.unchanged()

    def moved(self, buffers: Iterable[int]) -> None:
        """The caller pointed these buffers' owners at other memory of the same shape: that is not a change."""
        for buffer in buffers:
            self.locals[buffer] = plain(local_tensor(self.owners[buffer][0]))
        self._memory.remember()

    def manifest(
        self, *, rank: int, world_size: int, host: str, optional: Iterable[str] = (), movable: bool = False
    ) -> Manifest:
        """The manifest of this snapshot. ``optional``: canonical names or patterns (``*``) that the other side may lack."""
        known = [*(tensor.name for tensor in self.tensors), *self.aliases]
        allowed: set[str] = set()
        for pattern in optional:
            allowed.update(name for name in known if fnmatchcase(name, pattern))
        return Manifest(
            rank=rank, world_size=world_size, host=host, tensors=tuple(self.tensors), pieces=tuple(self.pieces),
            buffers=tuple(self.buffers), aliases=dict(self.aliases), optional=frozenset(allowed), movable=movable,
            fingerprint=self.fingerprint,
        )  # fmt: skip

    def _is_plain(self, entry: Entry) -> bool:
        """Whether the local tensor is memory that strides describe; records a problem if not."""
        tensor: Any = entry.tensor
        if not isinstance(tensor, torch.Tensor):
            self._problems.append(f"{entry.name} is a {type(tensor).__name__}, not a tensor; leave it out of the mapping")
            return False
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            self._problems.append(f"{entry.name} is not initialized yet; run one forward pass before connecting")
            return False
        local: Any = local_tensor(tensor)
        if local.layout is not torch.strided or local.is_quantized or is_traceable_wrapper_subclass(local):
            self._problems.append(
                f"{entry.name} is held as {type(local).__name__} ({local.layout}), which no rule unpacks; dequantize it first"
            )
            return False
        if local.is_conj() or local.is_neg():
            self._problems.append(f"{entry.name} is a lazy conjugate or negative; call resolve_conj() or resolve_neg() first")
            return False
        if isinstance(local, FakeTensor):
            self._problems.append(f"{entry.name} is a FakeTensor, which has no memory; push the real model")
            return False
        if _freed(local):
            self._problems.append(
                f"{entry.name} of shape {tuple(local.shape)} reaches beyond its memory, which was freed or made smaller"
            )
            return False
        return True

    def _build(self, found: list[Entry], root: Root, names: NameMap | None) -> None:
        shapes = {entry.name: tuple(entry.tensor.shape) for entry in found}
        boxes = canonical_boxes(shapes, root=root if isinstance(root, nn.Module) else None, names=names)
        files = MappedFiles()
        first: dict[Any, tuple[str, int]] = {}
        catalog = _Catalog(self.tensors, self._problems)
        for entry in found:
            identity = _identity(entry.tensor)
            if identity in first:
                name, buffer = first[identity]
                self._alias(boxes[entry.name], boxes[name])
                if buffer >= 0 and not any(entry.tensor is owner for owner in self.owners[buffer]):
                    self.owners[buffer].append(entry.tensor)
                continue
            first[identity] = entry.name, self._add(entry, boxes[entry.name], catalog, files)
        if self._target:
            self._refuse_shared_memory()

    def _refuse_shared_memory(self) -> None:
        """Two targets that overlap without being one and the same would overwrite each other."""
        ranges = [
            (local.data_ptr(), local.data_ptr() + buffer.nbytes, buffer.name)
            for local, buffer in zip(self.locals, self.buffers, strict=True)
            if buffer.nbytes and not _gaps(local) and local.device.type == "cpu"
        ]
        for (_, end, name), (start, _, other) in itertools.pairwise(sorted(ranges)):
            if start < end:
                self._problems.append(
                    f"{name} and {other} share part of their memory: loading one overwrites the other; clone one"
                )

    def _alias(self, names: Sequence[NamedBox], of: Sequence[NamedBox]) -> None:
        for alias, primary in zip(names, of, strict=False):
            if alias.name != primary.name:
                self.aliases[alias.name] = primary.name

    def _add(self, entry: Entry, boxes: Sequence[NamedBox], catalog: _Catalog, files: MappedFiles) -> int:
        """Enter one tensor; returns its buffer's index, -1 if this rank holds none of it."""
        try:
            local = local_of(entry.tensor)
        except ValueError as error:
            self._problems.append(f"{entry.name}: {error}")
            return -1
        dtype = str(local.tensor.dtype).removeprefix("torch.")
        spare = [box for box in boxes if box.is_padding]
        padding = sum(box.volume for named in spare for held in local.boxes for box, *_ in _intersection(named, held, local))
        boxes = [box for box in boxes if not box.is_padding]
        indices = [catalog.index(entry.name, box, dtype) for box in boxes]
        pieces = [
            Piece(tensor=index, box=box, buffer=len(self.buffers), offset=offset, strides=strides, dtype=dtype)
            for index, named in zip(indices, boxes, strict=True)
            for held in local.boxes
            for box, offset, strides in _intersection(named, held, local)
        ]
        if not pieces:
            return -1
        self.pieces += pieces
        self.buffers.append(self._buffer(entry.name, local.tensor, files, padding))
        self.locals.append(plain(local.tensor))
        self.owners.append([entry.tensor])
        return len(self.buffers) - 1

    def _buffer(self, name: str, local: torch.Tensor, files: MappedFiles, padding: int) -> Buffer:
        mapped = files.find(local.data_ptr()) if local.device.type == "cpu" else None
        if self._target:
            if mapped is not None and not mapped.writable:
                self._problems.append(f"{name} lies in a file that is mapped read-only; clone it before loading into it")
            if any(stride == 0 and size > 1 for size, stride in zip(local.shape, local.stride(), strict=True)):
                self._problems.append(f"{name} is an expanded tensor (stride 0): its elements share memory; clone it")
        kind = "file" if mapped is not None and mapped.is_file and not self._target else "memory"
        size = local.element_size()
        unsent = (_gaps(local) + padding) * size
        return Buffer(name=name, nbytes=_extent(local) * size, device=local.device.type, kind=kind, padding=unsent)


class _Catalog:
    """Canonical tensors by name, with a check that no two parameters claim one element."""

    def __init__(self, tensors: list[Tensor], problems: list[str]) -> None:
        self._tensors, self._problems = tensors, problems
        self._at: dict[str, int] = {}
        self._claims: list[list[tuple[str, NamedBox]]] = []

    def index(self, param: str, box: NamedBox, dtype: str) -> int:
        """The index of the box's canonical tensor, entered if new."""
        at = self._at.setdefault(box.name, len(self._tensors))
        if at == len(self._tensors):
            self._tensors.append(Tensor(name=box.name, shape=box.shape, dtype=dtype))
            self._claims.append([])
        known = self._tensors[at]
        for other, claimed in self._claims[at]:
            if _overlap(box, claimed) or known.shape != box.shape or known.dtype != dtype:
                self._problems.append(
                    f"{param} ({dtype}, in shape {box.shape}) and {other} ({known.dtype}, in shape {known.shape}) both map to "
                    f"{box.name}; give one of them another name in the name table"
                )
                break
        self._claims[at].append((param, box))
        return at


def _freed(local: torch.Tensor) -> bool:
    """Whether a tensor reaches beyond its storage, as one whose storage was resized to nothing does."""
    if local.device.type == "meta" or local.numel() == 0:
        return False
    last = local.storage_offset() + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    return (last + 1) * local.element_size() > local.untyped_storage().nbytes()


def _extent(local: torch.Tensor) -> int:
    """Elements of memory from a tensor's first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))


def _gaps(local: torch.Tensor) -> int:
    """Elements between those of a strided view of larger memory, which are not its own."""
    return max(0, _extent(local) - local.numel())


def _overlap(a: NamedBox, b: NamedBox) -> bool:
    """Whether two boxes of one tensor share an element."""
    return all(max(s, t) < min(s + n, t + m) for s, n, t, m in zip(a.start, a.size, b.start, b.size, strict=False))


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for two tensors that are one: the same object, or (plain ones) the same elements of the same memory."""
    local = local_tensor(tensor)
    if local is not tensor or local.device.type == "meta" or local.numel() == 0:
        return id(tensor)
    return local.device, local.data_ptr(), local.shape, local.stride(), local.dtype


def _intersection(named: NamedBox, held: HeldBox, local: Local) -> Iterator[tuple[Box, int, Index]]:
    """The part of a named box that a held box has: canonical box, offset into the local tensor, strides. At most one."""
    offset = 0
    strides = local.tensor.stride()
    low: list[int] = []
    count: list[int] = []
    for axis, (begin, size) in enumerate(zip(named.local_start, named.local_size(), strict=True)):
        first = max(begin, held.start[axis])
        last = min(begin + size, held.start[axis] + held.shape[axis])
        if last <= first:
            return
        low.append(first - begin)
        count.append(last - first)
        offset += (held.local_start[axis] + first - held.start[axis]) * strides[axis]
    start = tuple(s + (low[axis] if axis >= 0 else 0) for s, axis in zip(named.start, named.axes, strict=True))
    shape = tuple(count[axis] if axis >= 0 else 1 for axis in named.axes)
    yield Box(start=start, shape=shape), offset, tuple(strides[axis] if axis >= 0 else 0 for axis in named.axes)
