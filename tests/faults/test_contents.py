"""Faults of content: what has to arrive arrives, where it belongs, in the right type, whatever the layouts on both sides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.adapters.engines import ModuleLoader
from syncline.adapters.named_box import named_box
from syncline.adapters.names import NameTable, Unpack
from syncline.adapters.trainers import ModuleSource
from syncline.engine.errors import PlanError, PushError, SynclineError
from syncline.scheduler import plan as planning, proof
from syncline.stages.transports.gloo import GlooSender

FP8 = torch.float8_e4m3fn


# buffers


async def test_persistent_buffers_travel_and_others_stay(start_target, connect):
    class Router(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.weight = nn.Parameter(torch.full((3, 4), value))
            self.register_buffer("bias", torch.full((3,), value))
            self.register_buffer("steps", torch.tensor(int(value)))
            self.register_buffer("inv_freq", torch.full((2,), value), persistent=False)

    source, model = Router(1.0), Router(9.0)
    del source.inv_freq  # the trainer may not have it at all
    target = await start_target(model)
    pusher = await connect(source, [target])
    for version in (1, 2):
        source.bias += version
        source.steps += 5
        await pusher.push_well(version)
        assert torch.equal(model.bias, source.bias)
        assert torch.equal(model.steps, source.steps)
        assert torch.equal(model.weight, source.weight)
        assert model.inv_freq.tolist() == [9.0, 9.0]


# bucket edge


async def test_every_bucket_size_gives_the_same(start_target, connect, kit, transport, landing):
    """q, k and v of one fused parameter, and a weight and its scale, fall into one bucket or into several."""
    whole = kit.stamped({
        "q.weight": (6, 5), "k.weight": (2, 5), "v.weight": (2, 5), "w.weight": ((16, 8), FP8), "w.weight_scale_inv": (2, 1),
        "norm": ((7,), torch.bfloat16),
    })  # fmt: skip
    live = kit.poisoned(
        {
            "qkv.weight": torch.cat([whole[f"{n}.weight"] for n in "qkv"]),
            **{n: whole[n] for n in ("w.weight", "w.weight_scale_inv", "norm")},
        }
    )
    expected = {**{n: whole[n] for n in live if n in whole}, "qkv.weight": torch.cat([whole[f"{n}.weight"] for n in "qkv"])}
    layout = {
        "qkv.weight": [
            named_box("q.weight", (6, 5)),
            named_box("k.weight", (2, 5), local_start=(6, 0)),
            named_box("v.weight", (2, 5), local_start=(8, 0)),
        ]
    }
    model = kit.Bag(live)
    target = await start_target(ModuleLoader(model, layout=layout, movable=landing == "mapped"))
    digests, tasks = set(), []
    for version, size in enumerate((1, 39, 40, 41, 255, 256, 257, 511, 768, 1023, 1024, 1320, 4096), start=1):
        for tensor in model.state_dict().values():
            kit.poison(tensor)
        pusher = await connect(kit.row_shards(whole, 2), [target], transport=transport, landing=landing, bucket_bytes=size)
        report = await pusher.push_well(version)
        assert kit.differing(model, expected) == [], size
        digests.add(report.digest)
        tasks.append(report.tasks)
        await pusher.close()
    assert len(digests) == 1
    assert tasks == sorted(tasks, reverse=True)
    assert tasks[0] >= 6
    assert tasks[-1] <= 2  # one for each owner


# silent layout

HEAD, HIDDEN, INNER = 2, 6, 8
CANONICAL = {
    "q.weight": (8 * HEAD, HIDDEN), "k.weight": (2 * HEAD, HIDDEN), "v.weight": (2 * HEAD, HIDDEN),
    "o.weight": (HIDDEN, 8 * HEAD), "gate.weight": (INNER, HIDDEN), "up.weight": (INNER, HIDDEN),
    "down.weight": (HIDDEN, INNER), "norm.weight": (HIDDEN,),
}  # fmt: skip


def tensor_parallel(whole, rank, world):
    """The reference: what a rank of a tensor-parallel engine holds, by plain indexing. Two KV heads, copied where ranks are
    more."""

    def part(name, dim=0, count=world, at=rank):
        size = whole[name].shape[dim] // count
        return whole[name].narrow(dim, at * size, size)

    heads = {"count": min(world, 2), "at": rank * min(world, 2) // world}
    return {
        "qkv.weight": torch.cat([part("q.weight"), part("k.weight", **heads), part("v.weight", **heads)]),
        "o.weight": part("o.weight", 1).contiguous(),
        "gate_up.weight": torch.cat([part("gate.weight"), part("up.weight")]),
        "down.weight": part("down.weight", 1).contiguous(),
        "norm.weight": whole["norm.weight"].clone(),
    }


def tensor_parallel_layout(rank, world):
    """The same for the loader, in boxes."""

    def rows(name, at, count=world, place=rank):
        size = CANONICAL[name][0] // count
        return named_box(name, CANONICAL[name], start=(place * size, 0), size=(size, HIDDEN), local_start=(at, 0)), at + size

    def columns(name):
        size = CANONICAL[name][1] // world
        return named_box(name, CANONICAL[name], start=(0, rank * size), size=(HIDDEN, size))

    copies = {"count": min(world, 2), "place": rank * min(world, 2) // world}
    q, at = rows("q.weight", 0)
    k, at = rows("k.weight", at, **copies)
    v, _ = rows("v.weight", at, **copies)
    gate, at = rows("gate.weight", 0)
    up, _ = rows("up.weight", at)
    return {
        "qkv.weight": [q, k, v], "gate_up.weight": [gate, up], "o.weight": columns("o.weight"),
        "down.weight": columns("down.weight"),
    }  # fmt: skip


def rows_in_one_run(name, rank, world):
    """The wrong interleave that fits every shape: slices of ``[a; b; …]`` instead of ``[slice of a; slice of b; …]``."""
    boxes, at = [], 0
    for part in name:
        size = CANONICAL[part][0]
        boxes.append((part, at, size))
        at += size
    each = at // world
    first, last, found = rank * each, (rank + 1) * each, []
    for part, begin, size in boxes:
        low, high = max(first, begin), min(last, begin + size)
        if high > low:
            found.append(
                named_box(
                    part, CANONICAL[part], start=(low - begin, 0), size=(high - low, HIDDEN), local_start=(low - first, 0)
                )
            )
    return found


async def fused(start_target, connect, kit, world, layouts, **config):
    whole = kit.stamped(CANONICAL)
    models = [kit.Bag(kit.poisoned(tensor_parallel(whole, rank, world))) for rank in range(world)]
    target = await start_target(*(ModuleLoader(m, layout=layout) for m, layout in zip(models, layouts, strict=True)))
    pusher = await connect(kit.row_shards(whole, 3), [target], bucket_bytes=500, **config)
    await pusher.push_well(1)
    return [kit.differing(model, tensor_parallel(whole, rank, world)) for rank, model in enumerate(models)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("settings", [{"transport": "shm", "landing": "staged"}, {"transport": "gloo", "landing": "streamed"}])
async def test_fused_projections_under_tensor_parallelism(start_target, connect, kit, world, settings):
    layouts = [tensor_parallel_layout(rank, world) for rank in range(world)]
    assert await fused(start_target, connect, kit, world, layouts, **settings) == [[]] * world


async def test_a_wrong_interleave_fits_every_shape_and_is_seen_in_the_numbers(start_target, connect, kit):
    """So that the test above is known to be able to fail."""
    layouts = [
        {**tensor_parallel_layout(rank, 2), "gate_up.weight": rows_in_one_run(("gate.weight", "up.weight"), rank, 2)}
        for rank in range(2)
    ]
    assert await fused(start_target, connect, kit, 2, layouts) == [["gate_up.weight"], ["gate_up.weight"]]


# load twice, kernel layout, finalize


class KernelLoader:
    """An engine with a loader of its own: it takes checkpoint parts, and at the end turns them into what its kernels want:
    ``[w3; w1]`` in one tensor, transposed, and the scale folded in. Its live memory never has the checkpoint's form."""

    def __init__(self, whole):
        self.whole = whole
        self.inner = ModuleLoader(None)
        self.live = {"w13": torch.full((4, 12), float("nan")), "w2": torch.full((4, 6), float("nan"))}
        self.parts = {}
        self.log = []
        self._manifest = None

    def manifest(self, *, rank, world_size, host):
        if self._manifest is None:
            source = ModuleSource({name: torch.empty(t.shape, dtype=t.dtype) for name, t in self.whole.items()}, world_size=1)
            known = source.manifest()
            self._manifest = type(known)(
                rank=rank, world_size=world_size, host=host, tensors=known.tensors, pieces=known.pieces, buffers=known.buffers
            )
        return self._manifest

    def buffers(self):
        return None

    def begin(self, version):
        self.log.append(("begin", version))
        self.parts = {name: torch.full(t.shape, float("nan")) for name, t in self.whole.items()}

    def install(self, landed):
        self.log.append(("install", len(landed)))
        for part in landed:
            name = self._manifest.tensors[self._manifest.pieces[part.piece].tensor].name
            index = tuple(slice(s, s + n) for s, n in zip(part.box.start, part.box.shape, strict=True))
            self.parts[name][index] = part.tensor.float()

    def rebind(self, landed):
        raise AssertionError("not movable")

    def finish(self, version):
        self.log.append(("finish", version))
        assert not any(t.isnan().any() for t in self.parts.values()), "finished before it was complete"
        for name, tensor in kernel_form(self.parts).items():
            self.live[name].copy_(tensor)
        self.parts = {}


