"""The daemon as a process: is it dead, and which attachments has it accepted?

Two of the three proofs that no byte of a transfer can move any more come from here (the third is the
reply). Never starts or signals a process.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import weakref


class DaemonProcess:
    """One process that has been the daemon, held by a pidfd, so that a reused pid cannot be mistaken.

    `accepted` counts the registrations of this engine that the process has answered: an answer says
    that every transfer of an earlier attachment has ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.boot_id = ""
        self.accepted = 0
        self._dead = False
        self._poll = select.poll()
        self._visible = False
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError):
            return  # another pid namespace, or gone already: death cannot be proved
        self._visible = True
        self._poll.register(pidfd, select.POLLIN)
        self._release = weakref.finalize(self, os.close, pidfd)

    @property
    def visible(self) -> bool:
        """Whether the process's death can be observed from here."""
        return self._visible

    def close(self) -> None:
        """For one that nothing has been asked of: give the pidfd back now."""
        if self._visible:
            self._visible = False
            self._release()

    def dead(self) -> bool:
        """Whether the process is known to have ended: none of its threads runs, so it moves no byte."""
        if not self._dead and self._visible:
            self._dead = bool(self._poll.poll(0))
        return self._dead


def peer_pid(connection: socket.socket) -> int:
    """The pid of the process that listens at the other end of a unix socket; 0 when it is not visible."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", raw)[0]
    return pid
