"""A tiny engine over a cache: it 'computes' pages by writing their tags, and checks all that it reads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
from fake_lower import PAGE_TOKENS, FakeLower, Key, fill, key, make_layout, make_memory, tag

from hicache.cache import LoadRule, Request, UnifiedRadixCache, WritePolicy, WriteRules
from hicache.client import LayerBoard, Placement, Prompt
from hicache.core.coverage import Checkpoint
from hicache.core.words import NO_SLOT, SlotArray, Tier, TokenArray


def tokens_of(*pages: int, tail: int = 1) -> TokenArray:
    """A prompt whose pages are named by numbers, and `tail` tokens more."""
    whole = np.repeat(np.array(pages, np.int32), PAGE_TOKENS)
    return np.concatenate((whole, np.full(tail, 999, np.int32)))


@dataclass
class Running:
    """A request and the engine's own view of it."""

    request: Request
    prompt: Prompt
    table: dict[str, SlotArray] = field(default_factory=dict)
    private: int = NO_SLOT


class Engine:
    """Every call ends with `check`."""

    def __init__(
        self,
        *,
        lower: bool = True,
        share: float = 1.0,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        rules: WriteRules = WriteRules(),  # noqa: B008 - frozen
        rule: LoadRule | None = None,
        layers: LayerBoard | None = None,
        **slots: int,
    ) -> None:
        layout = make_layout(**slots)
        self.memory = make_memory(layout)
        self.lower = FakeLower(layout, self.memory)
        self.cache = UnifiedRadixCache(
            layout,
            model="m",
            client=self.lower if lower else None,
            copy_slot=self._copy_slot,
            max_backup_share=share,
            write_policy=policy,
            write_rules=rules,
            load_rule=rule,
            layers=layers,
        )
        self.users: dict[Key, set[str]] = {}
        """For every page that was ever computed: the requests that have used it, or more."""
        self.components = layout.index_components()
        self.running: list[Running] = []
        self.mine: dict[str, list[int]] = {name: [] for name in slots}
        """Slots that the engine holds outside of requests."""
        self._ids = itertools.count(1)

    def _copy_slot(self, component: str, source: int, target: int) -> None:
        self.memory[component][target] = self.memory[component][source]

    def begin(
        self,
        tokens: TokenArray,
        *,
        salt: str = "",
        adapter: str = "",
        private: bool = False,
        name: str = "",
        wait: bool = True,
    ) -> Running | None:
        """None when the engine has no slot for the request's recurrent state."""
        name = name or f"r{next(self._ids)}"
        prompt = Prompt(name, tokens, adapter, salt)
        own: dict[str, int] = {}
        if private:
            slots = self.cache.alloc("mamba", 1)
            if slots is None:
                self.check()
                return None
            own["mamba"] = int(slots[0])
        request = self.cache.begin(name, tokens, salt=salt, adapter=adapter, private=own, wait=wait)
        running = Running(request, prompt, private=own.get("mamba", NO_SLOT))
        for component in self.components:
            running.table[component.name] = request.slots[component.name].copy()
        self.running.append(running)
        self._check_private(running)
        self.check()
        return running

    def take_loaded(self, running: Running) -> None:
        """End the request's load, whether it has come or not."""
        loading = running.request.loading
        assert loading is not None
        loading.end()
        for name, slots in running.request.slots.items():
            running.table[name] = slots.copy()
        self._check_private(running)
        self.check()

    def _check_private(self, running: Running) -> None:
        request, prompt = running.request, running.prompt
        if running.private != NO_SLOT and request.boundary:
            got = self.memory["mamba"][running.private]
            assert np.array_equal(got, tag(prompt, "mamba", request.boundary - 1)), "another state"

    def compute(self, running: Running, to: int, *, checkpoint: bool = True) -> bool:
        """Prefill up to page `to`, in one chunk; False when there is no room. Recurrent state is kept for
        the last page only, window state for its window only."""
        request = running.request
        start = request.n_pages
        fresh: dict[str, SlotArray] = {}
        for component in self.components:
            name = component.name
            low = max(start, component.coverage.start(to)) if to > start else to
            slots = np.full(to - start, NO_SLOT, np.int32)
            skip = isinstance(component.coverage, Checkpoint) and not checkpoint
            got = None if skip else self.cache.alloc(name, to - low)
            if got is None and not isinstance(component.coverage, Checkpoint):
                for other, taken in fresh.items():
                    self.cache.free(other, taken)
                self.check()
                return False
            if got is not None:
                slots[low - start :] = got
                fill(self.memory, running.prompt, name, range(low, to), got)
            fresh[name] = slots
        table = {name: np.concatenate((running.table[name][:start], s)) for name, s in fresh.items()}
        self.cache.insert(request, running.prompt.tokens[: to * PAGE_TOKENS], table)
        running.table = {name: slots.copy() for name, slots in request.slots.items()}
        self._note_users(running, fresh, start)
        self.check()
        return True

    def _note_users(self, running: Running, fresh: dict[str, SlotArray], start: int) -> None:
        for name, slots in fresh.items():
            for page in range(running.request.n_pages):
                place = key(running.prompt, name, page)
                if place in self.users or (page >= start and slots[page - start] != NO_SLOT):
                    self.users.setdefault(place, set()).add(running.prompt.request_id)

    def finish(self, running: Running) -> None:
        n_tokens = running.request.n_pages * PAGE_TOKENS
        self.cache.finish(running.request, running.prompt.tokens[:n_tokens], running.table)
        self.running.remove(running)
        self.check()

    def abort(self, running: Running) -> None:
        self.cache.abort(running.request)
        self.running.remove(running)
        self.check()

    def serve(self, tokens: TokenArray, **how: str) -> Running:
        """A request from begin to finish, all of it computed."""
        running = self.begin(tokens, salt=how.get("salt", ""), adapter=how.get("adapter", ""))
        assert running is not None
        assert self.compute(running, len(tokens) // PAGE_TOKENS)
        self.finish(running)
        return running

    def check(self) -> None:
        """Nothing leaks, every running request still reads what recomputation would have stored, and the
        write policy keeps its promise."""
        assert self.cache.audit() == []
        self._check_policy()
        for transfer in self.lower.unsettled():
            for name, placement in transfer.placements.items():
                used = self.cache.pools[name].used_slots()
                assert np.isin(placement.slots, used).all(), f"slots of an unsettled {transfer.kind} are free"
                assert not set(self.mine[name]) & set(placement.slots.tolist())
                if transfer.kind == "backup":
                    self._check_sources(transfer.prompt, name, placement)
        for running in self.running:
            request = running.request
            for component in self.components:
                slots = request.slots[component.name]
                assert len(slots) == request.n_pages
                for page in np.flatnonzero(slots != NO_SLOT).tolist():
                    got = self.memory[component.name][slots[page]]
                    assert np.array_equal(got, tag(running.prompt, component.name, page)), (
                        f"{component.name} page {page} of {running.prompt.request_id}: other bytes"
                    )

    def _check_policy(self) -> None:
        writing, counters = self.cache.writing, self.cache.counters
        if writing is None:
            return
        if writing.policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            for place in self.lower.acknowledged:
                assert len(self.users[place]) >= writing.rules.min_uses, "backed up too early"
        if writing.policy is WritePolicy.WRITE_BACK and writing.rules.output:
            gone = self.users.keys() - self.lower.acknowledged - self._in_l1()
            dropped = counters.dropped_refused_pages + counters.dropped_away_pages
            assert len(gone) <= dropped, "pages have gone without a copy, and it was not counted"

    def _in_l1(self) -> set[Key]:
        index, here = self.cache._index, set()
        for end in index.leaves():
            tokens = index.tokens(end)
            prompt = Prompt("", tokens, end.namespace.adapter, end.namespace.salt)
            for component in self.components:
                slots = index.slots(end, component.name, Tier.DEVICE, 0, end.boundary)
                pages = np.flatnonzero(slots != NO_SLOT).tolist()
                here |= {key(prompt, component.name, page) for page in pages}
        return here

    def _check_sources(self, prompt: Prompt, name: str, placement: Placement) -> None:
        """What a backup may still read is what was computed."""
        for page, slot in zip(placement.pages.tolist(), placement.slots.tolist(), strict=True):
            assert np.array_equal(self.memory[name][slot], tag(prompt, name, page)), "changed under a backup"

    def free_slots(self) -> dict[str, int]:
        return {name: pool.n_free for name, pool in self.cache.pools.items()}

    def drop_l1(self) -> None:
        """Evict all that can go from L1."""
        for name, pool in self.cache.pools.items():
            self.cache.evict(name, pool.n_slots)
        self.check()
