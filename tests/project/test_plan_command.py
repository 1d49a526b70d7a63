"""``syncline plan``: forms, saved manifests and live targets in, words about the plan out."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

from syncline.adapters.engines import ModuleLoader
from syncline.bench import cli
from syncline.bench.layouts import Model
from syncline.bench.models import ModelError, find, from_config, named, parameters
from syncline.bench.specs import read_source, read_targets
from syncline.engine import Receiver, TransferConfig
from syncline.engine.transports import plan_options, transport_kinds
from syncline.scheduler.plan import build_plan

TINY = {
    "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 128, "vocab_size": 500, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY))
    return str(path)


def plan(capsys, *args: str) -> str:
    code = cli.main(["plan", *args])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def refused(capsys, *args: str) -> str:
    assert cli.main(["plan", *args]) == 1
    out, err = capsys.readouterr()
    assert not out
    return err


@pytest.mark.parametrize("source", ["full:2", "fsdp:3", "fsdp:2,replicas=2", "megatron:tp=2,pp=2,dp=2"])
@pytest.mark.parametrize("target", ["full:1", "tp:4", "tp:8,unfused", "2x tp:2,dp=2", "tp:2,whole"])
def test_every_form_of_source_goes_to_every_form_of_target(capsys, config, source, target) -> None:
    out = plan(capsys, "--model", config, "--source", source, "--target", target)
    for word in (
        "plan ",
        "direct ",
        "gathered ",
        "sent ",
        "received ",
        "critical ",
        "source rank to receiver",
        "tasks, in plan",
    ):
        assert word in out
    assert "every byte of which its receiver keeps" in out


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "mixtral-8x7b"])
def test_experts_are_spread_and_sliced(capsys, model) -> None:
    source, targets = "megatron:tp=4,dp=2,ep=4,etp=2", ("tp:4,dp=2,ep=8", "tp:4")
    facts = json.loads(plan(capsys, "--model", model, "--source", source, "--target", *targets, "--json"))
    expected = 0
    for p in parameters(find(model)):
        size = 2
        for n in p.shape:
            size *= n
        slices, sliced = {"whole": (8, 4)}.get(p.role, (2, 1)) if p.expert < 0 else (1, 1)
        if p.role in {"k", "v"}:  # four key-value heads or more, four ranks: no replica within a target's group
            slices, sliced = 2, 1
        expected += size * (slices + sliced)
    assert facts["needed_bytes"] == expected
    assert facts["sent_max_to_mean"] <= 1.2
    assert facts["routing"]["gathered_tensors"] == 0


def test_one_tensor_is_explained(capsys, config) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    out = plan(capsys, "--model", config, "--source", "megatron:tp=2,pp=2", "--target", "tp:4", "--explain", name)
    assert out.splitlines() == [
        f"{name}  16 x 64",
        "held by",
        "  [0:8, 0:64]  source rank 2",
        "  [8:16, 0:64]  source rank 3",
        "needed by",
        "  [0:8, 0:64]  0:0, 0:1",
        "  [8:16, 0:64]  0:2, 0:3",
        "kept in",
        *(
            f"  [{at}:{at + 8}, 0:64]  0:{rank}: model.layers.1.self_attn.qkv_proj.weight from element 1024 on"
            for rank, at in enumerate((0, 0, 8, 8))
        ),
        "sent in 2 part(s)",
        *(line for line in out.splitlines() if line.startswith("  task ")),
    ]
    assert "[0:8, 0:64]  rank 2 -> 0:0, 0:1  2.0 KiB as float32, out of its own memory" in out
    assert "[8:16, 0:64]  rank 3 -> 0:2, 0:3  2.0 KiB as float32, out of its own memory" in out


def test_a_gathered_tensor_says_why_and_from_where(capsys, config) -> None:
    out = plan(capsys, "--model", config, "--source", "fsdp:4", "--target", "full:1", "--explain", "model.norm.weight")
    assert "gathered because its parts are small: " in out
    assert out.count(" from rank ") == 3


def test_a_pattern_explains_what_it_matches(capsys, config) -> None:
    args = ("--model", config, "--source", "fsdp:2", "--target", "tp:2", "--explain")
    out = plan(capsys, *args, "model.layers.1.self_attn.?_proj.*")
    assert [line.split(" ")[0] for line in out.splitlines() if line.startswith("model.")] == [
        f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkvo"
    ]
    out = plan(capsys, *args, "*")
    assert out.count("sent in ") == 20
    assert out.endswith("and 4 more that match '*'\n")  # two layers of eleven, the embeddings and the last norm
    assert "moves no tensor 'model.stages.*'" in refused(capsys, *args, "model.stages.*")


def test_expert_tensor_parallelism_is_as_wide_as_tensor_parallelism_unless_given(capsys) -> None:
    def digest(form: str) -> object:
        return json.loads(plan(capsys, "--model", "mixtral-8x7b", "--source", form, "--target", "tp:2", "--json"))["digest"]

    assert (
        digest("megatron:tp=4,dp=2,ep=2") == digest("megatron:tp=4,dp=2,ep=2,etp=4") != digest("megatron:tp=4,dp=2,ep=2,etp=1")
    )
    args = ("--model", "mixtral-8x7b", "--source", "megatron:tp=4,dp=2,ep=4", "--target", "tp:2")
    assert "ep * etp = 16 does not divide the 8 ranks of a stage (tp * dp); etp is 4, as tp" in refused(capsys, *args)


def test_one_sentence_for_all_tensors_above_the_watermark(capsys, config) -> None:
    args = ("--model", config, "--source", "fsdp:4", "--target", "tp:2", "--max-tmp-bytes", "64")
    err = refused(capsys, *args)
    assert err.count("above the watermark") == 1
    assert "1 problem found" in err and "model.embed_tokens.weight" in err and "model.norm.weight" in err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "a mapping of names to values, not a list"),
        ({"vocab_size": "x"}, "vocab_size is 'x'"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
        ({"hidden_size": None, "head_dim": 0}, "hidden_size is None, head_dim is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
    ],
)
def test_a_config_of_something_else_is_refused(capsys, tmp_path, changes, said) -> None:
    (tmp_path / "list.json").write_text(json.dumps(TINY | changes if changes else changes))
    err = refused(capsys, "--model", str(tmp_path / "list.json"), "--source", "fsdp:2", "--target", "tp:2")
    assert "ModelError" in err and said in err


def test_an_unknown_tensor_is_refused_with_a_near_one(capsys, config) -> None:
    err = refused(capsys, "--model", config, "--source", "fsdp:2", "--target", "tp:2", "--explain", "model.norm.weigh")
    assert "moves no tensor 'model.norm.weigh'; did you mean model.norm.weight" in err


def test_large_plans_show_the_largest_pairs(capsys, config) -> None:
    out = plan(capsys, "--model", config, "--source", "fsdp:32", "--target", "8x tp:2")
    assert "the largest\n" in out
    assert "0:0" in out


def test_links_bound_the_time(capsys, config) -> None:
    args = ("--model", config, "--source", "fsdp:2", "--target", "full:1", "--json", "--route", "direct")
    slow, fast = (json.loads(plan(capsys, *args, "--link-gbps", rate))["critical"] for rate in ("1", "10"))
    assert slow["side"] == "receiver"
    assert slow["seconds"] == pytest.approx(10 * fast["seconds"])


def test_saved_manifests_make_the_same_plan(capsys, config, tmp_path) -> None:
    forms = ("--source", "megatron:tp=2", "--target", "2x tp:2")
    wrote = plan(capsys, "--model", config, *forms, "--save", str(tmp_path / "saved"))
    assert f"wrote {tmp_path / 'saved' / 'target-1'}" in wrote
    (digest,) = (line.split()[1] for line in wrote.splitlines() if line.startswith("plan  "))
    folders = [str(tmp_path / "saved" / name) for name in ("source", "target-0", "target-1")]
    assert digest in plan(capsys, "--source", folders[0], "--target", *folders[1:])
    files = sorted(str(path) for path in (tmp_path / "saved" / "source").iterdir())
    more = [str(path) for name in ("target-0", "target-1") for path in sorted((tmp_path / "saved" / name).iterdir())]
    assert digest in plan(capsys, "--source", *files, "--target", *more)


async def test_a_live_target_is_asked_for_its_manifests(capsys, config, tmp_path) -> None:
    shapes = {p.name: p.shape for p in parameters(find(config))}
    model = torch.nn.Module()
    for name, shape in shapes.items():
        at = model
        *path, last = name.split(".")
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        at.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))
    receiver = Receiver(loader=ModuleLoader(model), listen=f"unix:{tmp_path}/x.sock")
    await receiver.start()
    try:
        args = ["plan", "--model", config, "--source", "fsdp:2", "--target", receiver.address]
        assert await asyncio.to_thread(cli.main, args) == 0
    finally:
        await receiver.close()
    assert f"tensors    {len(shapes)}, in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--source", "zero3:8", "--target", "tp:2"), "fsdp:N[,replicas=R]"),
        (("--source", "fsdp:8", "--target", "pp:2"), "tp:T[,dp=D][,ep=E]"),
        (("--source", "fsdp:99999999999999999999", "--target", "tp:2"), "ranks are above the limit of 16384"),
        (("--source", "fsdp:16385", "--target", "tp:2"), "16385 ranks are above the limit of 16384"),
        (("--source", "fsdp:2", "--target", "99999x tp"), "neither of a known form"),
        (("--source", "fsdp:2", "--target", "99999x full:"), "99999 ranks are above the limit of 16384"),
        (("--source", "megatron:tp=8,pp=64,dp=64", "--target", "tp:2"), "32768 ranks are above the limit"),
        (("--source", "megatron:tp=2,ep=2", "--target", "tp:2"), "ep=2 means nothing for a model without experts"),
        (("--source", "fsdp:2", "--target", "tp:2,ep=2"), "ep=2 means nothing for a model without experts"),
        (("--source", "fsdp:2", "--target", "0x tp:2"), "0 targets are none; say how many"),
        (("--source", "fsdp:²", "--target", "tp:2"), "not a whole number above 0"),
        (("--source", "nonsense", "--target", "tp:2"), "neither of a known form nor a file"),
        (("--source", "fsdp:0", "--target", "tp:2"), "not a whole number above 0"),
        (("--source", "fsdp:2,tp=2", "--target", "tp:2"), "tp means nothing here; known are replicas"),
        (("--source", "fsdp:2", "fsdp:4", "--target", "tp:2"), "a source is one form, or files"),
        (("--source", "2x fsdp:2", "--target", "tp:2"), "there is one source"),
        (("--source", "fsdp:2", "--target", "tp:3"), "tp = 3 does not divide heads = 8"),
        (("--source", "fsdp:2", "--target", "tp:2,fast"), "fast is neither a number nor one of unfused, whole"),
        (("--source", "megatron:tp=4", "--target", "tp:2"), "tp = 4 does not divide kv_heads = 2"),
        (("--source", "megatron:pp=3", "--target", "tp:2"), "pp = 3 is above the 2 layers"),
        (("--source", "fsdp:2", "--target", "tp:2", "--link-gbps", "0"), "link_gbps"),
        *(
            (
                ("--source", "fsdp:2", "--target", "tp:2", knob, value),
                f"{knob.removeprefix('--').replace('-', '_')} is {float(value):g}",
            )
            for knob in ("--link-gbps", "--host-gbps", "--timeout")
            for value in ("nan", "inf", "0")
        ),
        (("--source", "fsdp:2", "--target", "tp:2", "--max-tmp-bytes", "lots"), "max_tmp_bytes"),
        (("--source", "fsdp:2", "--target", "unix:/nowhere/x.sock"), "unix:/nowhere/x.sock"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_would_be(capsys, config, args, said) -> None:
    assert said in refused(capsys, "--model", config, *args)


def test_the_plan_is_that_of_an_engine(capsys, config) -> None:
    """Whole ranks of a target on another host pass buckets on: the source sends about one copy, not eight."""
    knobs = ("--bucket-bytes", "4KiB", "--json")
    facts = json.loads(plan(capsys, "--model", config, "--source", "full:1", "--target", "full:8", *knobs))
    model = Model.of(find(config))
    sources, targets = read_source(["full:1"], model, 8), read_targets(["full:8"], model, 8, 1.0)
    settings = TransferConfig(max_tmp_bytes="256MiB", bucket_bytes="4KiB")
    options = plan_options(targets, settings, transport_kinds(sources, targets, settings))
    assert options.relays == {0}
    assert facts["digest"] == build_plan(sources, targets, options).digest
    assert facts["sent_bytes"][0] < 0.5 * facts["needed_bytes"]


def test_what_lands_mapped_has_to_be_on_one_host(capsys, config) -> None:
    err = refused(capsys, "--model", config, "--source", "full:1", "--target", "full:1", "--landing", "mapped")
    assert "one host" in err and "movable" not in err


def test_a_form_needs_a_model_and_an_unknown_model_lists_the_known(capsys, tmp_path) -> None:
    assert "give --model NAME" in refused(capsys, "--source", "fsdp:2", "--target", "tp:2")
    err = refused(capsys, "--model", "gpt-9", "--source", "fsdp:2", "--target", "tp:2")
    assert "kimi-k2" in err and "qwen3-8b" in err
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "not the config of a decoder" in refused(capsys, "--model", str(tmp_path), "--source", "fsdp:2", "--target", "tp:2")
    (tmp_path / "x.manifest").write_bytes(b"junk")
    assert "not the bytes of a manifest" in refused(capsys, "--source", str(tmp_path), "--target", str(tmp_path))
    (tmp_path / "empty").mkdir()
    assert "without any file *.manifest" in refused(capsys, "--source", str(tmp_path / "empty"), "--target", str(tmp_path))


def test_what_does_not_fit_is_a_plan_error(capsys, config, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"vocab_size": 600}))
    plan(capsys, "--model", str(tmp_path), "--source", "fsdp:2", "--target", "tp:2", "--save", str(tmp_path / "other"))
    err = refused(capsys, "--model", config, "--source", "fsdp:2", "--target", str(tmp_path / "other" / "target-0"))
    assert "PlanError" in err and "model.embed_tokens.weight" in err


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("kimi-k2", 1026), ("deepseek-v3", 671), ("qwen2.5-0.5b", 0.494), ("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235), ("llama3-8b", 8.03), ("llama3-70b", 70.6), ("mixtral-8x7b", 46.7),
    ],
)  # fmt: skip
def test_named_models_have_the_sizes_that_they_are_known_by(model, billions) -> None:
    total = 0
    for p in parameters(named()[model]):
        size = 1
        for n in p.shape:
            size *= n
        total += size
    assert total == pytest.approx(billions * 1e9, rel=0.01)


def test_shapes_read_from_a_config_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60}
    sizes |= {"intermediate_size": 48, "head_dim": 8}
    for kind, config in (
        ("qwen2", transformers.Qwen2Config(**sizes)),
        ("qwen3", transformers.Qwen3Config(**sizes)),
        ("llama", transformers.LlamaConfig(**sizes)),
    ):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        want = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        shape = from_config(config.to_dict() | {"model_type": kind})
        got = {p.name: p.shape for p in parameters(shape)}
        assert got == {name: size for name, size in want.items() if name in got or not shape.tied}


def test_a_config_without_a_size_is_refused() -> None:
    with pytest.raises(KeyError):
        from_config({"hidden_size": 8})
    with pytest.raises(ModelError, match="no such name"):
        find("nothing-at-all")
