"""The GPU engines under the laws of every copy engine, on the fake device, with the kernel's real code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from controller.transfers.copies import CopyEngine
from controller.transfers.cuda.engine import Always, CopyEngineMover, DeviceCopyEngine, KernelMover
from controller.transfers.cuda.lanes import Lanes
from tests.cuda.cpu_kernel import CpuKernel
from tests.cuda.fake_driver import FakeCuda
from tests.transfers.engine_laws import CopyEngineLaws


class ByCase:
    """Every third piece, in turn, by the kernel."""

    def by_kernel(self, direction: object, nbytes: np.ndarray) -> np.ndarray:
        return np.arange(len(nbytes)) % 3 == 0


def engine_on(
    cuda: FakeCuda,
    choice: object = None,
    *,
    host: range = range(0),
    seams: tuple[int, ...] = (),
    pinned: bool = True,
) -> DeviceCopyEngine:
    kernel = None if choice is None else KernelMover(CpuKernel(cuda), cuda, 0)
    return DeviceCopyEngine(
        Lanes(cuda, 0),
        CopyEngineMover(cuda, 0, pinned=pinned),
        kernel,
        choice or Always(kernel=False),  # type: ignore[arg-type]
        host=host,
        seams=np.array(seams, dtype=np.uint64),
    )


WAYS: dict[str, Callable[[], CopyEngine]] = {
    "cuda": lambda: engine_on(FakeCuda(strict=False)),
    # A driver before 12.8, or memory that is not pinned.
    "cuda piece by piece": lambda: engine_on(FakeCuda(strict=False, batch=False)),
    "cuda-kernel": lambda: engine_on(FakeCuda(strict=False), Always(kernel=True)),
    "both": lambda: engine_on(FakeCuda(strict=False), ByCase()),
}


class TestCuda(CopyEngineLaws):
    @pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
    def make(self, request: pytest.FixtureRequest) -> Callable[[], CopyEngine]:
        way: Callable[[], CopyEngine] = request.param
        return way
