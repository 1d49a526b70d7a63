"""What is searched: configurations, and the values that each knob may take. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from syncline.engine.config import TransferConfig, Transport
from syncline.engine.messages import Landing

MIB = 2**20
AXES = (
    "bucket_bytes", "max_tmp_bytes", "prepare_concurrency", "send_concurrency", "h2d_concurrency", "workers",
)  # fmt: skip
"""The knobs that are searched; those that the plan depends on come first."""
_SIZES = ("bucket_bytes", "max_tmp_bytes")
_POWERS = tuple(MIB << k for k in range(13))
_LARGEST_BUCKET = 512 * MIB
_MOST_TASKS = 4096


@dataclass(frozen=True, kw_only=True, order=True)
class Configuration:
    """The knobs that are searched, each with a value; sizes in bytes."""

    transport: Transport
    landing: Landing
    bucket_bytes: int
    max_tmp_bytes: int
    prepare_concurrency: int
    send_concurrency: int
    h2d_concurrency: int
    workers: int

    @classmethod
    def of(cls, config: TransferConfig, transport: Transport, landing: Landing) -> Configuration:
        """The knobs of ``config``, its defaults resolved."""
        counts = {name: getattr(config, name) for name in AXES if name not in _SIZES}
        return cls(
            transport=transport, landing=landing, bucket_bytes=config.bucket, max_tmp_bytes=config.watermark, **counts
        )  # fmt: skip

    @classmethod
    def default(cls, transport: Transport, landing: Landing, *, watermark: int | None = None) -> Configuration:
        """What a user has who sets nothing but these."""
        config = TransferConfig() if watermark is None else TransferConfig(max_tmp_bytes=watermark)
        return cls.of(config, transport, landing)

    def but(self, **values: Any) -> Configuration:
        """The same with other values."""
        return dataclasses.replace(self, **values)

    def knobs(self) -> dict[str, Any]:
        """Arguments of `TransferConfig`."""
        return dataclasses.asdict(self)

    def changed(self) -> dict[str, Any]:
        """The knobs that must be set to get this configuration; the others have their defaults already."""
        default = TransferConfig()
        found = {name: value for name, value in self.knobs().items() if value != getattr(default, name)}
        if self.max_tmp_bytes == default.watermark:
            found.pop("max_tmp_bytes")
        if self.bucket_bytes == TransferConfig(max_tmp_bytes=self.max_tmp_bytes).bucket:
            found.pop("bucket_bytes")
        return found

    def text(self) -> str:
        """A ready ``TransferConfig(...)``. It is made here once, so that what is printed is valid."""
        TransferConfig(**self.changed())
        words = [f"{name}={_literal(name, value)}" for name, value in self.changed().items()]
        return f"TransferConfig({', '.join(words)})"

    def __str__(self) -> str:
        counts = "/".join(str(getattr(self, name)) for name in ("h2d_concurrency", "prepare_concurrency", "send_concurrency"))
        return (
            f"{self.transport} {self.landing}, bucket {size_text(self.bucket_bytes)}, watermark "
            f"{size_text(self.max_tmp_bytes)}, h2d/prepare/send {counts}, workers {self.workers}"
        )


@dataclass(frozen=True, kw_only=True)
class Space:
    """Values of each axis, in order; the default's is among them.

    Attributes:
        axes: knob -> its values, ascending.
    """

    axes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, nbytes: int, *, most: int = 4) -> Space:
        """A grid that suits a push of ``nbytes``: what is larger than all of it makes no difference."""
        default = TransferConfig()
        top = max(4 * MIB, 1 << (nbytes - 1).bit_length())
        least = max(MIB, top // _MOST_TASKS)
        counts = [n for n in (1, 2, 4, 8) if n <= max(2, most)]
        sizes = {
            "bucket_bytes": [size for size in _POWERS if least <= size <= min(top // 2, _LARGEST_BUCKET)],
            "max_tmp_bytes": [size for size in _POWERS if 4 * least <= size <= min(top, 8 * _LARGEST_BUCKET)],
        }
        axes = {name: {*sizes.get(name, counts), getattr(_resolved(default), name)} for name in AXES}
        return cls(axes={name: tuple(sorted(values)) for name, values in axes.items()})

    def within(self, watermark: int) -> Space:
        """The part of it with at most this watermark, which is one of its values."""
        values = [value for value in self.axes["max_tmp_bytes"] if value < watermark]
        return Space(axes={**self.axes, "max_tmp_bytes": (*values, watermark)})

    def allows(self, configuration: Configuration) -> bool:
        """Whether the bucket is one that the plan would not make smaller all the same: two must fit the watermark."""
        return 2 * configuration.bucket_bytes <= configuration.max_tmp_bytes

    def plane(self, default: Configuration) -> list[Configuration]:
        """Every bucket size with every watermark, all else as in ``default``."""
        cells = itertools.product(*(self.axes[name] for name in _SIZES))
        found = (default.but(**dict(zip(_SIZES, cell, strict=True))) for cell in cells)
        return [configuration for configuration in found if self.allows(configuration)]

    def moves(self, configuration: Configuration, axes: tuple[str, ...] = AXES) -> Iterator[tuple[str, Configuration]]:
        """One step up or down along each axis: (axis, configuration)."""
        for axis in axes:
            values, here = self.axes[axis], getattr(configuration, axis)
            below, above = [v for v in values if v < here], [v for v in values if v > here]
            for value in (*below[-1:], *above[:1]):
                moved = configuration.but(**{axis: value})
                if self.allows(moved):
                    yield axis, moved

    def __len__(self) -> int:
        """Configurations of the whole grid, for one transport and landing."""
        size = len(self.plane(_resolved(TransferConfig())))
        for axis in AXES:
            size *= 1 if axis in _SIZES else len(self.axes[axis])
        return size


def _resolved(config: TransferConfig) -> Configuration:
    return Configuration.of(config, "auto", "staged")


def size_text(count: float) -> str:
    """``"32 MiB"``, ``"1.5 GiB"``, ``"900 B"``."""
    for unit, name in ((2**30, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count:.0f} B"


def _literal(name: str, value: object) -> str:
    """As it is written in Python: sizes with the largest unit that divides them."""
    if name in _SIZES and isinstance(value, int):
        for unit, word in ((2**30, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
            if value % unit == 0:
                return f'"{value // unit}{word}"'
    return f'"{value}"' if isinstance(value, str) else str(value)
