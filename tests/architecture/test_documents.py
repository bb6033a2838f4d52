"""What the documents promise exists: commands, targets, files, sample configurations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from controller.daemon import cli, config

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_commands_in_documents_exist(path: Path) -> None:
    text = path.read_text()
    code = "\n".join(re.findall(r"`[^`\n]+`", text) + re.findall(r"^(?: {4}|\$ ).+$", text, re.M))
    code += "\n".join(re.findall(r"```[a-z]*\n(.*?)```", text, re.S))
    assert set(re.findall(r"\bmake ([a-z-]+)\b", code)) <= TARGETS
    used = set(re.findall(r"^[` ]*(?:\$ )?(?:[\w./]+/)?hicache ([a-z]+(?:-[a-z]+)*)\b", code, re.M))
    assert used <= set(cli.main.commands)
    for module in re.findall(r"python3? -m ((?:examples|bench|controller|storage_backends)[\w.]*)", code):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_files_named_in_documents_exist(path: Path) -> None:
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / link).exists(), f"link to {link}"
    folders = "hicache|controller|storage_backends|proto|deploy|bench|docs|examples|tests"
    for name in re.findall(rf"`((?:{folders})/[\w./-]*\w)`", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", sorted((ROOT / "deploy").glob("*.yaml")), ids=named)
def test_sample_configurations_load(path: Path) -> None:
    if "server:" in path.read_text() or "host:" in path.read_text():
        config.load(path)
