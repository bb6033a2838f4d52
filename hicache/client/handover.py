"""Hands memory to the daemon: each region's fd travels once over the daemon's fd socket.

Every step has a deadline. Never keeps a connection: the registration names the fd by its ticket.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from hicache.client.cuda import CudaRegion
from hicache.client.daemon_process import DaemonProcess, peer_pid
from hicache.client.regions import SharedRegion

TICKET_BYTES = 16


class HandoverError(OSError):
    """The daemon took a connection, but not the memory."""


def hand_over(
    path: str, regions: Sequence[SharedRegion | CudaRegion], *, timeout_s: float
) -> tuple[DaemonProcess, tuple[bytes | None, ...]]:
    """Give every shared region to the daemon that listens at `path`; its process, and a ticket for each
    region: None for those on a GPU, which travel by their handles.

    The pidfd is opened before the daemon answers, so that it names the process that answered.
    Raises OSError when the daemon is away, refuses, or is silent for `timeout_s`.
    """
    daemon: DaemonProcess | None = None
    tickets: list[bytes | None] = []
    for region in regions:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            pid = peer_pid(connection)
            if daemon is None:
                daemon = DaemonProcess(pid)
            elif pid != daemon.pid:
                raise HandoverError(f"the daemon at {path} was replaced while it was being given memory")
            if isinstance(region, CudaRegion):
                tickets.append(None)
                continue
            ticket = os.urandom(TICKET_BYTES)
            socket.send_fds(connection, [ticket], [region.fd])
            if connection.recv(1) != b"1":
                raise HandoverError(f"the daemon at {path} did not take a region of {region.nbytes} bytes")
            tickets.append(ticket)
    if daemon is None:
        raise ValueError("regions: empty; an engine shares at least one region")
    return daemon, tuple(tickets)