def kernel_form(parts):
    """The reference of what the kernels want."""
    scaled = {name: parts[f"{name}.weight"] * parts[f"{name}.scale"] for name in ("w1", "w2", "w3")}
    return {"w13": torch.cat([scaled["w3"], scaled["w1"]]).T, "w2": scaled["w2"]}


MLP = {
    "w1.weight": (6, 4),
    "w1.scale": (6, 1),
    "w2.weight": (4, 6),
    "w2.scale": (4, 1),
    "w3.weight": (6, 4),
    "w3.scale": (6, 1),
}


async def test_packed_layouts_and_scales_survive_a_second_load(start_target, connect, kit, transport, in_place):
    """And what is derived from a layer's tensors is made once per version, when all of them are there."""
    whole = kit.stamped(MLP)
    loader = KernelLoader(whole)
    addresses = {name: t.data_ptr() for name, t in loader.live.items()}
    target = await start_target(loader)
    pusher = await connect(whole, [target], transport=transport, landing=in_place, bucket_bytes=64)
    for version in (1, 2, 3):
        for tensor in whole.values():
            tensor.add_(version)
        loader.log = []
        report = await pusher.push_well(version)
        assert report.tasks >= len(MLP)
        assert kit.differing(loader.live, {n: t.contiguous() for n, t in kernel_form(whole).items()}) == []
        steps = [step for step, _ in loader.log]
        assert steps == ["begin", *["install"] * (len(steps) - 2), "finish"]
        assert sum(count for step, count in loader.log if step == "install") >= len(MLP)
    assert addresses == {name: t.data_ptr() for name, t in loader.live.items()}


