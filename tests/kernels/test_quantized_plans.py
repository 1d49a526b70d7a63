"""What a plan says of quantized weights, through `from_plan`, gives the codes, scales and digests of the CPU stages."""

from __future__ import annotations

import pytest
import torch

from syncline.scheduler.formats import parse_format
from syncline.scheduler.layout import Box, Buffer, Manifest, Piece, Tensor
from syncline.scheduler.plan import PlanOptions, build_plan
from syncline.stages.kernels import from_plan
from syncline.stages.kernels.views import Part
from syncline.stages.recipes import build_recipes

SIZES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "float16": 2}


def manifest(rank, world, held):
    """``held``: name -> (shape, start, local tensor or (shape, dtype))."""
    tensors, pieces, buffers = [], [], []
    for index, (name, (shape, start, local)) in enumerate(held.items()):
        dtype = str(local.dtype).removeprefix("torch.")
        tensors.append(Tensor(name=name, shape=shape, dtype=dtype))
        span = sum((n - 1) * s for n, s in zip(local.shape, local.stride(), strict=True)) + 1
        buffers.append(Buffer(name=name, nbytes=span * SIZES[dtype]))
        box = Box(start=start, shape=tuple(local.shape))
        pieces.append(Piece(tensor=index, box=box, buffer=index, offset=0, strides=local.stride(), dtype=dtype))
    return Manifest(rank=rank, world_size=world, host="h", tensors=tensors, pieces=pieces, buffers=buffers)


def rows_of(weights, world, rank):
    held = {}
    for name, weight in weights.items():
        step = -(-weight.shape[0] // world)
        part = weight[rank * step : (rank + 1) * step]
        if len(part):
            local = part.clone() if rank else part.t().contiguous().t()  # rank 0 holds it transposed
            held[name] = (tuple(weight.shape), (rank * step, 0), local)
    return held


def quantized_target(weights, wire_format):
    how, held = parse_format(wire_format), {}
    for name, weight in weights.items():
        shape, grid = tuple(weight.shape), how.scale_shape(weight.shape)
        held[name] = (shape, (0, 0), torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta"))
        held[how.scale_name(name)] = (grid, (0,) * len(grid), torch.empty(grid, device="meta"))
    return manifest(0, 1, held)


def aligned(nbytes, device):
    memory = torch.zeros(nbytes + 256, dtype=torch.uint8, device=device)
    return memory[-memory.data_ptr() % 256 :][:nbytes]


FORMATS = ["fp8_e4m3:128x128", "fp8_e4m3:16x32:pow2", "fp8_e4m3:channel", "fp8_e4m3:tensor"]


@pytest.mark.parametrize("wire_format", FORMATS)
@pytest.mark.parametrize("world", [1, 2])
def test_kernels_give_what_the_cpu_stages_give(kernels, wire_format, world):
    """Blocks that lie in both ranks' shards, edges, a group of zeros, and parts of a weight that is cut between groups."""
    generator = torch.Generator().manual_seed(world)
    shapes, dtypes = {"a.weight": (150, 48), "b.weight": (129, 130)}, (torch.bfloat16, torch.float32)
    weights = {
        name: (torch.randn(shape, generator=generator) * 3).to(dtype)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    }
    weights["a.weight"][:128] = 0
    held = [rows_of(weights, world, rank) for rank in range(world)]
    options = PlanOptions(
        bucket_bytes=8192, max_tmp_bytes=1 << 20, leaf_bytes=2048, route="gather", landing="streamed", wire_format=wire_format
    )
    plan = build_plan([manifest(r, world, h) for r, h in enumerate(held)], [[quantized_target(weights, wire_format)]], options)
    memories = [[local for _, _, local in h.values()] for h in held]
    programs = [plan.source_program(rank) for rank in range(world)]
    recipes = [build_recipes(program, memory) for program, memory in zip(programs, memories, strict=True)]
    seen = 0
    for rank, program in enumerate(programs):
        there = [local.to(kernels.device) for local in memories[rank]]
        for task in program.tasks:
            if task.owner == rank:
                seen += check(kernels, task, rank, recipes, there)
    assert seen == 2 if "tensor" in wire_format else seen > 2


def check(kernels, task, rank, recipes, there):
    recipe = recipes[rank][task.index]
    private = aligned(recipe.layout.without_bucket, "cpu")
    expected, places = aligned(task.nbytes, "cpu"), recipe.layout.messages
    digest = recipe.assembly.fill(expected, private[: recipe.layout.files], verify=True)
    for number, message in enumerate(task.receives):
        packing = next(p for p in recipes[message.peer][task.index].packings if p.message.tag == message.tag)
        packing.run(private[places[number] : places[number] + message.nbytes], None)
    digest = (digest + recipe.assembly.finish(expected, private, verify=True)) % 2**128
    parts = from_plan.parts_of(task, there, places)
    assert all(isinstance(part, Part) and part.quantized is not None for part in parts)
    given = aligned(len(private), kernels.device)
    given.copy_(private)
    for backend in ("triton", "torch"):
        bucket = aligned(task.nbytes, kernels.device)
        built = kernels.assemble.BucketKernels(parts, kernels.device, backend=backend)
        scratch = torch.full((built.tmp_nbytes,), 0x5A, dtype=torch.uint8, device=kernels.device) if built.tmp_nbytes else None
        limbs = kernels.assemble.assemble(bucket, built, given=given, scratch=scratch)
        assert kernels.assemble.read_digest(limbs.cpu()) == digest
        for segment in task.segments:
            place = slice(segment.offset, segment.offset + segment.nbytes)
            assert torch.equal(bucket[place].cpu(), expected[place]), segment.name
    return len(parts)
