"""Configuration: one YAML file, every key declared once with unit, default, bound and meaning.

Decides what a valid file is; every complaint names the key's path and the remedy. Opens nothing, starts
nothing. Of the environment it reads only what a storage backend's text names as `${NAME}`.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import os
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import yaml
from msgspec import Meta, Struct

from controller.daemon.complaints import explained, joined
from controller.settings import ControllerSettings, HostShares
from storage_backends.specs import BackendSpec, FileSpec

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_UNITS = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_UNITS |= {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")
_IN_BACKEND = re.compile(r"(^|\.)backend\.")
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
SOCKET_PATH_BYTES = 107
"""Longest path a Unix socket can have (Linux, sun_path less its end mark)."""
FD_SUFFIX, CLAIM_SUFFIX = ".fds", ".lock"

Seconds = Annotated[float, Meta(gt=0, le=3600)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class ConfigError(Exception):
    """A file that cannot be used; the message names the key and the remedy."""


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all: frozen, by keyword, unknown keys refused. Sizes in bytes take an integer or text
    such as `4GiB` (KiB, MiB, GiB, TiB; kB, MB, GB, TB)."""


class Server(Section, frozen=True, kw_only=True):
    """The gRPC server, and how engines' lives are watched."""

    socket: str = "/run/hicache/hicache.sock"
    """Path of the Unix socket, absolute or with `~`. Beside it stand `<socket>.fds` (engines hand over
    memory there) and `<socket>.lock`. Its directory is created with mode 0700 if missing."""
    tcp: str | None = None
    """Also listen on `host:port`. Loopback only: without TLS nothing else is accepted."""
    max_message_bytes: Annotated[int, Meta(ge=1 * MIB, le=256 * MIB)] = 32 * MIB
    """Largest message either way: 32 MiB is a prompt of 8 million tokens."""
    max_requests_in_flight: Annotated[int, Meta(ge=1, le=65536)] = 256
    """Most unanswered requests on one engine's stream; more are answered RESOURCE_EXHAUSTED."""
    heartbeat_interval_s: Seconds = 2.0
    """How often an engine must be heard at least; told to it when it attaches."""
    heartbeat_timeout_s: Seconds = 10.0
    """Silence after which an engine counts as gone. At least twice the interval."""
    grace_s: Seconds = 5.0
    """Longest time that running calls and transfers get when the daemon is asked to stop."""


class Quota(Section, frozen=True, kw_only=True):
    """The most that one tenant may have of host memory."""

    salt: str
    """The tenant, as its prompts name it; empty for prompts without a salt."""
    capacity: Annotated[int, Meta(ge=1, le=64 * TIB)]
    """Bytes of frames; at most the host's capacity. Beyond it the tenant's own coldest pages make room."""


class Host(Section, frozen=True, kw_only=True):
    """Host memory, the second tier."""

    capacity: Annotated[int, Meta(ge=1 * MIB, le=64 * TIB)] = 4 * GIB
    """Bytes of host memory for frames, all models and components together; taken whole at start."""
    extent: Annotated[int, Meta(ge=4 * KIB, le=1 * TIB)] | None = None
    """Bytes of the equal pieces in which that memory goes to components. Leave it out: the first layout
    that attaches decides. Set it when models with much larger frames will attach later."""
    lease_s: Seconds = 30.0
    """How long a lookup's pages stay pinned when the engine neither loads nor releases them."""
    retain_share: Annotated[float, Meta(ge=0, le=0.9)] = 0.5
    """Largest part of host memory that prefixes pinned by an operator may hold, all together."""
    mode: Literal["cache", "staging"] = "cache"
    """`cache`: frames stay until room is needed. `staging`: they stay only on their way between engines and
    storage, which must take writes."""
    floors: dict[str, Annotated[float, Meta(gt=0, lt=1)]] = {}
    """By component: the part of host memory that other components never take from it. Together below 1."""
    quotas: tuple[Quota, ...] = ()
    """Tenants with a bound; the others share what there is."""


