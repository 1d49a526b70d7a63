"""Parts of a bucket written by plain torch, where Triton is absent and on the CPU.

The results are those of `reference`, by a faster way: torch's own conversion to e4m3 gives the same bits for finite values
that are not beyond 464 in magnitude, and quotients are not. Matrices are quantized in strips that fit a core's cache:
whole ones would go through memory a dozen times. (`torch.compile` of the whole does no better than strips, and takes seconds.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from syncline.scheduler.formats import Fp8Format

from .reference import FLOATS, cast, scale_of
from .views import Moved, Part, Quantized, View

_NAN_CODE = 0x7F
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF

# Elements of a strip: 1 MiB of float32.
_STRIP = 1 << 18


def write_part(part: Part | Moved, bucket: torch.Tensor, given: torch.Tensor | None) -> None:
    """Write one part, and its scales, into a bucket (1-d uint8)."""
    if isinstance(part, Moved):
        for read, write in part.moves:
            _move(read, write, bucket, given)
        return
    if part.quantized is not None:
        _quantize_part(part, part.quantized, bucket, given)
        return
    for piece in part.pieces:
        _move(piece.view, part.place(piece), bucket, given)


def _move(read: View, write: View, bucket: torch.Tensor, given: torch.Tensor | None) -> None:
    if not read.empty:
        source, target = read.tensor(given), write.tensor(bucket)
        target.copy_(source if source.dtype == target.dtype else cast(source, target.dtype))


Rows = Callable[[int, torch.Tensor], torch.Tensor]
"""``rows(top, strip)`` fills ``strip`` (n, N) float32 with a matrix's rows from ``top`` on, and returns it."""


def _quantize_part(part: Part, quantized: Quantized, bucket: torch.Tensor, given: torch.Tensor | None) -> None:
    """Codes and scales of a part, from wherever its pieces lie to their places; nothing but a strip is kept between."""
    pieces = [(piece.row, piece.column, piece.view.tensor(given)) for piece in part.pieces if not piece.view.empty]
    for _, _, source in pieces:
        _check(source)

    def rows(top: int, strip: torch.Tensor) -> torch.Tensor:
        for row, column, source in pieces:
            first, last = max(top, row), min(top + len(strip), row + len(source))
            if first < last:
                strip[first - top : last - top, column : column + source.shape[1]].copy_(source[first - row : last - row])
        return strip

    shape, how = part.shape, quantized.how
    down, across = how.group(shape)
    size = (-(-shape[0] // down), -(-shape[1] // across))
    codes = bucket[part.offset : part.offset + shape[0] * shape[1]].view(torch.float8_e4m3fn).view(shape)
    scale_nbytes = 4 * size[0] * size[1]
    grid = bucket[quantized.scale_offset : quantized.scale_offset + scale_nbytes].view(torch.float32).view(size)
    _quantize(rows, how, codes, grid)


def quantize(values: torch.Tensor, how: Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.quantize`, strip by strip."""
    _check(values)
    shape = (values.shape[0], values.shape[1])
    down, across = how.group(shape)
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=values.device)
    grid = torch.empty((-(-shape[0] // down), -(-shape[1] // across)), device=values.device)
    _quantize(lambda top, strip: strip.copy_(values[top : top + len(strip)]), how, codes, grid)
    return codes, grid.reshape(how.scale_shape(shape))


def _quantize(matrix: Rows, how: Fp8Format, codes: torch.Tensor, grid: torch.Tensor) -> None:
    """Write codes (M, N) and scales (groups down, groups across)."""
    shape = (codes.shape[0], codes.shape[1])
    if how.grouping == "tensor":
        _quantize_tensor(matrix, how, codes, grid)
        return
    group = how.group(shape)
    down, across = group
    rows = down * max(1, _STRIP // (down * shape[1]))
    strip = torch.empty((min(rows, shape[0]), shape[1]), device=codes.device)
    for top in range(0, shape[0], rows):
        part = matrix(top, strip[: min(rows, shape[0] - top)])
        absmax = _absmax(part, group)
        scale = scale_of(absmax, pow2=how.pow2)
        grid[top // down : top // down + len(scale)] = scale
        each = scale if across >= shape[1] else scale.repeat_interleave(across, dim=1)[:, : shape[1]]
        each = each if down == 1 else each.repeat_interleave(down, dim=0)[: len(part)]
        _store(part.div_(each), each, absmax, codes[top : top + rows])


def _check(values: torch.Tensor) -> None:
    if values.dtype not in FLOATS:
        raise ValueError(f"{values.dtype} cannot be quantized; float32, bfloat16 and float16 can")


def _absmax(strip: torch.Tensor, group: tuple[int, int]) -> torch.Tensor:
    """Bits of the largest magnitude of each group; a NaN wins, as in `reference.absmax_bits`. The strip begins with a group."""
    down, across = group
    edges = (0, -strip.shape[1] % across, 0, -strip.shape[0] % down)
    padded = torch.nn.functional.pad(strip, edges) if any(edges) else strip
    # one pass over the strip without a copy of magnitudes; the rest is small
    least, most = torch.aminmax(padded.unflatten(0, (-1, down)), dim=1)
    low, high = least.unflatten(1, (-1, across)).amin(dim=-1), most.unflatten(1, (-1, across)).amax(dim=-1)
    return torch.maximum(-low, high).view(torch.int32) & _MAGNITUDE


def _store(quotients: torch.Tensor, each: torch.Tensor, absmax: torch.Tensor, codes: torch.Tensor) -> None:
    codes.copy_(quotients)
    if bool((absmax >= _INFINITY).any()):
        codes.view(torch.uint8).masked_fill_(each.isnan().expand_as(quotients), _NAN_CODE)


def _quantize_tensor(matrix: Rows, how: Fp8Format, codes: torch.Tensor, grid: torch.Tensor) -> None:
    shape = (codes.shape[0], codes.shape[1])
    rows = max(1, _STRIP // shape[1])
    memory = torch.empty((min(rows, shape[0]), shape[1]), device=codes.device)
    strips = [(top, memory[: min(rows, shape[0] - top)]) for top in range(0, shape[0], rows)]
    absmax = torch.stack([_absmax(matrix(top, strip), (rows, shape[1])) for top, strip in strips]).amax().reshape(1, 1)
    scale = scale_of(absmax, pow2=how.pow2)
    grid.copy_(scale)
    for top, strip in strips:
        _store(matrix(top, strip).div_(scale), scale, absmax, codes[top : top + rows])
