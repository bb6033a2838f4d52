"""The rules of the house that a program can check: sizes that keep a file readable, and words."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("hicache", "controller", "storage_backends")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
EVERYWHERE = sorted(
    path
    for folder in (*PACKAGES, "bench", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if path != Path(__file__)
)
BANNED_NAMES = re.compile(
    r"(^|_)(manager|util|utils|helper|helpers|common|legacy|misc)(_|$)|(^|_)(do|new)_|_v[0-9]+$|^(data|info)$"
)
LOCK_WORD = re.compile(r"(^|_)lock(s|ed|ing)?(_|$)")
"""The word lock names a file lock only; a lock between threads is a mutex, protection is a pin."""


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def definitions(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def names_defined(path: Path) -> Iterator[str]:
    """Every name that a module defines: functions, classes, arguments, assigned names and attributes."""
    for node in definitions(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_a_module_fits_in_five_hundred_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_functions_and_classes_stay_small(path: Path) -> None:
    for node in definitions(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 50, f"{node.name} is longer than 50 lines"
        if isinstance(node, ast.ClassDef):
            public = [
                method.name
                for method in node.body
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name[0] != "_"
            ]
            assert len(public) <= 15, f"{node.name} has {len(public)} public methods"


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_a_module_says_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a module begins with what it decides or owns"


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_names_say_something(path: Path) -> None:
    words = {path.stem, *names_defined(path)}
    assert not sorted(word for word in words if BANNED_NAMES.search(word.lower()))


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_lock_names_files_only(path: Path) -> None:
    words = {word for word in names_defined(path) if LOCK_WORD.search(word.lower())}
    assert not sorted(word for word in words if "file" not in word and "path" not in word)


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_only_a_last_line_of_defence_catches_everything(path: Path) -> None:
    """A handler of every exception raises it again, or its line says that it is counted and shown
    (noqa: BLE001)."""
    lines = path.read_text().splitlines()
    for node in definitions(path):
        if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name):
            again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if node.type.id in ("Exception", "BaseException") and not again:
                line = lines[node.lineno - 1]
                assert "noqa: BLE001" in line, f"line {node.lineno}: {line.strip()}"


def test_no_unsafe_loader_in_the_tree() -> None:
    """SECURITY-01: bytes from the network, shared memory or storage are never executed."""
    unsafe = re.compile(r"\b(pickle|marshal|shelve\b|eval\(|exec\(|yaml\.load\(|torch\.load)")
    for path in MODULES:
        with path.open("rb") as source:
            code = " ".join(
                token.string
                for token in tokenize.tokenize(source.readline)
                if token.type not in (tokenize.STRING, tokenize.COMMENT)
            )
        assert not unsafe.search(code), named(path)


def test_nothing_unfinished_and_no_workplace_in_the_tree() -> None:
    words = re.compile(r"\b(TO" + "DO|FIX" + r"ME|XX" + r"X|NotImplementedError)\b|/work/|\.library/")
    texts = [*EVERYWHERE, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*")]
    texts += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    found = [
        named(path) for path in texts if path.is_file() and words.search(path.read_text(errors="ignore"))
    ]
    assert not found
