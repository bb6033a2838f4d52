"""The Mooncake library: its environment, its import and the shape of what we call. The only module that
imports it.

Decides the environment variables, which the library reads once, when it is imported or first set up.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module, metadata
from typing import Protocol, cast

from storage_backends.base import StorageError
from storage_backends.specs import MooncakeSpec

LANES_PER_PEER = 4
"""TCP connections to one peer; each carries one object at a time. More were no faster, and slower for small
objects."""


class Store(Protocol):
    """What we use of `mooncake.store.MooncakeDistributedStore`. Calls before `setup`, after `close` or
    during it crash the process; `setup` and `close` hold the GIL."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        /,
    ) -> int: ...
    def register_buffer(self, address: int, nbytes: int, /) -> int: ...
    def batch_is_exist(self, keys: list[str], /) -> list[int]: ...
    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int], /) -> list[int]: ...
    def batch_put_from(
        self, keys: list[str], addresses: list[int], sizes: list[int], config: object, /
    ) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool, /) -> list[int]: ...
    def get_size(self, key: str, /) -> int: ...
    def health_check(self) -> int: ...
    def close(self) -> int: ...


class Library:
    """The imported library, for one spec."""

    def __init__(self, spec: MooncakeSpec) -> None:
        """Raises StorageError with the remedy when it cannot be imported."""
        os.environ.update(environment(spec))
        try:
            self._module = import_module("mooncake.store")
        except ImportError as error:
            raise StorageError(_remedy(str(error))) from error
        _warn_of_two_owners()

    def store(self) -> Store:
        """A store that is not set up yet."""
        return cast(Store, self._module.MooncakeDistributedStore())

    def replicate_config(self, spec: MooncakeSpec) -> object:
        """How what we write is placed. Raises StorageError where this release cannot do what is asked."""
        config = self._module.ReplicateConfig()
        config.replica_num = spec.replicas
        if spec.preferred_segment:
            config.preferred_segment = spec.preferred_segment
        if spec.soft_pin:
            try:
                config.soft_pin_action = self._module.SoftPinAction.ENABLE
            except AttributeError as error:
                raise StorageError(
                    "this release of Mooncake has no soft pins with an end: leave `soft_pin` out"
                ) from error
            if spec.soft_pin_ttl_s:
                config.soft_pin_ttl_ms = round(1000 * spec.soft_pin_ttl_s)
        return config


def environment(spec: MooncakeSpec) -> dict[str, str]:
    """What the library must find. Its defaults wait 30 s for a peer, 90 s for a master that refuses, and
    fail for good beyond some 2000 objects in flight to one peer."""
    return {
        "MC_RPC_TIMEOUT_MS": str(round(1000 * spec.master_timeout_s)),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(round(1000 * spec.master_timeout_s)),
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_TCP_STATUS_TIMEOUT_SEC": str(spec.transfer_timeout_s),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(spec.transfer_timeout_s),
        "MC_TCP_LANES_PER_PEER": str(LANES_PER_PEER),
        "MC_TCP_ADMISSION_TIMEOUT_MS": "300",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
        "MC_LOG_LEVEL": "ERROR",
    }


def master_binary() -> str:
    """Path of the master that the package carries. Raises StorageError."""
    try:
        package = import_module("mooncake")
    except ImportError as error:
        raise StorageError(_remedy(str(error))) from error
    path = os.path.join(os.path.dirname(str(package.__file__)), "mooncake_master")
    if not os.access(path, os.X_OK):
        raise StorageError(f"{path} is missing or cannot be run: install the package Mooncake again")
    return path


def _remedy(said: str) -> str:
    for library, package in (("libibverbs", "libibverbs1"), ("libnuma", "libnuma1"), ("libcurl", "libcurl4")):
        if library in said:
            return f"Mooncake cannot be loaded, {library} is missing: apt-get install {package}"
    if "libcuda" in said or "libcudart" in said:
        return "this Mooncake was built for CUDA: pip install mooncake-transfer-engine-non-cuda instead"
    if sys.version_info >= (3, 14):
        return "Mooncake has no packages for Python 3.14 or newer: run the daemon with an older one"
    return f"Mooncake cannot be loaded ({said}): pip install 'hicache[mooncake]'"


def _warn_of_two_owners() -> None:
    """Two packages own the same files; the one installed last wins, and removing one breaks the other."""
    owners = sorted(set(metadata.packages_distributions().get("mooncake", ())))
    if len(owners) > 1:
        print(f"mooncake: installed twice, by {' and '.join(owners)}: remove one", file=sys.stderr)


def takes_key(key: str) -> bool:
    """Whether the library takes this key: text that UTF-8 can carry, not empty."""
    if key.isascii():
        return bool(key)
    try:
        return bool(key.encode())
    except UnicodeEncodeError:
        return False
