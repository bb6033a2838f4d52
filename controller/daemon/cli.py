"""The command `hicache`: run the daemon, look at a running one; what changes one is in `operate`.

Turns every expected failure into one line that says what to do, and into an exit code. Decides nothing else.
"""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import click

from controller.daemon import config as configuration
from controller.daemon.config import Config, ConfigError
from controller.daemon.operate import COMMANDS
from controller.daemon.terminal import (
    EX_CONFIG,
    EX_FAILED,
    EX_UNAVAILABLE,
    explained,
    fail,
    token_ids,
    with_address,
    with_prompt,
)

__all__ = ["EX_CONFIG", "EX_FAILED", "EX_UNAVAILABLE", "main"]

BENCHMARKS = {
    "index": "index",
    "copy": "copy",
    "copy-gpu": "copy_gpu",
    "rpc": "rpc",
    "storage": "storage",
    "storage-mooncake": "storage_mooncake",
}
PIPED_WIDTH = 120
"""Columns where the output is not a terminal."""

_config_option = click.option(
    "-c",
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="The YAML file; deploy/hicache.yaml shows every key.",
)


@click.version_option(package_name="hicache", message="%(version)s")
@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """HiCache keeps LLM inference state in GPU memory, host memory and storage.

    Start a daemon with `hicache serve -c FILE` next to the inference server, then look at it with
    `hicache status` or `hicache top`.
    """


@main.command()
@_config_option
def serve(config_path: Path) -> None:
    """Run the daemon until SIGTERM or Ctrl-C."""
    config = _loaded(config_path)
    from controller.daemon import tuning

    tuning.restart_with_fast_copies()
    from controller.daemon.logs import configure_logs
    from controller.daemon.server import StartError, run

    configure_logs(config.log.level, config.log.format, config.log.max_per_event)
    try:
        run(config)
    except StartError as error:
        fail(str(error), EX_FAILED)


@main.command("check-config")
@_config_option
def check_config(config_path: Path) -> None:
    """Check a file and print the effective configuration."""
    click.echo(configuration.dump(_loaded(config_path)), nl=False)


@main.command()
@with_address
@click.option("--json", "as_json", is_flag=True, help="Print the whole status as JSON.")
def status(address: str, timeout_s: float, as_json: bool) -> None:
    """Show how a running daemon stands."""
    from controller.daemon.remote import RemoteDaemon

    with explained(), RemoteDaemon(address, timeout_s) as daemon:
        reply = daemon.status()
    if as_json:
        from google.protobuf.json_format import MessageToJson

        click.echo(
            MessageToJson(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        )
        return
    from rich.console import Console

    from controller.daemon.show import status_view

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    console.print(status_view(reply))


@main.command()
@with_address
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between looks.",
)
@click.option("--looks", default=0, metavar="N", help="Stop after so many; 0 goes on until Ctrl-C.")
def top(address: str, timeout_s: float, every_s: float, looks: int) -> None:
    """Watch a running daemon: status and rates, again and again."""
    from rich.live import Live

    from controller.daemon.remote import RemoteDaemon
    from controller.daemon.show import status_view

    with explained(), RemoteDaemon(address, timeout_s) as daemon, Live(auto_refresh=False) as live:
        before, look = None, 0
        while True:
            reply = daemon.status()
            live.update(status_view(reply, before), refresh=True)
            before, look = reply, look + 1
            if look == looks:
                return
            time.sleep(every_s)


@main.command()
@with_address
@click.option(
    "--engine", "engine_id", required=True, metavar="ID", help="An attached engine: see `hicache status`."
)
@with_prompt
def lookup(
    address: str,
    timeout_s: float,
    engine_id: str,
    adapter: str,
    salt: str,
    path: Path | None,
    tokens: tuple[str, ...],
) -> None:
    """Ask how much of a prompt could be reused. TOKENS are ids, separated by blanks or commas."""
    import numpy as np

    from controller.daemon.remote import RemoteDaemon

    ids = token_ids(tokens, path)
    with explained(), RemoteDaemon(address, timeout_s) as daemon:
        reply = daemon.lookup(engine_id, ids, adapter, salt)
    click.echo(f"boundary: {reply.boundary} pages can be reused from host memory")
    click.echo(f"with storage: {reply.storage_boundary} pages, as far as known")
    click.echo(f"tokens known: {reply.matched_pages} pages")
    for part in reply.load:
        pages = np.frombuffer(part.pages, dtype="<i4")
        click.echo(f"to load, {part.component}: {len(pages)} pages [{pages[0]}, {pages[-1] + 1})")


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("name", type=click.Choice(list(BENCHMARKS)))
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def bench(name: str, options: tuple[str, ...]) -> None:
    """Run a benchmark of the source tree: index, copy, copy-gpu, rpc, storage or storage-mooncake.

    Further options go to it: `hicache bench rpc --help` lists them; all of them know --json.
    """
    root = Path(__file__).parents[2]
    if not (root / "bench").is_dir():
        fail(
            "the benchmarks come with the source tree: clone it, and install it with `pip install -e .`",
            EX_FAILED,
        )
    command = [sys.executable, "-m", f"bench.{BENCHMARKS[name]}", *options]
    sys.exit(subprocess.run(command, cwd=root, check=False).returncode)


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(metadata.version("hicache"))


def _loaded(path: Path) -> Config:
    try:
        return configuration.load(path)
    except ConfigError as error:
        fail(str(error), EX_CONFIG)


for _command in COMMANDS:
    main.add_command(_command)
