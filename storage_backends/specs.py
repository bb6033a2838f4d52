"""What a backend needs to be opened: one frozen struct per kind, also its section of the YAML file.

Opening is in `open_backend`; a spec itself touches nothing.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from storage_backends.base import StorageBackend


class FileSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="file", tag_field="kind"):
    """A local directory: the embedded default."""

    path: str
    """Directory for the objects; created with mode 0700 if missing. `~` is expanded."""
    capacity_bytes: Annotated[int, Meta(ge=1 << 20)] = 16 << 30
    """Most bytes of objects kept; the least recently used go first."""


class MemorySpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="memory", tag_field="kind"):
    """A dictionary in the worker process: the reference, for tests and demos."""

    capacity_bytes: Annotated[int, Meta(ge=1 << 10)] = 1 << 30
    """Most bytes of objects kept; the least recently used go first."""


BackendSpec: TypeAlias = FileSpec | MemorySpec


def open_backend(spec: BackendSpec) -> StorageBackend:
    """Open the backend a spec describes. Raises StorageError with the remedy when that cannot be done."""
    match spec:
        case FileSpec():
            from storage_backends.file import FileBackend

            return FileBackend(spec)
        case MemorySpec():
            from storage_backends.memory import MemoryBackend

            return MemoryBackend(spec)
