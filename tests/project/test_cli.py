"""The command line: quick, lazy, and clear when something is not there."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from syncline.bench import cli
from syncline.engine.errors import ConfigError

Run = Callable[..., subprocess.CompletedProcess[str]]

MAIN = "from syncline.bench.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True, kw_only=True)
class FakeArgs:
    """A fake command."""

    steps: int = 3
    """How many."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``fake(do)`` makes a command ``fake run`` that does ``do(args)``."""

    def install(do: Callable[[FakeArgs], int], extra: str = "demo") -> None:
        def command(args: FakeArgs) -> int:
            return do(args)

        module = types.ModuleType("fake_command")
        command.__annotations__ = {"args": FakeArgs, "return": int}
        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_command", module)
        entry = cli.Command(words=("fake", "run"), entry="fake_command:command", summary="a fake", extra=extra)
        monkeypatch.setattr(cli, "COMMANDS", (entry,))

    return install


def test_help_names_every_command_and_needs_nothing(without_extras: Run) -> None:
    done = without_extras(
        "import sys; from syncline.bench.cli import main; code = main(['--help'])\n"
        "assert not {'torch', 'tyro', 'numpy', 'asyncio'} & set(sys.modules), 'help is to be quick'\nsys.exit(code)"
    )
    assert done.returncode == 0, done.stderr
    for command in cli.COMMANDS:
        assert f"  {command.name} " in done.stdout


def test_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: syncline COMMAND" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("syncline 0.")


def test_unknown_command_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dmeo"]) == 2
    error = capsys.readouterr().err
    assert "'dmeo'" in error
    assert ", ".join(command.name for command in cli.COMMANDS) in error


def test_group_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 2
    assert "bench run" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help(command: cli.Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*command.words, "--help"])
    assert not end.value.code
    assert f"usage: syncline {command.name}" in capsys.readouterr().out


def test_arguments_reach_the_command_and_its_code_comes_back(fake: Callable[..., None]) -> None:
    seen: list[FakeArgs] = []
    fake(lambda args: seen.append(args) or 7)
    assert cli.main(["fake", "run", "--steps", "5"]) == 7
    assert seen == [FakeArgs(steps=5)]


def test_wrong_option_exits_with_usage(fake: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    fake(lambda args: 0)
    with pytest.raises(SystemExit) as error:
        cli.main(["fake", "run", "--stpes", "5"])
    assert error.value.code == 2
    assert "--stpes" in capsys.readouterr().err


def test_missing_extra_is_one_line(fake: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def lacks(args: FakeArgs) -> int:
        raise ModuleNotFoundError("No module named 'rich'", name="rich.live")

    fake(lacks)
    assert cli.main(["fake", "run"]) == 2
    assert capsys.readouterr().err == "syncline fake run needs rich, which is not installed: pip install 'syncline[demo]'\n"


def test_a_missing_module_of_ours_is_a_fault(fake: Callable[..., None]) -> None:
    def broken(args: FakeArgs) -> int:
        raise ModuleNotFoundError("No module named 'syncline.nothing'", name="syncline.nothing")

    fake(broken)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["fake", "run"])


def test_our_errors_are_said_without_a_traceback(fake: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(args: FakeArgs) -> int:
        raise ConfigError(["workers is 0"])

    fake(wrong)
    assert cli.main(["fake", "run"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("syncline fake run: ConfigError: 1 problem")
    assert "workers is 0" in error


def test_what_an_extra_lacks_is_said_before_anything_runs(
    fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(lambda args: pytest.fail("it was run"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(["fake", "run"]) == 2
    assert "needs rich, matplotlib, which are not installed: pip install 'syncline[demo]'" in capsys.readouterr().err


def test_extras_bring_what_their_commands_need(repository: Path) -> None:
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {
        name: {item.partition(">")[0] for item in items if not item.startswith("syncline")} for name, items in extras.items()
    }
    brought["demo"] |= brought["serve"]
    assert {name: set(modules) for name, modules in cli.EXTRAS.items()} == {name: brought[name] for name in cli.EXTRAS}
    assert {command.extra for command in cli.COMMANDS if command.extra} <= set(cli.EXTRAS)


@pytest.mark.parametrize("name", ["demo", "serve"])
def test_real_commands_name_their_extra(without_extras: Run, name: str) -> None:
    argv = {"demo": ["demo"], "serve": ["serve", "--model", "nowhere"]}[name]
    done = without_extras(MAIN, *argv)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert f"pip install 'syncline[{name}]'" in done.stderr
