"""The rows of ``syncline bench run --suites direct``, at a small size: they run, and every element arrives."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from syncline.bench.measure.bench import Bench
from syncline.bench.measure.direct import CASES, direct_rows
from syncline.bench.measure.shards import Shards, nbytes_of, rows_for


@pytest.mark.timeout(240)
def test_every_row_is_measured_and_intact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    bench = Bench(repeat=2, tensors=4, nbytes=16 * 2**20, out=out, pythons={"awex": tmp_path / "no-such-interpreter"})
    asyncio.run(direct_rows(bench))
    text = out.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert capsys.readouterr().out == text
    assert rows[0]["row"].startswith("awex") and "awex is not there" in rows[0]["skipped"]
    measured = rows[1:]
    assert [row["row"] for row in measured[1:]] == [case.name for case in CASES]
    assert measured[0]["row"].startswith("naive: all_gather and broadcast")
    assert all(row["integrity"] is True and row["bytes"] == 16 * 2**20 for row in measured)
    for row in measured[1:]:
        assert row["control"] == "caught"
        assert row["ratio_to_gather_and_broadcast"] > 0 and "ratio_to_awex" not in row
        assert row["digests"] is ("no digests" not in row["row"])
        assert row["gather_messages"] == 0  # source and target are sharded alike: also ``gather`` finds each box at one rank


def test_shards_of_all_ranks_are_the_whole() -> None:
    whole = Shards(4, 256)
    parts = [Shards(4, 256, rank=rank, size=2) for rank in range(2)]
    for shards in (whole, *parts):
        shards.stamp(3)
        assert shards.is_stamped(3) and not shards.is_stamped(2)
    assert sum(part.nbytes for part in parts) == whole.nbytes == nbytes_of(4, 256)
    for name, param in whole.named_parameters():
        found = torch.full_like(param, -1)
        for part in parts:
            found[part.slices(name)] = part.get_parameter(name)
        assert torch.equal(found, param)


def test_one_version_becomes_another_and_back() -> None:
    shards = Shards(2, 16, rank=1, size=2)
    shards.stamp(1)
    shards.restamp(5)
    assert shards.is_stamped(5) and not shards.is_stamped(1)
    shards.restamp(1)
    assert shards.is_stamped(1)


def test_content_of_large_matrices_is_exact() -> None:
    """float32 holds whole numbers up to 2**24: beyond, neighbours would be equal and a shift would go unseen."""
    shards = Shards(1, 20_000)
    shards.stamp(100_000)
    content = shards.get_parameter("w0").detach()
    assert content.max() < 2**24
    assert torch.equal(content, content.double().float()) and len(torch.unique(content[:8192])) == 8192 * 1024


@pytest.mark.parametrize(("sizes", "step"), [((1,), 1), ((2, 3), 6), ((4, 2), 4)])
def test_rows_can_be_shared(sizes: tuple[int, ...], step: int) -> None:
    rows = rows_for(40, 409_600_000, *sizes)
    assert rows % step == 0 and 2500 - step < rows <= 2500
    assert rows_for(1, 1, *sizes) == step
