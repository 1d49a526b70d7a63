"""From tables to launches: everything but addresses is settled when a `Program` is built, so running it is quick."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import strips, tiles, xxh3, xxh3_short
from .language import INTERPRETED
from .mixing import ACCUMULATORS, SECRET
from .tables import UNIT, CopyKind, LeafKind, Pieces, QuantizeKind, StripKind, Strips, Tables

LIMBS = 4
"""A digest on a device: int64 values that each count one 32-bit limb of the sum, least first."""

_ALIGNED = 16
_ELEMENTS_A_WARP = 2048
_MOST_WARPS = 8
_REGISTERS = 128
_LEAVES_EACH = 4
_SHORT_EACH = 32


class Memory(NamedTuple):
    """What launches of one run work on: addresses that pieces and leaves are relative to, and temporary memory."""

    source: int
    dest: int
    sums: torch.Tensor
    absmax: torch.Tensor
    limbs: torch.Tensor


Arguments = Callable[[Memory], tuple[Any, ...]]


class Launch(NamedTuple):
    """A kernel, and what it is launched with: ``arguments`` of a run, and constants, for which it is compiled."""

    kernel: Any
    grid: tuple[int]
    arguments: Arguments
    constants: Mapping[str, Any]

    def compiled(self, device: torch.device) -> Start:
        """What starts it on the current stream of ``device``, the calling thread's current one.

        Compiles and loads what was not compiled yet in this process, which takes seconds: in the first push that would be too
        late. What is compiled is started directly, as Triton's tutorials do: to ask again each time whether arguments are of
        the kinds that it was compiled for takes longer than all else.
        """
        if INTERPRETED:
            return lambda memory: self.kernel[self.grid](*self.arguments(memory), **self.constants)
        key = (device, self.kernel, *self.constants.items())
        if key not in _COMPILED:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                _COMPILED[key] = self.kernel.warmup(*self.arguments(_ALIKE), grid=self.grid, **self.constants)
                _ = _COMPILED[key][1, 1, 1]  # loads it
        start, arguments = _COMPILED[key][*self.grid, 1, 1], self.arguments
        constants = [self.constants[name] for name in self.kernel.arg_names if name in self.constants]
        return lambda memory: start(*arguments(memory), *constants)


Start = Callable[[Memory], object]

_ALIKE = Memory(0, 0, torch.int64, torch.int32, torch.int64)  # type: ignore[arg-type]
"""What a run's memory looks like to the compiler: types, and addresses that 16 divides."""

_COMPILED: dict[tuple[object, ...], Any] = {}
"""What was compiled in this process, for which device."""


class Program:
    """The launches of one table set, in the order in which they must run. Compiles what is not compiled yet: off the loop.

    Tables lie in device memory beside the watermark: about 0.09 % of the bytes that the launches work on.

    Attributes:
        tmp_nbytes: temporary memory of a run on the device, in bytes: sums of hash blocks (a 16th of what is hashed), and
            magnitudes of groups that are spread over pieces.
    """

    def __init__(self, tables: Tables, device: torch.device) -> None:
        self._device = device
        self._sums, self._groups = tables.blocks * 8, tables.groups
        self.tmp_nbytes = self._sums * 8 + self._groups * 4
        launches = [
            *_copies(tables.copies, device),
            *_quantizing(tables.quantize, device),
            *_copies(tables.returns, device),
            *_hashing(tables, device),
        ]
        self._starts = [launch.compiled(device) for launch in launches]

    def run(self, source: int, dest: int, limbs: torch.Tensor, scratch: torch.Tensor | None = None) -> None:
        """Launch on the current stream.

        Args:
            source: address that relative sources lie at.
            dest: address that relative destinations lie at.
            limbs: where the digest is added up.
            scratch: temporary memory (1-d uint8) of `tmp_nbytes`; allocated if not given.

        Raises:
            ValueError: something does not begin at a multiple of 16 bytes, as compiled kernels take it to.
        """
        if scratch is None:
            scratch = torch.empty(self.tmp_nbytes, dtype=torch.uint8, device=self._device)
        for name, address in (("source", source), ("dest", dest), ("limbs", limbs.data_ptr()), ("scratch", scratch.data_ptr())):
            if address % _ALIGNED and not INTERPRETED:
                raise ValueError(f"{name} begins {address % _ALIGNED} bytes after a multiple of {_ALIGNED}")
        sums = scratch[: self._sums * 8].view(torch.int64)
        absmax = scratch[self._sums * 8 : self.tmp_nbytes].view(torch.int32)
        if self._groups:
            absmax.zero_()
        memory = Memory(source, dest, sums, absmax, limbs)
        for start in self._starts:
            start(memory)


