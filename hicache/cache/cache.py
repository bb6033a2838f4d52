"""UnifiedRadixCache: the facade that an engine's scheduler calls, from one thread.

Owns L1: its slots and their index. Brings pages from the lower tiers when a request begins, and offers
them what requests computed. Copies no bytes itself, and never waits longer than its time limits, whatever
happens below.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

import numpy as np

from hicache.cache.backups import Backups
from hicache.cache.costs import LoadRule
from hicache.cache.counters import Counters
from hicache.cache.holding import Holding, limit_pages_of
from hicache.cache.l1 import L1
from hicache.cache.ledger import Owner
from hicache.cache.loads import NOTHING, Brought, LoadBack, Reach
from hicache.cache.lower import LowerTiers
from hicache.cache.owners import audit_owners
from hicache.cache.pending import Loading
from hicache.cache.requests import Queued, Request
from hicache.cache.writing import WritePolicy, WriteRules, Writing
from hicache.client.layers import LayerBoard
from hicache.client.messages import PrefetchPolicy, Prompt
from hicache.core.audit import audit
from hicache.core.coverage import Checkpoint
from hicache.core.identity import Namespace
from hicache.core.layout import Layout, LayoutError
from hicache.core.matching import Match
from hicache.core.pools import SlotPool
from hicache.core.tree import Inserted
from hicache.core.words import NO_SLOT, SlotArray, Tier, TokenArray, token_array

CopySlot = Callable[[str, int, int], None]
"""copy_slot(component, source, target): copy a slot's bytes within the engine's own memory. When it
returns, whatever the engine does next to either slot comes after the copy."""


class UnifiedRadixCache:
    """One engine's cache.

    `client`: None for L1 only. `copy_slot`: needed where requests have private slots. `max_backup_share`:
    part of each component's slots that backups may keep pinned. `prefetch_wait_s`: longest time that
    `begin` waits for the request's prefetch. `writing` (None without a client) has the write policy, and
    changes it; `load_rule` says which loads are worth it. `layers`: where loads that are not waited for
    say which of their layers have landed. Raises LayoutError for components that make no sense.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        model: str,
        revision: str = "",
        client: LowerTiers | None = None,
        copy_slot: CopySlot | None = None,
        write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        write_rules: WriteRules = WriteRules(),  # noqa: B008 - frozen
        lookup_timeout_s: float = 0.05,
        load_timeout_s: float = 2.0,
        load_rule: LoadRule | None = None,
        layers: LayerBoard | None = None,
        prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT,
        prefetch_wait_s: float = 2.0,
        max_backup_share: float = 0.25,
    ) -> None:
        if not layout.components or any(not layout.pools_of(spec.name) for spec in layout.components):
            raise LayoutError("layout.components: empty, or one has no pool; see Layout.validate")
        self.counters = Counters()
        self.load_rule = load_rule or LoadRule()
        self._identity = (model, revision, layout.fingerprint(), layout.page_size)
        self._page_size = layout.page_size
        self._l1 = L1(layout, self.counters)
        self._components, self._index, self._ledger = self._l1.components, self._l1.index, self._l1.ledger
        self._holding = Holding(self._l1, layout.page_size)
        self._copy_slot = copy_slot
        self._client = client
        self._prefetch_policy = prefetch_policy
        self._prefetch_wait_s = prefetch_wait_s
        self._queued: dict[str, Queued] = {}
        self._live: list[Request] = []
        self._loads: LoadBack | None = None
        self._backups: Backups | None = None
        self.writing: Writing | None = None
        if client is not None:
            self._loads = LoadBack(
                self._l1,
                client,
                self.load_rule,
                layers,
                lookup_timeout_s=lookup_timeout_s,
                load_timeout_s=load_timeout_s,
            )
            self._backups = Backups(self._l1, client, max_share=max_backup_share)
            self.writing = Writing(self._l1, self._backups, write_policy, write_rules)

    # ---- slots ----

    @property
    def pools(self) -> Mapping[str, SlotPool]:
        """Per component; for reading."""
        return self._ledger.pools

    def alloc(self, component: str, n: int) -> SlotArray | None:
        """`n` slots of a component, now the caller's: evicts what is least recently used and not in use
        where needed. None, and nothing taken, when even that gives too few."""
        self.poll()
        slots = self._l1.take(component, n, Owner.ENGINE)
        self.counters.allocations_failed += slots is None
        return slots

    def free(self, component: str, slots: SlotArray) -> None:
        """Give back slots that are the caller's: allocated, and not inserted. -1 entries are ignored.
        Raises ValueError, before any change, for any other slot."""
        self._ledger.give(component, np.asarray(slots, np.int32), Owner.ENGINE, Owner.NOBODY)

    def evict(self, component: str, pages: int) -> int:
        """Give up to `pages` pages of L1 back to the pool; how many went."""
        self.poll()
        return self._l1.evict(component, pages)

    def checkpoint(self, request: Request, component: str) -> int:
        """A copy of the request's private slot, to be offered to `insert`: the caller's from now on.
        -1, counted, when no slot is to be had: the request goes on without this checkpoint."""
        self._check_settled(request)
        source = request.private[component]
        slots = self._l1.take(component, 1, Owner.ENGINE)
        if slots is None:
            self.counters.checkpoints_skipped += 1
            return NO_SLOT
        self._copy(component, source, int(slots[0]))
        return int(slots[0])

    # ---- requests ----

    def prefetch(self, request_id: str, tokens: TokenArray, *, adapter: str = "", salt: str = "") -> None:
        """The request is queued: have what storage holds of its prompt brought to host memory meanwhile.
        Waits for nothing. Followed by `begin` or by `cancel`, under the same id."""
        self.poll()
        self.cancel(request_id)
        if self._client is None or not self._client.ready:
            return
        prompt = Prompt(request_id, token_array(tokens), adapter, salt)
        limit_pages = limit_pages_of(prompt.tokens, self._page_size)
        match = self._index.match(self._namespace(prompt), prompt.tokens, limit_pages=limit_pages)
        prefetch, boundary = None, match.boundaries[Tier.DEVICE]
        if boundary < limit_pages:
            prefetch = self._client.prefetch(
                prompt,
                device=self._l1.ready(match),
                limit_pages=limit_pages,
                policy=self._prefetch_policy,
            )
            self.counters.prefetches += prefetch is not None
        self._queued[request_id] = Queued(boundary, prefetch)

    def cancel(self, request_id: str) -> None:
        """A queued request will not begin: end its prefetch, if there is one."""
        queued = self._queued.pop(request_id, None)
        if queued is not None and queued.prefetch is not None:
            queued.prefetch.cancel()

    def begin(
        self,
        request_id: str,
        tokens: TokenArray,
        *,
        adapter: str = "",
        salt: str = "",
        private: Mapping[str, int] | None = None,
        wait: bool = True,
    ) -> Request:
        """Reuse as much of a prompt as L1 and the lower tiers can serve; at least one token is left to
        compute. What the request reads stays in place until it ends.

        `private`: per component with recurrent state, a slot of the caller's that becomes the request's
        own; the checkpoint at the boundary is copied there, so that the request may go on from it and
        change it. At boundary 0 nothing is copied. Waits at most for the prefetch, the lookup and the
        load; with `wait=False` not for the load, see `Request.loading`. Raises ValueError for a private
        slot that is not the caller's, before any change.
        """
        self.poll()
        prompt = Prompt(request_id, token_array(tokens), adapter, salt)
        private = dict(private or {})
        self._check_private(private)
        request = self._admit(prompt, self._reach(prompt)) if wait else self._begin_loading(prompt)
        if request.loading is None:
            self._holding.count_hit(request)
        for component, slot in private.items():
            self._ledger.give(component, np.array([slot], np.int32), Owner.ENGINE, Owner.REQUEST)
            request.private[component] = slot
        with ExitStack() as undo:
            undo.callback(self._end, request)
            self._copy_checkpoints(request)
            undo.pop_all()
        return request

    def insert(self, request: Request, tokens: TokenArray, slots: Mapping[str, SlotArray]) -> Inserted:
        """Cache what the request has computed: `tokens` from the prompt's start, as many as have state in
        place; the tail that fills no page stays the caller's.

        `slots[component]`, one entry per whole page, -1 for none: those of pages from `request.n_pages`
        on become the cache's (earlier entries are ignored: these pages are its own already). Where
        another request was faster, the caller's slot is freed and `request.slots` names the one to use.
        Raises ValueError before any change when a slot is not the caller's, or tokens do not continue the
        request's.
        """
        return self._insert(request, tokens, slots, donate=False)

    def advance(self, request: Request, boundary: int) -> None:
        """The request now computes beyond `boundary` pages: what its windows no longer need, and the
        checkpoint it began from, may be evicted."""
        self._check_settled(request)
        for component in self._components:
            if not component.coverage.whole_path and boundary > 0:
                start = min(component.coverage.start(boundary), request.n_pages)
                self._index.unpin_before(request.receipt, component.name, start)
                request.slots[component.name][:start] = NO_SLOT

    def finish(self, request: Request, tokens: TokenArray, slots: Mapping[str, SlotArray]) -> Inserted:
        """Insert for the last time and end the request. A private slot may be offered too (its state must
        be that of the page's end); one that is not goes back to the pool."""
        inserted = self._insert(request, tokens, slots, donate=True)
        self.counters.uncached_tail_tokens += inserted.tail_tokens
        self._end(request)
        return inserted

    def abort(self, request: Request) -> None:
        """End the request without inserting. Slots that the caller allocated for it and did not insert
        stay the caller's to free; its private slots go back to the pool."""
        self._check_live(request)
        self._end(request)

    # ---- upkeep ----

    def poll(self) -> int:
        """Reap transfers that have settled; how many. The other calls do it too: call this when idle."""
        reaped = 0 if self._loads is None else self._loads.reap()
        return reaped if self._backups is None else reaped + self._backups.reap()

    def audit(self) -> list[str]:
        """Recount everything; what is wrong, empty when nothing is."""
        names = [component.name for component in self._components]
        away = {
            (name, Tier.DEVICE): self._ledger.owned(name, Owner.ENGINE, Owner.REQUEST, Owner.TRANSFER)
            for name in names
        }
        pools = {(name, Tier.DEVICE): pool for name, pool in self.pools.items()}
        return audit(self._index, pools, held=away) + audit_owners(
            self._ledger, self._live, self._loads, self._backups
        )

    def close(self) -> None:
        """Cancel what is queued and leave the daemon. Slots stay where they are; the memory under them
        may be unmapped, for the daemon has a mapping of its own."""
        for request_id in list(self._queued):
            self.cancel(request_id)
        if self._client is not None:
            self._client.close()

    # ---- inside ----

    def _namespace(self, prompt: Prompt) -> Namespace:
        model, revision, layout, page_size = self._identity
        return Namespace(model, revision, layout, page_size, prompt.adapter, prompt.salt)

    def _copy(self, component: str, source: int, target: int) -> None:
        if self._copy_slot is None:
            raise ValueError("copy_slot: private slots need it; give it to the cache")
        self._copy_slot(component, source, target)

    def _check_private(self, private: Mapping[str, int]) -> None:
        checkpoints = {c.name for c in self._components if isinstance(c.coverage, Checkpoint)}
        for component, slot in private.items():
            if component not in checkpoints:
                raise ValueError(
                    f"private: {component!r} keeps no checkpoints, only {sorted(checkpoints)} do"
                )
            if self._copy_slot is None:
                raise ValueError("private: needs copy_slot; give it to the cache")
            self._ledger.check(component, np.array([slot], np.int32), Owner.ENGINE)

    def _reach(self, prompt: Prompt) -> Reach:
        """Get as deep as L1 and the lower tiers allow.

        A prefetch leaves out what L1 has when it is asked for. What has gone from there since is fetched
        now, in what is left of the time for prefetches.
        """
        deadline = time.monotonic() + self._prefetch_wait_s
        queued = self._queued.pop(prompt.request_id, None)
        if queued is None:
            return self._reach_once(prompt, None)
        before, promised = self._await_prefetch(queued, deadline)
        reach = self._reach_once(prompt, before)
        if reach.boundary < promised and time.monotonic() < deadline:
            self.prefetch(prompt.request_id, prompt.tokens, adapter=prompt.adapter, salt=prompt.salt)
            queued = self._queued.pop(prompt.request_id, None)
            if queued is not None:
                self.counters.prefetches_again += 1
                before, _ = self._await_prefetch(queued, deadline)
                reach = self._reach_once(prompt, before).after(reach)
        return reach

    def _reach_once(self, prompt: Prompt, before: int | None) -> Reach:
        namespace, limit_pages = self._namespace(prompt), limit_pages_of(prompt.tokens, self._page_size)
        match = self._index.match(namespace, prompt.tokens, limit_pages=limit_pages)
        brought = NOTHING
        if self._loads is not None and match.boundaries[Tier.DEVICE] < limit_pages:
            brought = self._loads.bring(prompt, namespace, match, limit_pages)
            match = self._index.match(namespace, prompt.tokens, limit_pages=limit_pages)
        return self._reached(namespace, match, brought, before)

    def _await_prefetch(self, queued: Queued, deadline: float) -> tuple[int | None, int]:
        """Wait for a prefetch: what L1 and L2 could serve before it, where that is known, and what they
        can now, if L1 still has what it had."""
        if queued.prefetch is None:
            return None, queued.boundary
        progress = queued.prefetch.wait(max(0.0, deadline - time.monotonic()))
        if progress is None:
            self.counters.prefetches_unanswered += 1
            return queued.prefetch.boundary_before, queued.boundary
        return queued.prefetch.boundary_before, progress.boundary

    def _begin_loading(self, prompt: Prompt) -> Request:
        """What L1 has now, and a load of what the lower tiers have beyond it."""
        stored_from = None
        queued = self._queued.pop(prompt.request_id, None)
        if queued is not None:
            stored_from, _ = self._await_prefetch(queued, time.monotonic() + self._prefetch_wait_s)
        namespace, limit_pages = self._namespace(prompt), limit_pages_of(prompt.tokens, self._page_size)
        match = self._index.match(namespace, prompt.tokens, limit_pages=limit_pages)
        load, joined, branching = None, False, 0
        if self._loads is not None and match.boundaries[Tier.DEVICE] < limit_pages:
            started = self._loads.begin(prompt, namespace, match, limit_pages, by_layer=True)
            load, joined, branching = started.load, started.joined, started.branching_boundary
            match = self._index.match(namespace, prompt.tokens, limit_pages=limit_pages)
        none = np.empty(0, np.int32)
        request = self._admit(prompt, Reach(namespace, match, Brought({}, branching), none, none))
        if load is not None:
            boundary, slots = request.boundary, request.slots
            if not joined:
                boundary, slots = self._holding.expected(load)
            request.loading = Loading(
                load,
                partial(self._take_loaded, request),
                self.poll,
                boundary=boundary,
                slots=slots,
                stored_from=stored_from,
            )
        return request

    def _take_loaded(self, request: Request, timeout_s: float) -> None:
        """End the request's load: what has come is the request's."""
        self._check_live(request)
        loading, request.loading = request.loading, None
        if loading is None or self._loads is None:
            return
        self.poll()
        self._loads.wait(loading.load, timeout_s)
        limit_pages = limit_pages_of(request.prompt.tokens, self._page_size)
        match = self._index.match(request.namespace, request.prompt.tokens, limit_pages=limit_pages)
        if match.boundaries[Tier.DEVICE] > request.boundary:
            pages = loading.load.pages if loading.load.landed else {}
            brought = Brought(pages, request.branching_boundary)
            self._holding.hold(request, self._reached(request.namespace, match, brought, loading.stored_from))
            self._copy_checkpoints(request)
        self._loads.let_go(loading.load)
        self._holding.count_hit(request)

    def _reached(self, namespace: Namespace, match: Match, brought: Brought, before: int | None) -> Reach:
        name = next((c.name for c in self._components if c.coverage.whole_path), self._components[0].name)
        came = brought.loaded.get(name, np.empty(0, np.int32))
        stored = came >= before if before is not None else np.zeros(len(came), bool)
        return Reach(namespace, match, brought, came[~stored], came[stored])

    def _admit(self, prompt: Prompt, reach: Reach) -> Request:
        request = self._holding.admit(prompt, reach)
        self._live.append(request)
        return request

    def _copy_checkpoints(self, request: Request) -> None:
        """Into the request's own slots."""
        for component, slot in request.private.items():
            if request.boundary:
                self._copy(component, int(request.slots[component][request.boundary - 1]), slot)

    def _insert(
        self,
        request: Request,
        tokens: TokenArray,
        slots: Mapping[str, SlotArray],
        *,
        donate: bool,
    ) -> Inserted:
        self._check_settled(request)
        self.poll()
        tokens = token_array(tokens)
        n_pages = len(tokens) // self._page_size
        known = len(request.tokens)
        if n_pages < request.n_pages or not np.array_equal(tokens[:known], request.tokens):
            raise ValueError("tokens: must begin with those that the request has in the cache already")
        offered = self._offered(request, n_pages, slots, donate=donate)
        first_page, reused = request.n_pages, {} if request.inserted else request.slots.copy()
        inserted = self._index.insert(
            request.namespace,
            tokens,
            offered,
            tier=Tier.DEVICE,
            cursor=request.cursor,
            first_page=request.n_pages,
        )
        for name, given in offered.items():
            own = request.private.get(name)
            if donate and own is not None and own in given:
                self._ledger.give(name, np.array([own], np.int32), Owner.REQUEST, Owner.ENGINE)
                del request.private[name]
            redundant = inserted.redundant[name]
            self._ledger.give(name, given, Owner.ENGINE, Owner.INDEX)
            self._ledger.give(name, redundant, Owner.INDEX, Owner.NOBODY)
            self.counters.inserted_pages += int((given != NO_SLOT).sum()) - len(redundant)
            self.counters.redundant_pages += len(redundant)
        self._holding.move_pin(request, tokens, inserted)
        request.inserted = True
        if self.writing is not None:
            self.writing.inserted(request, reused, first_page, inserted.canonical)
        return inserted

    def _offered(
        self, request: Request, n_pages: int, slots: Mapping[str, SlotArray], *, donate: bool
    ) -> dict[str, SlotArray]:
        """The slots of the pages that are new to the cache, all of them checked to be the caller's (or,
        where that is allowed, the request's private one)."""
        offered: dict[str, SlotArray] = {}
        for name, given in slots.items():
            if name not in self.pools:
                raise ValueError(f"slots: no component {name!r}; there are {sorted(self.pools)}")
            array = np.asarray(given, np.int32)
            if array.shape != (n_pages,):
                raise ValueError(f"slots of {name!r}: shape {array.shape} for {n_pages} whole pages")
            new = array[request.n_pages :].copy()
            own = request.private.get(name, NO_SLOT) if donate else NO_SLOT
            others = new[(new != NO_SLOT) & (new != own)]
            if len(others):
                self._ledger.check(name, others, Owner.ENGINE)
            if own != NO_SLOT and int((new == own).sum()) > 1:
                raise ValueError(f"slots of {name!r}: the private slot is named twice")
            offered[name] = new
        return offered

    def _end(self, request: Request) -> None:
        if request.loading is not None and self._loads is not None:
            self._loads.let_go(request.loading.load)
            request.loading = None
            self._holding.count_hit(request)
        self._index.unpin(request.receipt)
        for component, slot in request.private.items():
            self._ledger.give(component, np.array([slot], np.int32), Owner.REQUEST, Owner.NOBODY)
        request.private.clear()
        request.ended = True
        self._live.remove(request)

    def _check_settled(self, request: Request) -> None:
        self._check_live(request)
        if request.loading is not None:
            raise ValueError(f"request {request.prompt.request_id!r} is loading: request.loading.end() first")

    def _check_live(self, request: Request) -> None:
        if request.ended:
            raise ValueError(f"request {request.prompt.request_id!r} has ended")
