"""Messages of the two-phase document, field for field, and what can be wrong with an update before a byte moves.

    POST /init_weights_update_group     InitGroup        -> GroupAnswer
    POST /prepare_weights_update        PrepareUpdate    -> PrepareAnswer
    POST /complete_weights_update       CompleteUpdate   -> CompleteAnswer
    POST /destroy_weights_update_group  DestroyGroup     -> GroupAnswer

Sources of ours send more in the two middle ones (see `syncline.engine.messages`); fields that are not known are ignored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch

from syncline.engine.messages import BucketMetadata
from syncline.scheduler.dtypes import ITEMSIZE

NO_GROUP = "Process group not initialized"
"""What the document says where a group is not there."""

_MOST_PROBLEMS = 50


class InitGroup(msgspec.Struct, kw_only=True):
    """Join a group whose rank 0 (the source) hosts the store; this server is rank ``rank_offset`` in it, alone."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyGroup(msgspec.Struct, kw_only=True):
    """Leave a group."""

    group_name: str = "weight_update_group"


class GroupAnswer(msgspec.Struct, kw_only=True):
    """The answer to both; HTTP 400 goes with ``success`` false, as SGLang does it."""

    success: bool
    message: str = ""


class PrepareUpdate(msgspec.Struct, kw_only=True):
    """What is about to be broadcast: bucket by bucket, tensor by tensor, in this order."""

    num_buckets: int
    buckets: list[BucketMetadata]
    group_name: str


class PrepareAnswer(msgspec.Struct, kw_only=True):
    """``ready``: this server receives. HTTP 200 either way: the document's endpoints return their errors."""

    status: Literal["ready", "error"]
    message: str = ""


class CompleteUpdate(msgspec.Struct, kw_only=True):
    """Everything has been broadcast: apply it."""

    group_name: str
    flush_cache: bool = False


class CompleteAnswer(msgspec.Struct, kw_only=True):
    """``success`` only when the new weights are served. HTTP 200 either way."""

    success: bool
    num_buckets_received: int = 0
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Announced:
    """A tensor that is about to come: its name, full shape, type, and the bucket (from 0) that holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bucket: int

    def __str__(self) -> str:
        return f"{self.name} (bucket {self.bucket})"

    @property
    def nbytes(self) -> int:
        """Bytes of its content."""
        return math.prod(self.shape) * self.dtype.itemsize


def announced(request: PrepareUpdate) -> tuple[list[Announced], list[str]]:
    """The tensors that a prepare announces, in order, and everything that is wrong with how it does that."""
    problems: list[str] = []
    if request.num_buckets != len(request.buckets):
        problems.append(f"num_buckets is {request.num_buckets}, and {len(request.buckets)} buckets are described")
    if not request.buckets:
        problems.append("no bucket is described: an update of nothing would be none")
    tensors: list[Announced] = []
    for number, bucket in enumerate(request.buckets):
        counts = {"names": len(bucket.names), "dtypes": len(bucket.dtypes), "shapes": len(bucket.shapes)}
        if len(set(counts.values())) != 1:
            problems.append(f"bucket {number}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
            continue
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            try:
                tensors.append(_announced(name, dtype, shape, number))
            except ValueError as error:
                problems.append(f"{name}: {error}")
    for name, count in Counter(tensor.name for tensor in tensors).items():
        if count > 1:
            problems.append(f"{name}: announced {count} times")
    return tensors, problems


def _announced(name: str, dtype: str, shape: Sequence[int], bucket: int) -> Announced:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"dtype {dtype!r} is none that torch knows")
    if str(kind).removeprefix("torch.") not in ITEMSIZE:
        raise ValueError(f"dtype {dtype!r} cannot travel; those that can: {', '.join(ITEMSIZE)}")
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {list(shape)} has a negative size")
    return Announced(name=name, shape=tuple(shape), dtype=kind, bucket=bucket)


def told(problems: Sequence[str]) -> str:
    """Problems as one message; a long list is cut."""
    head = f"{len(problems)} problem(s) with this update, nothing was moved:"
    more = [f"… and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
    return "\n  - ".join([head, *problems[:_MOST_PROBLEMS], *more])
