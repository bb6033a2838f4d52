"""The host slab: one budget in bytes, one shared memory file, cut into equal extents.

Owns the memory of L2 and says which arena has which extent and which slots are in use. An extent
belongs to one arena while it holds a frame and goes back when it is empty: the division between
components follows need. Never evicts, never moves bytes, knows no layout and no page.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import heapq
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from controller.memory.budget import DEFAULT_RESERVE_BYTES, check_budget
from controller.memory.regions import address_of
from hicache.core.words import NO_SLOT, SlotArray

SLOT_ALIGN_BYTES = 256
"""Slots begin at multiples of this, from the start of their extent."""

_PREFAULT_CHUNK_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23
_PREFERRED_SLOTS = 8
"""Slots of the largest frame in an extent, where the slab has room for it."""
_PREFERRED_EXTENTS = 64
"""As many extents for each frame size, where frames are small enough for that."""
_LEAST_EXTENTS = 8
"""Not fewer for each frame size only to waste less: few extents divide the slab too coarsely."""
_MOST_SLOTS = 32
_TOLERATED_WASTE = 1 / 20
_MAX_SLOTS = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int


class SlabError(ValueError):
    """Frames that the slab cannot hold; the message names host.capacity and the sizes."""


def slot_bytes_of(frame_bytes: int) -> int:
    """Room that one frame takes in the slab."""
    return -(-frame_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


class HostSlab:
    """`capacity_bytes` of shared memory in a memfd that nobody can shrink or grow.

    Checks the budget before it takes anything (BudgetError). The owner closes it after the last copy
    and the last storage transfer have ended. `extent_bytes` fixes the cut; otherwise `plan` decides.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        extent_bytes: int | None = None,
        reserve_bytes: int = DEFAULT_RESERVE_BYTES,
        root: Path = Path("/"),
    ) -> None:
        if capacity_bytes < mmap.PAGESIZE:
            raise SlabError(f"host.capacity: {capacity_bytes} bytes; it must be at least {mmap.PAGESIZE}")
        if extent_bytes is not None and not SLOT_ALIGN_BYTES <= extent_bytes <= capacity_bytes:
            raise SlabError(
                f"host.extent: {extent_bytes} bytes; it must be between {SLOT_ALIGN_BYTES} and "
                f"host.capacity ({capacity_bytes} bytes)"
            )
        self.nbytes = capacity_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        check_budget(self.nbytes, reserve_bytes=reserve_bytes, root=root)
        self.fd = os.memfd_create("hicache-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.nbytes)
            fcntl.fcntl(
                self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            self._mapping = mmap.mmap(self.fd, self.nbytes)
        except OSError:
            os.close(self.fd)
            raise
        self._mapping.madvise(mmap.MADV_DONTDUMP)
        self.address = address_of(self._mapping)
        self.buffer = memoryview(self._mapping)
        self._closed = False
        self._fixed_extent_bytes = None if extent_bytes is None else slot_bytes_of(extent_bytes)
        self._extents: _Extents | None = None
        self._arenas: list[HostArena] = []

    @property
    def extent_bytes(self) -> int:
        """Size of an extent; 0 before the cut is decided."""
        return self._extents.nbytes if self._extents else 0

    @property
    def n_extents(self) -> int:
        return self._extents.n_extents if self._extents else 0

    @property
    def free_extents(self) -> int:
        """Extents that belong to no arena."""
        return len(self._extents.free) if self._extents else 0

    @property
    def used_bytes(self) -> int:
        """Bytes of extents that belong to an arena."""
        return (self.n_extents - self.free_extents) * self.extent_bytes

    def plan(self, frame_sizes: Sequence[int]) -> None:
        """Make sure that frames of each of these sizes (bytes, header included) fit, and at least one of
        each at the same time. The first plan decides the extent size; a later one may cut anew only
        while the slab holds no frame. Raises SlabError and changes nothing."""
        slots = sorted({slot_bytes_of(size) for size in frame_sizes})
        if not slots:
            raise SlabError("host slab: no frame size was given; a layout has at least one component")
        extents = self._extents
        if extents is not None and slots[-1] <= extents.nbytes and len(frame_sizes) <= extents.n_extents:
            return
        if extents is not None and len(extents.free) < extents.n_extents:
            raise SlabError(
                f"host.capacity: frames of {slots[-1]} bytes do not fit the slab's extents of "
                f"{extents.nbytes} bytes ({extents.n_extents} in {self.nbytes} bytes), "
                "and it cannot be cut anew while it holds frames; flush it first"
            )
        nbytes = self._fixed_extent_bytes or _extent_bytes(self.nbytes, slots, len(frame_sizes))
        if slots[-1] > nbytes or self.nbytes // nbytes < len(frame_sizes):
            raise SlabError(
                f"host.capacity: {self.nbytes} bytes are too few for one frame of each size "
                f"{list(frame_sizes)} in equal extents; it takes at least "
                f"{slots[-1] * len(frame_sizes)} bytes in extents of {slots[-1]} bytes"
            )
        self._extents = _Extents(nbytes, self.nbytes // nbytes)
        for arena in self._arenas:
            arena.recut(self._extents)

    def arena(self, frame_bytes: int) -> HostArena:
        """Room for frames of one size. Takes no extent yet. Raises SlabError when they cannot fit."""
        self.plan([frame_bytes])
        assert self._extents is not None
        arena = HostArena(self.address, self._extents, slot_bytes_of(frame_bytes))
        self._arenas.append(arena)
        return arena

    def prefault(
        self, progress: Callable[[int], None] = lambda done_bytes: None, *, threads: int = 2
    ) -> None:
        """Back every page with memory now, so that no copy waits for it. Calls `progress` on this
        thread with the bytes done so far, rising to `nbytes`. Contents stay. Raises SlabError."""
        starts = range(0, self.nbytes, _PREFAULT_CHUNK_BYTES)
        with ThreadPoolExecutor(threads, thread_name_prefix="hicache-prefault") as pool:
            done_bytes = 0
            for chunk_bytes in pool.map(self._prefault_chunk, starts):
                done_bytes += chunk_bytes
                progress(done_bytes)

    def _prefault_chunk(self, start: int) -> int:
        nbytes = min(_PREFAULT_CHUNK_BYTES, self.nbytes - start)
        while _libc.madvise(self.address + start, nbytes, _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # a kernel before 5.14
                touched = np.frombuffer(self.buffer[start : start + nbytes], dtype=np.uint8)[:: mmap.PAGESIZE]
                np.bitwise_or(touched, np.uint8(0), out=touched)
                return nbytes
            if code not in (errno.EINTR, errno.EAGAIN):
                raise SlabError(
                    f"host.capacity: memory for {self.nbytes} bytes could not be had ({os.strerror(code)} at "
                    f"{start}); lower host.capacity"
                )
        return nbytes

    def close(self) -> None:
        """Unmap and close; a second time does nothing. Raises BufferError while somebody holds a view."""
        if self._closed:
            return
        self.buffer.release()
        self._mapping.close()
        os.close(self.fd)
        self._closed = True

    def __enter__(self) -> HostSlab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _extent_bytes(capacity_bytes: int, slots: Sequence[int], n_sizes: int) -> int:
    """A small extent that wastes little: multiples of the largest slot up to a few slots are tried, and
    the first whose waste (the ends where no slot fits, for the worst size) can be tolerated is
    taken, else the one with the least. Small extents become empty sooner and so move sooner to
    whoever needs them."""
    largest = slots[-1]
    first = max(1, min(_PREFERRED_SLOTS, capacity_bytes // (_PREFERRED_EXTENTS * n_sizes * largest)))
    most = max(first, min(_MOST_SLOTS, capacity_bytes // (_LEAST_EXTENTS * n_sizes * largest)))
    candidates = [largest * n for n in range(first, most + 1)]

    def waste(nbytes: int) -> float:
        n_extents = capacity_bytes // nbytes
        return 1 - n_extents * min(nbytes - nbytes % slot for slot in slots) / capacity_bytes

    return next((n for n in candidates if waste(n) <= _TOLERATED_WASTE), min(candidates, key=waste))


class _Extents:
    """The cut and the free extents; shared by the slab and its arenas."""

    def __init__(self, nbytes: int, n_extents: int) -> None:
        self.nbytes = nbytes
        self.n_extents = n_extents
        self.free = list(range(n_extents - 1, -1, -1))

    def take(self, n_extents: int) -> NDArray[np.int64]:
        """Ascending numbers of extents that are free no longer; there must be enough."""
        cut = len(self.free) - n_extents
        taken = np.array(self.free[cut:], dtype=np.int64)
        del self.free[cut:]
        taken.sort()
        return taken

    def give_back(self, extents: NDArray[np.int64]) -> None:
        self.free.extend(reversed(extents.tolist()))


class HostArena:
    """Slots of one size, in extents taken from the slab as they are needed.

    Slot s is in extent `s // slots_per_extent`; numbers of extents that this arena does not have are
    never handed out. Not safe for threads: the loop that owns the index owns this.
    """

    def __init__(self, address: int, extents: _Extents, slot_bytes: int) -> None:
        self._address = address
        self.slot_bytes = slot_bytes
        self.recut(extents)

    def recut(self, extents: _Extents) -> None:
        """Begin anew with another cut; only the slab calls it, and only while no slot is in use."""
        if extents.nbytes < self.slot_bytes:
            extents = _Extents(extents.nbytes, 0)  # nothing fits any more: this arena can give no slot
        self._extents = extents
        self.slots_per_extent = extents.nbytes // self.slot_bytes
        n_slots = extents.n_extents * self.slots_per_extent
        if n_slots > _MAX_SLOTS:
            raise SlabError(f"host.capacity: {n_slots} slots of {self.slot_bytes} bytes; int32 counts fewer")
        self._used = np.zeros(n_slots, dtype=np.bool_)
        self._n_used = np.zeros(extents.n_extents, dtype=np.int32)
        self._open: list[int] = []
        """Heap of this arena's extents that have free slots."""
        self._n_free = 0

    def alloc(self, n_slots: int) -> SlotArray | None:
        """`n_slots` slots, or None and no change. Fills extents that are in use already, then takes
        free ones; neighbours in the result are neighbours in memory where possible."""
        if n_slots < 0:
            raise ValueError(f"n_slots: {n_slots} is negative")
        if n_slots > self.obtainable():
            return None
        parts: list[NDArray[np.int64]] = []
        wanted = n_slots
        while wanted and self._n_free:
            extent = self._open[0]
            start = extent * self.slots_per_extent
            free = np.flatnonzero(~self._used[start : start + self.slots_per_extent])[:wanted]
            self._occupy(extent, free + start)
            parts.append(free + start)
            wanted -= len(free)
            self._n_free -= len(free)
        if wanted:
            parts.append(self._alloc_fresh(wanted))
        slots: SlotArray = np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int32)
        return slots

    def emptiest(self, at_most: int) -> list[int]:
        """Up to so many extents of this arena, fewest frames first, when its free slots elsewhere can hold
        all frames of one; else none."""
        if self._n_free < max(1, self.slots_per_extent):
            return []
        mine = np.flatnonzero(self._n_used)
        counts = self._n_used[mine]
        if at_most < len(mine):
            few = np.argpartition(counts, at_most)[:at_most]
            mine, counts = mine[few], counts[few]
        emptiest: list[int] = mine[np.argsort(counts, kind="stable")].tolist()
        return emptiest

    def slots_in(self, extent: int) -> SlotArray:
        """Slots in use in an extent, ascending."""
        start = extent * self.slots_per_extent
        used = np.flatnonzero(self._used[start : start + self.slots_per_extent]) + start
        return used.astype(np.int32)

    def alloc_beside(self, extent: int, n_slots: int) -> SlotArray:
        """`n_slots` slots in this arena's other extents, the fullest first; there must be as many."""
        others = [one for one in self._open if one != extent]
        others.sort(key=lambda one: -self._n_used[one])
        parts: list[NDArray[np.int64]] = []
        wanted = n_slots
        for one in others:
            start = one * self.slots_per_extent
            free = np.flatnonzero(~self._used[start : start + self.slots_per_extent])[:wanted] + start
            self._used[free] = True
            self._n_used[one] += len(free)
            parts.append(free)
            wanted -= len(free)
        assert not wanted, "the emptiest extent's frames fit into the others"
        self._n_free -= n_slots
        self._open = sorted(one for one in self._open if self._n_used[one] < self.slots_per_extent)
        slots: SlotArray = np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int32)
        return slots

    def _occupy(self, extent: int, slots: NDArray[np.int64]) -> None:
        self._used[slots] = True
        self._n_used[extent] += len(slots)
        if self._n_used[extent] == self.slots_per_extent:
            heapq.heappop(self._open)

    def _alloc_fresh(self, n_slots: int) -> NDArray[np.int64]:
        size = self.slots_per_extent
        taken = self._extents.take(-(-n_slots // size))
        slots = (taken[:, None] * size + np.arange(size)).ravel()[:n_slots]
        self._used[slots] = True
        self._n_used[taken] = size
        left = len(taken) * size - n_slots
        if left:
            self._n_used[taken[-1]] = size - left
            self._n_free += left
            heapq.heappush(self._open, int(taken[-1]))
        return slots

    def free(self, slots: SlotArray) -> None:
        """Give slots back; -1 entries are ignored. Extents that hold no frame any more go back to the
        slab. Raises ValueError, before any change, for a slot that is not in use or is named twice."""
        given = np.asarray(slots, dtype=np.int64)
        given = given[given != NO_SLOT]
        if not len(given):
            return
        if int(given.min()) < 0 or int(given.max()) >= len(self._used):
            foreign = given[(given < 0) | (given >= len(self._used))]
            raise ValueError(f"slots: not of this arena: {foreign[:8]}")
        if not self._used[given].all():
            raise ValueError(f"slots: not in use: {given[~self._used[given]][:8]}")
        if len(np.unique(given)) != len(given):
            raise ValueError("slots: a slot is named twice")
        self._used[given] = False
        self._settle(given)

    def _settle(self, freed: NDArray[np.int64]) -> None:
        extents, counts = np.unique(freed // self.slots_per_extent, return_counts=True)
        was_full = self._n_used[extents] == self.slots_per_extent
        self._n_used[extents] -= counts.astype(np.int32)
        empty = self._n_used[extents] == 0
        for extent in extents[was_full & ~empty].tolist():
            heapq.heappush(self._open, extent)
        self._n_free += len(freed)
        if empty.any():
            gone = extents[empty]
            self._n_free -= len(gone) * self.slots_per_extent
            stay = set(self._open) - set(gone.tolist())
            if len(stay) < len(self._open):
                self._open = sorted(stay)
            self._extents.give_back(gone)

    def offsets(self, slots: SlotArray) -> NDArray[np.int64]:
        """Where the slots begin in the slab, in bytes."""
        extents, places = np.divmod(np.asarray(slots, dtype=np.int64), max(1, self.slots_per_extent))
        begins: NDArray[np.int64] = extents * self._extents.nbytes + places * self.slot_bytes
        return begins

    def addresses(self, slots: SlotArray) -> NDArray[np.uint64]:
        """Where the slots begin in this process."""
        return self.offsets(slots).astype(np.uint64) + np.uint64(self._address)

    def obtainable(self) -> int:
        """Slots that `alloc` could give now."""
        return self._n_free + len(self._extents.free) * self.slots_per_extent

    @property
    def free_slots(self) -> int:
        """Free slots in the extents that this arena has."""
        return self._n_free

    @property
    def used_bytes(self) -> int:
        """Bytes of slots in use."""
        return int(self._n_used.sum()) * self.slot_bytes

    def used_slots(self) -> SlotArray:
        """All slots in use, ascending."""
        return np.flatnonzero(self._used).astype(np.int32)
