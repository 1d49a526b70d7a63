"""Kernels are compiled and loaded when launches are built: no push waits for a compiler."""

from __future__ import annotations

import pytest
import torch

from syncline.scheduler.formats import parse_format
from syncline.scheduler.programs import Leaves
from syncline.stages.kernels import assemble, land, launches, tiles, xxh3, xxh3_short
from syncline.stages.kernels.assemble import BucketKernels
from syncline.stages.kernels.land import Landed, LandingKernels
from syncline.stages.kernels.views import Moved, Part, Piece, Quantized, View

CPU = torch.device("cpu")
KERNELS = {
    tiles: ["copy_tiles", "absmax_tiles", "quantize_tiles"],
    xxh3: ["block_sums", "finish_leaves"],
    xxh3_short: ["short_leaves"],
}


class Kernel:
    """Stands for a jitted kernel: notes what it is compiled for, and what it is launched with."""

    def __init__(self, name, arg_names, log):
        self.name, self.arg_names, self.log = name, arg_names, log

    def warmup(self, *arguments, grid, **constants):
        assert len(grid) == 1
        self.log.append(("compiled", _kind(self.name, arguments, constants)))
        return Compiled(self, len(arguments), constants)


class Compiled:
    """What a kernel's warm-up gives: launched with all arguments by position, constants as well, but for options."""

    def __init__(self, kernel, count, constants):
        self.kernel, self.count, self.constants = kernel, count, constants

    def __getitem__(self, grid):
        assert len(grid) == 3

        def start(*arguments):
            given = dict(zip(self.kernel.arg_names[self.count :], arguments[self.count :], strict=True))
            options = {name: value for name, value in self.constants.items() if name not in self.kernel.arg_names}
            kind = _kind(self.kernel.name, arguments[: self.count], given | options)
            self.kernel.log.append(("launched", kind))

        return start


def _kind(name, arguments, constants):
    types = tuple("int" if isinstance(a, int) else str(getattr(a, "dtype", a)) for a in arguments)
    return (name, types, *sorted((key, str(value)) for key, value in constants.items()))


@pytest.fixture
def log(monkeypatch):
    """What is compiled and launched, in order, as on a GPU."""
    log = []
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Kernel(name, getattr(module, name).arg_names, log))
    for module in (assemble, land):
        monkeypatch.setattr(module, "runs_triton", lambda _backend, _device: True)
    monkeypatch.setattr(launches, "INTERPRETED", False)
    monkeypatch.setattr(launches, "_COMPILED", {})
    return log


def leaves(nbytes):
    return Leaves(item_uid=1, first=0, blocks=1, block_nbytes=nbytes, leaf_nbytes=262144)


def aligned(nbytes):
    room = torch.zeros(nbytes + 256, dtype=torch.uint8)
    start = -room.data_ptr() % 256
    return room[start : start + nbytes]


def parts(shape):
    """A weight to quantize, one to cast, and a small one that is copied as it is."""
    source = torch.zeros(shape, dtype=torch.bfloat16)
    count = source.numel()
    how = parse_format("fp8_e4m3:tensor")
    small = View(base=None, offset=0, shape=(2, 8), strides=(8, 1), dtype=torch.bfloat16)
    scale = -(-count // 256) * 256
    codes = Part(
        offset=0, shape=shape, dtype=torch.float8_e4m3fn, pieces=(Piece(view=View.of(source)),), leaves=leaves(count),
        quantized=Quantized(how=how, scale_offset=scale, scale_leaves=leaves(4)),
    )  # fmt: skip
    moved = Moved(offset=0, nbytes=32, moves=((View.of(torch.zeros((2, 8), dtype=torch.bfloat16)), small),), leaves=leaves(32))
    return [codes], [moved], scale + 256


def compiled_before_launched(log):
    done = set()
    for what, kind in log:
        if what == "compiled":
            assert kind not in done, "once is enough"
            done.add(kind)
        else:
            assert kind in done
    return done


def test_a_run_launches_only_what_was_compiled_when_it_was_built(log):
    for shape in ((256, 256), (129, 64), (512, 256)):
        for some in parts(shape)[:2]:
            kernels = BucketKernels(some, CPU)
            assert all(what == "compiled" for what, _ in log)
            kernels.run(aligned(parts(shape)[2]), None, torch.zeros(launches.LIMBS, dtype=torch.int64))
            compiled_before_launched(log)
            log[:] = [entry for entry in log if entry[0] == "compiled"]
    assert {kind[0] for kind in compiled_before_launched(log)} >= {"quantize_tiles", "absmax_tiles", "short_leaves"}


def test_so_does_a_landing(log):
    place = torch.zeros((600, 1000), dtype=torch.bfloat16)
    landed = [
        Landed(offset=0, places=(place,), leaves=leaves(place.nbytes)),
        Landed(offset=0, places=(place.t().contiguous().t(),), leaves=leaves(place.nbytes)),
    ]
    for verify in (True, False):
        kernels = LandingKernels(landed, CPU, verify=verify)
        kernels.run(aligned(place.nbytes), torch.zeros((3, launches.LIMBS), dtype=torch.int64))
    assert any(what == "launched" for what, _ in log)
    compiled_before_launched(log)


def test_memory_that_begins_elsewhere_than_kernels_take_it_to_is_refused(log):
    """They were compiled for multiples of 16 bytes, and nothing else asks any more."""
    kernels = BucketKernels(parts((256, 256))[0], CPU)
    size = parts((256, 256))[2]
    limbs, scratch = torch.zeros(launches.LIMBS + 1, dtype=torch.int64), aligned(kernels.tmp_nbytes + 16)
    bucket = aligned(size + 256)
    for wrong in ({"limbs": limbs[1:]}, {"limbs": limbs[:-1], "scratch": scratch[8:]}):
        with pytest.raises(ValueError, match=f"{list(wrong)[-1]} begins 8 bytes after a multiple of 16"):
            kernels.run(bucket, None, **{"scratch": scratch, **wrong})
    assert all(what == "compiled" for what, _ in log)
