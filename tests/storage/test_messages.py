"""The messages between daemon and worker: every one comes back as it went, nonsense is refused."""

from __future__ import annotations

import pickle

import pytest

from storage_backends.base import Item, Outcome, Usage
from storage_backends.faults import Fault, FaultKind, FaultySpec
from storage_backends.messages import (
    LENGTH,
    MOST_MESSAGE_BYTES,
    Answer,
    BadMessage,
    Close,
    Contains,
    Delete,
    NotOpened,
    Open,
    Opened,
    Probe,
    Probed,
    Read,
    Reply,
    Request,
    Write,
    body_bytes,
    framed,
    parse_reply,
    parse_request,
)
from storage_backends.specs import FileSpec, MemorySpec

ITEMS = [Item("hicache/full/0-of-1/ab", 0, 4096), Item("ключ", (1 << 40) + 1, 1)]
FAULTY = FaultySpec(inner=FileSpec(path="/x"), faults=(Fault(kind=FaultKind.DELAY, delay_s=0.5),), seed=3)
REQUESTS: list[Request] = [
    Open(FileSpec(path="~/x", capacity_bytes=1 << 40), 1 << 36, 2),
    Open(MemorySpec(), 1, 1),
    Open(FAULTY, 1, 1),
    Contains(1, 12.5, ["a", ""]),
    Read(2, 0.0, ITEMS),
    Write(1 << 60, 1e9, []),
    Delete(4, 1.0, ["a"]),
    Probe(5, 1.0),
    Close(),
]
REPLIES: list[Reply] = [
    Opened(),
    NotOpened("no such directory: make one"),
    Answer(7, list(Outcome)),
    Answer(7, [], "problem"),
    Probed(8, Usage(1, 2, 3)),
    Probed(8, None, "full"),
]


def body(message: Request | Reply) -> bytes:
    framed_bytes = framed(message)
    assert body_bytes(framed_bytes[: LENGTH.size]) == len(framed_bytes) - LENGTH.size
    return framed_bytes[LENGTH.size :]


@pytest.mark.parametrize("message", REQUESTS, ids=repr)
def test_a_request_comes_back_as_it_went(message: Request) -> None:
    assert parse_request(body(message)) == message


@pytest.mark.parametrize("message", REPLIES, ids=repr)
def test_a_reply_comes_back_as_it_went(message: Reply) -> None:
    assert parse_reply(body(message)) == message


@pytest.mark.parametrize(
    "nonsense", [b"", b"\x00", b"\xc1", pickle.dumps(ITEMS), b"\x93\xa4Read\x01", body(Opened())[:-1]]
)
def test_nonsense_is_refused(nonsense: bytes) -> None:
    """SECURITY-01: bytes are parsed into our types or refused, never executed."""
    with pytest.raises(BadMessage):
        parse_request(nonsense)
    with pytest.raises(BadMessage):
        parse_reply(nonsense)


def test_a_message_too_long_is_neither_sent_nor_received() -> None:
    with pytest.raises(ValueError, match="split the batch"):
        framed(Contains(1, 0.0, ["k" * MOST_MESSAGE_BYTES]))
    with pytest.raises(BadMessage):
        body_bytes(LENGTH.pack(MOST_MESSAGE_BYTES + 1))


def test_messages_carry_no_objects_bytes() -> None:
    """A batch of 64 frames of 256 KiB is a message of a few KiB: the bytes stay in the slab."""
    items = [Item(f"hicache/full/0-of-1/{number:064x}", number << 18, 1 << 18) for number in range(64)]
    assert len(framed(Read(1, 1.0, items))) < 64 * 256