class Transfers(Section, frozen=True, kw_only=True):
    """Copies between the engines' memory and host memory."""

    threads: Annotated[int, Meta(ge=1, le=64)] = 2
    """Copy threads."""
    chunk_bytes: Annotated[int, Meta(ge=64 * KIB, le=1 * GIB)] = 4 * MIB
    """Largest piece of a store that a load has to wait for."""
    timeout_s: Seconds = 10.0
    """Longest time for one load-back or backup, queueing included."""
    engine: Literal["auto", "cpu", "cuda", "cuda-kernel"] = "auto"
    """What copies to and from GPU memory. `auto`: the cheaper of the two below by measurement on each
    device, none without a GPU. `cpu`: use no GPU. `cuda`: the driver's copies. `cuda-kernel`: a kernel."""


class TierEntry(Section, frozen=True, kw_only=True):
    """One storage tier: a backend, and what it is used for."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    """What status, metrics and commands call it; empty for the backend's kind. Each name once."""
    backend: BackendSpec
    """Where frames are stored; `kind` says what it is. `${NAME}` in its texts stands for the daemon's
    environment variable of that name, so that one text serves many nodes."""
    read: bool = True
    """Whether frames are looked for here."""
    write: bool = True
    """Whether frames are written here."""
    required: bool = True
    """Whether the daemon refuses to start, or the tier to be attached, when the backend cannot be opened.
    Otherwise the tier is there, health says what is wrong, and opening is tried again and again."""


class Storage(Section, frozen=True, kw_only=True):
    """The third tier. Leave the section out to run without."""

    tiers: Annotated[tuple[TierEntry, ...], Meta(min_length=1, max_length=16)]
    """Where frames are stored: the first is asked first, each that writes gets everything."""
    prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "hicache"
    """First part of every storage key: letters, digits, `.`, `_`, `-`."""
    timeout_s: Seconds = 2.0
    """Longest time for one batch; past it the batch counts as missed."""
    batch_bytes: Annotated[int, Meta(ge=64 * KIB, le=1 * GIB)] = 16 * MIB
    """Most bytes in one batch."""
    write_queue_bytes: Annotated[int, Meta(ge=1 * MIB, le=1 * TIB)] = 256 * MIB
    """Most bytes waiting to be written; beyond it writes are dropped and counted."""
    write_attempts: Annotated[int, Meta(ge=1, le=100)] = 5
    """How often one frame's write is tried before it is given up."""


class Prefetch(Section, frozen=True, kw_only=True):
    """Bringing frames from storage to host memory before they are needed."""

    threshold_pages: Annotated[int, Meta(ge=1)] = 1
    """A prefetch that would deepen the boundary by fewer pages is not worth its reads."""
    base_s: Annotated[float, Meta(ge=0, le=3600)] = 1.0
    """Deadline of a prefetch: this, ..."""
    per_1k_tokens_s: Annotated[float, Meta(ge=0, le=3600)] = 0.25
    """... plus this for every 1024 tokens, ..."""
    max_s: Seconds = 30.0
    """... but never more than this."""
    host_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Largest share of host memory that prefetches may hold, until their engine looks up."""


class Events(Section, frozen=True, kw_only=True):
    """What came and went in host memory and storage, for routers that watch."""

    keep_pages: Annotated[int, Meta(ge=0, le=1 << 24)] = 65_536
    """Pages whose events can be read again by a watcher that was away; 0 turns events off."""


class Http(Section, frozen=True, kw_only=True):
    """Metrics, health and the status page. `http: null` turns them off."""

    address: str = "127.0.0.1"
    """IP address to listen on. Read-only pages without a password: keep them off public networks."""
    port: Port = 9410
    """TCP port; 0 picks a free one, shown in the log."""


class Log(Section, frozen=True, kw_only=True):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level written."""
    format: Literal["text", "json"] = "text"
    """For people, or one JSON object a line."""
    max_per_event: Annotated[int, Meta(ge=1)] = 20
    """Most lines of one event in ten seconds; what is left out is counted in the next line."""


