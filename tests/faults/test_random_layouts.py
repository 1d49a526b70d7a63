"""Random sources, targets and settings, pushed for real: every element lands where plain indexing says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings, strategies as st

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.named_box import named_box
from syncline.engine import Receiver, RemoteTarget, TransferConfig, TransferEngine

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float64]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
MODES = [("shm", "staged"), ("shm", "streamed"), ("gloo", "staged"), ("gloo", "streamed"), ("shm", "mapped")]


@st.composite
def cuts(draw, size, parts):
    """``parts`` lengths that add up to ``size``."""
    marks = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    return [b - a for a, b in itertools.pairwise([0, *marks, size])]


@st.composite
def worlds(draw):
    """Canonical tensors, how the source's ranks hold them, and how the target's ranks want them."""
    source_ranks, target_ranks = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    transport, landing = draw(st.sampled_from(MODES))
    tensors = []
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        wanted = draw(st.sampled_from(FLOATS)) if dtype in FLOATS else dtype
        tensors.append({
            "name": f"t.{number}", "shape": shape, "dtype": dtype, "wanted": wanted,
            "held": draw(splits(shape, source_ranks)), "target": draw(splits(shape, target_ranks)),
            "strided": draw(st.booleans()),
        })  # fmt: skip
    size = draw(st.sampled_from([1, 64, 256, 300, 1000, 100_000]))
    return {
        "tensors": tensors, "source_ranks": source_ranks, "target_ranks": target_ranks, "bucket_bytes": size,
        "transport": transport, "landing": landing,
    }  # fmt: skip


@st.composite
def splits(draw, shape, ranks):
    """An index for each rank: cut along some axis, or the whole on all of them, or on one alone."""
    whole = (slice(None),) * len(shape)
    if not shape or draw(st.integers(0, 3)) == 0:
        only = draw(st.one_of(st.none(), st.integers(0, ranks - 1)))
        return [whole if only in (None, rank) else None for rank in range(ranks)]
    axis = draw(st.integers(0, len(shape) - 1))
    ends = [0, *itertools.accumulate(draw(cuts(shape[axis], ranks)))]
    return [tuple(slice(a, b) if i == axis else slice(None) for i in range(len(shape))) for a, b in itertools.pairwise(ends)]


def content(kit, world):
    whole = kit.stamped({tensor["name"]: (tensor["shape"], tensor["dtype"]) for tensor in world["tensors"]})
    return {name: tensor.contiguous() for name, tensor in whole.items()}


def make_sources(kit, world, whole):
    group = kit.MeetingGroup(torch.distributed.HashStore())
    sources = []
    for rank in range(world["source_ranks"]):
        held = {}
        for tensor in world["tensors"]:
            index, full = tensor["held"][rank], whole[tensor["name"]]
            if index is not None and full[index].numel():
                local = full[index].clone()
                if tensor["strided"] and local.ndim == 2:
                    local = local.T.contiguous().T
                held[tensor["name"]] = [(kit.box_of(full, index), local)]
        sources.append(kit.ShardSource(rank, world["source_ranks"], group, whole, held))
    return sources


def make_loader(kit, world, whole, rank):
    live, layout = {}, {}
    for tensor in world["tensors"]:
        index, full = tensor["target"][rank], whole[tensor["name"]]
        if index is not None:
            box = kit.box_of(full, index)
            live[tensor["name"]] = kit.poison(torch.empty(box.shape, dtype=tensor["wanted"]))
            layout[tensor["name"]] = named_box(tensor["name"], tensor["shape"], start=box.start, size=box.shape)
    model = kit.Bag(live)
    return model, ModuleLoader(model, layout=layout, movable=world["landing"] == "mapped")


async def push_twice(kit, world):
    whole = content(kit, world)
    sources = make_sources(kit, world, whole)
    pairs = [make_loader(kit, world, whole, rank) for rank in range(world["target_ranks"])]
    async with contextlib.AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        receivers = []
        for rank, (_, loader) in enumerate(pairs):
            receiver = Receiver(
                loader, f"unix:{home}/{rank}", rank=rank, world_size=len(pairs),
                leader=receivers[0].address if rank else None,
            )  # fmt: skip
            receivers.append(await stack.enter_async_context(receiver))
        for receiver in receivers:
            await receiver.joined()
        config = TransferConfig(
            max_tmp_bytes="1MiB", bucket_bytes=world["bucket_bytes"], transport=world["transport"], landing=world["landing"],
            push_timeout_s=30.0, connect_timeout_s=30.0,
        )  # fmt: skip
        target = RemoteTarget(receivers[0].address)
        engines = [TransferEngine(source=source, targets=[target], config=config) for source in sources]
        for engine in engines:
            stack.push_async_callback(engine.close)
        await asyncio.gather(*(engine.connect() for engine in engines))
        for version in (1, 2):
            for model, _ in pairs:
                for tensor in model.state_dict().values():
                    kit.poison(tensor)
            reports = await asyncio.gather(*(engine.push(version) for engine in engines))
            assert all(report.ok for report in reports), str(reports[0])
            for rank, (model, _) in enumerate(pairs):
                expected = {
                    tensor["name"]: whole[tensor["name"]][tensor["target"][rank]].to(tensor["wanted"])
                    for tensor in world["tensors"]
                    if tensor["target"][rank] is not None
                }
                assert kit.differing(model, expected) == []


def moves_something(world):
    return any(0 not in tensor["shape"] for tensor in world["tensors"])


@settings(max_examples=30, deadline=None)
@given(world=worlds().filter(moves_something))
def test_random_layouts_land_where_plain_indexing_says(kit, world):
    asyncio.run(push_twice(kit, world))
