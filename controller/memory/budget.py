"""Budget: how much memory this process may still take, and whether a slab of a given size fits.

Reads the machine's and the control groups' own accounts (cgroup v1 and v2). Allocates nothing and
changes nothing; whoever needs the memory takes it right after the check.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEFAULT_RESERVE_BYTES = 512 << 20
"""Left to the daemon itself and to the machine."""

_UNLIMITED_BYTES = 1 << 60


class BudgetError(ValueError):
    """The memory that was asked for is not there; the message holds needed, available and reserve."""


@dataclass(frozen=True)
class Headroom:
    """Bytes that can still be taken, and the account that says so."""

    available_bytes: int
    account: str


def headroom(root: Path = Path("/")) -> Headroom:
    """The tightest of MemAvailable and every memory control group above this process.

    Page cache that a group could drop at once (inactive files) counts as available. `root` is where
    `proc` and `sys` are found. Raises BudgetError when MemAvailable cannot be read.
    """
    found = [Headroom(_mem_available_bytes(root), "MemAvailable")]
    found.extend(_group_headroom(root))
    return min(found, key=lambda entry: entry.available_bytes)


def check_budget(
    needed_bytes: int, *, reserve_bytes: int = DEFAULT_RESERVE_BYTES, root: Path = Path("/")
) -> Headroom:
    """Raise BudgetError unless `needed_bytes` fit beside the reserve; return what was measured."""
    found = headroom(root)
    if needed_bytes + reserve_bytes > found.available_bytes:
        largest = max(0, found.available_bytes - reserve_bytes)
        raise BudgetError(
            f"host.capacity: needed {needed_bytes} bytes, available {found.available_bytes} "
            f"(by {found.account}), reserve {reserve_bytes}; "
            f"lower host.capacity to at most {largest} bytes or raise the limit"
        )
    return found


def _mem_available_bytes(root: Path) -> int:
    path = root / "proc/meminfo"
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise BudgetError(f"{path}: no MemAvailable line; a Linux kernel since 3.14 is needed")


def _group_headroom(root: Path) -> Iterator[Headroom]:
    groups = root / "proc/self/cgroup"
    if not groups.exists():
        return
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                yield from _walk(root / mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = "sys/fs/cgroup/memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
            yield from _walk(root / mount, path, limit, usage, "total_inactive_file")


def _walk(mount: Path, path: str, limit: str, usage: str, droppable: str) -> Iterator[Headroom]:
    """The group itself and every group above it: each may be the tightest. A path of another
    namespace does not exist below the mount; what is above it still counts."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:depth])
        limit_bytes = _number(group / limit)
        if limit_bytes is None or limit_bytes >= _UNLIMITED_BYTES:
            continue
        used_bytes = (_number(group / usage) or 0) - _stat(group / "memory.stat", droppable)
        yield Headroom(max(0, limit_bytes - max(0, used_bytes)), str(group / limit))


def _number(path: Path) -> int | None:
    """The file's number; None when there is no such file or it says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
