"""``syncline bench gpu``: what a GPU can do, and what kernels, transports and whole pushes make of it, in one run on one GPU.

Every result is compared with the reference, bit for bit. Each row is one JSON line on standard output
(`syncline.bench.measure.rows`); a table comes at the end, on standard error. Where a ratio was asked for, the row says which
one, and whether it is met.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import uvloop

from .gpu_bed import GpuBed, GpuSetup, gpu_bed
from .gpu_floors import D2D, H2D, ONE_COPY, Sizes, Timed, floors, kernels, one_copy
from .measure.errors import BenchError
from .measure.phases import Phases, Quantiles
from .measure.provenance import Provenance, load
from .measure.pushes import Pushes
from .measure.rows import Kind, Row, Skipped, line, whole_config
from .outputs import check_outputs

SLACK_BYTES = 64 << 20
"""Temporary device memory that a push may have beyond its watermark: what allocators round up, and tables of launches. Those
grow with the bytes that are pushed, about 0.09 % of them: 14 MiB for 16 GB.
"""

_ROWS, _COLUMNS = 12_288, 8_192
_TENSOR_NBYTES = _ROWS * _COLUMNS * 2
_LEAST_TENSORS = 8
_KEEP_BYTES = 6 << 30
"""Of each process: what a push may hold besides (a watermark of 8 GiB on one side), contexts, and what is looked at."""


@dataclass(frozen=True, kw_only=True)
class GpuArgs:
    """Measure one GPU: floors, kernels, transports, pushes. Ends within about four minutes."""

    nbytes: int = 16_000_000_000
    """bf16 bytes that are pushed out of the host's memory; less where the device's memory is small."""
    device_nbytes: int = 56_000_000_000
    """bf16 bytes that are pushed from the device to itself; less where its memory is small. Such pushes take milliseconds, of
    which some go to control messages, whatever the bytes: 16 GB are copied in as little as 8."""
    repeat: int = 6
    """Pushes of each row, the cold one among them."""
    out: Path | None = None
    """Append the rows to this file, too."""
    device: str = "cuda"
    """``cpu`` runs the same without a GPU, in small: for tests of this command. Its figures say nothing."""
    strict: bool = False
    """Exit code 1 also where a ratio that was asked for is not met."""


_LARGE = {"max_tmp_bytes": 8 << 30, "bucket_bytes": 2 << 30, "prepare_concurrency": 4, "send_concurrency": 8}
"""For what never leaves the device: a copy of 1 GiB takes half a millisecond there, and a task may take as long in Python,
whatever its size. The watermark has room for three, so that the device need not wait for either process."""

_LENT = {**_LARGE, "bucket_bytes": 4 << 30}
"""For what receivers copy from where it lies: such tasks hold nothing, so only the watermark's half bounds them."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A ratio that was asked for."""

    of: str
    at_least: float | None = None
    at_most: float | None = None

    def met(self, ratio: float) -> bool:
        """Whether ``ratio`` is as asked."""
        return (self.at_least is None or ratio >= self.at_least) and (self.at_most is None or ratio <= self.at_most)

    def __str__(self) -> str:
        return f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"


