"""What was acknowledged can be read, at once, by everybody: ten thousand times, under load."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from hicache.client import Client, Outcome, Placement, Prompt, SharedRegion
from hicache.core.layout import ComponentSpec, Kind, Layout, Plane, Pool
from tests.live import START_S, LiveDaemon

PAGE_TOKENS, PAGE_BYTES = 4, 512
N_ENGINES, N_EACH, MOST_PAGES = 4, 2500, 4
N_SLOTS = 2 * MOST_PAGES
LAYOUT = Layout(
    page_size=PAGE_TOKENS,
    components=(ComponentSpec("full", Kind.FULL), ComponentSpec("mamba", Kind.MAMBA)),
    pools=(
        Pool("kv", "full", N_SLOTS, (Plane(0, 0, PAGE_BYTES, PAGE_BYTES),)),
        Pool("state", "mamba", N_SLOTS, (Plane(0, N_SLOTS * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES),)),
    ),
)
DEADLINE_S = 20.0


class Writer(threading.Thread):
    """One engine: backs up prompts of its own, and after each acknowledgement looks up, or loads and
    compares, what it wrote, through its own attachment and through another engine's."""

    def __init__(self, address: str, number: int) -> None:
        super().__init__(name=f"writer-{number}")
        self.number = number
        self.region = SharedRegion(2 * N_SLOTS * PAGE_BYTES)
        self.memory = self.region.array(np.uint8, (2, N_SLOTS, PAGE_BYTES))
        self.client = Client(address, engine_id=f"w{number}", model="m", layout=LAYOUT, regions=[self.region])
        assert self.client.wait_attached(START_S), self.client.problem
        self.others: list[Client] = []
        self.done = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        random = np.random.default_rng(self.number)
        for n in range(N_EACH):
            self.once(n, int(random.integers(1, MOST_PAGES + 1)), random)
            if self.wrong:
                return

    def once(self, n: int, n_pages: int, random: np.random.Generator) -> None:
        words = random.integers(0, 1 << 30, n_pages * PAGE_TOKENS - 2)
        prompt = Prompt(f"{self.number}/{n}", np.concatenate(([self.number, n], words)).astype(np.int32))
        pages = np.arange(n_pages, dtype=np.int32)
        last = pages[-1:]
        self.memory[:, :n_pages] = random.integers(0, 256, (2, n_pages, 1), np.uint8)
        backup = self.client.start_backup(
            prompt, {"full": Placement(pages, pages), "mamba": Placement(last, last)}
        )
        outcome = backup.wait(DEADLINE_S)
        refused = sum(each.refused_pages for each in backup.backup_outcomes.values())
        if outcome is not Outcome.OK or refused:
            self.wrong.append(f"{prompt.request_id}: not acknowledged: {outcome} {backup.reason} {refused}")
            return
        other = self.others[n % len(self.others)]
        for client in (self.client, other) if n % 4 == 0 else (other,):
            found = client.lookup(prompt, device={}, limit_pages=n_pages, timeout_s=DEADLINE_S)
            if found is None or found.boundary != n_pages or found.lease is None:
                self.wrong.append(f"{prompt.request_id}: {n_pages} pages acknowledged, found {found}")
                return
            if client is self.client and n % 20 == 0:
                into = Placement(pages, pages + MOST_PAGES), Placement(last, last + MOST_PAGES)
                load = client.start_load(found.lease, dict(zip(("full", "mamba"), into, strict=True)))
                end = load.wait(DEADLINE_S)
                written, back = self.memory[:, :n_pages], self.memory[:, MOST_PAGES : MOST_PAGES + n_pages]
                same = (written[0] == back[0]).all() and (written[1, -1] == back[1, -1]).all()
                if end is not Outcome.OK or not same:
                    self.wrong.append(f"{prompt.request_id}: {end}, other bytes")
            client.release(found.lease)
        self.done += 1

    def close(self) -> None:
        self.client.close()
        self.region.close()


def test_the_lookup_right_after_an_acknowledged_backup_hits_ten_thousand_times(tmp_path: Path) -> None:
    """Four engines at once, each looking up what it wrote, through another one or itself. The host has room
    for a part only, so that it evicts all the time. Of every twenty one is loaded and compared."""
    daemon = LiveDaemon(tmp_path, capacity="16MiB", storage=None)
    writers = [Writer(daemon.address, number) for number in range(N_ENGINES)]
    try:
        for writer in writers:
            writer.others = [other.client for other in writers if other is not writer]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(timeout=110)
        assert [complaint for writer in writers for complaint in writer.wrong] == []
        assert [writer.done for writer in writers] == [N_EACH] * N_ENGINES
        assert daemon.counter("internal_errors") == 0
        assert daemon.counter("host_evicted_pages") > 0, "the host was never short of room"
    finally:
        for writer in writers:
            writer.close()
        daemon.close()
