"""The kernel's own source, compiled for the CPU: blocks and threads as loops, its indices as variables."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from controller.transfers.cuda.kernel import KERNEL_NAME, THREADS, kernel_source
from tests.cuda.fake_driver import FakeCuda

_SHIM = """
#define __device__
#define __global__
struct Place { unsigned x; };
static thread_local Place blockIdx, threadIdx, blockDim, gridDim;
%s
extern "C" void launch(const u64* table, u64 n_pieces, unsigned n_blocks, unsigned n_threads) {
    gridDim.x = n_blocks, blockDim.x = n_threads;
    for (blockIdx.x = 0; blockIdx.x < n_blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < n_threads; ++threadIdx.x)
            %s(table, n_pieces);
}
"""


@functools.cache
def compiled() -> ctypes.CDLL:
    """Skips the test where there is no C++ compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: the kernel's index arithmetic is not tested")
    folder = Path(tempfile.mkdtemp(prefix="hicache-kernel-"))
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(_SHIM % (kernel_source(), KERNEL_NAME))
    command = ["g++", "-std=c++17", "-O2", "-Wall", "-Wno-unknown-pragmas", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True, timeout=60)
    loaded = ctypes.CDLL(str(library))
    shutil.rmtree(folder)
    loaded.launch.argtypes = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint, ctypes.c_uint)
    loaded.launch.restype = None
    return loaded


class CpuKernel:
    """Kernel, run by the fake device when its turn comes. Reads its table then, as the real one does."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._code = compiled()

    def launch(self, device: int, stream: int, table: int, n_pieces: int, n_blocks: int) -> None:
        columns = (ctypes.c_uint64 * (3 * n_pieces)).from_address(table)
        words = list(columns)
        pieces = list(
            zip(words[:n_pieces], words[n_pieces : 2 * n_pieces], words[2 * n_pieces :], strict=True)
        )
        self._cuda.launch(
            device, stream, pieces, lambda: self._code.launch(table, n_pieces, n_blocks, THREADS)
        )