async def test_swapped_halves_are_right_after_the_second_update_too(start_target, connect, kit, transport, landing):
    """The engine keeps ``[w3; w1]`` in its live parameter; checkpoint, wire and source know w1 and w3."""
    whole = kit.stamped({"w1": (6, 4), "w3": (6, 4), "w2": (4, 6)})
    model = kit.Bag(kit.poisoned({"w31": torch.empty(12, 4), "w2": whole["w2"]}))
    layout = {"w31": [named_box("w3", (6, 4)), named_box("w1", (6, 4), local_start=(6, 0))]}
    target = await start_target(ModuleLoader(model, layout=layout, movable=landing == "mapped"))
    pusher = await connect(whole, [target], transport=transport, landing=landing, bucket_bytes=100)
    for version in (1, 2):
        for tensor in whole.values():
            tensor.add_(1000)
        await pusher.push_well(version)
        assert kit.differing(model, {"w31": torch.cat([whole["w3"], whole["w1"]]), "w2": whole["w2"]}) == []


async def test_derived_content_is_made_once_per_version_when_all_is_there(start_target, connect, kit, transport, landing):
    whole = kit.stamped({f"layer.{part}": (9, 7) for part in "abc"})
    model = kit.Bag(kit.poisoned(whole))
    seen = []

    def on_update(version):
        seen.append((version, kit.differing(model, whole)))

    target = await start_target(ModuleLoader(model, on_update=on_update, movable=landing == "mapped"))
    pusher = await connect(whole, [target], transport=transport, landing=landing, bucket_bytes=50)
    for version in (1, 2):
        whole["layer.b"] += 1
        await pusher.push_well(version)
    assert seen == [(1, []), (2, [])]


