"""Linters, types, import rules, generated code: each is a check that fails."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def run(*command: str, cwd: Path = ROOT) -> str:
    """Run a tool; its output when it fails is the test's message."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ruff_finds_nothing() -> None:
    run(str(BIN / "ruff"), "check", ".")


def test_code_is_formatted() -> None:
    run(str(BIN / "ruff"), "format", "--check", ".")


@pytest.mark.timeout(300)
def test_mypy_strict_finds_nothing() -> None:
    run(sys.executable, "-m", "mypy")


def test_imports_go_one_way() -> None:
    run(str(BIN / "lint-imports"))


def test_generated_code_is_what_the_proto_says(tmp_path: Path) -> None:
    (tmp_path / "proto" / "v1").mkdir(parents=True)
    shutil.copy(ROOT / "proto/v1/hicache.proto", tmp_path / "proto/v1/hicache.proto")
    flags = ["-I.", "--python_out=.", "--pyi_out=.", "--grpc_python_out=."]
    run(sys.executable, "-m", "grpc_tools.protoc", *flags, "proto/v1/hicache.proto", cwd=tmp_path)
    for name in ("hicache_pb2.py", "hicache_pb2.pyi", "hicache_pb2_grpc.py"):
        made, kept = tmp_path / "proto/v1" / name, ROOT / "proto/v1" / name
        assert made.read_text() == kept.read_text(), f"{name} is stale: run `make proto`"


def test_everything_imports_without_cupy_and_mooncake() -> None:
    """In a fresh process in which the optional packages cannot be imported."""
    names = [
        module.name
        for package in ("hicache", "controller", "storage_backends", "proto.v1")
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
    ]
    code = (
        "import sys, importlib\n"
        "for name in ('cupy', 'mooncake', 'redis', 'torch'): sys.modules[name] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    assert len(names) > 30
    run(sys.executable, "-c", code)


def test_an_engine_needs_only_the_base_packages() -> None:
    """`import hicache` and its client work where only numpy, grpcio and protobuf are installed."""
    code = (
        "import sys\n"
        "for name in ('msgspec', 'yaml', 'aiohttp', 'click', 'prometheus_client', 'rich', 'structlog',"
        " 'uvloop', 'xxhash', 'torch', 'cupy', 'grpc_health', 'grpc_reflection'): sys.modules[name] = None\n"
        "import hicache, hicache.cache, hicache.client\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('controller', 'storage_backends')]\n"
    )
    run(sys.executable, "-c", code)
