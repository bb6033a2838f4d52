"""The laws of a backend against a real master: with objects in another process's memory, over TCP, and with
objects in our own segment, which the library copies."""

from __future__ import annotations

import pytest

from storage_backends.base import StorageBackend
from storage_backends.testing import ObjectLaws, StorageBackendLaws, ThreadLaws


class TestMooncake(StorageBackendLaws):
    @pytest.fixture
    def backend(self, backend: StorageBackend) -> StorageBackend:
        return backend


class TestOwnSegment(ObjectLaws, ThreadLaws):
    @pytest.fixture
    def backend(self, own_segment: StorageBackend) -> StorageBackend:
        return own_segment
