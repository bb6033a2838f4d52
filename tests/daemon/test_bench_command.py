"""`hicache bench` finds every benchmark of the source tree and hands it its options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from controller.daemon.cli import BENCHMARKS

HICACHE = str(Path(sys.executable).parent / "hicache")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_starts_and_speaks_json(name: str, tmp_path: Path) -> None:
    command = [HICACHE, "bench", name, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_no_benchmark_is_left_out() -> None:
    modules = {path.stem for path in (ROOT / "bench").glob("*.py")} - {"__init__", "workload"}
    assert set(BENCHMARKS.values()) == modules
