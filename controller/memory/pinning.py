"""Pinned host memory: the slab registered with CUDA, spread over NUMA nodes, in huge pages where allowed.

Registers in chunks, because drivers refuse very large calls and because a start must show progress. What
could not be pinned stays usable, slower, and is said aloud: `Pinning.problem` is for health. Copies must
not span two registrations: engines cut their pieces at `seams`. Never allocates, never copies.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from controller.memory.cuda import CudaError, DeviceMemory
from controller.memory.regions import address_of

CHUNK_BYTES = 2 << 30
"""Bytes registered at a time: below the 4 GiB at which old drivers refuse a call."""

_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MPOL_INTERLEAVE = 3
_SYSCALL_MBIND = {"x86_64": 237, "aarch64": 235}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.restype = ctypes.c_long


class HostMemory(Protocol):
    """What is pinned: a HostSlab."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Chunk:
    """One registration."""

    address: int
    nbytes: int


class PinnedBuffer:
    """A little pinned memory of its own. The owner closes it when no device uses it any more."""

    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        """Raises CudaError."""
        self._memory = memory
        self._mapping = mmap.mmap(-1, nbytes)
        self.nbytes = nbytes
        self.address = address_of(self._mapping)
        memory.register_host(self.address, nbytes)

    def write(self, offset: int, values: NDArray[np.uint64]) -> None:
        """Put numbers at an offset in bytes."""
        np.frombuffer(self._mapping, np.uint64, len(values), offset)[:] = values

    def close(self) -> None:
        """Unpin and unmap. Raises CudaError."""
        self._memory.unregister_host(self.address)
        self._mapping.close()


class Pinning:
    """What of the slab is pinned. `unpin` undoes it; the owner calls that before the slab is unmapped and
    after the last copy has ended."""

    def __init__(self, memory: DeviceMemory, pinned: Sequence[Chunk], nbytes: int, failures: Sequence[str]):
        self._memory = memory
        self._chunks = list(pinned)
        self._nbytes = nbytes
        self.n_failed = len(failures)
        self._failure = failures[0] if failures else ""

    @property
    def pinned_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    @property
    def whole(self) -> bool:
        """Whether every byte is pinned, so that kernels may touch it."""
        return self.pinned_bytes == self._nbytes

    @property
    def seams(self) -> tuple[int, ...]:
        """Addresses, ascending, that no copied piece may span: both ends of every registration."""
        return tuple(
            sorted({end for chunk in self._chunks for end in (chunk.address, chunk.address + chunk.nbytes)})
        )

    @property
    def problem(self) -> str:
        """Why copies are slower than they could be; empty when all is pinned."""
        if not self.n_failed:
            return ""
        return (
            f"host memory: {self.pinned_bytes} of {self._nbytes} bytes are pinned ({self._failure}); copies "
            "go on unpinned and slower; raise the memlock limit (ulimit -l unlimited) or lower host.capacity"
        )

    def unpin(self) -> list[str]:
        """Undo every registration; what could not be undone, in words. A second time does nothing."""
        chunks, self._chunks = self._chunks, []
        failures = []
        for chunk in chunks:
            try:
                self._memory.unregister_host(chunk.address)
            except CudaError as error:
                failures.append(f"unpinning {chunk.nbytes} bytes failed: {error.name}")
        return failures


def pin(
    host: HostMemory,
    memory: DeviceMemory,
    *,
    extent_bytes: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
    threads: int = 4,
    progress: Callable[[int], None] = lambda done_bytes: None,
) -> Pinning:
    """Register all of `host`, which must be prefaulted, and tell `progress` (on this thread) the bytes done.
    Chunks end on extent boundaries where these are known and fall on pages. A chunk that is refused
    stays unpinned, and the chunks that were not begun yet with it. Raises nothing of CUDA's; what
    `progress` raises goes through, with nothing left pinned."""
    chunks = _chunks(host, extent_bytes, chunk_bytes)
    pinned: list[Chunk] = []
    failures: list[str] = []

    def register(chunk: Chunk) -> None:
        if failures:
            return
        try:
            memory.register_host(chunk.address, chunk.nbytes)
        except CudaError as error:
            failures.append(f"cuMemHostRegister of {chunk.nbytes} bytes: {error.name}")
            return
        pinned.append(chunk)

    _advise(host, _MADV_DONTFORK)  # a child that touched a pinned page would take it away from the device
    told = False
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="hicache-pin") as pool:
            registering = [pool.submit(register, chunk) for chunk in chunks]
            try:
                for done in registering:
                    done.result()
                    progress(sum(chunk.nbytes for chunk in pinned))
                told = True
            finally:
                if not told:
                    failures.append("stopped")
    finally:
        pinning = Pinning(memory, pinned, host.nbytes, failures)
        if not told:
            pinning.unpin()
    return pinning


def spread(host: HostMemory, *, root: Path = Path("/")) -> list[str]:
    """Before the first touch: interleave the memory over the machine's NUMA nodes and ask for huge pages.
    Returns what was done or why not, for the log: neither is needed for right bytes."""
    return [_interleave(host, root), _huge_pages(host, root)]


def _chunks(host: HostMemory, extent_bytes: int, chunk_bytes: int) -> list[Chunk]:
    step = max(mmap.PAGESIZE, chunk_bytes // mmap.PAGESIZE * mmap.PAGESIZE)
    if extent_bytes and extent_bytes % mmap.PAGESIZE == 0:
        step = max(extent_bytes, step // extent_bytes * extent_bytes)
    starts = range(0, host.nbytes, step)
    return [Chunk(host.address + start, min(step, host.nbytes - start)) for start in starts]


def _interleave(host: HostMemory, root: Path) -> str:
    try:
        nodes = _numbers((root / "sys/devices/system/node/online").read_text())
    except OSError:
        return "numa: this kernel names no nodes; left to its default"
    if len(nodes) < 2:
        return "numa: one node; nothing to spread"
    number = _SYSCALL_MBIND.get(platform.machine())
    if number is None:
        return f"numa: {len(nodes)} nodes; not spread on {platform.machine()}"
    mask = sum(1 << node for node in nodes)
    words = max(nodes) // 64 + 1
    bits = (ctypes.c_ulong * words)(*((mask >> 64 * word) & (2**64 - 1) for word in range(words)))
    failed = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(host.address),
        ctypes.c_ulong(host.nbytes),
        ctypes.c_ulong(_MPOL_INTERLEAVE),
        bits,
        ctypes.c_ulong(words * 64 + 1),
        ctypes.c_ulong(0),
    )
    if failed:
        return f"numa: {len(nodes)} nodes; mbind refused ({os.strerror(ctypes.get_errno())})"
    return f"numa: interleaved over {len(nodes)} nodes"


def _numbers(text: str) -> list[int]:
    """`0-1,4` as the kernel writes it."""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return found


def _huge_pages(host: HostMemory, root: Path) -> str:
    try:
        setting = (root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return "huge pages: this kernel has none for shared memory"
    found = re.search(r"\[(\w+)\]", setting)
    mode = found.group(1) if found else "unknown"
    if mode not in ("always", "within_size", "advise", "force"):
        return f"huge pages: shmem_enabled is {mode}; set it to advise for fewer page table entries"
    code = _advise(host, _MADV_HUGEPAGE)
    return f"huge pages: refused ({os.strerror(code)})" if code else f"huge pages: asked for ({mode})"


def _advise(host: HostMemory, advice: int) -> int:
    """0, or the error number; EINVAL on kernels without this advice."""
    if _libc.madvise(host.address, host.nbytes, advice):
        return ctypes.get_errno() or errno.EINVAL
    return 0
