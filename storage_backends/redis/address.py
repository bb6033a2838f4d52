"""Where a server listens: `host:port`, `[IPv6]:port` or `unix:/path`.

Owns the written form only; touches no network.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    """TCP when `path` is empty, else a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ValueError that says how to write it."""
        if text.startswith("unix:"):
            path = text.removeprefix("unix:")
            if not path.startswith("/"):
                raise ValueError(f"{text!r}: write the socket's absolute path, as in unix:/run/redis.sock")
            return cls(path=path)
        host, _, port = text.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        if not bare or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in bare and bare == host):
            raise ValueError(f"{text!r} is no address; write host:port, [IPv6]:port or unix:/path")
        return cls(bare, int(port))

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
