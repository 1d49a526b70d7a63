"""The table of faults in the documentation: every test that it names exists, and every row names one."""

from __future__ import annotations

import ast
import re

import pytest

KINDS = 47
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows(text):
    """Kind and last column of every row."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return [(row[0], row[-1]) for row in cells if row[0] not in ("kind", "---")]


def unknown(text, repository):
    """Tests that are named and do not exist."""
    found = {}
    for file in {file for file, _ in TEST.findall(text)}:
        path = repository / file
        tree = ast.parse(path.read_text()) if path.exists() else ast.Module(body=[], type_ignores=[])
        found[file] = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return [f"{file}::{name}" for file, name in TEST.findall(text) if name not in found[file]]


@pytest.fixture
def table(repository):
    return (repository / "docs" / "faults.md").read_text()


def test_every_row_names_tests_that_exist(table, repository):
    kinds = [kind for kind, _ in rows(table)]
    assert len(kinds) == len(set(kinds)) >= KINDS
    assert [kind for kind, shown in rows(table) if not TEST.search(shown)] == []
    assert unknown(table, repository) == []


def test_a_test_that_does_not_exist_would_be_found(repository):
    text = "| a | b | `tests/faults/test_table.py::rows`, `tests/faults/test_table.py::gone`, `tests/faults/gone.py::x` |"
    assert unknown(text, repository) == ["tests/faults/test_table.py::gone", "tests/faults/gone.py::x"]
