"""Whether the daemon can serve: starting, ready, draining or stopping, and what the start is doing.

Decides what health and requests are told meanwhile. Starts and stops nothing.
"""

from __future__ import annotations

from enum import Enum

from controller.daemon.port import NotReady


class Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"


class Readiness:
    """The daemon's phase: starting, ready (and back and forth: draining), stopping."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.progress = "starting"

    @property
    def ready(self) -> bool:
        return self.phase is Phase.READY

    def starting(self, progress: str) -> None:
        """Tell what the start is doing."""
        if self.phase is Phase.STARTING:
            self.progress = progress

    def serve(self) -> None:
        if self.phase is Phase.STARTING:
            self.phase, self.progress = Phase.READY, ""

    def drain(self) -> None:
        """Serve who is here, and take on nothing new."""
        if self.phase is Phase.READY:
            self.phase, self.progress = Phase.DRAINING, "draining"

    def resume(self) -> None:
        if self.phase is Phase.DRAINING:
            self.phase, self.progress = Phase.READY, ""

    def stop(self) -> None:
        self.phase, self.progress = Phase.STOPPING, "stopping"

    def check(self) -> None:
        """Raise NotReady unless the daemon serves."""
        if self.phase not in (Phase.READY, Phase.DRAINING):
            raise NotReady(f"the daemon is not ready ({self.progress}); try again, or go on without it")

    def check_takes_on(self) -> None:
        """Raise NotReady unless the daemon serves and takes on engines and prefetches."""
        self.check()
        if self.phase is Phase.DRAINING:
            raise NotReady("the daemon is draining; try again later, or go on without it")
