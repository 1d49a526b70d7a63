"""The rows of ``syncline bench run --suites direct``, at a small size: they run, and every element arrives."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from syncline.bench.direct import CASES, direct_rows
from syncline.bench.run import Bench, RunArgs
from syncline.bench.shards import Shards


@pytest.mark.timeout(240)
def test_every_row_is_measured_and_intact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = RunArgs(
        repeat=2, tensors=4, nbytes=16 * 2**20, out=tmp_path / "rows.jsonl", awex_python=tmp_path / "no-such-interpreter"
    )
    asyncio.run(direct_rows(Bench(args)))
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out else []
    assert capsys.readouterr().out.splitlines() == [json.dumps(row) for row in rows]
    assert rows[0]["row"].startswith("awex") and "not installed" in rows[0]["skipped"]
    measured = rows[1:]
    assert [row["row"] for row in measured[1:]] == [case.name for case in CASES]
    assert measured[0]["row"].startswith("naive: all_gather and broadcast")
    assert all(row["integrity"] is True and row["bytes"] == args.nbytes for row in measured)
    for row in measured[1:]:
        assert row["ratio_to_gather_and_broadcast"] > 0 and row["ratio_to_awex"] is None
        assert row["digests"] is ("no digests" not in row["row"])
        assert row["gather_messages"] == 0  # source and target are sharded alike: also ``gather`` finds each box at one rank


def test_shards_of_all_ranks_are_the_whole() -> None:
    whole = Shards(4, 4 * 2**20, rank=0, size=1)
    parts = [Shards(4, 4 * 2**20, rank=rank, size=2) for rank in range(2)]
    for shards in (whole, *parts):
        shards.stamp(3)
        assert shards.is_stamped(3) and not shards.is_stamped(2)
    for name, param in whole.named_parameters():
        found = torch.full_like(param, -1)
        for part in parts:
            found[part.slices(name)] = part.get_parameter(name)
        assert torch.equal(found, param)
    parts[0].clear()
    assert not parts[0].is_stamped(3)
