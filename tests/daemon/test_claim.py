"""The claim to a socket path: one owner, no theft, and nothing left of the dead."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from controller.daemon.claim import ClaimError, SocketClaim


def socket_file(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path)


def test_a_second_claim_is_refused_with_the_owners_pid(short_path: str) -> None:
    first = SocketClaim(f"{short_path}/s")
    with pytest.raises(ClaimError, match=f"is served by process {os.getpid()}; stop that daemon"):
        SocketClaim(f"{short_path}/s")
    first.release()
    SocketClaim(f"{short_path}/s").release()
    assert os.listdir(short_path) == []


def test_a_refused_claim_touches_nothing(short_path: str) -> None:
    """FACTS: gRPC would steal the live socket without an error."""
    first = SocketClaim(f"{short_path}/s")
    socket_file(f"{short_path}/s")
    before = os.stat(f"{short_path}/s").st_ino
    with pytest.raises(ClaimError):
        SocketClaim(f"{short_path}/s")
    assert os.stat(f"{short_path}/s").st_ino == before
    first.release()


def test_what_a_killed_owner_left_is_removed(short_path: str) -> None:
    """LIFE-04: after SIGKILL the next start removes stale sockets, of a dead owner only."""
    code = (
        "import os, signal\n"
        "from controller.daemon.claim import SocketClaim\n"
        f"SocketClaim({short_path + '/s'!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    socket_file(f"{short_path}/s")
    socket_file(f"{short_path}/s.fds")
    claim = SocketClaim(f"{short_path}/s")
    assert os.listdir(short_path) == ["s.lock"]
    claim.release()


def test_a_missing_directory_is_made_private(short_path: str) -> None:
    """SECURITY-05"""
    claim = SocketClaim(f"{short_path}/run/s")
    assert os.stat(f"{short_path}/run").st_mode & 0o777 == 0o700
    assert os.stat(f"{short_path}/run/s.lock").st_mode & 0o777 == 0o600
    claim.release()


@pytest.mark.parametrize("suffix", ["", ".fds"])
def test_a_file_that_is_no_socket_is_left_alone(short_path: str, suffix: str) -> None:
    place = Path(f"{short_path}/s{suffix}")
    place.write_text("precious")
    with pytest.raises(ClaimError, match="exists and is not a socket"):
        SocketClaim(f"{short_path}/s")
    assert place.read_text() == "precious"
    place.unlink()
    SocketClaim(f"{short_path}/s").release()  # the failed one holds nothing


def test_a_symbolic_link_is_not_followed(short_path: str) -> None:
    """SECURITY-05: neither for the sockets nor for the claim file."""
    target = Path(f"{short_path}/target")
    target.write_text("precious")
    for name in ("s.lock", "s"):
        link = Path(f"{short_path}/{name}")
        link.symlink_to(target)
        with pytest.raises(ClaimError):
            SocketClaim(f"{short_path}/s")
        link.unlink()
    assert target.read_text() == "precious"


def test_a_place_that_cannot_be_written_says_so() -> None:
    with pytest.raises(ClaimError, match=r"server\.socket: /proc/none/s cannot be used"):
        SocketClaim("/proc/none/s")
