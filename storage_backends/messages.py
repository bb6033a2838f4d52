"""What the daemon and a storage worker say to each other: msgpack arrays, each after its length.

Owns the frames and the message types. Never carries an object's bytes: those lie in the slab, which both
processes map. Requests carry an id; their answers may come in any order.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec
from msgspec import Struct

from storage_backends.base import Item, Outcome, Usage
from storage_backends.faults import FaultySpec
from storage_backends.specs import BackendSpec

WorkerSpec: TypeAlias = BackendSpec | FaultySpec
"""Every backend that a worker can open: those of the configuration, and the one for tests."""

LENGTH = struct.Struct("<I")
MOST_MESSAGE_BYTES = 64 << 20


class Message(Struct, frozen=True, array_like=True, tag=True):
    """Base of all: an array whose first entry names the type."""


class Open(Message, frozen=True, tag=True):
    """The first message: what to open. Answered by Opened or NotOpened."""

    spec: WorkerSpec
    slab_bytes: int
    threads: int
    """How many reads, and how many writes, run at once."""


class Contains(Message, frozen=True, tag=True):
    id: int
    deadline_s: float
    """On the monotonic clock, which all processes of a machine share. What has not begun by then never
    begins: its items are FAILED."""
    keys: list[str]


class Read(Message, frozen=True, tag=True):
    id: int
    deadline_s: float
    items: list[Item]


class Write(Message, frozen=True, tag=True):
    id: int
    deadline_s: float
    items: list[Item]


class Delete(Message, frozen=True, tag=True):
    id: int
    deadline_s: float
    keys: list[str]


class Probe(Message, frozen=True, tag=True):
    """Ask whether the backend is well and what it holds."""

    id: int
    deadline_s: float


class Close(Message, frozen=True, tag=True):
    """Finish what runs, close the backend, exit."""


class Opened(Message, frozen=True, tag=True):
    """The backend is open."""


class NotOpened(Message, frozen=True, tag=True):
    """It cannot be opened; the worker exits."""

    problem: str


class Answer(Message, frozen=True, tag=True):
    """Outcomes in the order of the request. `problem` is set when the whole batch could not be tried."""

    id: int
    outcomes: list[Outcome]
    problem: str = ""


class Probed(Message, frozen=True, tag=True):
    """`usage` is None and `problem` set when the backend is not well."""

    id: int
    usage: Usage | None
    problem: str = ""


Operation: TypeAlias = Contains | Read | Write | Delete | Probe
Request: TypeAlias = Open | Contains | Read | Write | Delete | Probe | Close
Reply: TypeAlias = Opened | NotOpened | Answer | Probed

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class BadMessage(Exception):  # noqa: N818
    """Bytes that are no message: the other end is not what it should be."""


def framed(message: Request | Reply) -> bytes:
    """The message as it goes over the socket. ValueError when it is too long."""
    body = _ENCODER.encode(message)
    if len(body) > MOST_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; at most {MOST_MESSAGE_BYTES} go: split the batch")
    return LENGTH.pack(len(body)) + body


def body_bytes(head: bytes) -> int:
    """The length that a frame's first LENGTH.size bytes announce. Raises BadMessage."""
    n: int = LENGTH.unpack(head)[0]
    if n > MOST_MESSAGE_BYTES:
        raise BadMessage(f"a message of {n} bytes")
    return n


def parse_request(body: bytes) -> Request:
    """Raises BadMessage."""
    try:
        return _REQUESTS.decode(body)
    except msgspec.MsgspecError as error:
        raise BadMessage(str(error)) from error


def parse_reply(body: bytes) -> Reply:
    """Raises BadMessage."""
    try:
        return _REPLIES.decode(body)
    except msgspec.MsgspecError as error:
        raise BadMessage(str(error)) from error
