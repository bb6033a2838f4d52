"""The journal: whoever wants to know what became READY and what is no longer so, page by page.

States facts in the order in which they happen; decides nothing, keeps nothing. An index without a journal
pays one comparison for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hicache.core.identity import Namespace
from hicache.core.words import BoolArray, HashArray, PageArray, Tier


@dataclass(frozen=True, eq=False)
class Move:
    """Pages of one component that became READY in a tier, or were READY and are there no longer."""

    namespace: Namespace
    component: str
    tier: Tier
    ready: bool
    pages: PageArray
    """Page numbers from the start of the prompt."""
    hashes: HashArray
    parents: HashArray
    """Hashes of the pages before them; the namespace's seed for page 0."""
    elsewhere: BoolArray
    """Which of them are READY in another tier of this index."""


class Journal(Protocol):
    """Must not change the index, nor raise."""

    def moved(self, move: Move) -> None: ...
