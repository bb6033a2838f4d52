"""A point in time that a whole call, with all its tries and waits, must not outlive.

Owns nothing but a number. Every wait in this package takes one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from storage_backends.redis.errors import Late


@dataclass(frozen=True, slots=True)
class Deadline:
    at_s: float
    """On the monotonic clock."""
    timeout_s: float
    """How long it was when it was set; for messages."""

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        return cls(time.monotonic() + timeout_s, timeout_s)

    def sooner(self, timeout_s: float) -> Deadline:
        """This one, or `timeout_s` from now if that is earlier."""
        other = Deadline.after(timeout_s)
        return other if other.at_s < self.at_s else self

    def remaining_s(self, whom: object) -> float:
        """Above 0. Raises Late, which names `whom` we waited for, once it has passed."""
        remaining_s = self.at_s - time.monotonic()
        if remaining_s <= 0:
            raise self.late(whom)
        return remaining_s

    def late(self, whom: object) -> Late:
        return Late(
            f"{whom} did not answer within {self.timeout_s:g} s: it is frozen, overloaded or cut off; "
            "see to the server and the network, or raise `op_timeout_s`"
        )
