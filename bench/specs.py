"""What ``syncline plan`` is told of a source or a target: a form such as ``fsdp:8``, saved manifests, or a live target."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from syncline.engine.control_client import ControlClient
from syncline.scheduler.errors import SynclineError
from syncline.scheduler.layout import Layout, Manifest

from .layouts import Model, fsdp, manifests_of, whole_layout
from .splits import Engine, Megatron

FORMS = """a source is one of
    full:N                              N ranks that each hold everything
    fsdp:N[,replicas=R]                 rows of every tensor over N ranks, the whole R times (HSDP)
    megatron:tp=T,pp=P,dp=D,ep=E,etp=X  T*P*D ranks; experts over E ranks, each sliced over X
                                        (X is T unless given, as in Megatron; the others 1)
a target is one of
    full:N                              N ranks that each take everything
    tp:T[,dp=D][,ep=E][,unfused][,whole]  D groups of T ranks; whole experts over E ranks, else sliced over all;
                                        'unfused': every parameter on its own; 'whole': its loader takes whole tensors only
    4x tp:8                             four such targets
    unix:/path, tcp://host:port         a target that is running
and either is
    PATH                                manifests that were saved: one file a rank, or a folder with the files of all ranks"""

_SUFFIX = ".manifest"
_MOST = 16384
"""Ranks of a source or of a form's targets, at most."""
_MANY = 2048
"""Ranks that take more than some seconds to plan, which is said beforehand."""
_FORM = re.compile(r"(?:(?P<times>\d+)\s*x\s*)?(?P<kind>[a-z_]+):(?P<rest>[^/]*)")


class SpecError(SynclineError):
    """A source or target is described in a way that is not understood, or that does not fit the model."""


def read_source(texts: Sequence[str], model: Model | None, ranks_per_host: int) -> list[Manifest]:
    """Manifests of all source ranks. Raises `SpecError`."""
    _hosted(ranks_per_host)
    if not texts:
        raise SpecError(f"there is no source: {FORMS}")
    if any(Path(text).exists() for text in texts):
        return _saved([Path(text) for text in texts])
    if len(texts) > 1:
        raise SpecError(f"a source is one form, or files; {' '.join(texts)!r} is {len(texts)} of them")
    times, kind, numbers, flags = _parsed(texts[0])
    if times != 1 or flags:
        raise SpecError(f"{texts[0]!r}: there is one source, and nothing to say of it but numbers")
    shape = _needed(texts[0], model)
    _bounded(texts[0], numbers)
    if kind == "full":
        world = _only(texts[0], numbers, ("",)).get("", 1)
        return manifests_of([whole_layout(shape)] * world, "trainer", ranks_per_host)
    if kind == "fsdp":
        sizes = _only(texts[0], numbers, ("", "replicas"))
        return fsdp(shape, shards=sizes.get("", 1), replicas=sizes.get("replicas", 1), ranks_per_host=ranks_per_host)
    if kind == "megatron":
        sizes = _only(texts[0], numbers, ("tp", "pp", "dp", "ep", "etp"))
        _sparse(texts[0], sizes, shape)
        if shape.shape.experts:
            sizes.setdefault("etp", sizes.get("tp", 1))
        split = Megatron(**sizes)
        hint = [] if "etp" in numbers or sizes.get("etp", 1) == 1 else [f"etp is {split.etp}, as tp, unless given"]
        found = split.problems(shape.shape)
        _fits(texts[0], [*found, *hint] if found else [])
        return split.manifests(shape, ranks_per_host)
    raise SpecError(f"source {texts[0]!r} is of no known form; {FORMS}")


def read_targets(
    texts: Sequence[str], model: Model | None, ranks_per_host: int, timeout_s: float, *, movable: bool = False
) -> list[list[Manifest]]:
    """Manifests of all ranks of each target. ``movable``: loaders of targets of a form let parameters move.

    Raises `SpecError`, or `ControlError` for a target that does not answer.
    """
    _hosted(ranks_per_host)
    if not texts:
        raise SpecError(f"there is no target: {FORMS}")
    targets: list[list[Manifest]] = []
    files: dict[Path, list[Path]] = {}
    for text in texts:
        path = Path(text)
        if text.startswith(("unix:", "tcp://")):
            targets.append(asyncio.run(_live(text, timeout_s)))
        elif path.is_dir():
            targets.append(_saved([path]))
        elif path.exists():
            files.setdefault(path.parent, []).append(path)
        else:
            hosts, layouts = _built(text, model, len(targets))
            layouts = [replace(layout, movable=True) for layout in layouts] if movable else layouts
            targets += [manifests_of(layouts, host, ranks_per_host) for host in hosts]
    return targets + [_saved(paths) for paths in files.values()]


