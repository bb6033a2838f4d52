"""What a backend needs to be opened: one frozen struct per kind, also its section of the YAML file.

Opening is in `open_backend`; a spec itself touches nothing.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from storage_backends.base import StorageBackend


class Spec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of all: frozen, by keyword, unknown keys refused; `kind` in YAML says which."""


class FileSpec(Spec, frozen=True, kw_only=True, tag="file"):
    """A local directory: the embedded default."""

    path: str
    """Directory for the objects; created with mode 0700 if missing. `~` is expanded."""
    capacity_bytes: Annotated[int, Meta(ge=1 << 20)] = 16 << 30
    """Most bytes of objects kept; the least recently used go first."""


class MemorySpec(Spec, frozen=True, kw_only=True, tag="memory"):
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
