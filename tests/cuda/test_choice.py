"""Who moves which bytes: routes between devices and the CPU, and the measured choice on a device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from controller.transfers.copies import CopyTable
from controller.transfers.cpu import CpuCopyEngine
from controller.transfers.cuda.calibration import LEAST_PIECES, SIZES, Calibration, calibrate
from controller.transfers.cuda.engine import Always
from controller.transfers.cuda.routes import Routes
from controller.transfers.scheduler import Direction
from tests.cuda.fake_driver import FakeCuda
from tests.cuda.test_engines import engine_on
from tests.transfers.engine_laws import CopyEngineLaws


class Recorder:
    """A copy engine that only remembers."""

    def __init__(self) -> None:
        self.moved: list[tuple[int, int]] = []

    def copy(self, table: CopyTable) -> None:
        self.moved += zip(table.source.tolist(), table.target.tolist(), strict=True)


def ways(*pairs: tuple[int, int]) -> CopyTable:
    columns = np.array(pairs, dtype=np.uint64)
    return CopyTable(columns[:, 0].copy(), columns[:, 1].copy(), np.full(len(pairs), 10, dtype=np.uint64))


def test_each_piece_goes_to_the_device_that_it_touches() -> None:
    cpu, first, second = Recorder(), Recorder(), Recorder()
    routes = Routes(cpu)
    routes.add(1000, 500, first)
    routes.add(5000, 500, second)
    routes.copy(ways((1000, 90), (90, 1499), (5000, 90), (90, 95), (1500, 90), (999, 4999)))
    assert first.moved == [(1000, 90), (90, 1499)]
    assert second.moved == [(5000, 90)]
    assert cpu.moved == [(90, 95), (1500, 90), (999, 4999)]


def test_a_region_that_is_mapped_twice_keeps_its_route_until_the_last_is_gone() -> None:
    cpu, device = Recorder(), Recorder()
    routes = Routes(cpu)
    routes.add(1000, 500, device)
    routes.add(1000, 500, device)
    routes.remove(1000)
    routes.copy(ways((1000, 1)))
    assert len(device.moved) == 1
    routes.remove(1000)
    routes.copy(ways((1000, 1)))
    assert (len(device.moved), len(cpu.moved)) == (1, 1)


def test_regions_that_overlap_on_one_device_are_all_found() -> None:
    cpu, device = Recorder(), Recorder()
    routes = Routes(cpu)
    routes.add(1000, 5000, device)
    routes.add(2000, 10, device)
    routes.copy(ways((4000, 1)))
    assert cpu.moved == []


class TestRoutesWithoutDevices(CopyEngineLaws):
    @pytest.fixture
    def make(self) -> Callable[[], Routes]:
        return lambda: Routes(CpuCopyEngine())


class Timed:
    """An engine on which a piece costs 1 s by the copy engine, and a launch `launch_s` by the kernel."""

    def __init__(self, launch_s: float) -> None:
        self.choice: object = Always(kernel=False)
        self.now_s = 0.0
        self._launch_s = launch_s

    def copy(self, table: CopyTable) -> None:
        by_kernel = bool(self.choice.by_kernel(Direction.LOAD, table.nbytes).all())  # type: ignore[attr-defined]
        self.now_s += self._launch_s if by_kernel else len(table)


@pytest.mark.parametrize(
    ("launch_s", "by_kernel"),
    [
        (1e9, [False] * len(SIZES)),
        (1e-9, [True] * len(SIZES)),
        # 4 MiB are 32 pieces of 128 KiB: the launch must cost less than 32 / 1.25 s.
        (32 / 1.3, [True] * 5 + [False]),
        (32 / 1.2, [True] * 4 + [False] * 2),
    ],
)
def test_the_cheaper_way_is_chosen_by_measurement(launch_s: float, by_kernel: list[bool]) -> None:
    cuda, engine = FakeCuda(), Timed(launch_s)
    before = engine.choice
    measured = calibrate(engine, cuda, 0, now_s=lambda: engine.now_s)  # type: ignore[arg-type]
    for direction in Direction:
        sizes = np.repeat(np.array(SIZES, dtype=np.uint64), LEAST_PIECES)
        assert measured.by_kernel(direction, sizes)[::LEAST_PIECES].tolist() == by_kernel
    assert engine.choice is before
    assert len(measured.lines()) == 2 * len(SIZES)
    assert cuda.leftovers() == []


def test_what_is_measured_are_real_copies_both_ways() -> None:
    """The samples are within their memory: the strict device would object."""
    cuda = FakeCuda()
    measured = calibrate(engine_on(cuda, Always(kernel=False)), cuda, 0, sample_bytes=1 << 20)
    assert {size for by_size in measured.seconds.values() for size in by_size} == set(SIZES)
    assert cuda.violations == []


def test_few_pieces_are_not_worth_a_launch() -> None:
    choice = Calibration({Direction.LOAD: {512: (2.0, 1.0), 8192: (1.0, 2.0)}})
    small = np.full(LEAST_PIECES - 1, 512, dtype=np.uint64)
    assert not choice.by_kernel(Direction.LOAD, small).any()
    assert choice.by_kernel(Direction.LOAD, np.append(small, [np.uint64(600)])).all()


def test_sizes_between_two_measured_go_by_the_nearer() -> None:
    choice = Calibration({Direction.LOAD: {1000: (2.0, 1.0), 100_000: (1.0, 2.0)}})
    nbytes = np.repeat(np.array([1, 9_000, 11_000, 1 << 22], dtype=np.uint64), LEAST_PIECES)
    chosen = choice.by_kernel(Direction.LOAD, nbytes)[::LEAST_PIECES]
    assert chosen.tolist() == [True, True, False, False]


def test_a_failed_measurement_leaves_no_memory_behind() -> None:
    cuda = FakeCuda(strict=False)
    engine = engine_on(cuda, Always(kernel=True))
    cuda.fail("register_host")
    with pytest.raises(OSError, match="register_host"):
        calibrate(engine, cuda, 0)
    assert not cuda._allocations
