"""Every backend under the laws of storage_backends.testing, and the fault wrapper, which must change nothing
while nothing is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage_backends.base import StorageBackend
from storage_backends.faults import FaultyBackend, FaultySpec
from storage_backends.specs import FileSpec, MemorySpec, open_backend
from storage_backends.testing import (
    BOUNDED_OBJECTS,
    OBJECT_BYTES,
    Bench,
    BoundedBackendLaws,
    PersistentBackendLaws,
    StorageBackendLaws,
)

CAPACITY_BYTES = BOUNDED_OBJECTS * OBJECT_BYTES


class TestMemory(StorageBackendLaws, BoundedBackendLaws):
    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        with open_backend(MemorySpec()) as backend:
            yield backend

    @pytest.fixture
    def bounded(self) -> Iterator[StorageBackend]:
        with open_backend(MemorySpec(capacity_bytes=CAPACITY_BYTES)) as backend:
            yield backend


class TestFile(StorageBackendLaws, BoundedBackendLaws, PersistentBackendLaws):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[StorageBackend]:
        with open_backend(FileSpec(path=str(tmp_path / "store"))) as backend:
            yield backend

    @pytest.fixture
    def bounded(self, tmp_path: Path) -> Iterator[StorageBackend]:
        with open_backend(FileSpec(path=str(tmp_path), capacity_bytes=CAPACITY_BYTES)) as backend:
            yield backend

    @pytest.fixture
    def reopened(self, tmp_path: Path) -> Iterator[Callable[[], Bench]]:
        opened: list[StorageBackend] = []

        def again() -> Bench:
            for backend in opened:
                backend.close()
            opened.append(open_backend(FileSpec(path=str(tmp_path), capacity_bytes=CAPACITY_BYTES)))
            return Bench(opened[-1])

        yield again
        for backend in opened:
            backend.close()


class TestFaultyWithoutFaults(StorageBackendLaws):
    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        with FaultyBackend(FaultySpec(inner=MemorySpec())) as backend:
            yield backend