class Bench:
    """The run: rows as they come, and the floors that they are held against."""

    def __init__(self, args: GpuArgs) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.rows: list[Row | Skipped] = []
        self._provenance = Provenance.here()
        self._floors: dict[str, float] = {}

    async def run(self) -> None:
        """Everything, quickest first."""
        sizes = Sizes() if self.device.type == "cuda" else Sizes(rows=300, columns=512, big=1 << 20, repeat=3)
        for timed in floors(self.device, sizes):
            self._floors[timed.name] = timed.nbytes / statistics.median(timed.seconds)
            self._add(self._timed("floor", timed))
        for timed in kernels(self.device, sizes):
            asked = Ask(of=D2D, at_least=0.6) if timed.name == "FP8 128x128, with digest" else Ask(of=D2D)
            self._add(self._timed("work", timed, asked))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        async for row in self._pushes():
            self._add(row)

    async def _pushes(self) -> AsyncIterator[Row | Skipped]:
        async for row in self._from_device():
            yield row
        async for row in self._offloaded():
            yield row
        nccl = self._config("nccl") | {"max_tmp_bytes": 256 << 20, "bucket_bytes": 32 << 20}
        small = replace(self._setup(min(self.args.nbytes, 1 << 30)), rows=1_536, source_ranks=2, nccl=True)
        async with gpu_bed(small if self.device.type == "cuda" else replace(self._setup(0), source_ranks=2)) as bed:
            name = "NCCL, 2 ranks and a target on one GPU (over sockets)"
            yield await self._push(bed, name, nccl, Ask(of=D2D), self._floors[D2D] / 2)

    async def _from_device(self) -> AsyncIterator[Row | Skipped]:
        """bf16 that lies on the device, against one copy of as many bytes: each is read and written."""
        setup = self._setup(self.args.device_nbytes)
        timed = one_copy(self.device, setup.nbytes)
        copy = timed.nbytes / statistics.median(timed.seconds) / 2
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        yield self._timed("floor", timed)
        config = {**self._config("cuda_ipc"), **_LARGE}
        async with gpu_bed(replace(setup, place="padded")) as bed:
            yield await self._push(bed, "bf16 through buckets, digests", config, Ask(of=ONE_COPY, at_least=0.33), copy)
            small = {**config, "max_tmp_bytes": 1 << 30, "bucket_bytes": 256 << 20}
            yield await self._push(bed, "bf16 through buckets, digests, 1 GiB", small, Ask(of=ONE_COPY), copy)
        async with gpu_bed(setup) as bed:
            lent = {**config, **_LENT}
            bare = {**lent, "verify": False}
            yield await self._push(bed, "bf16 straight from its storage", bare, Ask(of=ONE_COPY, at_least=0.8), copy)
            yield await self._push(bed, "bf16 straight from its storage, digests", lent, Ask(of=ONE_COPY), copy)

    async def _offloaded(self) -> AsyncIterator[Row | Skipped]:
        """bf16 in page-locked memory, quantized on the way, against the line that it comes over."""
        async with gpu_bed(replace(self._setup(self.args.nbytes), place="pinned", fp8=True)) as bed:
            name, asked = "offloaded bf16, pinned, to FP8, digests", Ask(of=H2D, at_least=0.92)
            row = await self._push(bed, name, self._config("cuda_ipc"), asked, self._floors[H2D])
            yield row
            if isinstance(row, Row):
                yield self._overlap(row)
            staged = {**self._config("cuda_ipc"), "landing": "staged"}
            yield await self._push(bed, "offloaded, staged", staged, Ask(of=H2D), self._floors[H2D])
            async for row in self._watermarks(bed):
                yield row

    async def _watermarks(self, bed: GpuBed) -> AsyncIterator[Row | Skipped]:
        """Temporary memory at three watermarks, and whether 1 GiB is enough for the best time."""
        found: dict[int, Row] = {}
        for watermark in (256 << 20, 1 << 30, 4 << 30):
            # a task holds its bf16 and its FP8: three times its bucket, and four tasks are under way
            config = {**self._config("cuda_ipc"), "max_tmp_bytes": watermark, "bucket_bytes": watermark // 12}
            row = await self._push(bed, f"offloaded, watermark {watermark >> 20} MiB", config, Ask(of=""), float("nan"))
            if isinstance(row, Row):
                found[watermark] = row = self._held(row, bed.peak_bytes / (watermark + SLACK_BYTES), bed.peak_bytes)
            yield row
        if len(found) == 3:
            best = min(row.seconds.median for row in found.values())
            one = found[1 << 30]
            figures = _figures(one.seconds.median / best, Ask(of="best watermark", at_most=1.1))
            yield _named(one, "offloaded, watermark 1024 MiB against the best", figures)

    def _overlap(self, row: Row) -> Row:
        figures = {**row.figures, **_figures(row.figures["over_busiest"], Ask(of="busiest stage", at_most=1.08))}
        return _named(row, f"{row.row}: seconds over the busiest stage's", figures)

    @staticmethod
    def _held(row: Row, ratio: float, peak: int) -> Row:
        asked = Ask(of="watermark + 64 MiB", at_most=1.0)
        return _named(row, row.row, {**row.figures, **_figures(ratio, asked), "device_tmp_bytes": peak})

    async def _push(self, bed: GpuBed, name: str, config: Mapping[str, Any], asked: Ask, floor: float) -> Row | Skipped:
        """One row: ``repeat`` pushes, looked at element by element. ``floor``: bytes a second that the ratio is of."""
        if self.device.type != "cuda":
            config = {key: value for key, value in config.items() if key != "transport"}
        pushes = await bed.push(config, repeat=self.args.repeat)
        if not pushes.ok:
            why = "; ".join(pushes.errors) or "a push was not committed"
            return Skipped(row=name, skipped=why, failed=True, machine=self._provenance.machine)
        row = self._row("push", name, tuple(pushes.seconds), bed.setup.nbytes, right=pushes.intact)
        ratio = row.gb_s * 1e9 / floor if row.gb_s else 0.0
        figures = _figures(ratio, asked) | _told(pushes, bed, warm=row.n)
        return _named(row, name, figures, knobs=whole_config(config), digests=bool(config.get("verify", True)))

    def _timed(self, kind: Kind, timed: Timed, asked: Ask | None = None) -> Row:
        row = self._row(kind, timed.name, timed.seconds, timed.nbytes, right=timed.right)
        if asked is None:
            return row
        rate = timed.nbytes / row.seconds.median
        return _named(row, row.row, _figures(rate / self._floors[asked.of], asked))

    def _row(self, kind: Kind, name: str, samples: Sequence[float], nbytes: int, *, right: bool | None) -> Row:
        phases = Phases.of(samples)
        warm = samples[phases.warm_from :]
        middle = statistics.median(warm)
        return Row(
            row=name, kind=kind, n=len(warm), seconds=Quantiles.of(warm), first_s=samples[0],
            first_to_median=samples[0] / middle, phases=phases, samples=tuple(samples), bytes=nbytes,
            gb_s=nbytes / middle / 1e9 if nbytes else None, integrity=right, load_1m=load(),
            machine=self._provenance.machine, versions=self._provenance.versions, commit=self._provenance.commit,
            dirty=self._provenance.dirty,
        )  # fmt: skip

    def _setup(self, nbytes: int) -> GpuSetup:
        """Matrices of about ``nbytes``, twice on the device, with room to spare."""
        if self.device.type != "cuda":
            return GpuSetup(device="cpu")
        free, _ = torch.cuda.mem_get_info()
        tensors = min(nbytes, (free - 2 * _KEEP_BYTES) // 2) // _TENSOR_NBYTES
        if tensors < min(_LEAST_TENSORS, nbytes // _TENSOR_NBYTES):
            raise BenchError(f"{free} bytes are free on the device; this needs 16 GB or more")
        return GpuSetup(device=self.args.device, tensors=tensors, rows=_ROWS, columns=_COLUMNS)

    def _config(self, transport: str) -> dict[str, Any]:
        """More than 64 tasks of FP8 or bf16 that came over the line, three or more within the watermark."""
        return {
            "transport": transport, "landing": "streamed", "max_tmp_bytes": 1 << 30, "bucket_bytes": 101 << 20,
            "prepare_concurrency": 2, "send_concurrency": 3, "workers": 4, "push_timeout_s": 60.0,
        }  # fmt: skip

    def _add(self, row: Row | Skipped) -> None:
        self.rows.append(row)
        print(line(row), flush=True)
        if self.args.out is not None:
            with self.args.out.open("a") as file:
                file.write(line(row) + "\n")


def _figures(ratio: float, asked: Ask) -> dict[str, Any]:
    known = asked.at_least is not None or asked.at_most is not None
    return {
        "ratio": ratio,
        "ratio_of": asked.of,
        "asked": str(asked) if known else None,
        "met": asked.met(ratio) if known else None,
    }


def _told(pushes: Pushes, bed: GpuBed, *, warm: int) -> dict[str, Any]:
    over = [push.seconds / max(push.busy_s.values()) for push in pushes.reports[-warm:] if any(push.busy_s.values())]
    return {
        "over_busiest": statistics.median(over) if over else float("nan"),  # not measured, and no ratio is met by that
        "busy_s": pushes.busy_s, "tasks": pushes.tasks, "connect_s": pushes.connect_s, "device_tmp_bytes": bed.peak_bytes,
        "peak_tmp_bytes": pushes.peak_tmp_bytes,
    }  # fmt: skip


def _named(row: Row, name: str, figures: dict[str, Any], **changes: Any) -> Row:
    return msgspec.structs.replace(row, row=name, figures=figures, **changes)


def table(rows: Sequence[Row | Skipped]) -> Iterator[str]:
    """The rows for people, a line each."""
    yield f"{'row':<56} {'median':>12} {'GB/s':>9} {'ratio':>7}  {'of':<22} {'asked':>8} {'':>4} right"
    for row in rows:
        if isinstance(row, Skipped):
            yield f"{row.row:<56} {'FAILED' if row.failed else 'skipped'}: {row.skipped}"
            continue
        said = row.figures
        ratio = f"{said['ratio']:.3f}" if "ratio" in said else ""
        met = {None: "", True: "ok", False: "NOT"}[said.get("met")]
        right = {None: "", True: "yes", False: "NO"}[row.integrity]
        rate = f"{row.gb_s:.1f}" if row.gb_s else ""
        yield (
            f"{row.row:<56} {row.seconds.median * 1e3:>9.3f} ms {rate:>9} {ratio:>7}  {said.get('ratio_of', ''):<22} "
            f"{said.get('asked') or '':>8} {met:>4} {right}"
        )


def main(args: GpuArgs) -> int:
    """Exit code: 0 if every result is right, 1 if one is wrong or a row failed, 2 without a GPU.

    Ratios are only told, unless ``strict``: then one that is not as asked is a 1, too.
    """
    check_outputs(args.out)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        build = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no usable CUDA device"
        print(f"syncline bench gpu: no GPU here ({build}); nothing was measured", file=sys.stderr)
        return 2
    bench, began = Bench(args), time.perf_counter()
    try:
        uvloop.run(bench.run())
    except BenchError as error:
        print(f"syncline bench gpu: {error}", file=sys.stderr)
        return 1
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU: figures say nothing"
    print(f"\n{where}, torch {torch.__version__}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    for text in table(bench.rows):
        print(text, file=sys.stderr)
    return 0 if all(_passes(row, strict=args.strict) for row in bench.rows) else 1


def _passes(row: Row | Skipped, *, strict: bool) -> bool:
    if not isinstance(row, Row) or row.integrity is False:
        return False
    return not (strict and row.figures.get("met") is False)
