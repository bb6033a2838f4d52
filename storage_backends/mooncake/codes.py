"""The library's result codes as outcomes. Absent is only what the master says is not there, or not yet.

Pure mapping; the codes were seen with release 0.3.13.
"""

from __future__ import annotations

from storage_backends.base import Outcome

NO_SPACE = -200
BAD_PARAMETERS = -600
"""Also: the object is larger than the room given for it."""
BEING_WRITTEN = -703
NOT_FOUND = -704
EXISTS = -705
REPLICA_NOT_FOUND = -710
REPLICA_GONE = -712
TRANSFER_FAILED = -800
UNANSWERED = frozenset({-900, -901})
"""The master refused, or did not answer in time."""

_ABSENT = frozenset({BEING_WRITTEN, NOT_FOUND, REPLICA_NOT_FOUND, REPLICA_GONE})


def of_presence(code: int) -> Outcome:
    if code in (0, 1):
        return Outcome.OK if code else Outcome.ABSENT
    return Outcome.FAILED


def of_read(code: int, nbytes: int) -> Outcome:
    """`code` is the object's length where it is not negative. A lease that ran out while the batch was read
    is FAILED: the bytes may be another object's."""
    if code >= 0:
        return Outcome.OK if code == nbytes else Outcome.WRONG_SIZE
    return Outcome.ABSENT if code in _ABSENT else Outcome.FAILED


def of_length(code: int, nbytes: int) -> Outcome:
    """What a refused read was, from the object's length or the code got instead of it."""
    if code >= 0:
        return Outcome.FAILED if code == nbytes else Outcome.WRONG_SIZE
    return Outcome.ABSENT if code in _ABSENT else Outcome.FAILED


def of_write(code: int) -> Outcome:
    if code in (0, EXISTS):
        return Outcome.OK
    return Outcome.FULL if code == NO_SPACE else Outcome.FAILED


def of_removal(code: int) -> Outcome:
    if code == 0:
        return Outcome.OK
    return Outcome.ABSENT if code == NOT_FOUND else Outcome.FAILED
