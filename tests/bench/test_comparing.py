"""What `syncline bench compare` calls a change, on samples that were drawn with a known one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from syncline.bench import cli
from syncline.bench.measure.comparing import Comparison, compare, holm, regressions
from syncline.bench.measure.errors import BenchError
from syncline.bench.measure.phases import Phases, Quantiles
from syncline.bench.measure.provenance import Machine
from syncline.bench.measure.rows import Row, Skipped, line

MACHINE = Machine(cpu="one", cores=2, memory_bytes=2**34)
KNOBS = {"bucket_bytes": 2**25, "landing": "staged"}


def row(name: str, samples: Sequence[float], **more: object) -> Row:
    phases = Phases.of(samples)
    how = {"machine": MACHINE, "knobs": KNOBS, "bytes": 10**6, "integrity": True, "control": "caught", **more}
    return Row(
        row=name, seconds=Quantiles.of(samples[phases.warm_from :]), phases=phases, samples=tuple(samples), **how
    )  # type: ignore[arg-type]  # fmt: skip


def drawn(seed: int, *, n: int = 12, scale: float = 1.0, noise: float = 0.04) -> list[float]:
    """A cold sample, then log-normal ones, with one that strays."""
    values = scale * 0.1 * np.exp(np.random.default_rng(seed).normal(0.0, noise, n))
    values[0] *= 3
    values[n // 2] *= 2
    return [float(value) for value in values]


def verdicts(found: Sequence[Comparison]) -> dict[str, str]:
    return {one.row: one.verdict for one in found}


def test_a_shift_of_a_fifth_is_found_among_rows_without_one() -> None:
    names = [f"row {number}" for number in range(10)]
    a = [row(name, drawn(seed)) for seed, name in enumerate(names)]
    b = [row(name, drawn(100 + seed, scale={"row 3": 1.2, "row 7": 1 / 1.2}.get(name, 1.0))) for seed, name in enumerate(names)]
    found = compare(a, b)
    assert verdicts(found) == {**dict.fromkeys(names, "within noise"), "row 3": "slower", "row 7": "faster"}
    assert found[3].ratio == pytest.approx(1.2, rel=0.05)
    assert found[3].superiority is not None and found[3].superiority > 0.8


def test_noise_is_hardly_ever_a_change() -> None:
    """At most one set of ten rows in twenty may have any: alpha is of the whole set."""
    sets = 100
    changed = 0
    for start in range(sets):
        a = [row(str(number), drawn(1000 * start + number)) for number in range(10)]
        b = [row(str(number), drawn(1000 * start + 500 + number)) for number in range(10)]
        changed += any(verdict != "within noise" for verdict in verdicts(compare(a, b)).values())
    assert changed <= 0.05 * sets


def test_holm_as_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_change_that_is_sure_but_small_does_not_count() -> None:
    a, b = row("x", drawn(1, noise=0.001)), row("x", drawn(2, noise=0.001, scale=1.01))
    (found,) = compare([a], [b])
    assert found.p_holm is not None and found.p_holm < 0.05
    assert found.verdict == "within noise"
    assert compare([a], [b], least=0.005)[0].verdict == "slower"


def test_runs_that_differ_among_themselves_hide_a_difference() -> None:
    a = [row("x", drawn(1, noise=0.01)), row("x", drawn(2, noise=0.01, scale=1.15))]
    b = [row("x", drawn(3, noise=0.01, scale=1.25)), row("x", drawn(4, noise=0.01, scale=1.25))]
    (found,) = compare(a, b)
    assert found.p_holm is not None and found.p_holm < 0.05
    assert found.verdict == "within noise" and "runs of one side differ" in found.why
    steady = [row("x", drawn(1, noise=0.01)), row("x", drawn(2, noise=0.01))]
    assert compare(steady, b)[0].verdict == "slower"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"knobs": {**KNOBS, "landing": "mapped"}}, "knob landing (staged and mapped)"),
        ({"machine": Machine(cpu="another", cores=2, memory_bytes=2**34)}, "cpu (one and another)"),
        ({"machine": Machine(cpu="one", cores=2, memory_bytes=2**34, gpu=("H100",))}, "gpu"),
        ({"bytes": 10**7}, "bytes"),
    ],
)
def test_rows_of_different_kinds_are_compared_only_when_asked_for(more: dict[str, object], said: str) -> None:
    a, b = row("x", drawn(1)), row("x", drawn(2, scale=2.0), **more)
    (refused,) = compare([a], [b])
    assert refused.verdict == "not comparable" and refused.ratio is None and said in refused.why
    (asked,) = compare([a], [b], across=True)
    assert asked.verdict == "slower" and said in asked.why


def test_a_knob_that_is_new_does_not_hinder() -> None:
    a, b = row("x", drawn(1)), row("x", drawn(2), knobs={**KNOBS, "new": 1})
    assert compare([a], [b])[0].verdict == "within noise"


def test_where_nothing_could_show_it_is_too_few_and_no_noise() -> None:
    """Twice the time in every row passes no gate only since each has few samples."""
    a = [row(str(number), [0.3, *(0.1 + 0.001 * i for i in range(5))]) for number in range(7)]
    slow = [row(one.row, [2 * sample for sample in one.samples]) for one in a]
    found = compare(a, slow)
    assert set(verdicts(found).values()) == {"too few"} and "5 and 5 warm samples" in found[0].why
    assert len(regressions(found)) == 7
    assert set(verdicts(compare(a[:6], slow[:6])).values()) == {"slower"}
    assert set(verdicts(compare(a[:6], a[:6])).values()) == {"within noise"}


def test_floors_cost_other_rows_nothing() -> None:
    few = [0.3, *(0.1 + 0.001 * i for i in range(5))]
    floors = [row(f"floor {number}", few, kind="floor") for number in range(6)]
    found = compare([*floors, row("x", few)], [*floors, row("x", [2 * sample for sample in few])])
    assert verdicts(found)["x"] == "slower" and [one.row for one in found][-1] == "x"


@pytest.mark.parametrize("lost", [{"integrity": None}, {"control": None}])
def test_what_nobody_looked_at_is_not_compared(lost: dict[str, None]) -> None:
    found = compare([row("x", drawn(1))], [row("x", drawn(2), **lost)])
    assert verdicts(found) == {"x": "not comparable"} and "looked at" in found[0].why
    assert regressions(found)


def test_rows_of_one_side_say_how_many_samples_they_have() -> None:
    a, b = compare([row("x", drawn(1))], [row("y", drawn(2))])
    assert (a.verdict, a.n_b, b.verdict, b.n_a) == ("only in A", 0, "only in B", 0)
    assert a.n_a > 4 and b.n_b > 4


def test_integrity_goes_before_speed() -> None:
    good, bad = row("x", drawn(1)), row("x", drawn(2, scale=0.5), integrity=False)
    assert compare([good], [bad])[0].verdict == "broken"
    assert compare([bad], [good])[0].verdict == "mended"
    assert compare([good], [row("x", drawn(2), control="missed by digests (committed)")])[0].verdict == "broken"


def test_too_few_samples_are_said_to_be() -> None:
    (found,) = compare([row("x", drawn(1, n=3))], [row("x", drawn(2, n=3, scale=9.0))])
    assert found.verdict == "too few" and "at least 4 each" in found.why


def test_rows_that_broke_are_broken_also_where_they_cannot_be_compared() -> None:
    (found,) = compare([row("x", drawn(1))], [row("x", drawn(2), bytes=10**7, integrity=False)])
    assert found.verdict == "broken"


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 2.0, float("nan")])
def test_alpha_is_a_chance(alpha: float) -> None:
    with pytest.raises(BenchError, match=f"alpha is {alpha}.*between 0 and 1"):
        compare([row("x", drawn(1))], [row("x", drawn(2))], alpha=alpha)


@pytest.mark.parametrize("least", [-1.0, -1e-9, float("inf"), float("nan")])
def test_least_is_a_part(least: float) -> None:
    with pytest.raises(BenchError, match=f"least is {least}.*from 0"):
        compare([row("x", drawn(1))], [row("x", drawn(2))], least=least)


GOOD, FEW, NOTHING = row("x", drawn(1)), row("x", drawn(2, n=3)), Skipped(row="x", skipped="why")


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        ([GOOD], [row("x", drawn(3))], []),
        ([GOOD], [row("x", drawn(3, scale=0.5))], []),
        ([row("x", drawn(1), integrity=False)], [GOOD], []),
        ([GOOD], [GOOD, row("new", drawn(4))], []),
        ([GOOD, row("plan", [1.0])], [GOOD, row("plan", [2.0])], []),
        ([GOOD], [row("x", drawn(3, scale=1.5))], ["x: slower"]),
        ([GOOD], [row("x", drawn(3), integrity=False)], ["x: broken"]),
        ([GOOD, row("y", drawn(2))], [GOOD], ["y: only in A"]),
        ([GOOD], [], ["x: only in A"]),
        ([GOOD], [NOTHING], ["x: only in A"]),
        ([GOOD], [row("x", drawn(3), bytes=10**7)], ["x: not comparable"]),
        ([GOOD], [FEW], ["x: too few"]),
        ([FEW], [GOOD], ["no row could be compared"]),
        ([], [GOOD], ["no row could be compared"]),
    ],
)
def test_what_does_not_pass_and_why(a: list[Row | Skipped], b: list[Row | Skipped], why: list[str]) -> None:
    assert regressions(compare(a, b)) == why


def test_rows_of_one_side_alone() -> None:
    found = compare([row("a", drawn(1)), Skipped(row="b", skipped="no")], [row("b", drawn(2))])
    assert verdicts(found) == {"a": "only in A", "b": "only in B"}


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., list[str]]:
    """``files(first, second)`` writes two result files."""

    def write(*sides: Sequence[Row]) -> list[str]:
        paths = [tmp_path / f"{number}.jsonl" for number in range(len(sides))]
        for path, rows in zip(paths, sides, strict=True):
            path.write_text("".join(line(one) + "\n" for one in rows))
        return [str(path) for path in paths]

    return write


def test_command_line(files: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    paths = files([row("x", drawn(1)), row("y", drawn(2))], [row("x", drawn(3, scale=1.2)), row("y", drawn(4))])
    assert cli.main(["bench", "compare", *paths]) == 0
    said = capsys.readouterr()
    found = [json.loads(text) for text in said.out.splitlines()]
    assert [(one["row"], one["verdict"]) for one in found] == [("x", "slower"), ("y", "within noise")]
    assert "slower" in said.err and "within noise" in said.err
    assert cli.main(["bench", "compare", *paths, "--fail-on-regression"]) == 1
    assert "regression: x: slower\n" in capsys.readouterr().err
    assert cli.main(["bench", "compare", *reversed(paths), "--fail-on-regression"]) == 0


def test_command_line_says_what_it_needs(
    files: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = files([row("x", drawn(1))])
    assert cli.main(["bench", "compare", one]) == 1
    assert "give two files, or --revisions OLD NEW" in capsys.readouterr().err
    assert cli.main(["bench", "compare", one, str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "other").write_text('{"row": "x"}\n')
    assert cli.main(["bench", "compare", one, str(tmp_path / "other")]) == 1
    assert "other:1: no row of syncline bench run" in capsys.readouterr().err
    (tmp_path / "bytes").write_bytes(b"\x80\x93\xff\n")
    assert cli.main(["bench", "compare", one, str(tmp_path / "bytes")]) == 1
    assert "bytes:1: no row of syncline bench run" in capsys.readouterr().err
    assert cli.main(["bench", "compare", one, one, "--alpha", "nan"]) == 1
    assert "alpha is nan" in capsys.readouterr().err