def _upload(pieces: Pieces, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, tuple[int]]:
    piece_of = pieces.piece_of().to(device)
    return torch.tensor(pieces.rows, dtype=torch.int64, device=device), piece_of, (len(piece_of),)


def _copies(copies: Mapping[CopyKind, Pieces], device: torch.device) -> list[Launch]:
    return [_copy(kind, *_upload(pieces, device)) for kind, pieces in copies.items()]


def _copy(kind: CopyKind, pieces: torch.Tensor, piece_of: torch.Tensor, grid: tuple[int]) -> Launch:
    constants = {
        "FROM": kind.source, "TO": kind.to, "NBYTES": kind.nbytes,
        "ROWS": kind.tile[0], "COLUMNS": kind.tile[1], "VECTOR": kind.vector,
    }  # fmt: skip

    return Launch(tiles.copy_tiles, grid, lambda memory: (memory.source, memory.dest, pieces, piece_of), constants)


def _quantizing(quantize: Mapping[QuantizeKind, Pieces], device: torch.device) -> list[Launch]:
    """Magnitudes of all groups that need them before any quantizing: pieces of one group may be of different kinds."""
    before, after = [], []
    hardware = _converts(device)
    for kind, pieces in quantize.items():
        uploaded = _upload(pieces, device)
        constants = {
            "FROM": kind.source, "ROWS": kind.tile[0], "COLUMNS": kind.tile[1], "VECTOR": kind.vector,
            "GROUP_ROWS": kind.group[0], "GROUP_COLUMNS": kind.group[1],
        }  # fmt: skip
        if not kind.whole:
            before.append(_absmax(dict(constants), *uploaded))
        constants |= {"WHOLE": kind.whole, "POW2": kind.pow2, "STEPS": 0 if kind.pow2 else 2, "HARDWARE": hardware}
        after.append(_quantize(constants, *uploaded))
    return before + after


def _absmax(constants: Mapping[str, Any], pieces: torch.Tensor, piece_of: torch.Tensor, grid: tuple[int]) -> Launch:
    def arguments(memory: Memory) -> tuple[Any, ...]:
        return memory.source, pieces, piece_of, memory.absmax

    return Launch(tiles.absmax_tiles, grid, arguments, {**constants, "num_warps": _warps(constants)})


def _quantize(constants: Mapping[str, Any], pieces: torch.Tensor, piece_of: torch.Tensor, grid: tuple[int]) -> Launch:
    def arguments(memory: Memory) -> tuple[Any, ...]:
        return memory.source, memory.dest, pieces, piece_of, memory.absmax

    return Launch(tiles.quantize_tiles, grid, arguments, {**constants, **_in_registers(constants)})


def _in_registers(constants: Mapping[str, Any]) -> dict[str, int]:
    """Warps and registers for a tile that is quantized out of registers."""
    warps = _warps(constants)
    # left alone the compiler takes so many registers that one program may fill a multiprocessor, and memory idles
    return {"num_warps": warps, "maxnreg": _REGISTERS} if warps == _MOST_WARPS else {"num_warps": warps}


