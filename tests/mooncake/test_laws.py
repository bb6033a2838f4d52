"""The laws of a backend against a real master, with objects in another process's memory, over TCP."""

from __future__ import annotations

import pytest

from storage_backends.base import StorageBackend
from storage_backends.testing import StorageBackendLaws


class TestMooncake(StorageBackendLaws):
    @pytest.fixture
    def backend(self, backend: StorageBackend) -> StorageBackend:
        return backend
