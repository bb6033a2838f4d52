"""What all commands share: the options of those that talk to a daemon, and failures as one line.

Exit codes: 1 refused or failed, 2 wrong usage, 69 no daemon there, 78 configuration wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import click

from controller.daemon import config as configuration

if TYPE_CHECKING:  # every small command is quicker without numpy
    from hicache.core.words import TokenArray

EX_FAILED, EX_UNAVAILABLE, EX_CONFIG = 1, 69, 78
F = TypeVar("F", bound=Callable[..., None])


def with_address(command: F) -> F:
    """The options of every command that talks to a running daemon."""
    address = click.option(
        "-a",
        "--address",
        default=configuration.Server().socket,
        show_default=True,
        metavar="ADDRESS",
        envvar="HICACHE_ADDRESS",
        show_envvar=True,
        help="The daemon's socket path, or host:port.",
    )
    timeout = click.option(
        "--timeout", "timeout_s", default=5.0, show_default=True, metavar="SECONDS", help="Longest wait."
    )
    return address(timeout(command))


def with_prompt(command: F) -> F:
    """The options and arguments that name a prompt."""
    adapter = click.option("--adapter", default="", help="LoRA adapter of the prompt.")
    salt = click.option("--salt", default="", help="Tenant of the prompt.")
    path = click.option(
        "--file",
        "path",
        type=click.Path(path_type=Path, dir_okay=False, exists=True),
        help="Read the ids from a text file.",
    )
    return adapter(salt(path(click.argument("tokens", nargs=-1)(command))))


def token_ids(tokens: tuple[str, ...], path: Path | None) -> TokenArray:
    """Ids, separated by blanks or commas."""
    import numpy as np

    from hicache.core.words import token_array

    text = " ".join(tokens) if path is None else path.read_text(encoding="utf-8")
    words = text.replace(",", " ").split()
    try:
        return token_array(np.array([int(word) for word in words], dtype=np.int64))
    except (ValueError, OverflowError) as error:
        raise click.UsageError(f"TOKENS: {error}; give integer ids such as `1 2 3`") from error


@contextmanager
def explained() -> Iterator[None]:
    """Expected failures as one line."""
    from controller.daemon.remote import DaemonAway, DaemonRefused

    try:
        yield
    except DaemonAway as error:
        fail(str(error), EX_UNAVAILABLE)
    except DaemonRefused as error:
        fail(str(error), EX_FAILED)


def fail(message: str, code: int) -> NoReturn:
    click.echo(f"hicache: {message}", err=True)
    sys.exit(code)
