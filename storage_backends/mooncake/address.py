"""Where a master listens: `host:port`, `[IPv6]:port`, or `etcd://` before several of them.

Owns the written form, and whether anybody takes connections there. Sends nothing.
"""

from __future__ import annotations

import contextlib
import socket
import time

ETCD = "etcd://"


def host_and_port(text: str) -> tuple[str, int]:
    """Raises ValueError that says how to write it."""
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    plain = bare == host and ":" not in bare
    usable = bool(bare) and (plain or host == f"[{bare}]") and not set(bare) & set("/@ \t\n")
    if not usable or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is no address; write host:port or [IPv6]:port")
    return bare, int(port)


def endpoints(text: str) -> list[tuple[str, int]]:
    """One address, or those of `etcd://host:port;host:port`. Raises ValueError."""
    return [host_and_port(part) for part in text.removeprefix(ETCD).split(";")]


def check_names(metadata: str, metrics: str, local_hostname: str) -> None:
    """Raises ValueError. The library ends the process on a metadata server of a kind that it does not know
    (`redis://` is one), so only the known kinds pass."""
    if metadata.startswith("http://"):
        host_and_port(metadata.removeprefix("http://").partition("/")[0])
    elif metadata.startswith(ETCD):
        endpoints(metadata)
    elif metadata != "P2PHANDSHAKE":
        raise ValueError(
            f"`metadata` {metadata!r}: write P2PHANDSHAKE, http://host:port/metadata or etcd://host:port"
        )
    if metrics:
        host_and_port(metrics)
    if local_hostname and (set(local_hostname) & set(":/@[] \t\n")):
        raise ValueError(f"`local_hostname` {local_hostname!r}: write a host name or an IPv4 address alone")


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def takes_connections(text: str, timeout_s: float) -> bool:
    """Whether one of the endpoints accepts a TCP connection within `timeout_s`, all tries together."""
    ends_s = time.monotonic() + timeout_s
    for address in endpoints(text):
        left_s = ends_s - time.monotonic()
        if left_s > 0:
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=left_s):
                return True
    return False
