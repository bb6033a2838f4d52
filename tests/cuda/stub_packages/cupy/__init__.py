"""As much of CuPy as launches our kernel, over the stub driver: the kernel, compiled for the CPU, runs on the
stream's thread. On the path only where the stub driver is."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace, TracebackType

import numpy as np

from tests.cuda.cpu_kernel import compiled

uint64 = np.uint64
_current = threading.local()
_driver = ctypes.CDLL("libcuda.so.1")


class _Entered:
    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Device(_Entered):
    def __init__(self, number: int) -> None:
        assert number == 0


class ExternalStream(_Entered):
    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __enter__(self) -> None:
        _current.stream = self._pointer


class RawModule:
    def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
        assert "hicache_move" in code
        assert options == ("-std=c++17",)

    def get_function(self, name: str) -> object:
        assert name == "hicache_move"
        return _launch


def _launch(grid: tuple[int], block: tuple[int], args: tuple[np.uint64, np.uint64]) -> None:
    code = ctypes.cast(compiled().launch, ctypes.c_void_p)
    table, n_pieces = (ctypes.c_uint64(int(arg)) for arg in args)
    failed = _driver.stubLaunch(
        ctypes.c_void_p(_current.stream),
        code,
        table,
        n_pieces,
        ctypes.c_uint(grid[0]),
        ctypes.c_uint(block[0]),
    )
    assert failed == 0


cuda = SimpleNamespace(
    Device=Device,
    ExternalStream=ExternalStream,
    compiler=SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
)
