"""The operator's side of the API: what `hicache status`, `lookup` and `flush` say to a running daemon.

Blocking calls with a deadline each. Turns gRPC errors into one sentence that says what to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import grpc

from controller.daemon import wire
from hicache.core.words import TokenArray
from proto.v1 import hicache_pb2 as pb
from proto.v1 import hicache_pb2_grpc as pb_grpc

_MAX_MESSAGE_BYTES = 256 << 20


class DaemonAway(Exception):  # noqa: N818 - the name is what it is
    """Nobody answers at the address."""


class DaemonRefused(Exception):  # noqa: N818
    """The daemon answered, with an error."""


class RemoteDaemon:
    """A connection to a daemon at a socket path or at `host:port`."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        target = f"unix:{os.path.abspath(os.path.expanduser(address))}" if "/" in address else address
        self._channel = grpc.insecure_channel(
            target, options=[("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)]
        )
        # The generated classes carry no annotations.
        self._admin = pb_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]
        self._cache = pb_grpc.HybridCacheStub(self._channel)  # type: ignore[no-untyped-call]

    def status(self) -> pb.StatusReply:
        with self._explained():
            reply: pb.StatusReply = self._admin.Status(pb.StatusRequest(), timeout=self._timeout_s)
        return reply

    def flush(self, request: pb.FlushRequest) -> pb.FlushReply:
        with self._explained():
            reply: pb.FlushReply = self._admin.Flush(request, timeout=self._timeout_s)
        return reply

    def pin(self, request: pb.PinPrefixRequest) -> pb.Retained:
        with self._explained():
            reply: pb.PinPrefixReply = self._admin.PinPrefix(request, timeout=self._timeout_s)
        return reply.retained

    def unpin(self, pin_id: str) -> None:
        with self._explained():
            self._admin.UnpinPrefix(pb.UnpinPrefixRequest(pin_id=pin_id), timeout=self._timeout_s)

    def drain(self, request: pb.DrainRequest) -> pb.DrainReply:
        with self._explained():
            reply: pb.DrainReply = self._admin.Drain(request, timeout=self._timeout_s)
        return reply

    def attach_storage(self, request: pb.AttachStorageRequest) -> pb.AttachStorageReply:
        with self._explained():
            reply: pb.AttachStorageReply = self._admin.AttachStorage(request, timeout=self._timeout_s)
        return reply

    def update_storage(self, request: pb.UpdateStorageRequest) -> None:
        with self._explained():
            self._admin.UpdateStorage(request, timeout=self._timeout_s)

    def detach_storage(self, request: pb.DetachStorageRequest) -> pb.DetachStorageReply:
        with self._explained():
            reply: pb.DetachStorageReply = self._admin.DetachStorage(request, timeout=self._timeout_s)
        return reply

    def lookup(self, engine_id: str, tokens: TokenArray, adapter: str, salt: str) -> pb.LookupPrefixReply:
        """Look a prompt up as an attached engine would, holding nothing: the lease is given back at once."""
        prompt = pb.Prompt(
            engine_id=engine_id,
            request_id="hicache-lookup",
            adapter=adapter,
            salt=salt,
            tokens=wire.packed(tokens),
        )
        with self._explained():
            request = pb.LookupPrefixRequest(prompt=prompt)
            reply: pb.LookupPrefixReply = self._cache.LookupPrefix(request, timeout=self._timeout_s)
            if reply.lease_id:
                release = pb.ReleaseLeaseRequest(engine_id=engine_id, lease_id=reply.lease_id)
                self._cache.ReleaseLease(release, timeout=self._timeout_s)
        return reply

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> RemoteDaemon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forbidden(self) -> bool:
        """Whether there is a socket that this user may not use."""
        path = os.path.expanduser(self._address)
        try:
            return "/" in path and not os.access(path, os.W_OK) and bool(os.stat(path))
        except PermissionError:
            return True
        except OSError:
            return False

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            code, text = error.code(), error.details()
            if code is grpc.StatusCode.UNAVAILABLE and "not ready" not in (text or ""):
                if self._forbidden():
                    raise DaemonAway(
                        f"{self._address}: permission denied; run as the user that the daemon runs as"
                    ) from error
                raise DaemonAway(
                    f"no daemon answers at {self._address}; start one with `hicache serve`, "
                    "or name its address with --address"
                ) from error
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DaemonAway(
                    f"the daemon at {self._address} did not answer within {self._timeout_s} s; "
                    "see its log, or allow more with --timeout"
                ) from error
            raise DaemonRefused(f"{text} ({code.name})") from error
