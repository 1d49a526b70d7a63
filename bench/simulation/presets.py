"""Machines whose figures are known. Every number has its source; what nobody has measured is said to be assumed.

"H200" in a source is one H200 on PCIe 5 with torch 2.11, measured by this project.
"""

from __future__ import annotations

from .hardware import Cores, Gpus, Hardware, Work

_H200 = {
    "h2d": "measured on an H200: 55.4 GB/s from pinned memory",
    "kernel": "measured on an H200: 1,782 GB/s read and written, FP8 128x128 quantize in a plain Triton kernel",
    "copy": "measured on an H200: 4,170 GB/s read and written",
    "digest": "assumed: one read at half the rate of a copy",
    "nvlink": "NVLink 4: 450 GB/s each way; 80% of it",
    "nic": "400 Gb/s each way (ConnectX-7); 97% of it, what is left of the line after headers",
    "launch_s": "assumed: two CUDA events (5.4 us to record, H200), a launch and an NCCL call",
    "task_s": "the driver takes 20 to 30 us a task for three stages (bench run, driver); the rest is assumed",
    "round_s": "assumed: a message of gloo between hosts",
    "begin_s": "assumed",
    "end_s": "assumed",
}
_H100_SCALED = "the H200's figure times 3.35/4.8, the ratio of their memory bandwidths"


def presets() -> tuple[Hardware, ...]:
    """All of them."""
    h200 = Gpus(
        name="h200-400g", h2d=55.4e9, kernel=1782e9, copy=4170e9, digest=1000e9, nvlink=360e9, nic=48.5e9, sources=_H200
    )
    h100 = Gpus(
        name="h100-400g", h2d=55.4e9, kernel=1244e9, copy=2910e9, digest=700e9, nvlink=360e9, nic=48.5e9,
        sources={**_H200, "kernel": _H100_SCALED, "copy": _H100_SCALED, "digest": _H100_SCALED},
    )  # fmt: skip
    h800 = Gpus(
        name="h800-400g", h2d=55.4e9, kernel=1244e9, copy=2910e9, digest=700e9, nvlink=160e9, nic=48.5e9,
        sources={**h100.sources, "nvlink": "200 GB/s each way (H800); 80% of it"},
    )  # fmt: skip
    return h100, h200, h800, _two_cores()


def _two_cores() -> Cores:
    return Cores(
        name="cpu-2",
        cores=2,
        copy=Work(s_per_byte=1 / 9.9e9, bus=0.65),
        digest=Work(s_per_byte=1 / 13.6e9, bus=0.4),
        copy_digest=Work(s_per_byte=1 / 7e9, bus=0.5),
        loopback=Work(s_per_byte=1 / 2.8e9, bus=0.5, cores=1.5),
        sources={
            "copy": "measured on two cores of an AMD EPYC: 9.9 GB/s with one thread, 15.3 with two",
            "digest": "the same: 409.6 MB in 30 ms",
            "others": "rough; 'syncline bench calibrate' measures all of them",
        },
    )
