"""Whether the daemon can serve: starting, ready or stopping, and what the start is doing.

Decides what health and requests are told meanwhile. Starts and stops nothing.
"""

from __future__ import annotations

from enum import Enum

from controller.daemon.port import NotReady


class Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


class Readiness:
    """The daemon's phase. Only forward: starting, ready, stopping."""

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

    def stop(self) -> None:
        self.phase, self.progress = Phase.STOPPING, "stopping"

    def check(self) -> None:
        """Raise NotReady unless the daemon serves."""
        if self.phase is not Phase.READY:
            raise NotReady(f"the daemon is not ready ({self.progress}); try again, or go on without it")