# address


async def test_addresses_of_live_parameters_never_change(start_target, connect, kit, transport, in_place):
    """A captured graph keeps pointers: it must see new weights at the old addresses, also after a push that failed."""
    source, model = nn.Linear(5, 3), nn.Linear(5, 3)
    addresses = [p.data_ptr() for p in model.parameters()]
    weight, bias = model.weight.detach(), model.bias.detach()  # what the graph has captured
    failing = [False]

    def on_update(version):
        if failing[0]:
            raise ZeroDivisionError

    target = await start_target(ModuleLoader(model, on_update=on_update))
    pusher = await connect(source, [target], transport=transport, landing=in_place)
    for version in (1, 2, 3, 4):
        with torch.no_grad():
            source.weight.add_(1)
        failing[0] = version == 2
        report = await pusher.push(version)
        assert report.ok == (version != 2)
        assert addresses == [p.data_ptr() for p in model.parameters()]
        if report.ok:
            x = torch.ones(1, 5)
            assert torch.equal(x @ weight.T + bias, x @ source.weight.T + source.bias)


# idempotence


async def test_equal_weights_change_no_output(start_target, connect, kit, transport, landing):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).bfloat16() for _ in range(2)]
    source, model = layers
    target = await start_target(ModuleLoader(model, movable=landing == "mapped"))
    pusher = await connect(source, [target], transport=transport, landing=landing)
    x = torch.randn(3, 6).bfloat16()
    outputs, digests = [], []
    for version in (1, 2, 3):
        digests.append((await pusher.push_well(version)).digest)
        with torch.no_grad():
            outputs.append(model(x))
        assert await target.served() == version
    assert all(kit.same(output, source(x)) for output in outputs)
    assert len(set(digests)) == 1


# block edge


