"""The budget check against fake machine and cgroup files."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.memory.budget import BudgetError, check_budget, headroom
from controller.memory.slab import HostSlab

GIB = 1 << 30


class Machine:
    """A directory that looks like `/` as far as the budget reads it."""

    def __init__(self, root: Path, available_bytes: int) -> None:
        self.root = root
        self.write(
            "proc/meminfo", f"MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable:   {available_bytes // 1024} kB\n"
        )

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group_v2(self, path: str, limit: str, used_bytes: int, inactive_bytes: int = 0) -> None:
        where = f"sys/fs/cgroup{path}"
        self.write(f"{where}/memory.max", f"{limit}\n")
        self.write(f"{where}/memory.current", f"{used_bytes}\n")
        self.write(f"{where}/memory.stat", f"anon 5\ninactive_file {inactive_bytes}\nactive_file 7\n")

    def group_v1(self, path: str, limit_bytes: int, used_bytes: int, inactive_bytes: int = 0) -> None:
        where = f"sys/fs/cgroup/memory{path}"
        self.write(f"{where}/memory.limit_in_bytes", f"{limit_bytes}\n")
        self.write(f"{where}/memory.usage_in_bytes", f"{used_bytes}\n")
        self.write(f"{where}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive_bytes}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, 64 * GIB)


def test_without_groups_the_machine_decides(machine: Machine) -> None:
    found = headroom(machine.root)
    assert (found.available_bytes, found.account) == (64 * GIB, "MemAvailable")


def test_a_group_of_version_2_is_tighter_than_the_machine(machine: Machine) -> None:
    """MEMORY-03: the whole machine's free memory is not what a small container may take."""
    machine.write("proc/self/cgroup", "0::/pod/box\n")
    machine.group_v2("/pod/box", str(2 * GIB), used_bytes=GIB, inactive_bytes=GIB // 4)
    found = headroom(machine.root)
    assert found.available_bytes == 2 * GIB - GIB + GIB // 4
    assert found.account.endswith("pod/box/memory.max")


def test_a_group_of_version_1_is_tighter_than_the_machine(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:hugetlb,memory:/pod/box\n0::/\n")
    machine.group_v1("/pod/box", 2 * GIB, used_bytes=GIB, inactive_bytes=GIB // 2)
    assert headroom(machine.root).available_bytes == 2 * GIB - GIB + GIB // 2


def test_every_group_above_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pod/box\n")
    machine.group_v2("/pod/box", "max", used_bytes=GIB)
    machine.group_v2("/pod", str(3 * GIB), used_bytes=2 * GIB)
    found = headroom(machine.root)
    assert (found.available_bytes, found.account.endswith("pod/memory.max")) == (GIB, True)


def test_a_path_of_another_namespace_still_finds_the_mounted_group(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/../../elsewhere\n")
    machine.group_v2("", str(GIB), used_bytes=0)
    assert headroom(machine.root).available_bytes == GIB


def test_no_limit_is_no_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/box\n0::/box\n")
    machine.group_v1("/box", 0x7FFFFFFFFFFFF000, used_bytes=GIB)
    machine.group_v2("/box", "max", used_bytes=GIB)
    assert headroom(machine.root).account == "MemAvailable"


def test_a_group_over_its_limit_has_nothing_left(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/box\n")
    machine.group_v2("/box", str(GIB), used_bytes=2 * GIB)
    assert headroom(machine.root).available_bytes == 0


def test_a_refusal_names_needed_available_and_reserve(machine: Machine) -> None:
    """MEMORY-03: never killed by the kernel later, and the reserve is in the message."""
    machine.write("proc/self/cgroup", "0::/box\n")
    machine.group_v2("/box", str(2 * GIB), used_bytes=0)
    assert check_budget(GIB, reserve_bytes=GIB, root=machine.root).available_bytes == 2 * GIB
    with pytest.raises(BudgetError) as refused:
        check_budget(GIB + 4096, reserve_bytes=GIB, root=machine.root)
    text = str(refused.value)
    assert "host.capacity" in text
    assert f"needed {GIB + 4096}" in text
    assert f"available {2 * GIB}" in text
    assert f"reserve {GIB}" in text
    assert f"at most {GIB} bytes" in text


def test_a_slab_over_the_budget_is_refused_before_anything_is_taken(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/box\n")
    machine.group_v2("/box", str(GIB), used_bytes=0)
    with pytest.raises(BudgetError, match="needed"):
        HostSlab(GIB, reserve_bytes=1, root=machine.root)


def test_a_kernel_without_the_figure_is_told(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 12 kB\n")
    with pytest.raises(BudgetError, match="MemAvailable"):
        headroom(tmp_path)


def test_this_machine_can_be_read() -> None:
    assert headroom().available_bytes > 0
