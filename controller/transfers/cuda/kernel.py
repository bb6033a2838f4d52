"""The gather/scatter kernel on a real device, compiled and launched by CuPy.

Owns the compiled kernel. The pieces that it moves come as a table in pinned memory; it allocates nothing.
"""

from __future__ import annotations

from importlib import resources
from typing import Protocol

from controller.memory.cuda import INVALID_VALUE, CudaError

KERNEL_NAME = "hicache_move"
OPTIONS = ("-std=c++17",)
THREADS = 512
"""In a block: sixteen warps, each moving a piece of its own."""
LANES = 32


class KernelMissing(RuntimeError):  # noqa: N818 - the name is what it is
    """The kernel cannot be had here; the message says what to install."""


class Kernel(Protocol):
    def launch(self, device: int, stream: int, table: int, n_pieces: int, n_blocks: int) -> None:
        """Queue the moving of `n_pieces` pieces. `table`: address of their sources, then their targets,
        then their sizes (uint64 each), in memory that the device reads; it and all that it names must
        stay until the launch has ended. Any thread. Raises CudaError."""


def kernel_source() -> str:
    """The CUDA C++ text."""
    return resources.files(__package__).joinpath("gather.cu").read_text(encoding="utf-8")


class CupyKernel:
    """See Kernel."""

    def __init__(self) -> None:
        """Raises KernelMissing without CuPy, or when it cannot compile here."""
        try:
            import cupy
        except ImportError as error:
            raise KernelMissing(
                f"CuPy is not installed ({error}); install hicache[cuda12] or hicache[cuda13], or set "
                "transfers.engine to cuda"
            ) from error
        self._cupy = cupy
        try:
            module = cupy.RawModule(code=kernel_source(), options=OPTIONS)
            self._kernel = module.get_function(KERNEL_NAME)
        except (RuntimeError, cupy.cuda.compiler.CompileException) as error:
            raise KernelMissing(f"CuPy could not compile the kernel: {error}") from error

    def launch(self, device: int, stream: int, table: int, n_pieces: int, n_blocks: int) -> None:
        cupy = self._cupy
        arguments = (cupy.uint64(table), cupy.uint64(n_pieces))
        try:
            with cupy.cuda.Device(device), cupy.cuda.ExternalStream(stream):
                self._kernel((n_blocks,), (THREADS,), arguments)
        except RuntimeError as error:  # of the driver or the runtime; `status` is its number
            raise CudaError("cuLaunchKernel", getattr(error, "status", INVALID_VALUE), str(error)) from error