async def test_quantization_blocks_that_straddle_ranks(start_target, connect, kit):
    """384 rows in blocks of 128 over two ranks: 192 rows each, and both need the scale of the middle block."""
    scale = torch.tensor([[1.0], [10.0], [100.0]])
    whole = {"w.weight": kit.stamped({"w": ((384, 8), FP8)})["w"], "w.weight_scale_inv": scale}
    reference = whole["w.weight"].float() * scale.repeat_interleave(128, 0)
    models = [kit.Bag(kit.poisoned({"w.weight": whole["w.weight"][:192], "w.weight_scale_inv": scale[:2]})) for _ in range(2)]
    loaders = [
        ModuleLoader(model, layout={
            "w.weight": named_box("w.weight", (384, 8), start=(192 * rank, 0), size=(192, 8)),
            "w.weight_scale_inv": named_box("w.weight_scale_inv", (3, 1), start=(rank, 0), size=(2, 1)),
        })
        for rank, model in enumerate(models)
    ]  # fmt: skip
    target = await start_target(*loaders)
    await (await connect(kit.row_shards(whole, 2), [target])).push_well(1)
    for rank, model in enumerate(models):
        rows = torch.arange(192 * rank, 192 * rank + 192)
        own = model.w.weight_scale_inv[(rows // 128) - rank]
        assert torch.equal(model.w.weight.float() * own, reference[rows])


@pytest.mark.parametrize(("here", "there"), [(torch.bfloat16, FP8), (FP8, torch.bfloat16)])
async def test_quantizing_on_the_way_is_refused_by_name(start_target, engines, here, there):
    target = await start_target(nn.ParameterDict({"w": nn.Parameter(torch.zeros(192, 8).to(there), requires_grad=False)}))
    with pytest.raises(PlanError, match=r"w: the source has .*would take a quantization rule"):
        await engines({"w": torch.zeros(192, 8).to(here)}, [target]).connect()


# dtype and size


@pytest.mark.parametrize(
    ("here", "there"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.float16)]
)
async def test_content_is_cast_to_the_targets_type(start_target, connect, kit, *, transport, landing, here, there):
    torch.manual_seed(1)
    whole = {"w": (torch.randn(33, 5) * 3).to(here), "step": torch.tensor(5)}
    model = kit.Bag(kit.poisoned({"w": whole["w"].to(there), "step": whole["step"]}))
    target = await start_target(ModuleLoader(model, movable=landing == "mapped"))
    pusher = await connect(kit.row_shards(whole, 2), [target], transport=transport, landing=landing, bucket_bytes=64)
    await pusher.push_well(1)
    assert kit.differing(model, {"w": whole["w"].to(there), "step": whole["step"]}) == []


async def test_what_was_announced_and_what_there_is_now_differ(start_target, connect, kit):
    """A tensor gets another shape between connect and push: refused by name, nothing moved; another type: planned anew."""
    source = nn.ParameterDict({"w": nn.Parameter(torch.ones(4, 3)), "b": nn.Parameter(torch.ones(3))})
    model = kit.Bag(kit.poisoned({"w": torch.empty(4, 3), "b": torch.empty(3)}))
    target = await start_target(model)
    pusher = await connect(source, [target])
    await pusher.push_well(1)
    source["w"] = nn.Parameter(torch.full((5, 3), 2.0))
    with pytest.raises(PlanError, match=r"w: the source has shape \(5, 3\), target 0 rank 0 expects \(4, 3\)"):
        await pusher.push(2)
    assert await target.served() == 1
    assert model.w.unique().tolist() == [1.0]
    source["w"] = nn.Parameter(torch.full((4, 3), 3.0, dtype=torch.bfloat16))
    await pusher.push_well(2)
    assert model.w.unique().tolist() == [3.0]


@pytest.mark.parametrize("landing", ["staged", "streamed"])
async def test_fewer_bytes_than_announced_end_in_an_error_and_never_hang(start_target, connect, kit, monkeypatch, landing):
    whole = kit.stamped({"a": (64,), "b": (64,)})
    model = kit.Bag(kit.poisoned(whole))
    target = await start_target(model)
    pusher = await connect(whole, [target], transport="gloo", landing=landing, bucket_bytes=256, push_timeout_s=8.0)
    await pusher.push_well(1)
    for tensor in whole.values():
        tensor.add_(1000)
    send = GlooSender.send

    def short(self, task, bucket, receivers, lent=None):
        return send(self, task, bucket[: bucket.numel() // 2] if task.index else bucket, receivers, lent)

    with monkeypatch.context() as patch:
        patch.setattr(GlooSender, "send", short)
        try:
            report = await pusher.push(2)
        except PushError:
            report = None
    if report is not None:
        assert not report.ok
        assert isinstance(report.targets[target.address].error, SynclineError)
    assert await target.served() == (1 if landing == "staged" else None)
    await pusher.push_well(3)
    assert kit.differing(model, whole) == []


# strides


async def test_strided_views_on_both_sides(start_target, connect, kit, transport, landing):
    """A transposed source, a column slice as target, every second row, a view that begins inside its storage."""
    whole = kit.stamped({"transposed": (6, 4), "columns": (5, 6), "second": (4, 3), "inside": (3, 3), "conv": (2, 3, 4, 5)})
    source = {
        "transposed": whole["transposed"].T.contiguous().T,
        "columns": whole["columns"].clone(),
        "second": torch.stack([whole["second"], torch.zeros(4, 3)], 1).reshape(8, 3)[::2],
        "inside": torch.cat([torch.zeros(7), whole["inside"].reshape(-1)])[7:].view(3, 3),
        "conv": whole["conv"].contiguous(memory_format=torch.channels_last),
    }
    assert not any(source[name].is_contiguous() for name in ("transposed", "second", "conv"))
    wide, tall = torch.full((5, 20), -7.0), torch.full((12, 6), -7.0)
    live = {
        "transposed": torch.full((4, 6), -7.0).T,
        "columns": wide[:, 3:9],
        "second": tall[1:9:2, 2:5],
        "inside": torch.full((3, 3), -7.0),
        "conv": torch.full((2, 3, 4, 5), -7.0),
    }
    model = kit.Bag(live)
    assert model.columns.data_ptr() == wide[:, 3:].data_ptr()
    target = await start_target(ModuleLoader(model, movable=landing == "mapped"))
    pusher = await connect(source, [target], transport=transport, landing=landing, bucket_bytes=100)
    for version in (1, 2):
        await pusher.push_well(version)
        assert kit.differing(model, whole) == []
        assert wide[:, :3].unique().tolist() == wide[:, 9:].unique().tolist() == [-7.0]
        assert tall[0::2].unique().tolist() == [-7.0]


# mixed dtypes, mixed kinds


MIXED = {
    "a": ((3,), torch.bool), "b": ((5,), torch.int64), "c": ((), torch.bfloat16), "d": ((7, 3), torch.float32),
    "e": ((1,), torch.uint8), "f": ((2, 2), torch.float64), "g": ((9,), FP8), "h": ((), torch.int64),
    "i": ((3,), torch.float16), "j": ((4,), torch.int32), "k": ((1,), torch.int8),
}  # fmt: skip


async def test_all_types_in_one_bucket(start_target, connect, kit, transport, landing):
    whole = kit.stamped(MIXED)
    model = kit.Bag(kit.poisoned(whole))
    target = await start_target(ModuleLoader(model, movable=landing == "mapped"))
    pusher = await connect(whole, [target], transport=transport, landing=landing)
    report = await pusher.push_well(1)
    assert report.tasks == 1
    assert kit.differing(model, whole) == []
    (task,) = pusher.engines[0]._session._wiring.program.tasks
    assert [segment.offset for segment in task.segments] == [256 * i for i in range(len(MIXED))]


async def test_plain_tensors_among_sharded_ones(start_target, connect, kit, transport, landing):
    """Every rank holds the plain ones: they travel once. (Real DTensors: tests/adapters.)"""
    whole = kit.stamped({"sharded": (5, 3), "plain": (3, 3), "scalar": (), "mask": ((2,), torch.bool)})
    model = kit.Bag(kit.poisoned(whole))
    target = await start_target(ModuleLoader(model, movable=landing == "mapped"))
    sources = kit.row_shards(whole, 2, replicated=("plain", "mask"))
    pusher = await connect(sources, [target], transport=transport, landing=landing)
    report = await pusher.push_well(1)
    assert kit.differing(model, whole) == []
    assert report.bytes <= len(whole) * 256


# tail


async def test_an_incomplete_last_group_of_experts_is_sent(start_target, connect, kit):
    """Seven experts, packed in one parameter and sharded 4 + 3; two of them fill a bucket, and the last one is alone."""
    packed = kit.stamped({"mlp.experts.gate_up_proj": (7, 8, 4), "mlp.experts.down_proj": (7, 4, 4)})
    table = NameTable([
        Unpack(r"(mlp\.experts\.)gate_up_proj", (r"\1{e}.gate.weight", r"\1{e}.up.weight")),
        Unpack(r"(mlp\.experts\.)down_proj", (r"\1{e}.down.weight",)),
    ])  # fmt: skip
    single = {}
    for e in range(7):
        gate_up = packed["mlp.experts.gate_up_proj"][e]
        single[f"mlp.experts.{e}.gate.weight"], single[f"mlp.experts.{e}.up.weight"] = gate_up[:4].clone(), gate_up[4:].clone()
        single[f"mlp.experts.{e}.down.weight"] = packed["mlp.experts.down_proj"][e].clone()
    model = kit.Bag(kit.poisoned(single))
    target = await start_target(model)
    pusher = await connect(ModuleSource(packed, world_size=1, names=table), [target], bucket_bytes=6 * 256)
    report = await pusher.push_well(1)
    assert report.tasks == 4  # 2 + 2 + 2 + 1 experts
    assert kit.differing(model, single) == []
    sharded = kit.Bag(kit.poisoned(single))
    owners = {name: 0 if int(name.split(".")[2]) < 4 else 1 for name in single}
    sources = kit.row_shards(single, 2, sizes={name: [4, 0] if owner == 0 else [0, 4] for name, owner in owners.items()})
    other = await start_target(sharded)
    await (await connect(sources, [other], bucket_bytes=6 * 256)).push_well(1)
    assert kit.differing(sharded, single) == []


# empty rank


async def test_ranks_that_own_nothing_and_tensors_without_elements(start_target, connect, kit, transport, landing):
    whole = kit.stamped({"two": (2, 3), "none": (0, 4), "nothing": (3, 0), "scalar": ()})
    model = kit.Bag(kit.poisoned(whole))
    target = await start_target(ModuleLoader(model, movable=landing == "mapped"))
    sources = kit.row_shards(whole, 4)  # two rows over four ranks
    assert [[name for name, ((_, t),) in s.held.items() if t.numel()] for s in sources[2:]] == [["scalar"], ["scalar"]]
    sources[3].held = {}
    sources[3].whole = {} if landing == "staged" else whole  # it may know the names or not
    pusher = await connect(sources, [target], transport=transport, landing=landing)
    for version in (1, 2):
        await pusher.push_well(version)
        assert kit.differing(model, whole) == []


async def test_a_target_rank_that_needs_nothing(start_target, connect, kit):
    whole = kit.stamped({"w": (4, 2)})
    model = kit.Bag(kit.poisoned(whole))
    target = await start_target(model, nn.Identity())
    await (await connect(whole, [target])).push_well(1)
    assert kit.differing(model, whole) == []
    assert target.states == [("COMMITTED", 1), ("COMMITTED", 1)]


# unwritten


def partial(kit, whole):
    """A target whose spec leaves the last row of its parameter out."""
    model = kit.Bag(kit.poisoned({"w": torch.empty(5, 2), "v": torch.empty(3)}))
    return model, ModuleLoader(model, layout={"w": named_box("w", (4, 2))})


async def test_a_spec_that_leaves_a_region_unwritten_is_refused(start_target, engines, kit):
    whole = kit.stamped({"w": (4, 2), "v": (3,)})
    model, loader = partial(kit, whole)
    target = await start_target(loader)
    with pytest.raises(PlanError, match="pieces write 32 bytes of buffer w, which has 40"):
        await engines(whole, [target]).connect()
    assert model.w.isnan().all()


async def test_without_the_coverage_proof_the_poison_stays(start_target, connect, kit, monkeypatch):
    """So that the proof is known to be needed: everything else is content with the push, and serves a row of NaN."""
    monkeypatch.setattr("syncline.scheduler.coverage.check_written_once", lambda *_: None)
    monkeypatch.setattr(proof, "check_written_once", lambda *_: None)
    assert planning.build_plan
    whole = kit.stamped({"w": (4, 2), "v": (3,)})
    model, loader = partial(kit, whole)
    target = await start_target(loader)
    await (await connect(whole, [target])).push_well(1)
    assert model.w[:4].equal(whole["w"])
    assert model.w[4].isnan().all()
