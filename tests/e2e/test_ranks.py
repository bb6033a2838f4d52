"""Four rank processes and a daemon: one answer for all, whatever their timing, also after a rank's death."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.e2e import rank_process
from tests.live import LiveDaemon, wait_until

SPAWN = multiprocessing.get_context("spawn")


class Ranks:
    """The processes of one group, told and heard together."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.ends: dict[int, Connection] = {}
        self.processes: dict[int, BaseProcess] = {}
        self._number = 0
        for rank in range(rank_process.RANKS):
            self.start(rank)
        self.hear()

    def start(self, rank: int) -> None:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=rank_process.live, args=(self.address, rank, theirs), daemon=True)
        process.start()
        theirs.close()
        self.ends[rank], self.processes[rank] = ours, process

    def serve(self, seed: int) -> list[tuple[int, int, int]]:
        """What every rank that lives found of this prompt."""
        self._number += 1
        for end in self.ends.values():
            end.send((self._number, seed))
        return [answer[0] for answer in self.hear()]  # type: ignore[index]

    def hear(self) -> list[object]:
        answers = []
        for end in self.ends.values():
            assert end.poll(30), "a rank does not answer"
            answers.append(end.recv())
        return answers

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join(10)
        self.ends.pop(rank).close()

    def close(self) -> None:
        for end in self.ends.values():
            end.close()
        for process in self.processes.values():
            process.join(10)
            process.kill()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LiveDaemon]:
    made = LiveDaemon(tmp_path)
    yield made
    made.close()


@pytest.mark.timeout(180)
def test_four_ranks_decide_as_one(daemon: LiveDaemon) -> None:
    """RANKS-01 to RANKS-05: equal answers from host memory and storage; a killed rank costs misses only,
    and its successor brings the hits back."""
    ranks = Ranks(daemon.address)
    try:
        for seed in range(6):
            assert ranks.serve(seed) == [(0, 0, 0)] * 4
        for seed in range(6):
            assert ranks.serve(seed) == [(0, 10, 0)] * 4
        wait_until(lambda: daemon.counter("storage_written_pages") == 6 * 21, "write-through to storage")
        wait_until(lambda: daemon.flush().kept_pages == 0, "host memory to be empty")
        for seed in range(3):
            assert ranks.serve(seed) == [(0, 0, 10)] * 4
        ranks.kill(2)
        wait_until(lambda: len(daemon.status().engines) == 3, "the daemon to notice")
        assert ranks.serve(0) == [(0, 0, 0)] * 3
        ranks.start(2)
        assert ranks.ends[2].poll(30)
        assert ranks.ends[2].recv() == "attached"
        for seed in range(3):
            assert ranks.serve(seed) == [(0, 10, 0)] * 4
        assert not daemon.status().problems
    finally:
        ranks.close()
