"""Opens connections: reach, TLS, who we are, which database, and whether the server is the one we want.

Owns credentials and certificates. They are read anew for each connection where they lie in a file, so a
changed password needs no restart. Never shows a password in a message.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from storage_backends.base import StorageError
from storage_backends.redis.address import Address
from storage_backends.redis.connection import Connection, Reply, encode
from storage_backends.redis.deadline import Deadline
from storage_backends.redis.errors import ErrorReply, Late, Lost, RedisTrouble, Refused
from storage_backends.redis.stream import open_stream
from storage_backends.specs import RedisSpec


class Connector:
    """How to connect to any server of one storage."""

    def __init__(self, spec: RedisSpec) -> None:
        """Raises StorageError when a certificate or the password cannot be had."""
        self._spec = spec
        self._tls = _tls_context(spec) if spec.tls else None
        self._password()

    def open(self, address: Address, deadline: Deadline) -> Connection:
        """A connection for keys, within `connect_timeout_s`. Raises Lost, Late or Refused."""
        commands: list[tuple[bytes | str | int, ...]] = [*self._introduction()]
        if self._spec.db:
            commands.append(("SELECT", self._spec.db))
        if self._spec.mode == "sentinel":
            commands.append(("ROLE",))
        connection, replies = self._opened(address, deadline, commands)
        if self._spec.mode == "sentinel" and not _is_primary(replies[-1]):
            connection.close()
            raise Lost(f"{address} is not the primary: its Sentinels have not agreed on another yet")
        return connection

    def open_sentinel(self, address: Address, deadline: Deadline) -> Connection:
        """A connection to a Sentinel. Raises as `open`."""
        commands = self._introduction() if self._spec.sentinel_auth else []
        return self._opened(address, deadline, commands)[0]

    def _opened(
        self, address: Address, deadline: Deadline, commands: list[tuple[bytes | str | int, ...]]
    ) -> tuple[Connection, list[Reply]]:
        """PING is always asked, so that a server that accepts and then says nothing is found out here."""
        deadline = deadline.sooner(self._spec.connect_timeout_s)
        connection = Connection(open_stream(address, self._tls, deadline))
        try:
            commands = [*commands, ("PING",)]
            connection.send([b"".join(encode(*command) for command in commands)], len(commands), deadline)
            replies = [connection.reply(deadline) for _ in commands]
        except Late as error:
            connection.close()
            raise Late(
                f"{address} accepts connections and does not answer within {deadline.timeout_s:g} s: it is "
                "frozen or overloaded"
            ) from error
        except RedisTrouble:
            connection.close()
            raise
        for reply in replies:
            if isinstance(reply, ErrorReply):
                connection.close()
                raise Refused(str(address), reply)
        return connection, replies[:-1]

    def _introduction(self) -> list[tuple[bytes | str | int, ...]]:
        password = self._password()
        if not password:
            return []
        return [("AUTH", self._spec.username, password) if self._spec.username else ("AUTH", password)]

    def _password(self) -> str:
        """ "" when none is set. Raises StorageError when it is not where the spec says."""
        spec = self._spec
        if spec.password_env:
            if spec.password_env not in os.environ:
                raise StorageError(
                    f"the environment variable {spec.password_env} that `password_env` names is not set for "
                    "the daemon: set it where the daemon is started"
                )
            return os.environ[spec.password_env]
        if spec.password_file:
            try:
                return Path(spec.password_file).expanduser().read_text().rstrip("\r\n")
            except OSError as error:
                raise StorageError(
                    f"`password_file` {spec.password_file} cannot be read: {error.strerror}; let the "
                    "daemon's user read it"
                ) from error
        return ""


def _is_primary(role: Reply) -> bool:
    return isinstance(role, list) and bool(role) and role[0] == b"master"


def _tls_context(spec: RedisSpec) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=spec.tls_ca or None)
        if spec.tls_cert:
            context.load_cert_chain(spec.tls_cert, spec.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        named = ", ".join(path for path in (spec.tls_ca, spec.tls_cert, spec.tls_key) if path)
        raise StorageError(
            f"TLS cannot be set up with {named or 'the system certificates'}: {error}; check `tls_ca`, "
            "`tls_cert` and `tls_key`"
        ) from error
    if not spec.tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
