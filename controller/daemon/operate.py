"""The commands that change a running daemon: storage tiers that come and go, and what host memory keeps.

Each says what it did in one line. Decides nothing: the daemon does.
"""

from __future__ import annotations

import click

from controller.daemon.terminal import explained, with_address

STOP_S = 15.0
"""How much longer than its own bound a change may take: opening, or stopping, a worker process."""


@click.command("attach-storage")
@with_address
@click.option("--name", default="", help="What to call it; the backend's kind if left out.")
@click.option("--read/--no-read", default=True, help="Whether frames are looked for there.")
@click.option("--write/--no-write", default=True, help="Whether frames are written there.")
@click.option(
    "--required/--keep-trying",
    default=True,
    help="Refuse when it cannot be opened now, or attach it and keep trying.",
)
@click.argument("backend")
def attach_storage(
    address: str, timeout_s: float, name: str, read: bool, write: bool, required: bool, backend: str
) -> None:
    """Open a storage tier and use it from now on, after those that are there.

    BACKEND is what stands under `backend:` in the file, for instance '{kind: file, path: /var/lib/hicache}'.
    With the same backend as one of that name, only what it is used for is set.
    """
    from controller.daemon.remote import RemoteDaemon
    from proto.v1 import hicache_pb2 as pb

    request = pb.AttachStorageRequest(name=name, backend=backend, read=read, write=write, required=required)
    with explained(), RemoteDaemon(address, timeout_s + STOP_S) as daemon:
        reply = daemon.attach_storage(request)
    problem = f"; not well yet: {reply.problem}" if reply.problem else ""
    click.echo(f"{reply.name}: {'attached' if reply.opened else 'there already, its use is set'}{problem}")


@click.command("update-storage")
@with_address
@click.option("--read/--no-read", default=True, help="Whether frames are looked for there.")
@click.option("--write/--no-write", default=True, help="Whether frames are written there.")
@click.argument("name")
def update_storage(address: str, timeout_s: float, read: bool, write: bool, name: str) -> None:
    """Say what the storage tier NAME is used for from now on."""
    from controller.daemon.remote import RemoteDaemon
    from proto.v1 import hicache_pb2 as pb

    with explained(), RemoteDaemon(address, timeout_s) as daemon:
        daemon.update_storage(pb.UpdateStorageRequest(name=name, read=read, write=write))
    click.echo(f"{name}: {'read' if read else 'not read'}, {'written' if write else 'not written'}")


@click.command("detach-storage")
@with_address
@click.option("--force", is_flag=True, help="Cut off what is in flight after the wait.")
@click.option(
    "--wait", "wait_s", default=10.0, show_default=True, metavar="SECONDS", help="For what is in flight."
)
@click.argument("name")
def detach_storage(address: str, timeout_s: float, force: bool, wait_s: float, name: str) -> None:
    """Let the storage tier NAME go. What it holds stays, and is found when it is attached again."""
    from controller.daemon.remote import RemoteDaemon
    from proto.v1 import hicache_pb2 as pb

    request = pb.DetachStorageRequest(name=name, force=force, timeout_s=wait_s)
    with explained(), RemoteDaemon(address, timeout_s + wait_s + STOP_S) as daemon:
        reply = daemon.detach_storage(request)
    click.echo(f"{name}: detached" + ("" if reply.stopped else "; the kernel does not let its worker end"))


COMMANDS = (attach_storage, update_storage, detach_storage)