def _built(text: str, model: Model | None, before: int) -> tuple[list[str], list[Layout]]:
    """The hosts of targets that are alike, and what each rank of one holds."""
    times, kind, numbers, flags = _parsed(text)
    shape = _needed(text, model)
    _bounded(text, numbers, times)
    hosts = [f"engine{before + i}-" for i in range(times)]
    if kind == "full" and not flags:
        return hosts, [whole_layout(shape)] * _only(text, numbers, ("",)).get("", 1)
    if kind != "tp":
        raise SpecError(f"target {text!r} is of no known form; {FORMS}")
    unknown = sorted(flags - {"unfused", "whole"})
    if unknown:
        raise SpecError(f"{text!r}: {', '.join(unknown)} is neither a number nor one of unfused, whole")
    sizes = _only(text, numbers, ("", "tp", "dp", "ep"))
    _sparse(text, sizes, shape)
    tp = sizes.pop("", sizes.pop("tp", 1))
    engine = Engine(tp=tp, **sizes, fused="unfused" not in flags, whole="whole" in flags)
    _fits(text, engine.problems(shape.shape))
    return hosts, engine.layouts(shape)


def _parsed(text: str) -> tuple[int, str, dict[str, int], set[str]]:
    """How many, what kind, numbers by name (the first may have none), and words."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise SpecError(f"{text!r} is neither of a known form nor a file; {FORMS}")
    numbers: dict[str, int] = {}
    flags: set[str] = set()
    for word in filter(None, (w.strip() for w in match["rest"].split(","))):
        name, equals, value = word.rpartition("=")
        if (number := _number(value)) and name not in numbers:
            numbers[name] = number
        elif not equals and value.isidentifier():
            flags.add(value)
        else:
            raise SpecError(f"{text!r}: {word!r} is not a whole number above 0, or given twice; {FORMS}")
    times = _number(match["times"] or "1")
    if not times:
        raise SpecError(f"{text!r}: {match['times']} targets are none; say how many (above 0), or leave out the 'x'")
    return times, match["kind"], numbers, flags


def _number(text: str) -> int:
    """A whole number; 0 where it is none. One that is far too large stays so."""
    return int(text[:20]) if text.isascii() and text.isdecimal() else 0


def _bounded(text: str, numbers: Mapping[str, int], times: int = 1) -> None:
    """Refuse what would take minutes to plan, or never end."""
    ranks = times * math.prod(size for name, size in numbers.items() if name not in {"ep", "etp"})
    if ranks > _MOST or max(numbers.values(), default=0) > _MOST:
        raise SpecError(f"{text!r}: {max([ranks, *numbers.values()])} ranks are above the limit of {_MOST}")
    if ranks > _MANY:
        print(f"{text}: planning {ranks} ranks may take minutes", file=sys.stderr, flush=True)


def _hosted(ranks_per_host: int) -> None:
    if ranks_per_host < 1:
        raise SpecError(f"ranks_per_host is {ranks_per_host}; give how many ranks share a host, at least 1")


def _sparse(text: str, sizes: Mapping[str, int], model: Model) -> None:
    """Refuse expert parallelism without experts."""
    named = [f"{name}={sizes[name]}" for name in ("ep", "etp") if sizes.get(name, 1) > 1]
    if named and not model.shape.experts:
        raise SpecError(f"{text!r}: {', '.join(named)} means nothing for a model without experts; leave it out")


def _only(text: str, numbers: Mapping[str, int], known: Iterable[str]) -> dict[str, int]:
    unknown = sorted(set(numbers) - set(known))
    if unknown:
        named = ", ".join(name or f"the bare number {numbers[name]}" for name in unknown)
        raise SpecError(f"{text!r}: {named} means nothing here; known are {', '.join(filter(None, known))}")
    return dict(numbers)


def _needed(text: str, model: Model | None) -> Model:
    if model is None:
        raise SpecError(f"{text!r} says how a model is split, not which: give --model NAME, or a config.json or its folder")
    return model


def _fits(text: str, problems: Sequence[str]) -> None:
    if problems:
        raise SpecError(f"{text!r} does not fit the model: {'; '.join(problems)}")


async def _live(address: str, timeout_s: float) -> list[Manifest]:
    client = ControlClient(address, timeout_s=timeout_s)
    try:
        return Manifest.all_from_bytes((await client.manifest()).manifests)
    finally:
        await client.close()


def _saved(paths: Iterable[Path]) -> list[Manifest]:
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else [path]
        if not found:
            raise SpecError(f"{path} is a folder without any file *{_SUFFIX}")
        files += found
    try:
        return Manifest.all_from_bytes(file.read_bytes() for file in files)
    except (OSError, ValueError) as error:
        raise SpecError(f"{', '.join(map(str, files[:4]))}{' …' if len(files) > 4 else ''}: {error}") from error


def save(folder: Path, sources: Sequence[Manifest], targets: Sequence[Sequence[Manifest]]) -> list[Path]:
    """Write all manifests, a file for each rank. Returns the folders: of the source, then of each target.

    Raises `SpecError` where they cannot be written.
    """
    folders = [folder / "source", *(folder / f"target-{t}" for t in range(len(targets)))]
    try:
        for place, manifests in zip(folders, (sources, *targets), strict=True):
            place.mkdir(parents=True, exist_ok=True)
            for manifest in manifests:
                (place / f"rank-{manifest.rank:05d}{_SUFFIX}").write_bytes(manifest.to_bytes())
    except OSError as error:
        raise SpecError(f"manifests cannot be saved: {error}") from error
    return folders
