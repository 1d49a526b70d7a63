"""The wheel: built, installed into an empty environment, imported from there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={"PATH": "/usr/bin:/bin", **env},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(repository: Path, folders: Sequence[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources (the checkout stays as it is), offline, by the setuptools that is installed."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE", "noxfile.py"):
        shutil.copy(repository / name, copy)
    for folder in (*folders, "tests"):
        shutil.copytree(repository / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation")
    run(*pip, "--no-index", "--wheel-dir", out, copy, cwd=copy)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A new environment with nothing in it but the wheel: its Python, and the names that installing it has put there."""
    home = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--no-deps", "--no-index")
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    before = set(site.iterdir())
    run(*pip, wheel, cwd=home)
    return python, sorted(path.name for path in set(site.iterdir()) - before)


def test_installs_nothing_but_syncline(empty: tuple[Path, list[str]]) -> None:
    _, names = empty
    version = names[-1].removeprefix("syncline-").removesuffix(".dist-info")
    assert names == ["syncline", f"syncline-{version}.dist-info"]


def test_contains_every_module_once_and_is_typed(wheel: Path, modules: Sequence[str], folders: Sequence[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
    packed = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files if name.endswith(".py")]
    assert sorted(packed) == sorted(modules)
    assert {f"syncline/{folder}/py.typed" for folder in folders} <= set(files)
    assert any(name.endswith("licenses/LICENSE") for name in files)


def test_no_file_outside_the_subpackages(wheel: Path, folders: Sequence[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {tuple(name.split("/")[:2]) for name in archive.namelist() if ".dist-info/" not in name}
    assert tops == {("syncline", folder) for folder in folders}


def test_is_imported_from_the_empty_environment(empty: tuple[Path, list[str]], tmp_path: Path) -> None:
    """The wheel's own modules, with the dependencies of the environment that the tests run in."""
    python, _ = empty
    code = (
        "import importlib, sys\n"
        "for name in ('scheduler', 'stages', 'engine', 'adapters', 'adapters.trainers', 'adapters.engines', 'bench.cli'):\n"
        "    module = importlib.import_module('syncline.' + name)\n"
        "    assert module.__file__.startswith(sys.prefix), module.__file__\n"
        "bare = {'engine', 'scheduler', 'stages', 'adapters', 'bench', 'tests'} & set(sys.modules)\n"
        "assert not bare, bare\n"
    )
    run(python, "-c", code, cwd=tmp_path, PYTHONPATH=sysconfig.get_path("purelib"), HOME=str(tmp_path))


def test_command_is_installed(empty: tuple[Path, list[str]], tmp_path: Path) -> None:
    """``syncline --help`` needs no package but itself."""
    python, _ = empty
    assert "syncline COMMAND" in run(python.parent / "syncline", "--help", cwd=tmp_path)