class Config(Section, frozen=True, kw_only=True):
    """The whole file."""

    server: Server = Server()
    host: Host = Host()
    transfers: Transfers = Transfers()
    storage: Storage | None = None
    prefetch: Prefetch = Prefetch()
    events: Events = Events()
    http: Http | None = Http()
    log: Log = Log()

    def controller_settings(self) -> ControllerSettings:
        """The part that the controller needs, in its own type."""
        settings = ControllerSettings(
            lease_s=self.host.lease_s,
            host_shares=HostShares(
                floors=self.host.floors,
                quotas_bytes={quota.salt: quota.capacity for quota in self.host.quotas},
            ),
            staging=self.host.mode == "staging",
            retain_share=self.host.retain_share,
            events_pages=self.events.keep_pages,
            copy_timeout_s=self.transfers.timeout_s,
            prefetch_threshold_pages=self.prefetch.threshold_pages,
            prefetch_base_s=self.prefetch.base_s,
            prefetch_per_1k_tokens_s=self.prefetch.per_1k_tokens_s,
            prefetch_max_s=self.prefetch.max_s,
            prefetch_host_share=self.prefetch.host_share,
        )
        if self.storage is None:
            return settings
        return dataclasses.replace(
            settings,
            storage_prefix=self.storage.prefix,
            storage_timeout_s=self.storage.timeout_s,
            storage_batch_bytes=self.storage.batch_bytes,
            write_queue_bytes=self.storage.write_queue_bytes,
            write_attempts=self.storage.write_attempts,
        )


# ---- reading ----------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice instead of keeping the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"{key}: given twice (line {line}); keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep)


def load(path: Path) -> Config:
    """Read and check a file. Raises ConfigError; the order of keys never matters."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); name a readable YAML file") from error
    return parse(text)


def parse(text: str) -> Config:
    """Check YAML text. Raises ConfigError."""
    try:
        raw: object = _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {error}") from error
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError(f"the file is a {type(raw).__name__}; write sections such as `server:` at its top")
    try:
        config = msgspec.convert(_plain(raw, ""), Config)
    except msgspec.ValidationError as error:
        raise ConfigError(explained(str(error), Config)) from error
    return _checked(config)


def parse_tier(name: str, backend: str, *, read: bool, write: bool, required: bool) -> TierEntry:
    """Check a storage tier whose backend is YAML or JSON text, as under `storage.tiers`. Raises
    ConfigError."""
    try:
        raw: object = _Loader(backend).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"backend: not YAML: {error}") from error
    given = {"name": name, "backend": raw, "read": read, "write": write, "required": required}
    try:
        entry = msgspec.convert(_plain(given, ""), TierEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(explained(str(error), TierEntry)) from error
    return _checked_tier(entry, "")


def _plain(value: object, path: str) -> object:
    """Sizes as integers; keys as text; variables filled in; no NaN or infinity, which would pass every
    bound."""
    if isinstance(value, dict):
        return {str(key): _plain(item, joined(path, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: {value} is not a usable number; give a finite one")
    if isinstance(value, str):
        text = _filled(value, path) if _IN_BACKEND.search(path) else value
        return parse_size(text, path) if _is_size(path.rpartition(".")[2]) else text
    return value


def _filled(text: str, path: str) -> str:
    """The text with `${NAME}` as this node has it."""

    def value(found: re.Match[str]) -> str:
        name = found.group(1)
        if name not in os.environ:
            raise ConfigError(f"{path}: the daemon's environment has no variable {name!r}; set it")
        return os.environ[name]

    return _VARIABLE.sub(value, text)


def _is_size(key: str) -> bool:
    return key.endswith("_bytes") or key in ("capacity", "extent")


def parse_size(text: str, path: str) -> int:
    """Bytes in `4GiB`, `1.5 MiB`, `512`. Raises ConfigError naming the path."""
    found = _SIZE.match(text)
    unit = _UNITS.get(found.group(2)) if found else None
    if not found or unit is None:
        raise ConfigError(f"{path}: {text!r} is not a size; write an integer of bytes or text such as 4GiB")
    return round(float(found.group(1)) * unit) if "." in found.group(1) else int(found.group(1)) * unit


def format_size(nbytes: int) -> int | str:
    """The shortest exact way to write a size: `4GiB`, or the plain number."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return nbytes


def kind_of(spec: BackendSpec) -> str:
    """What the file calls this kind of backend."""
    return str(spec.__struct_config__.tag)


# ---- checks across keys -----------------------------------------------------------------------------


