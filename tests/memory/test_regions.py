"""Mapping an engine's memory: only what cannot kill the reader is accepted."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.memory.regions import RegionError, map_region

NBYTES = 3 * mmap.PAGESIZE
SHRINK = fcntl.F_SEAL_SHRINK


def memfd(nbytes: int = NBYTES, seals: int = SHRINK) -> int:
    fd = os.memfd_create("hicache-test-region", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.fixture
def fd() -> Iterator[int]:
    fd = memfd()
    yield fd
    os.close(fd)


def test_both_sides_see_each_others_writes(fd: int) -> None:
    with map_region(fd, NBYTES) as region:
        assert region.nbytes == NBYTES
        assert region.mapped.address == region.address
        os.pwrite(fd, b"engine", 10)
        assert ctypes.string_at(region.address + 10, 6) == b"engine"
        ctypes.memmove(region.address + NBYTES - 6, b"daemon", 6)
        assert os.pread(fd, 6, NBYTES - 6) == b"daemon"


def test_the_descriptor_may_be_closed_at_once() -> None:
    fd = memfd()
    with map_region(fd, NBYTES) as region:
        os.close(fd)
        ctypes.memmove(region.address, b"still here", 10)
        assert ctypes.string_at(region.address, 10) == b"still here"


def test_part_of_a_file_can_be_mapped(fd: int) -> None:
    with map_region(fd, 100) as region:
        assert region.nbytes == 100


def test_a_file_that_can_shrink_is_refused_with_the_remedy() -> None:
    fd = memfd(seals=fcntl.F_SEAL_GROW)
    with pytest.raises(RegionError, match="F_SEAL_SHRINK"):
        map_region(fd, NBYTES)
    os.close(fd)


def test_a_short_file_is_refused_with_both_sizes(fd: int) -> None:
    with pytest.raises(RegionError, match=f"{NBYTES + 1} bytes were announced, the file has {NBYTES}"):
        map_region(fd, NBYTES + 1)


@pytest.mark.parametrize("nbytes", [0, -5])
def test_an_empty_region_is_refused(fd: int, nbytes: int) -> None:
    with pytest.raises(RegionError, match="at least one byte"):
        map_region(fd, nbytes)


def test_a_file_sealed_against_writing_is_refused() -> None:
    fd = memfd(seals=SHRINK | fcntl.F_SEAL_WRITE)
    with pytest.raises(RegionError, match="F_SEAL_WRITE"):
        map_region(fd, NBYTES)
    os.close(fd)


def test_an_ordinary_file_a_pipe_and_a_closed_descriptor_are_refused(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(NBYTES)
        for fd in (file.fileno(), reader, 10**6):
            with pytest.raises(RegionError, match="memfd"):
                map_region(fd, NBYTES)
    os.close(reader)
    os.close(writer)


def test_a_descriptor_opened_for_reading_only_is_refused(fd: int) -> None:
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    with pytest.raises(RegionError, match="reading and writing"):
        map_region(reader, NBYTES)
    os.close(reader)


def test_nothing_is_left_behind(fd: int) -> None:
    def left() -> tuple[int, int]:
        gc.collect()  # what other tests left to it
        maps = Path("/proc/self/maps").read_text().count("hicache-test-region")
        return len(os.listdir("/proc/self/fd")), maps

    before = left()
    for _ in range(20):
        region = map_region(fd, NBYTES)
        region.close()
        region.close()
        with pytest.raises(RegionError):
            map_region(fd, NBYTES + 1)
    fds, maps = left()
    assert (fds <= before[0], maps) == (True, before[1])
