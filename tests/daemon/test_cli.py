"""The command line: it reads well, fails with one line that says what to do, and exits accordingly."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from controller.daemon import config
from controller.daemon.cli import EX_CONFIG, EX_UNAVAILABLE, main
from controller.daemon.show import duration_text, size_text

DEPLOY = Path(__file__).parents[2] / "deploy"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_help_names_every_command() -> None:
    shown = run("--help").output
    for name, command in main.commands.items():
        assert name in shown
        assert command.get_short_help_str(80).split()[0] in shown
        assert run(name, "--help").exit_code == 0


def test_check_config_prints_what_is_in_force() -> None:
    result = run("check-config", "-c", str(DEPLOY / "minimal.yaml"))
    assert result.exit_code == 0
    assert config.parse(result.output) == config.load(DEPLOY / "hicache.yaml")


@pytest.mark.parametrize("command", ["check-config", "serve"])
def test_a_wrong_file_exits_with_its_own_code(command: str, tmp_path: Path) -> None:
    """CONFIG-01: one line, the key's path, the remedy; nothing is started."""
    path = tmp_path / "x.yaml"
    path.write_text("host: {capcity: 1GiB}")
    result = run(command, "-c", str(path))
    assert result.exit_code == EX_CONFIG
    assert result.stderr == "hicache: host.capcity: unknown key; did you mean `capacity`?\n"
    assert run(command, "-c", str(tmp_path / "none.yaml")).exit_code == EX_CONFIG


@pytest.mark.parametrize(
    "command", [("status",), ("status", "--json"), ("flush",), ("top",), ("lookup", "--engine", "e", "1")]
)
def test_without_a_daemon_every_command_says_how_to_start_one(
    command: tuple[str, ...], short_path: str
) -> None:
    result = run(*command, "-a", f"{short_path}/s")
    assert result.exit_code == EX_UNAVAILABLE
    assert result.stderr.count("\n") == 1
    assert f"no daemon answers at {short_path}/s; start one with `hicache serve`" in result.stderr


@pytest.mark.parametrize("tokens", ["one two", "1.5", "99999999999999999999", "4294967296"])
def test_tokens_that_are_no_ids_are_wrong_usage(tokens: str) -> None:
    result = run("lookup", "--engine", "e", tokens)
    assert result.exit_code == 2
    assert "TOKENS" in result.stderr


def test_version() -> None:
    assert run("version").output.strip().count(".") == 2


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1 << 30, "1 GiB"),
        (5000 << 40, "5,000 TiB"),
    ],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.9, "0 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (90000, "1 d 1 h")]
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
