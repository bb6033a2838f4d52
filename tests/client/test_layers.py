"""Layer by layer against `hicache serve` without a GPU: a layer that is told has all its bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hicache import Client, SharedRegion
from hicache.client import LayerBoard, LayerCells, Outcome, Placement, Prompt, ReadyEvent
from hicache.core.identity import Namespace
from tests.live import LiveDaemon
from tests.tagged import TaggedMemory, hashes_of, make_layout, prompt

SLOTS = {"full": 64, "swa": 64, "mamba": 16}
N_LAYERS = 3
N_PAGES = 20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    made = LiveDaemon(tmp_path_factory.mktemp("daemon"), storage=None)
    yield made
    made.close()


class Engine:
    """Two regions: pools, and a board of cells."""

    def __init__(self, address: str) -> None:
        layout, nbytes = make_layout(SLOTS)
        self.pools, self.cells = SharedRegion(nbytes), SharedRegion(4096)
        memory = self.pools.array(np.uint8, (nbytes,)).view(np.uint8)
        self.tagged = TaggedMemory(layout, memory)
        self.board = LayerBoard(self.cells, number=1, n_layers=N_LAYERS, n_rows=2)
        self.client = Client(
            address, engine_id="layers", model="m", layout=layout, regions=[self.pools, self.cells]
        )
        assert self.client.wait_attached(20)
        self.tokens = prompt(1, 4 * N_PAGES)
        namespace = Namespace("m", "", layout.fingerprint(), 4)
        self.hashes = hashes_of(namespace, self.tokens)

    def prompt(self) -> Prompt:
        return Prompt("r", self.tokens)

    def backed_up(self) -> None:
        pages = np.arange(N_PAGES, dtype=np.int32)
        placements = {"full": Placement(pages, pages), "swa": Placement(pages, pages)}
        placements["mamba"] = Placement(pages[-1:], pages[:1])
        for name, placement in placements.items():
            for page, slot in zip(placement.pages.tolist(), placement.slots.tolist(), strict=True):
                self.tagged.write(name, slot, self.hashes[page])
        ticket = self.client.start_backup(self.prompt(), placements)
        assert ticket.wait(20) is Outcome.OK, ticket.reason

    def layer_is_right(self, placements: dict[str, Placement], layer: int) -> bool:
        for name, placement in placements.items():
            for page, slot in zip(placement.pages.tolist(), placement.slots.tolist(), strict=True):
                expected, at = self.tagged.expected(name, self.hashes[page]), 0
                for pool in self.tagged.layout.pools_of(name):
                    for plane in pool.planes:
                        start = plane.offset + slot * plane.stride
                        here = self.tagged.memory[start : start + plane.nbytes].tobytes()
                        if plane.layer == layer and here != expected[at : at + plane.nbytes]:
                            return False
                        at += plane.nbytes
        return True

    def close(self) -> None:
        self.client.close()
        del self.board, self.tagged
        self.pools.close()
        self.cells.close()


@pytest.fixture
def engine(daemon: LiveDaemon) -> Iterator[Engine]:
    made = Engine(daemon.address)
    yield made
    made.close()


def test_a_layer_that_is_told_has_landed_whole(engine: Engine) -> None:
    """SIDECAR-03: sidecars included; checked at the moment when the cell is seen."""
    engine.backed_up()
    for round_ in range(5):
        engine.tagged.memory[:] = 0
        found = engine.client.lookup(engine.prompt(), device={}, limit_pages=0, timeout_s=5)
        assert found is not None
        assert found.lease is not None
        placements = {
            name: Placement(pages, (pages + round_) % SLOTS[name]) for name, pages in found.load.items()
        }
        row = engine.board.take()
        assert row is not None
        ticket = engine.client.start_load(found.lease, placements, cells=row.cells)
        for layer in range(N_LAYERS):
            assert row.wait(layer, 20)
            assert engine.layer_is_right(placements, layer)
        assert ticket.wait(20) is Outcome.OK, ticket.reason
        engine.client.release(found.lease)
        engine.board.give_back(row)


def test_a_load_of_nothing_tells_every_layer(engine: Engine) -> None:
    """A forward pass waits for each layer, whether or not the load had bytes of it."""
    engine.backed_up()
    found = engine.client.lookup(engine.prompt(), device={}, limit_pages=0, timeout_s=5)
    assert found is not None
    assert found.lease is not None
    row = engine.board.take()
    assert row is not None
    ticket = engine.client.start_load(found.lease, {}, cells=row.cells)
    assert all(row.wait(layer, 20) for layer in range(N_LAYERS))
    assert ticket.wait(20) is Outcome.OK


@pytest.mark.parametrize(
    ("cells", "complaint"),
    [
        (LayerCells(1, 4, 1), "cells.offset: 4; give a multiple of 8"),
        (LayerCells(7, 0, 1), "cells.region: 7"),
        (LayerCells(1, 4096 - 16, 1), "do not fit region 1 of 4096 bytes"),
    ],
)
def test_bad_cells_are_refused_and_nothing_is_written(
    engine: Engine, cells: LayerCells, complaint: str
) -> None:
    engine.backed_up()
    found = engine.client.lookup(engine.prompt(), device={}, limit_pages=0, timeout_s=5)
    assert found is not None
    assert found.lease is not None
    ticket = engine.client.start_load(found.lease, {}, cells=cells)
    assert ticket.wait(20) is Outcome.FAILED
    assert complaint in ticket.reason
    assert not np.frombuffer(engine.cells.buffer, dtype=np.uint8).any()


def test_an_event_where_there_is_no_gpu_is_refused(engine: Engine) -> None:
    pages = np.arange(2, dtype=np.int32)
    ready = ReadyEvent(bytes(64), bytes(16))
    ticket = engine.client.start_backup(engine.prompt(), {"full": Placement(pages, pages)}, ready=ready)
    assert ticket.wait(20) is Outcome.FAILED
    assert "this daemon uses no GPU" in ticket.reason
    short = engine.client.start_backup(
        engine.prompt(), {"full": Placement(pages, pages)}, ready=ReadyEvent(b"1", bytes(16))
    )
    assert short.wait(20) is Outcome.FAILED
    assert "a handle of 1 bytes" in short.reason
