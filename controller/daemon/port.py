"""What the daemon needs of the controller; HybridCacheController is it, and tests bring smaller ones.

Effects and errors are described where HybridCacheController defines them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from controller.preserving import Preserving
from controller.requests import (
    Backup,
    BackupOutcome,
    CloseSession,
    EngineSpec,
    Found,
    Load,
    Lookup,
    Prefetch,
    Progress,
    RequestError,
    Status,
)
from controller.retention import Retention


class NotReady(RequestError):  # noqa: N818 - the name is what it is
    """The daemon is starting or stopping: ask again, or go on without."""


class Controller(Protocol):
    """For engines."""

    @property
    def boot_id(self) -> str: ...

    async def start(self) -> None: ...
    async def stop(self, drain_s: float) -> None: ...

    def attach(self, spec: EngineSpec) -> None: ...
    async def detach(self, engine_id: str) -> None: ...

    def lookup(self, request: Lookup) -> Found: ...
    def release(self, engine_id: str, lease_id: str) -> None: ...
    def close_session(self, request: CloseSession) -> bool: ...
    async def load(self, request: Load) -> int: ...
    async def backup(self, request: Backup) -> Mapping[str, BackupOutcome]: ...

    def prefetch(self, request: Prefetch) -> str: ...
    async def wait_prefetch(self, engine_id: str, prefetch_id: str) -> Progress: ...
    async def cancel_prefetch(self, engine_id: str, prefetch_id: str) -> Progress: ...


class Operated(Protocol):
    """For operators."""

    @property
    def retention(self) -> Retention: ...
    @property
    def preserving(self) -> Preserving: ...

    def status(self) -> Status: ...
    def flush(self) -> tuple[int, int]: ...
