"""Structure: namespaces, the tree of runs, and finding one's way in it.

Walks, lengthens, divides and prunes. A node object keeps its tail when it is divided and a fresh parent
gets the head, and a pruned node keeps its link upwards: so (node, page number) stays a valid place for
as long as the page exists, and is found by walking up. Decides nothing about payload.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hicache.core.columns import UNBROKEN, Node, Shape
from hicache.core.identity import HASH_BYTES, Namespace, page_hashes
from hicache.core.queues import Queues
from hicache.core.words import HashArray, TokenArray, token_array


class StaleCursor(LookupError):  # noqa: N818 - the name is what it is
    """The pages a cursor points at were given up since: match again."""


@dataclass(frozen=True, eq=False)
class Cursor:
    """A place in the tree: the first `boundary` pages of a path. Good for as long as these pages exist."""

    namespace: Namespace
    boundary: int
    node: Node
    """Holds page boundary - 1, or did when the cursor was made: that page is here or above."""
    tick: int
    """When it was made."""


class PackedPrompt:
    """The tokens of a prompt from page `base` on, not copied. What is before is known from elsewhere."""

    __slots__ = ("_bytes", "_width", "base", "n_pages", "tail_tokens")

    def __init__(self, tokens: TokenArray, page_size: int, base: int = 0) -> None:
        self._bytes = token_array(tokens).data.cast("B")
        self._width = 4 * page_size
        self.base = base
        self.n_pages = base + len(tokens) // page_size
        """Whole pages, those before `base` included."""
        self.tail_tokens = len(tokens) % page_size

    def part(self, start: int, stop: int) -> memoryview:
        """Packed tokens of the pages [start, stop), which must not lie before `base`."""
        return self._bytes[(start - self.base) * self._width : (stop - self.base) * self._width]


Segment = tuple[Node, int, int]
"""A node and a half-open range of offsets in it."""


class Ticks:
    """Logical time. Indexes that share one can compare the ages of their pages."""

    def __init__(self) -> None:
        self.now = 1


class Tree:
    """The nodes of one index."""

    def __init__(self, shape: Shape, queues: Queues, ticks: Ticks | None = None) -> None:
        self.shape = shape
        self.queues = queues
        self.roots: dict[Namespace, Node] = {}
        self._names: dict[Node, Namespace] = {}
        self._spare = Node(shape, None, 0, b"")
        """The root of every namespace that has none yet; the first that adds something keeps it."""
        self._ticks = ticks or Ticks()
        self.n_pages = 0

    @property
    def tick(self) -> int:
        return self._ticks.now

    @tick.setter
    def tick(self, now: int) -> None:
        self._ticks.now = now

    def root(self, namespace: Namespace) -> Node:
        """The namespace's root; a fresh one is not entered before something is added under it."""
        if namespace.page_size != self.shape.page_size:
            raise ValueError(f"namespace: page size {namespace.page_size}, index has {self.shape.page_size}")
        return self.roots.get(namespace) or self._spare

    def walk(self, node: Node, at: int, prompt: PackedPrompt, limit: int) -> tuple[Node, int]:
        """Follow a prompt from the end of a node, which is at page `at`: the last node reached and the
        number of pages that match."""
        while at < limit and node.children is not None:
            child = node.children.get(prompt.part(at, at + 1).tobytes())
            if child is None:
                break
            node, at = child, self._agreed(child, prompt, limit)
            if at < node.end:
                break
        return node, at

    def _agreed(self, node: Node, prompt: PackedPrompt, limit: int) -> int:
        """The page up to which the node agrees with the prompt, as far as the prompt's tokens are given."""
        start = max(node.start, prompt.base)
        end = min(node.end, limit)
        theirs, skip = prompt.part(start, end), (start - node.start) * self.shape.page_bytes
        if node.tokens.startswith(theirs, skip):
            return max(start, end)
        tokens = np.frombuffer(theirs, dtype=np.int32)
        differ = np.frombuffer(node.tokens, dtype=np.int32, count=len(tokens), offset=skip) != tokens
        return start + int(differ.argmax()) // self.shape.page_size

    def find(
        self,
        namespace: Namespace,
        prompt: PackedPrompt,
        limit: int,
        cursor: Cursor | None = None,
        after: Cursor | None = None,
    ) -> tuple[Node, int]:
        """The last node on the prompt's path and the number of pages that match, at most `limit`.

        Behind `after`, only what follows its boundary is compared. With `cursor`, the prompt is compared
        all the same (one comparison of memory per node), so a wrong or stale one costs time, never a wrong
        answer. Raises StaleCursor when the pages before `after` are gone."""
        if after is not None:
            if after.namespace != namespace:
                raise ValueError("after: a cursor of another namespace")
            if after.boundary:
                return self._go_on(after, prompt, limit)
        elif cursor is not None and 0 < cursor.boundary <= limit and cursor.namespace == namespace:
            place = self._resume(cursor, prompt, limit)
            if place is not None:
                return place
        return self.walk(self.root(namespace), 0, prompt, limit)

    def _go_on(self, after: Cursor, prompt: PackedPrompt, limit: int) -> tuple[Node, int]:
        at = after.boundary
        node = self.segments(after, at - 1, at)[0][0]
        if at >= limit:
            return node, min(at, limit)
        at = max(at, self._agreed(node, prompt, limit))
        return (node, at) if at < node.end else self.walk(node, at, prompt, limit)

    def _resume(self, cursor: Cursor, prompt: PackedPrompt, limit: int) -> tuple[Node, int] | None:
        try:
            segments = self.segments(cursor, 0, cursor.boundary)
        except StaleCursor:
            return None
        last = segments[0][0]
        for node, _, _ in segments[1:]:
            if self._agreed(node, prompt, limit) < node.end:
                return None
        at = self._agreed(last, prompt, limit)
        if at < cursor.boundary:
            return None
        return (last, at) if at < last.end else self.walk(last, at, prompt, limit)

    def cursor(self, namespace: Namespace, node: Node, boundary: int) -> Cursor:
        return Cursor(namespace, boundary, node, self.tick)

    def segments(self, cursor: Cursor, start: int, stop: int) -> list[Segment]:
        """Where the pages [start, stop) of the cursor's path stand, deepest node first.

        Raises StaleCursor when some of them were given up, ValueError beyond the cursor's boundary."""
        if not 0 <= start <= stop <= cursor.boundary:
            raise ValueError(f"pages [{start}, {stop}) of a cursor at {cursor.boundary}")
        if start == stop:
            return []
        node = cursor.node
        while node.start >= stop and node.parent is not None:
            node = node.parent
        if node.start + node.n < stop or (node.cuts and kept_end(node, cursor.tick) < stop):
            raise StaleCursor(f"pages up to {stop} were given up: match again")
        return segments_up(node, start, stop)

    def extend(self, namespace: Namespace, node: Node, at: int, prompt: PackedPrompt, upto: int) -> Node:
        """Make the path `upto` pages deep; it matched `at` pages, ending in `node`. Returns the node that
        holds the last page. A leaf grows in place, a node left in its middle is divided."""
        if upto <= at:
            return node
        width = self.shape.page_bytes
        tokens = prompt.part(at, upto).tobytes()
        self.n_pages += upto - at
        if at < node.end:
            node = self.split(node, at)
        if node.children is None and node.parent is not None:
            node.grow(self.shape, tokens)
            return node
        if node is self._spare:
            self.roots[namespace], self._names[node] = node, namespace
            self._spare = Node(self.shape, None, 0, b"")
        child = Node(self.shape, node, at, tokens)
        if node.dead_from < UNBROKEN:
            child.dead_from = at
        if node.children is None:
            node.children = {}
        node.children[tokens[:width]] = child
        return child

    def split(self, node: Node, at: int) -> Node:
        """Divide a node at page `at`, inside it; returns the new node that holds what comes before."""
        parent, width = node.parent, self.shape.page_bytes
        assert parent is not None
        assert parent.children is not None
        head = node.divide(self.shape, at - node.start)
        parent.children[bytes(head.tokens[:width])] = head
        head.children = {bytes(node.tokens[:width]): node}
        node.parent = head
        head.cuts = [(tick, min(end, at)) for tick, end in node.cuts] if node.cuts else None
        head.blocked = node.blocked
        if node.dead_from < at:
            head.dead_from, node.dead_from = node.dead_from, at
        for lane in self.shape.lanes:
            row = lane.row
            key = node.queued[row]
            if lane.whole:
                head.below[row] = int(bool(node.present[row] or node.below[row]))
                if not head.below[row] and head.present[row]:
                    self.queues.requeue(head, lane)
            elif key is not None and head.present[row]:
                self.queues.push(head, lane, key)
            if not node.present[row]:
                self.queues.discard(node, lane)
        return head

    def trim(self, node: Node) -> None:
        """Cut off trailing pages without payload in any lane, and prune what is left empty, upwards."""
        while node.children is None and node.parent is not None:
            end = max(node.tail(lane) for lane in self.shape.lanes)
            if end == node.n:
                return
            self.n_pages -= node.n - end
            self._note_cut(node, node.start + end)
            if end:
                node.cut(self.shape, end)
                if node.dead_from >= node.end:
                    node.dead_from = UNBROKEN
                return
            self._prune(node)
            node = node.parent

    def _prune(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        for lane in self.shape.lanes:
            self.queues.discard(node, lane)
        del parent.children[bytes(node.tokens[: self.shape.page_bytes])]
        node.clear(self.shape)
        if not parent.children:
            parent.children = None
            if parent.parent is None:
                del self.roots[self._names.pop(parent)]

    def _note_cut(self, node: Node, end: int) -> None:
        self.tick += 1
        cuts = node.cuts = node.cuts or []
        while cuts and cuts[-1][1] >= end:
            cuts.pop()
        cuts.append((self.tick, end))

    def leaves(self) -> list[Cursor]:
        """A cursor to the end of every path."""
        found = []
        for namespace, root in self.roots.items():
            todo = [root]
            while todo:
                node = todo.pop()
                if node.children is not None:
                    todo.extend(node.children.values())
                elif node.parent is not None:
                    found.append(self.cursor(namespace, node, node.end))
        return found

    def hashes(self, namespace: Namespace, segments: list[Segment]) -> HashArray:
        """Hashes of the pages of a path's segments (deepest first); computed once and kept."""
        parts = []
        for node, start, stop in reversed(segments):
            self._fill_hashes(namespace, node)
            assert node.hashes is not None
            kept = bytes(node.hashes[HASH_BYTES * start : HASH_BYTES * stop])
            parts.append(np.frombuffer(kept, dtype=np.uint8).reshape(-1, HASH_BYTES))
        return np.concatenate(parts) if parts else np.empty((0, HASH_BYTES), dtype=np.uint8)

    def names(self, node: Node, offsets: NDArray[np.intp]) -> tuple[Namespace, HashArray, HashArray]:
        """Namespace, hashes and parents' hashes of some pages (ascending, at least one) of a node."""
        root = node
        while root.parent is not None:
            root = root.parent
        namespace = self._names[root]
        self._fill_hashes(namespace, node)
        assert node.hashes is not None
        assert node.parent is not None
        low, high = int(offsets[0]), int(offsets[-1]) + 1
        chain = bytes(node.hashes[HASH_BYTES * max(0, low - 1) : HASH_BYTES * high])
        if not low:
            above = node.parent.hashes
            chain = (bytes(above[-HASH_BYTES:]) if above else namespace.seed()) + chain
        rows = np.frombuffer(chain, dtype=np.uint8).reshape(-1, HASH_BYTES)
        return namespace, rows[offsets - low + 1], rows[offsets - low]

    def _fill_hashes(self, namespace: Namespace, node: Node) -> None:
        behind = []
        while node.parent is not None and len(node.hashes or b"") < HASH_BYTES * node.n:
            behind.append(node)
            node = node.parent
        previous = bytes(node.hashes[-HASH_BYTES:]) if node.hashes else namespace.seed()
        for node in reversed(behind):
            if node.hashes is None:
                node.hashes = bytearray()
            have = len(node.hashes) // HASH_BYTES
            if have:
                previous = bytes(node.hashes[-HASH_BYTES:])
            rest = np.frombuffer(bytes(node.tokens[have * self.shape.page_bytes :]), dtype=np.int32)
            node.hashes += page_hashes(previous, rest, self.shape.page_size).tobytes()
            previous = bytes(node.hashes[-HASH_BYTES:])


def kept_end(node: Node, since: int) -> int:
    """End of the pages of the node that were there at tick `since` and were not given up in between."""
    if node.cuts:
        for tick, end in node.cuts:
            if tick > since:
                return min(node.end, end)
    return node.end


def segments_up(node: Node, start: int, stop: int) -> list[Segment]:
    """Where the pages [start, stop) stand, from the node that holds page stop - 1 (or lies beneath it)
    upwards, deepest first."""
    segments: list[Segment] = []
    while stop > start:
        low = node.start
        if low < stop:
            segments.append((node, max(start, low) - low, stop - low))
            stop = low
        if stop <= start or node.parent is None:
            break
        node = node.parent
    return segments
