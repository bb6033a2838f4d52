"""The oracle: the index as plain sets of pages. No tree, no arrays, no cleverness.

A page is named by its whole path: (salt, pages up to and including it). Everything the index may answer or
give up is worked out from scratch each time, straight from the rules in docs/index.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hicache.core.coverage import Component
from hicache.core.policies import Policy
from hicache.core.words import NO_SLOT, Tier

Path = tuple[str, str]
"""Salt, and one letter per page."""

Key = tuple[int, int, int, int, int]


class Oracle:
    """Resident pages per component and tier."""

    def __init__(
        self,
        components: Sequence[Component],
        tiers: Sequence[Tier],
        policies: Mapping[str, Policy] | None = None,
    ) -> None:
        self.policy = {part.name: (policies or {}).get(part.name, Policy.LRU) for part in components}
        self.coverage = {component.name: component.coverage for component in components}
        self.tiers = list(tiers)
        self.ready: dict[tuple[str, Tier], dict[Path, int]] = {
            (c, t): {} for c in self.coverage for t in tiers
        }
        self.inbound: dict[tuple[str, Tier], dict[Path, int]] = {lane: {} for lane in self.ready}
        self.pins: dict[tuple[str, Tier], dict[Path, int]] = {lane: {} for lane in self.ready}
        self.use: dict[str, dict[Path, int]] = {c: {} for c in self.coverage}
        self.rank: dict[str, dict[Path, int]] = {c: {} for c in self.coverage}
        self.sessions: dict[str, dict[str, set[Path]]] = {}
        """Session id to component to the pages it counts on."""
        self.known_since: dict[Path, int] = {}
        self.tick = 0

    # What is there.

    def present(self, lane: tuple[str, Tier]) -> set[Path]:
        return {*self.ready[lane], *self.inbound[lane]}

    def anywhere(self, component: str) -> set[Path]:
        return {path for tier in self.tiers for path in self.present((component, tier))}

    def known(self) -> set[Path]:
        """Pages with payload at them or beneath them."""
        every = {path for component in self.coverage for path in self.anywhere(component)}
        return {prefix for path in every for prefix in prefixes(path)}

    def settle(self) -> None:
        """After every step: pages that came to be known or unknown, recency of what is nowhere."""
        self.tick += 1
        known = self.known()
        self.known_since = {path: self.known_since.get(path, self.tick) for path in known}
        for table in (self.use, self.rank):
            for component, column in table.items():
                there = self.anywhere(component)
                table[component] = {path: value for path, value in column.items() if path in there}
        for regions in self.sessions.values():
            for component, paths in regions.items():
                regions[component] = paths & known
        for component, policy in self.policy.items():
            if policy is Policy.FIFO:
                for path in self.anywhere(component):
                    self.use[component].setdefault(path, self.tick)

    def matched(self, salt: str, pages: str) -> int:
        known = self.known()
        n = 0
        while n < len(pages) and (salt, pages[: n + 1]) in known:
            n += 1
        return n

    def boundary(
        self, salt: str, pages: str, limit: int, reach: Sequence[Tier], device: Mapping[str, Sequence[bool]]
    ) -> int:
        """The deepest boundary at which every component can be read, tried one by one."""
        for boundary in range(limit, 0, -1):
            if all(
                self.readable(component, salt, pages[: page + 1], reach, device)
                for component, coverage in self.coverage.items()
                for page in range(coverage.start(boundary), boundary)
            ):
                return boundary
        return 0

    def branching(
        self, salt: str, pages: str, limit: int, reach: Sequence[Tier], device: Mapping[str, Sequence[bool]]
    ) -> int:
        whole = [component for component, coverage in self.coverage.items() if coverage.whole_path]
        n = 0
        while n < limit and all(self.readable(c, salt, pages[: n + 1], reach, device) for c in whole):
            n += 1
        return n

    def readable(
        self,
        component: str,
        salt: str,
        pages: str,
        reach: Sequence[Tier],
        device: Mapping[str, Sequence[bool]],
    ) -> bool:
        held = device.get(component, ())
        if len(held) >= len(pages) and held[len(pages) - 1]:
            return True
        return any((salt, pages) in self.ready[component, tier] for tier in reach)

    def dead(self) -> set[Path]:
        """Known pages that some whole-path component cannot reach in any tier."""
        whole = [component for component, coverage in self.coverage.items() if coverage.whole_path]
        there = [self.anywhere(component) for component in whole]
        return {
            path
            for path in self.known()
            if any(prefix not in pages for pages in there for prefix in prefixes(path))
        }

    # What happens.

    def insert(
        self,
        salt: str,
        pages: str,
        offered: Mapping[str, Sequence[int]],
        tier: Tier,
        first: int,
        priority: int,
    ) -> tuple[dict[str, list[int]], dict[str, list[int]], int]:
        """Redundant and canonical slots, and the depth known afterwards."""
        redundant: dict[str, list[int]] = {c: [] for c in offered}
        canonical: dict[str, list[int]] = {c: [] for c in offered}
        depth = self.matched(salt, pages)
        for component, slots in offered.items():
            ready, inbound = self.ready[component, tier], self.inbound[component, tier]
            for page, slot in enumerate(slots, start=first):
                path = (salt, pages[: page + 1])
                if slot != NO_SLOT:
                    depth = max(depth, page + 1)
                    if path not in ready:
                        ready[path] = slot
                        inbound.pop(path, None)
                    elif ready[path] != slot:
                        redundant[component].append(slot)
                canonical[component].append(ready.get(path, NO_SLOT))
        self.touch(salt, pages, depth)
        for component, policy in self.policy.items():
            if policy is Policy.PRIORITY:
                for path in prefixes((salt, pages[:depth])):
                    if path in self.anywhere(component):
                        self.rank[component][path] = max(priority, self.rank[component].get(path, 0))
        return redundant, canonical, depth

    def touch(self, salt: str, pages: str, boundary: int) -> None:
        self.tick += 1
        for component, coverage in self.coverage.items():
            there = self.anywhere(component)
            for page in range(coverage.start(boundary), boundary) if boundary else ():
                if (salt, pages[: page + 1]) in there:
                    self.used(component, (salt, pages[: page + 1]))

    def used(self, component: str, path: Path) -> None:
        """One use of a page, now."""
        if self.policy[component] is not Policy.FIFO:
            self.use[component][path] = self.tick
        if self.policy[component].counts_uses:
            self.rank[component][path] = self.rank[component].get(path, 0) + 1

    def publish(
        self, salt: str, depth: int, entries: Mapping[str, Mapping[Path, int]], tier: Tier
    ) -> dict[str, list[int]]:
        """Slots that are surplus."""
        self.tick += 1
        surplus: dict[str, list[int]] = {c: [] for c in entries}
        for component, slots in entries.items():
            for path, slot in slots.items():
                if self.inbound[component, tier].get(path) == slot:
                    del self.inbound[component, tier][path]
                    self.ready[component, tier][path] = slot
                    if len(path[1]) > self.coverage[component].start(depth):
                        self.used(component, path)
                else:
                    surplus[component].append(slot)
        return surplus

    def withdraw(self, entries: Mapping[str, Mapping[Path, int]], tier: Tier) -> None:
        for component, slots in entries.items():
            for path, slot in slots.items():
                if self.inbound[component, tier].get(path) == slot:
                    del self.inbound[component, tier][path]

    def pin(self, lane: tuple[str, Tier], paths: Iterable[Path], by: int) -> None:
        for path in paths:
            count = self.pins[lane].get(path, 0) + by
            assert count >= 0
            if count:
                self.pins[lane][path] = count
            else:
                del self.pins[lane][path]

    def loose(self, lane: tuple[str, Tier]) -> set[Path]:
        return {path for path in self.ready[lane] if path not in self.pins[lane]}

    def evictable(self, lane: tuple[str, Tier]) -> set[Path]:
        """Pages that may go now."""
        loose = self.loose(lane)
        if not self.coverage[lane[0]].whole_path:
            return loose
        present = self.present(lane)
        carrying = {prefix for path in present for prefix in prefixes(path) if prefix != path}
        return loose - carrying

    def key(self, lane: tuple[str, Tier], path: Path, dead: set[Path]) -> Key:
        component, tier = lane
        at = self.tiers.index(tier)
        lost = int(at + 1 < len(self.tiers) and path not in self.ready[component, self.tiers[at + 1]])
        refs = sum(path in regions.get(component, ()) for regions in self.sessions.values())
        rank = self.rank[component].get(path, 0)
        if self.policy[component] is Policy.SLRU:
            rank = int(rank > 1)
        return (
            0 if path in dead else 1,
            0 if tier is Tier.STORAGE else refs,
            rank,
            self.use[component].get(path, 0),
            lost,
        )

    def evict(
        self, lane: tuple[str, Tier], pages: int, went: Mapping[str, set[Path]]
    ) -> tuple[int, dict[str, set[Path]]]:
        """Give up pages one at a time, lowest key first. Among equals take what the index took (`went`).
        Returns how many went, and all that should have gone, by component."""
        gone: dict[str, set[Path]] = {}
        count = 0
        while count < pages:
            candidates = self.evictable(lane)
            if not candidates:
                break
            dead = self.dead()
            best = min(self.key(lane, path, dead) for path in candidates)
            equals = sorted(path for path in candidates if self.key(lane, path, dead) == best)
            victim = next((path for path in equals if path in went.get(lane[0], ())), equals[0])
            del self.ready[lane][victim]
            gone.setdefault(lane[0], set()).add(victim)
            count += 1
            self._drop_dependants(lane, dead, gone)
        return count, gone

    def _drop_dependants(self, lane: tuple[str, Tier], dead: set[Path], gone: dict[str, set[Path]]) -> None:
        """What became dead by the last loss goes too, in that tier, where it is not pinned."""
        fresh = self.dead() - dead
        for component in self.coverage:
            if component != lane[0]:
                for path in self.loose((component, lane[1])) & fresh:
                    del self.ready[component, lane[1]][path]
                    gone.setdefault(component, set()).add(path)


def prefixes(path: Path) -> Iterator[Path]:
    """The path itself and everything above it."""
    salt, pages = path
    for n in range(1, len(pages) + 1):
        yield salt, pages[:n]
