"""The commands that change a running daemon: storage tiers that come and go, and what host memory keeps.

Each says what it did in one line. Decides nothing: the daemon does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from controller.daemon.terminal import EX_FAILED, explained, token_ids, with_address, with_prompt

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
@click.option("--read/--no-read", required=True, default=None, help="Whether frames are looked for there.")
@click.option("--write/--no-write", required=True, default=None, help="Whether frames are written there.")
@click.argument("name")
def update_storage(address: str, timeout_s: float, read: bool, write: bool, name: str) -> None:
    """Say what the storage tier NAME is used for from now on: both, so that nothing is guessed."""
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


@click.command()
@with_address
@click.option("--preserve", is_flag=True, help="Store everything first; else drop nothing.")
@click.option(
    "--wait",
    "wait_s",
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="For everything to be stored.",
)
def flush(address: str, timeout_s: float, preserve: bool, wait_s: float) -> None:
    """Drop every page in host memory that nothing holds. Storage keeps what it has."""
    from controller.daemon.remote import RemoteDaemon
    from proto.v1 import hicache_pb2 as pb

    request = pb.FlushRequest(preserve=preserve, timeout_s=wait_s if preserve else 0)
    with explained(), RemoteDaemon(address, timeout_s + (wait_s if preserve else 0)) as daemon:
        reply = daemon.flush(request)
    click.echo(f"dropped {reply.dropped_pages} pages, kept {reply.kept_pages} that are in use")


@click.command()
@with_address
@click.option(
    "--engine", "engine_id", default="", metavar="ID", help="An attached engine, whose model it is; or"
)
@click.option("--model", default="", help="the model")
@click.option("--revision", default="", help="and its revision.")
@click.option(
    "--for",
    "keep_s",
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long after its last hit.",
)
@click.option("--share", default=0.0, help="Most of host memory, 0 to 1; 0 is what host.retain_share leaves.")
@with_prompt
def pin(
    address: str,
    timeout_s: float,
    engine_id: str,
    model: str,
    revision: str,
    keep_s: float,
    share: float,
    adapter: str,
    salt: str,
    path: Path | None,
    tokens: tuple[str, ...],
) -> None:
    """Keep a prefix in host memory for a time. TOKENS are ids, separated by blanks or commas."""
    from controller.daemon.remote import RemoteDaemon
    from controller.daemon.wire import packed
    from proto.v1 import hicache_pb2 as pb

    request = pb.PinPrefixRequest(
        engine_id=engine_id,
        model=model,
        revision=revision,
        adapter=adapter,
        salt=salt,
        tokens=packed(token_ids(tokens, path)),
        keep_s=keep_s,
        host_share=share,
    )
    with explained(), RemoteDaemon(address, timeout_s) as daemon:
        kept = daemon.pin(request)
    why = f" ({kept.reason.replace('_', ' ')})" if kept.reason else ""
    click.echo(f"{kept.pin_id or 'nothing'}: {kept.kept_pages} of {kept.asked_pages} pages kept{why}")
    if not kept.pin_id:
        sys.exit(EX_FAILED)


@click.command()
@with_address
@click.argument("pin_id")
def unpin(address: str, timeout_s: float, pin_id: str) -> None:
    """Let the pinned prefix PIN_ID be ordinary again; `hicache status` lists them."""
    from controller.daemon.remote import RemoteDaemon

    with explained(), RemoteDaemon(address, timeout_s) as daemon:
        daemon.unpin(pin_id)
    click.echo(f"{pin_id}: unpinned")


@click.command()
@with_address
@click.option("--resume", is_flag=True, help="Take on engines and prefetches again.")
@click.option(
    "--wait", "wait_s", default=30.0, show_default=True, metavar="SECONDS", help="For what runs to end."
)
def drain(address: str, timeout_s: float, resume: bool, wait_s: float) -> None:
    """Take on no new engines and prefetches, and wait until what runs has ended."""
    from controller.daemon.remote import RemoteDaemon
    from proto.v1 import hicache_pb2 as pb

    request = pb.DrainRequest(resume=resume, timeout_s=wait_s)
    with explained(), RemoteDaemon(address, timeout_s + wait_s) as daemon:
        reply = daemon.drain(request)
    if resume:
        click.echo("taking on engines and prefetches again")
    elif reply.idle:
        click.echo("drained: nothing runs")
    else:
        click.echo(f"draining, not idle yet: {', '.join(reply.running)}")
        sys.exit(EX_FAILED)


COMMANDS = (attach_storage, update_storage, detach_storage, flush, pin, unpin, drain)
