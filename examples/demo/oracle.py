"""The ceiling: what a cache that never forgets could serve, computed from the prompts alone.

Knows pages by the tokens before them and nothing of the product: no tree, no hashes, no tiers. It follows
the engine's own rule for recurrent checkpoints: one at the end of the prompt's whole pages, and one
where the known pages end when they go on past the last usable checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from hicache.core.words import TokenArray


@dataclass(frozen=True)
class Ceiling:
    """The best that can be done for one prompt, in pages."""

    boundary: int
    branching_boundary: int


class InfiniteCache:
    """A cache without limits, told of every request in the order in which it is served."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: set[bytes] = set()
        self._checkpoints: set[bytes] = set()

    def serve(self, prompt: TokenArray) -> Ceiling:
        """The ceiling for a prompt; remembers the prompt and the checkpoints taken on the way."""
        prefixes = self._prefixes(prompt)
        limit = (len(prompt) - 1) // self._page_size
        known = 0
        while known < limit and prefixes[known] in self._pages:
            known += 1
        boundary = known
        while boundary and prefixes[boundary - 1] not in self._checkpoints:
            boundary -= 1
        for taken in (known, len(prefixes)):
            if taken > boundary:
                self._checkpoints.add(prefixes[taken - 1])
        self._pages.update(prefixes)
        return Ceiling(boundary, known)

    def finish(self, tokens: TokenArray) -> None:
        """Remember the pages of all tokens whose KV was computed: prompt and answer."""
        self._pages.update(self._prefixes(tokens))

    def _prefixes(self, tokens: TokenArray) -> list[bytes]:
        """For each whole page, all the bytes up to its end (that is what makes it this page)."""
        size = self._page_size
        return [tokens[: (page + 1) * size].tobytes() for page in range(len(tokens) // size)]