def _checked(config: Config) -> Config:
    """Expand paths, and check what one key's bound cannot say."""
    server, storage, http = config.server, config.storage, config.http
    server = msgspec.structs.replace(server, socket=_absolute(server.socket, "server.socket"))
    longest = len(os.fsencode(server.socket + CLAIM_SUFFIX))
    if longest > SOCKET_PATH_BYTES:
        raise ConfigError(
            f"server.socket: {server.socket!r} is too long for a Unix socket ({longest} bytes with its "
            f"suffix, {SOCKET_PATH_BYTES} at most); choose a shorter directory"
        )
    if server.heartbeat_timeout_s < 2 * server.heartbeat_interval_s:
        raise ConfigError(
            f"server.heartbeat_timeout_s: {server.heartbeat_timeout_s} is less than twice "
            f"server.heartbeat_interval_s ({server.heartbeat_interval_s}); one late beat would end an engine"
        )
    if server.tcp is not None:
        _check_loopback(server.tcp)
    _check_shares(config.host)
    _check_mode(config.host, storage)
    if storage is not None:
        tiers = tuple(_checked_tier(one, f"storage.tiers[{i}]") for i, one in enumerate(storage.tiers))
        for i, one in enumerate(tiers):
            if any(one.name == other.name for other in tiers[:i]):
                raise ConfigError(f"storage.tiers[{i}].name: {one.name!r} is taken; name each tier once")
        storage = msgspec.structs.replace(storage, tiers=tiers)
    if http is not None:
        try:
            ipaddress.ip_address(http.address)
        except ValueError as error:
            raise ConfigError(
                f"http.address: {http.address!r} is not an IP address; try 127.0.0.1"
            ) from error
    if config.prefetch.base_s > config.prefetch.max_s:
        raise ConfigError(
            f"prefetch.base_s: {config.prefetch.base_s} is above prefetch.max_s ({config.prefetch.max_s}); "
            "raise the maximum or lower the base"
        )
    return msgspec.structs.replace(config, server=server, storage=storage)


def _check_shares(host: Host) -> None:
    if sum(host.floors.values()) >= 1:
        raise ConfigError(
            f"host.floors: together {sum(host.floors.values()):g}; leave some for need, below 1"
        )
    for i, quota in enumerate(host.quotas):
        if any(quota.salt == other.salt for other in host.quotas[:i]):
            raise ConfigError(f"host.quotas[{i}].salt: {quota.salt!r} is named twice; one quota a tenant")
        if quota.capacity > host.capacity:
            raise ConfigError(
                f"host.quotas[{i}].capacity: {format_size(quota.capacity)} is above host.capacity "
                f"({format_size(host.capacity)}); lower it, or leave the tenant out"
            )


def _check_mode(host: Host, storage: Storage | None) -> None:
    if host.mode == "staging" and not any(tier.write for tier in (storage.tiers if storage else ())):
        raise ConfigError(
            "host.mode: staging passes everything on to storage, and no tier under storage.tiers takes "
            "writes; add one, or use cache"
        )


def _checked_tier(tier: TierEntry, path: str) -> TierEntry:
    """With its name, and its backend's path, as they are used."""
    backend = tier.backend
    if isinstance(backend, FileSpec):
        absolute = _absolute(backend.path, joined(path, "backend.path"))
        backend = msgspec.structs.replace(backend, path=absolute)
    return msgspec.structs.replace(tier, name=tier.name or kind_of(backend), backend=backend)


def _absolute(path: str, key: str) -> str:
    expanded = os.path.expanduser(path)
    if not os.path.isabs(expanded) or "\0" in expanded:
        raise ConfigError(f"{key}: {path!r} is not an absolute path; start it with / or ~/")
    return os.path.normpath(expanded)


def parse_tcp(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, IPv6 hosts in brackets. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"server.tcp: {address!r} is not host:port; write for instance 127.0.0.1:7400")
    return host, int(port)


def _check_loopback(address: str) -> None:
    host, _ = parse_tcp(address)
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"server.tcp: {host!r} is not a loopback address; TLS is not available yet, so listen on "
            "127.0.0.1 or use server.socket"
        )


# ---- writing ----------------------------------------------------------------------------------------


def dump(config: Config) -> str:
    """The effective configuration as YAML that loads to the same value."""
    text: str = yaml.safe_dump(_readable(msgspec.to_builtins(config), ""), sort_keys=False, width=100)
    return text


def _readable(value: object, key: str) -> object:
    if isinstance(value, dict):
        return {name: _readable(item, str(name)) for name, item in value.items()}
    if isinstance(value, int) and not isinstance(value, bool) and _is_size(key):
        return format_size(value)
    return value
