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
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from bench.workload import bushy_tree, conversation, deep_tree
from hicache.core.columns import Node
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
    total_min_us: float
    """Of the fastest run: the machine at its quietest."""


def one_conversation(kinds: str, page_size: int, with_cursor: bool, turns: int) -> dict[str, float]:
    """Mean cost per turn over the last eighth of the turns. With a cursor each call is given what follows
    the one before, without one the whole prompt."""
    engine, clock = Engine(kinds, page_size), time.thread_time
    index, namespace = engine.index, engine.namespace
    spent: dict[str, list[float]] = {"match": [], "pin": [], "insert": [], "unpin": []}
    cursor: Cursor | None = None
    gc.collect()
    for turn in conversation(turns):
        behind = turn.prompt[cursor.boundary * page_size :] if cursor else turn.prompt
        t0 = clock()
        match = index.match(namespace, behind, after=cursor)
        boundary = match.boundaries[DEVICE]
        index.touch(match.cursor, boundary)
        t1 = clock()
        receipt = index.pin(match.cursor, boundary, tier=DEVICE)
        t2 = clock()
        assert boundary == (len(turn.full) - 200) // page_size
        slots = engine.offer(boundary, len(turn.full) // page_size)
        near = match.cursor if with_cursor else None
        full = turn.full[boundary * page_size :] if near else turn.full
        t3 = clock()
        done = index.insert(namespace, full, slots, tier=DEVICE, first_page=boundary, after=near)
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
    totals = [sum(row.values()) for row in rows]
    whole = (statistics.median(totals), min(totals))
    return TurnFigures(
        kinds, page_size, with_cursor, *(round(value, 1) for value in (*median.values(), *whole))
    )


@dataclass(frozen=True)
class TreeFigures:
    shape: str
    kinds: str
    page_size: int
    pages: int
    nodes: int
    bytes_per_page: float
    """Everything the tree holds beside token ids."""
    us: Mapping[str, float]


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
    index, rng = engine.index, random.Random(7)
    kept: dict[int, TokenArray] = {}
    build = []
    for number, prompt in enumerate(prompts):
        tokens = np.array(prompt, dtype=np.int32)
        build += timed(lambda _, tokens=tokens: engine.insert(tokens), 1)  # type: ignore[misc]  # default binds
        kept[rng.randrange(6000) if shape == "bushy" else number % scale] = tokens
    nodes = list(index._occupancy.nodes())
    n_pages = index.resident("full", DEVICE)
    held = sum(_node_bytes(node) for node in nodes)
    keys = list(kept.values())
    rng.shuffle(keys)
    spent = {"build a prompt": build} | _reads_and_inserts(engine, keys) | _evictions(engine, keys)
    us = {name: round(statistics.median(values), 1) for name, values in spent.items()}
    us["evict 1, slowest of 200"] = round(max(spent["evict 1"]), 1)
    return TreeFigures(shape, kinds, page_size, n_pages, len(nodes), round(held / n_pages, 1), us)


def _reads_and_inserts(engine: Engine, keys: list[TokenArray]) -> dict[str, list[float]]:
    index, namespace, n = engine.index, engine.namespace, min(1000, len(keys) // 4)
    cut = 64 - max(engine.page_size, 32 // engine.page_size * engine.page_size)
    other = np.full(64, 300_001, dtype=np.int32)
    part = [np.concatenate([key[:-cut], other]) for key in keys[2 * n : 3 * n]]
    return {
        "match, hit": timed(lambda i: index.match(namespace, keys[i]), n),
        "match, miss": timed(lambda i: index.match(namespace, np.full(192, -i - 5, dtype=np.int32)), n),
        "match, ends in a node": timed(lambda i: index.match(namespace, part[i]), n),
        "pin + unpin": timed(_pin_unpin(engine, keys[:n]), n),
        "insert a leaf": timed(_insert(engine, [key[:-64] for key in keys[n : 2 * n]], 64), n),
        "insert, divides a node": timed(_insert(engine, [key[:-cut] for key in keys[3 * n : 4 * n]], 64), n),
    }


def _evictions(engine: Engine, keys: list[TokenArray]) -> dict[str, list[float]]:
    index, namespace = engine.index, engine.namespace
    spent = {
        "evict 1": timed(_evict(index, "full", 1), 200),
        "evict 1000": timed(_evict(index, "full", 1000), 5),
    }
    for component in index.shape.components[1:]:
        spent[f"evict 1 of {component.name}"] = timed(_evict(index, component.name, 1), 100)
    for key in keys:
        match = index.match(namespace, key)
        index.touch(match.cursor, match.boundaries[DEVICE])
    spent["evict 1, first after touching 6000"] = timed(_evict(index, "full", 1), 1)
    for number, key in enumerate(keys):
        match = index.match(namespace, key)
        turn = index.sessions.begin(str(number))
        index.sessions.finish(turn, match.cursor, match.boundaries[DEVICE])
    spent["evict 1, 6000 sessions"] = timed(_evict(index, "full", 1), 200)
    spent["evict 1000, 6000 sessions"] = timed(_evict(index, "full", 1000), 5)
    return spent


def _node_bytes(node: Node) -> int:
    """What a node holds beside its token ids."""
    parts: list[object] = [node, node.block, node.use, node.present, node.below, node.high, node.queued]
    parts += [part for part in (node.rank, node.refs, node.hashes, node.children) if part is not None]
    keys = sum(map(sys.getsizeof, node.children or ()))
    return sum(map(sys.getsizeof, parts)) + sys.getsizeof(node.tokens) - len(node.tokens) + keys


def _evict(index: Index, kind: str, pages: int) -> Callable[[int], object]:
    return lambda _: index.evict(kind, DEVICE, pages)


def _pin_unpin(engine: Engine, keys: Sequence[TokenArray]) -> Callable[[int], object]:
    matches = [engine.index.match(engine.namespace, key) for key in keys]

    def call(i: int) -> None:
        match = matches[i]
        engine.index.unpin(engine.index.pin(match.cursor, match.boundaries[DEVICE], tier=DEVICE))

    return call


def _insert(engine: Engine, heads: Sequence[TokenArray], n_tokens: int) -> Callable[[int], object]:
    """Insert of one new leaf behind each head; slots and tokens are prepared."""
    rng = random.Random(8)
    prepared = []
    for i, head in enumerate(heads):
        body = [200_000 + i] + [rng.randrange(1, 150_000) for _ in range(n_tokens - 1)]
        tokens = np.concatenate([head, np.array(body, dtype=np.int32)])
        match = engine.index.match(engine.namespace, tokens)
        slots = engine.offer(match.n_pages, len(tokens) // engine.page_size)
        prepared.append((tokens, slots, match.n_pages))

    def call(i: int) -> None:
        tokens, slots, first = prepared[i]
        engine.index.insert(engine.namespace, tokens, slots, tier=DEVICE, first_page=first)

    return call


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
    fields |= fields.pop("us", {})
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