def _warps(constants: Mapping[str, Any]) -> int:
    """For a tile that is kept in registers."""
    elements: int = constants["ROWS"] * constants["COLUMNS"]
    return min(max(elements // _ELEMENTS_A_WARP, 1), _MOST_WARPS)


def _converts(device: torch.device) -> bool:
    """Whether the device itself converts to e4m3."""
    return device.type == "cuda" and not INTERPRETED and rounds_once(torch.cuda.get_device_capability(device))


def rounds_once(capability: tuple[int, int]) -> bool:
    """Whether Triton's conversion of float32 to e4m3 rounds once, with the GPU's own instruction.

    For 8.9, which has it, Triton 3.6 and 3.7 go by way of float16, cut off: that makes other codes.
    """
    return capability >= (9, 0)


def _hashing(tables: Tables, device: torch.device) -> list[Launch]:
    launches = []
    if tables.long:
        words = [int.from_bytes(SECRET[at : at + 8], "little") for at in range(0, len(SECRET), 8)]
        secret = _words([*words, *ACCUMULATORS], device)
        leaves = _padded(tables.long, _LEAVES_EACH).to(device)
        for strip_kind, matrices in tables.strips.items():
            launches.append(_strips(strip_kind, matrices, leaves, secret))
        for kind, units in tables.units.items():
            unit_leaf = torch.tensor(units, dtype=torch.int32, device=device)
            launches.append(_block_sums(leaves, unit_leaf, secret, kind))
        launches.append(_finish(leaves, secret))
    if tables.short:
        short = _padded(tables.short, _SHORT_EACH).to(device)
        launches.append(_short(short, _words(xxh3_short.SECRET_AT, device)))
    return launches


def _padded(rows: Sequence[Sequence[int]], each: int) -> torch.Tensor:
    """A table filled up with zeros to a multiple of ``each`` rows: a count as an argument would be compiled for anew."""
    table = torch.tensor(rows, dtype=torch.int64)
    return torch.nn.functional.pad(table, (0, 0, 0, -len(rows) % each))


def _words(words: Sequence[int], device: torch.device) -> torch.Tensor:
    """Unsigned words of 64 bits as int64."""
    return torch.tensor([word - 2**64 if word >= 2**63 else word for word in words], dtype=torch.int64, device=device)


def _block_sums(leaves: torch.Tensor, unit_leaf: torch.Tensor, secret: torch.Tensor, kind: LeafKind) -> Launch:
    constants = {"UNIT": UNIT, "COPY": kind.copied, "ALIGNED": kind.aligned, "STRIDED": kind.strided}
    grid = (len(unit_leaf),)

    def arguments(memory: Memory) -> tuple[Any, ...]:
        return memory.dest, memory.source, leaves, unit_leaf, secret, memory.sums

    return Launch(xxh3.block_sums, grid, arguments, constants)


def _strips(kind: StripKind, matrices: Strips, leaves: torch.Tensor, secret: torch.Tensor) -> Launch:
    device = leaves.device
    constants = {
        "FROM": kind.source, "ROWS": kind.block[0], "COLUMNS": kind.block[1], "POW2": kind.pow2,
        "STEPS": 0 if kind.pow2 else 2, "HARDWARE": _converts(device),
        # also for small blocks: hash blocks of a strip's rows need as many threads, whatever the size of the others
        "num_warps": _MOST_WARPS, "maxnreg": _REGISTERS,
    }  # fmt: skip
    table = torch.tensor(matrices.rows, dtype=torch.int64, device=device)
    of = matrices.matrix_of().to(device)

    def arguments(memory: Memory) -> tuple[Any, ...]:
        return memory.source, memory.dest, table, of, leaves, secret, memory.sums

    return Launch(strips.quantize_strips, (len(of),), arguments, constants)


def _finish(leaves: torch.Tensor, secret: torch.Tensor) -> Launch:
    grid = (len(leaves) // _LEAVES_EACH,)

    def arguments(memory: Memory) -> tuple[Any, ...]:
        return memory.dest, leaves, secret, memory.sums, memory.limbs

    return Launch(xxh3.finish_leaves, grid, arguments, {"LEAVES": _LEAVES_EACH, "num_warps": 1})


def _short(leaves: torch.Tensor, secret: torch.Tensor) -> Launch:
    grid = (len(leaves) // _SHORT_EACH,)

    def arguments(memory: Memory) -> tuple[Any, ...]:
        return memory.dest, leaves, secret, memory.limbs

    return Launch(xxh3_short.short_leaves, grid, arguments, {"LEAVES": _SHORT_EACH, "num_warps": 1})
