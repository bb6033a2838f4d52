"""The tests for a real device, run against a driver library without one: every ctypes call as it is, and the
daemon in a process of its own. What the stub cannot show is CUDA itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_the_real_tests_pass_on_a_stub_driver(tmp_path: Path) -> None:
    """LIFE-01, LIFE-02, WRITE-09, SIDECAR-03 between two processes."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: the driver's calls are not exercised")
    library, memory = tmp_path / "libcuda.so.1", tmp_path / "memory"
    memory.mkdir()
    flags = ["-std=c++17", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread"]
    source = ROOT / "tests/cuda/stub_driver.cpp"
    subprocess.run(["g++", *flags, "-o", str(library), str(source)], check=True, timeout=120)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/cuda/test_gpu.py",
        "-m",
        "gpu",
        "-q",
        "-x",
        "-rs",
    ]
    paths = f"{ROOT / 'tests/cuda/stub_packages'}:{ROOT}"
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(tmp_path),
        "HICACHE_STUB_DIR": str(memory),
        "PYTHONPATH": paths,
    }
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "NO CUDA DEVICE" not in done.stdout
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
