"""Client: an engine's connection to the daemon, for life.

Owns the background thread that attaches, reconnects with backoff for ever and sees a restarted daemon.
The verbs may be called from any thread, never wait past their deadline and never raise the daemon's
trouble: what cannot be had reads as a miss. Never touches the engine's memory.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol

import grpc

from hicache.client import wire
from hicache.client.connection import Call, Connection
from hicache.client.cuda import CudaRegion
from hicache.client.daemon_process import DaemonProcess
from hicache.client.handover import hand_over
from hicache.client.messages import (
    ALONE,
    Found,
    LayerCells,
    Lease,
    Placement,
    PrefetchPolicy,
    Prompt,
    RankPlace,
    ReadyEvent,
)
from hicache.client.prefetching import Prefetching
from hicache.client.regions import SharedRegion
from hicache.client.tickets import Ticket
from hicache.core.layout import Layout
from hicache.core.words import BoolArray
from proto.v1 import hicache_pb2 as pb

log = logging.getLogger(__name__)

_ATTACH = "/hicache.v1.HybridCache/Attach"
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must not inherit an old one's backoff
    ("grpc.enable_http_proxy", 0),
)
_HANDOVER_TIMEOUT_S = 2.0
_BACKOFF_S = 0.05
"""First pause before another try; it doubles up to one of these:"""
_AWAY_PAUSE_S = 0.5
_REFUSED_PAUSE_S = 5.0


class _Refused(Exception):  # noqa: N818 - the name is what it is
    """The daemon does not accept this engine: only a change of one of the two can help."""


class Asking:
    """A lookup that was sent. Made by `Client.ask`."""

    def __init__(self, connection: Connection, call: Call) -> None:
        self._connection = connection
        self.call = call

    def found(self) -> Found | None:
        """What was found, now that the caller's deadline has passed or the answer is there; None for a
        refusal or no answer: the daemon is then asked nothing more until it says something, and what it
        still finds is released."""
        if not self.call.ended:
            self._connection.late()
            self.give_up()
            return None
        reply = self.call.reply
        if reply is None or not reply.HasField("lookup_prefix"):
            return None
        return wire.found_from(reply.lookup_prefix, self._connection.attachment)

    def give_up(self) -> None:
        """Nobody takes the answer: release what it finds."""
        self.call.then(partial(_release_found, self._connection))


class _Stream(Protocol):
    """What we use of a bidirectional gRPC call."""

    def __next__(self) -> pb.DaemonMessage: ...

    def cancel(self) -> object: ...


class Client:
    """Attaches the engine to the daemon at `address` and keeps it attached until `close`.

    `regions` must outlive the client. `engine_id` is unique among the daemon's engines and stays the
    same across reconnections. `silence_s`: a daemon that says nothing for that long is attached anew.
    """

    def __init__(
        self,
        address: str,
        *,
        engine_id: str,
        model: str,
        revision: str = "",
        layout: Layout,
        regions: Sequence[SharedRegion | CudaRegion],
        place: RankPlace = ALONE,
        silence_s: float = 15.0,
    ) -> None:
        """Raises LayoutError for a layout that no daemon would take, ValueError for an address that is
        not a unix socket (memory can be handed over through no other). Does not wait for the daemon."""
        self._socket = _socket_path(address)
        layout.validate([region.nbytes for region in regions])
        self._engine = (engine_id, model, revision, layout)
        self._place = place
        self._regions = tuple(regions)
        self._silence_s = silence_s
        self._mutex = threading.Lock()
        self._stream: _Stream | None = None
        self._connection: Connection | None = None
        self._daemon: DaemonProcess | None = None
        self._attached = threading.Event()
        self._closing = threading.Event()
        self._epoch = 0
        self._attachments = 0
        self._was_attached = False
        self._problem = "the daemon has not answered yet"
        self._logged = ""
        self._thread = threading.Thread(target=self._keep_attached, name="hicache-client", daemon=True)
        self._thread.start()

    # ---- how it stands ----

    @property
    def ready(self) -> bool:
        """Whether asking is worth it: attached, and the daemon is not keeping a caller waiting."""
        connection = self._connection
        return connection is not None and not connection.quiet

    @property
    def epoch(self) -> int:
        """Grows whenever another daemon process answers: what an earlier one held in host memory is gone."""
        return self._epoch

    @property
    def problem(self) -> str:
        """Why lookups read as misses; empty while all is well."""
        connection = self._connection
        if connection is None:
            return self._problem
        return "the daemon does not answer in time" if connection.quiet else ""

    def wait_attached(self, timeout_s: float) -> bool:
        """Whether the engine is attached, waited for at most `timeout_s`. For start-up and tests."""
        return self._attached.wait(timeout_s)

    # ---- the verbs ----

    def lookup(
        self,
        prompt: Prompt,
        *,
        device: Mapping[str, BoolArray],
        limit_pages: int,
        timeout_s: float,
    ) -> Found | None:
        """The deepest boundary over L1 (`device`: per component, the pages READY there) and L2; None
        when the daemon is away, refuses, or does not answer within `timeout_s`. Release the lease."""
        asking = self.ask(prompt, device=device, limit_pages=limit_pages)
        if asking is None:
            return None
        asking.call.wait(timeout_s)
        return asking.found()

    def ask(self, prompt: Prompt, *, device: Mapping[str, BoolArray], limit_pages: int) -> Asking | None:
        """Send a lookup and wait for nothing; None when the daemon is away. End it with `found`."""
        connection = self._connection
        if connection is None or connection.quiet:
            return None
        call = connection.send(_lookup_message(prompt, device, limit_pages))
        return None if call is None else Asking(connection, call)

    def start_load(
        self,
        lease: Lease,
        placements: Mapping[str, Placement],
        *,
        ready: ReadyEvent | None = None,
        cells: LayerCells | None = None,
    ) -> Ticket:
        """Ask for host frames to be copied into the engine's slots, all or none. The slots belong to the
        transfer until the ticket is settled. `ready`: what the engine's GPU does with the slots until then
        comes first. `cells`: where to say which layers have landed; those may be read before the rest."""
        connection = self._connection
        if connection is None or connection.attachment != lease.attachment:
            return Ticket(None, None)
        load = pb.LoadRequest(
            lease_id=lease.lease_id,
            components=wire.placement_messages(placements),
            ready=wire.ready_message(ready),
            cells=wire.cells_message(cells),
        )
        return _transfer(connection, pb.EngineMessage(load=load))

    def start_backup(
        self, prompt: Prompt, placements: Mapping[str, Placement], *, ready: ReadyEvent | None = None
    ) -> Ticket:
        """Ask for the engine's slots to be copied to host memory, and on by the daemon's policy. The
        slots must not change until the ticket is settled, but by what the engine's GPU has queued before
        `ready`, which is copied too."""
        connection = self._connection
        if connection is None:
            return Ticket(None, None)
        backup = pb.BackupRequest(
            prompt=wire.prompt_message(prompt),
            components=wire.placement_messages(placements),
            ready=wire.ready_message(ready),
        )
        return _transfer(connection, pb.EngineMessage(backup=backup))

    def prefetch(
        self,
        prompt: Prompt,
        *,
        device: Mapping[str, BoolArray],
        limit_pages: int,
        policy: PrefetchPolicy,
        timeout_s: float = 0.0,
    ) -> Prefetching | None:
        """Ask for a prompt's frames to be brought from storage to host memory; None when the daemon is
        away. Waits for nothing. `timeout_s`: for TIMEOUT, 0 for the daemon's own."""
        connection = self._connection
        if connection is None or connection.quiet:
            return None
        ahead = Prompt(f"{prompt.request_id}/before", prompt.tokens, prompt.adapter, prompt.salt)
        before = connection.send(_lookup_message(ahead, device, limit_pages))
        started = connection.send(
            pb.EngineMessage(
                prefetch=pb.PrefetchRequest(
                    prompt=wire.prompt_message(prompt),
                    device=wire.residency_messages(device),
                    limit_pages=limit_pages,
                    policy=wire.policy_value(policy),
                    timeout_s=timeout_s,
                )
            )
        )
        if before is None or started is None:
            return None
        before.then(lambda reply: _release_found(connection, reply))
        return Prefetching(connection, started, before)

    def release(self, lease: Lease) -> None:
        """Give up a lease. Does not wait; a lease of an earlier attachment has ended already."""
        connection = self._connection
        if connection is not None and connection.attachment == lease.attachment:
            _release(connection, lease.lease_id)

    def close(self) -> None:
        """Detach and end the background thread. Calls in flight end unanswered; a ticket that was not
        settled becomes so only when the daemon's process dies."""
        with self._mutex:
            self._closing.set()
            stream = self._stream
        if stream is not None:
            stream.cancel()
        self._thread.join(timeout=2 * _HANDOVER_TIMEOUT_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the background thread ----

    def _keep_attached(self) -> None:
        pause_s = _BACKOFF_S
        while not self._closing.is_set():
            longest_s = _AWAY_PAUSE_S
            self._was_attached = False
            try:
                self._attach_once()
            except _Refused as refusal:
                self._trouble(f"the daemon refused this engine: {refusal}", log_as=str(refusal))
                longest_s = _REFUSED_PAUSE_S
            except (OSError, grpc.RpcError) as error:
                self._trouble(f"the daemon is away: {_reason(error)}", log_as="away")
            except Exception as error:  # noqa: BLE001 - last line of defence: logged, shown, tried again
                self._unexpected(error)
                longest_s = _REFUSED_PAUSE_S
            pause_s = _BACKOFF_S if self._was_attached else min(2 * pause_s, longest_s)
            self._closing.wait(pause_s * random.uniform(0.8, 1.2))

    def _attach_once(self) -> None:
        """Attach, then deliver answers until the stream ends. Raises OSError, grpc.RpcError, _Refused."""
        engine_id, model, revision, layout = self._engine
        daemon, tickets = hand_over(self._socket + ".fds", self._regions, timeout_s=_HANDOVER_TIMEOUT_S)
        registration = wire.registration_message(
            engine_id=engine_id,
            model=model,
            revision=revision,
            layout=layout,
            regions=[
                wire.region_message(r, ticket) for r, ticket in zip(self._regions, tickets, strict=True)
            ],
            place=self._place,
        )
        self._attachments += 1
        connection = Connection(registration, daemon, attachment=self._attachments, silence_s=self._silence_s)
        try:
            with grpc.insecure_channel(f"unix:{self._socket}", options=_CHANNEL_OPTIONS) as channel:
                self._follow(self._open(channel, connection), connection)
        finally:
            self._connection = None
            self._attached.clear()
            connection.close()
            if not connection.serial:  # never accepted: nothing was asked of that process
                daemon.close()

    def _open(self, channel: grpc.Channel, connection: Connection) -> _Stream:
        attach = channel.stream_stream(
            _ATTACH,
            request_serializer=pb.EngineMessage.SerializeToString,
            response_deserializer=pb.DaemonMessage.FromString,
        )
        opened = threading.Event()
        holder: list[_Stream] = []

        def expired() -> None:
            opened.wait(_HANDOVER_TIMEOUT_S)
            for stream in holder:
                stream.cancel()

        stream: _Stream = attach(connection.outgoing(expired))
        holder.append(stream)
        opened.set()
        with self._mutex:
            self._stream = stream
            closing = self._closing.is_set()
        if closing:
            stream.cancel()
        return stream

    def _follow(self, stream: _Stream, connection: Connection) -> None:
        try:
            first = next(stream)
            if first.HasField("error"):
                raise _Refused(first.error.message)
            if not first.HasField("registered"):
                raise _Refused(f"it answered a registration with {first.WhichOneof('body')!r}")
            self._welcome(first.registered, connection)
            while True:
                connection.deliver(next(stream))
        except StopIteration:
            self._trouble("the daemon ended the connection", log_as="away")
        except grpc.RpcError as error:
            if not self._attached.is_set() and _refuses(error):
                raise _Refused(_reason(error)) from error
            raise
        finally:
            self._connection = None
            stream.cancel()

    def _welcome(self, registered: pb.Registered, connection: Connection) -> None:
        """The daemon has taken us: a process that we know, or another one."""
        if self._daemon is None or self._daemon.boot_id != registered.boot_id:
            connection.daemon.boot_id = registered.boot_id
            self._daemon = connection.daemon
            self._epoch += 1
        else:
            connection.daemon.close()
            connection.daemon = self._daemon
        self._daemon.accepted += 1
        connection.accepted(registered)
        if not self._daemon.visible:
            log.warning(
                "hicache: the daemon's process is not visible from here (another pid namespace): if it "
                "dies during a transfer, the slots under it stay out of use"
            )
        log.info("hicache: attached to daemon %s (boot %s)", self._daemon.pid, registered.boot_id)
        self._problem = self._logged = ""
        self._connection = connection
        self._was_attached = True
        self._attached.set()

    def _unexpected(self, error: Exception) -> None:
        log.error("hicache: unexpected error in the client's thread", exc_info=error)
        self._problem = f"unexpected error: {error!r}"

    def _trouble(self, problem: str, *, log_as: str) -> None:
        """Show a problem, and log it once however often its like is met in a row."""
        if log_as != self._logged and not self._closing.is_set():
            log.warning("hicache: %s", problem)
        self._problem, self._logged = problem, log_as


def _lookup_message(prompt: Prompt, device: Mapping[str, BoolArray], limit_pages: int) -> pb.EngineMessage:
    return pb.EngineMessage(
        lookup_prefix=pb.LookupPrefixRequest(
            prompt=wire.prompt_message(prompt),
            device=wire.residency_messages(device),
            limit_pages=limit_pages,
        )
    )


def _transfer(connection: Connection, message: pb.EngineMessage) -> Ticket:
    call = connection.send(message)
    return Ticket(call, connection if call is not None else None)


def _release(connection: Connection, lease_id: str) -> None:
    connection.send(pb.EngineMessage(release_lease=pb.ReleaseLeaseRequest(lease_id=lease_id)))


def _release_found(connection: Connection, reply: pb.DaemonMessage | None) -> None:
    """Nobody waits for this lookup's answer any more: its lease must not stay."""
    if reply is not None and reply.HasField("lookup_prefix") and reply.lookup_prefix.lease_id:
        _release(connection, reply.lookup_prefix.lease_id)


def _socket_path(address: str) -> str:
    path = address.removeprefix("unix:")
    path = path[2:] if path.startswith("//") else path
    if not path.startswith("/"):
        raise ValueError(f"address: {address!r}; give the daemon's unix socket, as in unix:/run/hicache.sock")
    return path


def _refuses(error: grpc.RpcError) -> bool:
    """Whether trying again as we are cannot help."""
    return isinstance(error, grpc.Call) and error.code() in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    )


def _reason(error: OSError | grpc.RpcError) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or repr(error)
