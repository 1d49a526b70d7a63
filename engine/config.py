"""`TransferConfig`: every knob of a transfer, validated at construction with every problem in one message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from syncline.scheduler.formats import parse_format
from syncline.scheduler.options import Route

from .errors import ConfigError
from .messages import InFlight, Landing

Transport = Literal["auto", "shm", "gloo", "cuda_ipc", "nccl"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)

_LARGEST = 2**62
_Number = TypeVar("_Number", int, float)

_MOST_WORKERS = 256

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def parse_size(value: int | str) -> int:
    """Bytes of ``64 * 2**20``, ``"64MiB"``, ``"1.5 GB"``. Raises `ValueError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is not a size; write bytes as a whole number, or text such as '64MiB'")
    if isinstance(value, int):
        return _within(value)
    match = _SIZE.fullmatch(value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write bytes, or a number with one of {', '.join(_UNITS)[2:]}")
    return int(_within(float(match[1]) * _UNITS[match[2].lower()]))


def _within(nbytes: _Number) -> _Number:
    if nbytes > _LARGEST:  # infinity is: digits without end
        raise ValueError(f"a size of more than {_LARGEST} bytes; no memory has so many")
    return nbytes


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Every knob of a transfer.

    Attributes:
        max_tmp_bytes: watermark: the most temporary bytes that all tasks in flight hold on one source rank. Bytes, or text
            such as ``"2GiB"``.
        bucket_bytes: a bucket is closed when the next tensor would take it beyond this; a larger tensor is split. None
            takes a quarter of the watermark, at most 32 MiB.
        h2d_concurrency, prepare_concurrency, send_concurrency: tasks that may be in a stage at once.
        landing: ``staged`` (spare memory, copied into the live parameters at commit; a failed push leaves the old version
            serving), ``streamed`` (no spare memory; fenced from the first byte until commit), ``mapped`` (parameters are
            pointed at shared memory at commit; needs shared memory and a loader that says its parameters may move).
        verify: digests over every landed byte, compared before a target votes. Without them a version that is pushed again
            is taken for the same content.
        push_timeout_s: deadline of a push, in seconds.
        connect_timeout_s: deadline of `connect` and of every single control call, in seconds.
        target_timeout_s: a target that makes no progress for so long while it is waited for is lost; the others go on.
            None takes a quarter of ``push_timeout_s``.
        transport: ``auto`` takes shared memory on one host and gloo between hosts; for targets on GPUs CUDA IPC on one host
            and NCCL between hosts.
        route: ``auto`` sends what targets need straight from the source ranks that hold it, and has a rank gather what the
            target takes whole only, what would be cut too small, and what ``mapped`` landing needs in one piece; ``gather``
            and ``direct`` do one or the other wherever that is possible. The report says which went how.
        relay: ranks of a target that are on one host, which is not that of the rank that sends, pass buckets that several of
            them keep on to each other: each crosses the network once. ``True``: over gloo; ``"nccl"``: over NCCL, too, which
            needs devices that run all of a rank's messages side by side (more than one of `CUDA_DEVICE_MAX_CONNECTIONS`).
        wire_format: how weights are quantized that a target holds as FP8 and the trainer does not. ``auto`` reads it off the
            scales that the target declares beside them (blocks of 128 x 128, a scale a row, one for all); a format's name
            such as ``fp8_e4m3:128x128:pow2`` says what they don't tell; ``cast`` quantizes nothing.
        modules_to_not_convert: modules that must not be quantized, as a checkpoint's ``quantization_config`` lists them: a
            target that holds one of them as FP8 all the same is refused.
        in_flight: what happens to requests that are being answered at a commit: ``drain``, ``abort`` or ``keep``.
        workers: threads that copy, cast and digest, on each source rank.
        poll_interval_s: longest pause of the completion poller, in seconds.
        bind_host: address that source sockets bind to. Anything but loopback needs ``secret``.
        secret: shared secret of source and targets.
        trace: record a trace of every push (`PushReport.trace`).
    """

    max_tmp_bytes: int | str = "256MiB"
    bucket_bytes: int | str | None = None
    h2d_concurrency: int = 2
    prepare_concurrency: int = 2
    send_concurrency: int = 2
    landing: Landing = "staged"
    verify: bool = True
    push_timeout_s: float = 60.0
    connect_timeout_s: float = 60.0
    target_timeout_s: float | None = None
    transport: Transport = "auto"
    route: Route = "auto"
    relay: bool | Literal["nccl"] = True
    wire_format: str = "auto"
    modules_to_not_convert: Sequence[str] = ()
    in_flight: InFlight = "keep"
    workers: int = 2
    poll_interval_s: float = 0.001
    bind_host: str = "127.0.0.1"
    secret: str | None = None
    trace: bool = True

    def __post_init__(self) -> None:
        problems: list[str] = []
        if isinstance(self.modules_to_not_convert, list):  # as JSON has it
            object.__setattr__(self, "modules_to_not_convert", tuple(self.modules_to_not_convert))
        self._check_sizes(problems)
        self._check_numbers(problems)
        self._check_choices(problems)
        self._check_reach(problems)
        if problems:
            raise ConfigError(problems)

    def _check_numbers(self, problems: list[str]) -> None:
        for name in ("h2d_concurrency", "prepare_concurrency", "send_concurrency", "workers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problems.append(f"{name} is {value!r}; it must be a whole number of at least 1")
            elif name == "workers" and value > _MOST_WORKERS:
                problems.append(f"workers is {value}; more than {_MOST_WORKERS} threads only wait for each other")
        for name in ("push_timeout_s", "connect_timeout_s", "target_timeout_s", "poll_interval_s"):
            value = getattr(self, name)
            if name == "target_timeout_s" and value is None:
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
                problems.append(f"{name} is {value!r}; it must be a finite number of seconds above 0")

    def _check_choices(self, problems: list[str]) -> None:
        for name, kind in (("landing", Landing), ("transport", Transport), ("route", Route), ("in_flight", InFlight)):
            value = getattr(self, name)
            if value not in get_args(kind):
                problems.append(f"{name} is {value!r}; choose one of {', '.join(get_args(kind))}")
        if self.landing == "mapped" and self.transport in {"gloo", "nccl", "cuda_ipc"}:
            problems.append(
                f"landing 'mapped' needs shared memory; transport {self.transport!r} has none (choose 'auto' or 'shm')"
            )
        if self.landing == "mapped" and self.route == "direct":
            problems.append(
                "landing 'mapped' needs whole tensors in one rank's memory; route 'direct' has none (choose 'auto')"
            )
        self._check_formats(problems)
        if not isinstance(self.relay, bool) and self.relay != "nccl":
            problems.append(f"relay is {self.relay!r}; it must be True, False or 'nccl'")
        for name in ("verify", "trace"):
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name} is {getattr(self, name)!r}; it must be True or False")

    def _check_formats(self, problems: list[str]) -> None:
        if self.wire_format not in {"auto", "cast"}:
            try:
                parse_format(self.wire_format)
            except (ValueError, TypeError) as error:
                problems.append(f"wire_format: {error}; or 'auto', or 'cast'")
        modules = self.modules_to_not_convert
        if not isinstance(modules, tuple) or not all(isinstance(module, str) and module for module in modules):
            problems.append(f"modules_to_not_convert is {modules!r}; it must be a list of module names or patterns")

    def _check_reach(self, problems: list[str]) -> None:
        if self.bind_host not in LOOPBACK and not self.secret:
            problems.append(f"bind_host {self.bind_host!r} is beyond loopback and secret is not set; set one on both sides")
        if not (self.secret is None or (isinstance(self.secret, str) and self.secret)):
            problems.append(f"secret is a {type(self.secret).__name__} of no use; it must be text that is not empty, or None")

    def _check_sizes(self, problems: list[str]) -> None:
        sizes: dict[str, int] = {}
        for name in ("max_tmp_bytes", "bucket_bytes"):
            value = getattr(self, name)
            if name == "bucket_bytes" and value is None:
                continue
            try:
                sizes[name] = parse_size(value)
            except (ValueError, TypeError) as error:
                problems.append(f"{name}: {error}")
                continue
            if sizes[name] < 1:
                problems.append(f"{name} is {value!r}; it must be at least 1 byte")
        if len(sizes) == 2 and sizes["bucket_bytes"] > sizes["max_tmp_bytes"]:
            problems.append(
                f"bucket_bytes ({sizes['bucket_bytes']}) is above the watermark max_tmp_bytes ({sizes['max_tmp_bytes']}): "
                "no bucket could ever start; lower bucket_bytes or raise max_tmp_bytes"
            )

    @property
    def watermark(self) -> int:
        """`max_tmp_bytes` in bytes."""
        return parse_size(self.max_tmp_bytes)

    @property
    def bucket(self) -> int:
        """`bucket_bytes` in bytes, with its default resolved."""
        if self.bucket_bytes is None:
            return max(1, min(self.watermark // 4, 32 * 2**20))
        return parse_size(self.bucket_bytes)

    @property
    def target_timeout(self) -> float:
        """`target_timeout_s` in seconds, with its default resolved."""
        return self.push_timeout_s / 4 if self.target_timeout_s is None else self.target_timeout_s
