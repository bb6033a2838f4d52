"""Figures of the index: turns of one long conversation, and operations on trees of 100,000 leaves.

Run from the repository root: `python -m bench.index [--json] [--quick]`. Times are of this thread
(`time.thread_time`), microseconds, median unless said otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json as json_module
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from bench.workload import bushy_tree, conversation, deep_tree
from hicache.core.coverage import Checkpoint, Component, SlidingWindow, WholePath
from hicache.core.identity import Namespace
from hicache.core.structure import Cursor
from hicache.core.tree import Index
from hicache.core.words import NO_SLOT, SlotArray, Tier, TokenArray

DEVICE = Tier.DEVICE
WINDOW_TOKENS = 128
KINDS = ("full", "full+swa", "full+mamba", "full+swa+mamba")


def components(kinds: str, page_size: int) -> list[Component]:
    rules = {
        "full": WholePath(),
        "swa": SlidingWindow(max(1, WINDOW_TOKENS // page_size)),
        "mamba": Checkpoint(),
    }
    return [Component(kind, rules[kind]) for kind in kinds.split("+")]


class Engine:
    """Plays the engine: hands out slots and offers what a finished request would offer."""

    def __init__(self, kinds: str, page_size: int) -> None:
        self.index = Index(page_size, components(kinds, page_size), (DEVICE,))
        self.namespace = Namespace("bench", "", b"", page_size)
        self.page_size = page_size
        self._next = 0

    def offer(self, first: int, stop: int) -> dict[str, SlotArray]:
        """Fresh slots for the pages [first, stop): FULL all, SWA its last window, MAMBA the last page."""
        offered = {}
        for component in self.index.shape.components:
            slots: SlotArray = np.full(stop - first, NO_SLOT, dtype=np.int32)
            start = max(component.coverage.start(stop), first)
            slots[start - first :] = np.arange(self._next, self._next + stop - start)
            self._next += stop - start
            offered[component.name] = slots
        return offered

    def insert(self, tokens: TokenArray) -> None:
        first = self.index.match(self.namespace, tokens).n_pages
        stop = len(tokens) // self.page_size
        if stop > first:
            slots = self.offer(first, stop)
            self.index.insert(self.namespace, tokens, slots, tier=DEVICE, first_page=first)


@dataclass(frozen=True)
class TurnFigures:
    kinds: str
    page_size: int
    cursor: bool
    match_us: float
    pin_us: float
    insert_us: float
    unpin_us: float
    total_us: float


def one_conversation(kinds: str, page_size: int, with_cursor: bool, turns: int) -> dict[str, float]:
    """Mean cost per turn over the last eighth of the turns."""
    engine, clock = Engine(kinds, page_size), time.thread_time
    index, namespace = engine.index, engine.namespace
    spent: dict[str, list[float]] = {"match": [], "pin": [], "insert": [], "unpin": []}
    cursor: Cursor | None = None
    gc.collect()
    for turn in conversation(turns):
        t0 = clock()
        match = index.match(namespace, turn.prompt, cursor=cursor)
        boundary = match.boundaries[DEVICE]
        index.touch(match.cursor, boundary)
        t1 = clock()
        receipt = index.pin(match.cursor, boundary, tier=DEVICE)
        t2 = clock()
        assert boundary == (len(turn.full) - 200) // page_size
        slots = engine.offer(boundary, len(turn.full) // page_size)
        near = match.cursor if with_cursor else None
        t3 = clock()
        done = index.insert(namespace, turn.full, slots, tier=DEVICE, first_page=boundary, cursor=near)
        t4 = clock()
        index.unpin(receipt)
        t5 = clock()
        cursor = done.cursor if with_cursor else None
        if turn.number > turns - turns // 8:
            for name, seconds in zip(spent, (t1 - t0, t2 - t1, t4 - t3, t5 - t4), strict=True):
                spent[name].append(seconds * 1e6)
    return {name: statistics.mean(values) for name, values in spent.items()}


def turn_figures(kinds: str, page_size: int, with_cursor: bool, quick: bool) -> TurnFigures:
    turns, runs = (40, 1) if quick else (200, 5)
    one_conversation(kinds, page_size, with_cursor, 20)
    rows = [one_conversation(kinds, page_size, with_cursor, turns) for _ in range(runs)]
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    total = statistics.median(sum(row.values()) for row in rows)
    return TurnFigures(
        kinds, page_size, with_cursor, *(round(value, 1) for value in (*median.values(), total))
    )


@dataclass(frozen=True)
class TreeFigures:
    shape: str
    kinds: str
    page_size: int
    pages: int
    build_us_per_prompt: float
    bytes_per_page: float
    match_hit_us: float
    match_miss_us: float
    match_part_us: float
    pin_unpin_us: float
    insert_us: float
    insert_split_us: float
    evict_1_us: float
    evict_1_max_us: float
    evict_1000_us: float
    evict_1_worst_lane_us: float


def timed(call: Callable[[int], object], n: int) -> list[float]:
    spent = []
    for i in range(n):
        start = time.thread_time()
        call(i)
        spent.append((time.thread_time() - start) * 1e6)
    return spent


def tree_figures(shape: str, kinds: str, page_size: int, quick: bool) -> TreeFigures:
    scale = 50 if quick else 1000
    prompts: Iterable[list[int]] = bushy_tree(scale) if shape == "bushy" else deep_tree(scale)
    engine = Engine(kinds, page_size)
    index, namespace, rng = engine.index, engine.namespace, random.Random(7)
    gc.collect()
    rss, started, n_prompts, kept = _rss_bytes(), 0.0, 0, dict[int, list[int]]()
    for prompt in prompts:
        tokens = np.array(prompt, dtype=np.int32)
        begun = time.thread_time()
        engine.insert(tokens)
        started += time.thread_time() - begun
        kept[rng.randrange(6000) if shape == "bushy" else n_prompts % scale] = prompt
        n_prompts += 1
    gc.collect()
    n_pages = index.resident("full", DEVICE)
    per_page = (_rss_bytes() - rss) / n_pages - 4 * page_size
    probes = list(kept.values())
    rng.shuffle(probes)
    keys = [np.array(prompt, dtype=np.int32) for prompt in probes]
    n = min(1000, len(keys) // 4)
    hit = timed(lambda i: index.match(namespace, keys[i]), n)
    miss = timed(lambda i: index.match(namespace, np.full(192, -i - 5, dtype=np.int32)), n)
    pinned = timed(_pin_unpin(engine, keys), n)
    insert = timed(_insert(engine, [prompt[:-64] for prompt in probes[n : 2 * n]], 64), n)
    cut = max(page_size, 32 // page_size * page_size)
    part = [np.array(prompt[: len(prompt) - 64 + cut] + [300_001] * 64, dtype=np.int32) for prompt in probes]
    partly = timed(lambda i: index.match(namespace, part[2 * n + i]), n)
    split = timed(_insert(engine, [p[: len(p) - 64 + cut] for p in probes[3 * n : 4 * n]], 64), n)
    one = timed(lambda _: index.evict("full", DEVICE, 1), 200)
    thousand = timed(lambda _: index.evict("full", DEVICE, 1000), 5)
    lanes = [timed(_evict_one(index, kind), 100) for kind in kinds.split("+")]
    medians = (hit, miss, partly, pinned, insert, split, one)
    return TreeFigures(
        shape,
        kinds,
        page_size,
        n_pages,
        round(started / n_prompts * 1e6, 1),
        round(per_page, 1),
        *(round(statistics.median(values), 1) for values in medians),
        round(max(one), 1),
        round(statistics.median(thousand), 1),
        round(max(statistics.median(values) for values in lanes), 1),
    )


def _evict_one(index: Index, kind: str) -> Callable[[int], object]:
    return lambda _: index.evict(kind, DEVICE, 1)


def _pin_unpin(engine: Engine, keys: Sequence[TokenArray]) -> Callable[[int], object]:
    matches = [engine.index.match(engine.namespace, key) for key in keys]

    def call(i: int) -> None:
        match = matches[i]
        engine.index.unpin(engine.index.pin(match.cursor, match.boundaries[DEVICE], tier=DEVICE))

    return call


def _insert(engine: Engine, heads: Sequence[list[int]], n_tokens: int) -> Callable[[int], object]:
    """Insert of one new leaf behind each head; slots and tokens are prepared."""
    rng = random.Random(8)
    prepared = []
    for i, head in enumerate(heads):
        body = [200_000 + i] + [rng.randrange(1, 150_000) for _ in range(n_tokens - 1)]
        tokens = np.array(head + body, dtype=np.int32)
        match = engine.index.match(engine.namespace, tokens)
        slots = engine.offer(match.n_pages, len(tokens) // engine.page_size)
        prepared.append((tokens, slots, match.n_pages))

    def call(i: int) -> None:
        tokens, slots, first = prepared[i]
        engine.index.insert(engine.namespace, tokens, slots, tier=DEVICE, first_page=first)

    return call


def _rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def run(json: bool = False, quick: bool = False) -> None:
    """Run everything and print it, as a table or as one JSON line per row."""
    header = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
    print(json_module.dumps(header) if json else f"index benchmark: {header}", flush=True)
    for kinds in KINDS:
        for page_size in (1, 16, 64):
            for with_cursor in (False, True):
                _show(turn_figures(kinds, page_size, with_cursor, quick), json)
    for shape in ("bushy", "deep"):
        for kinds in ("full", "full+swa+mamba"):
            _show(tree_figures(shape, kinds, 16, quick), json)


def _show(row: TurnFigures | TreeFigures, json: bool) -> None:
    fields = asdict(row)
    if json:
        print(json_module.dumps(fields), flush=True)
    else:
        print("  ".join(f"{name} {value}" for name, value in fields.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of the index.")
    parser.add_argument("--json", action="store_true", help="one JSON line per row")
    parser.add_argument("--quick", action="store_true", help="small sizes, one run: to see that it works")
    arguments = parser.parse_args()
    run(arguments.json, arguments.quick)


if __name__ == "__main__":
    main()
