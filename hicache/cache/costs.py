"""LoadRule: whether a load-back is worth it, by its length and by what loading and computing take.

Decides from rates that it is told of; measures nothing itself and waits for nothing.
"""

from __future__ import annotations

from enum import Enum, auto

_FADE = 0.9
"""What came before counts so much less with each new measurement."""
_TRY_EVERY = 16
"""Of the loads that seem too slow one in so many is tried: things may have changed."""


class Skip(Enum):
    """Why a load is not worth it."""

    TOO_SHORT = auto()
    TOO_SLOW = auto()


class Rate:
    """Tokens a second: given, or learned from what took how long, the latest and longest counting most."""

    def __init__(self, given: float | None) -> None:
        self._given = given
        self._tokens = self._seconds = 0.0

    def learn(self, n_tokens: int, seconds: float) -> None:
        if n_tokens > 0 and seconds > 0:
            self._tokens = _FADE * self._tokens + n_tokens
            self._seconds = _FADE * self._seconds + seconds

    @property
    def tokens_per_s(self) -> float | None:
        """None while nothing is known."""
        if self._given is not None:
            return self._given
        return self._tokens / self._seconds if self._seconds else None


class LoadRule:
    """One engine's. Fewer tokens than `min_load_tokens` are never loaded; nor are those that would take
    longer than to compute them, once both rates are known. A rate that is given is not learned."""

    def __init__(
        self,
        *,
        min_load_tokens: int = 0,
        load_tokens_per_s: float | None = None,
        compute_tokens_per_s: float | None = None,
    ) -> None:
        for name, given in (("load", load_tokens_per_s), ("compute", compute_tokens_per_s)):
            if given is not None and not given > 0:
                raise ValueError(f"{name}_tokens_per_s: {given}; it must be above 0")
        self._min_load_tokens = min_load_tokens
        self.loading = Rate(load_tokens_per_s)
        self.computing = Rate(compute_tokens_per_s)
        self._too_slow = 0

    def loaded(self, n_tokens: int, seconds: float) -> None:
        """So many tokens were loaded in that time. The cache reports loads that it waited for."""
        self.loading.learn(n_tokens, seconds)

    def computed(self, n_tokens: int, seconds: float) -> None:
        """So many tokens of prompts were computed in that time. The engine reports its prefills."""
        self.computing.learn(n_tokens, seconds)

    def skip(self, n_tokens: int) -> Skip | None:
        """Whether, and why, these tokens are better computed."""
        if n_tokens < self._min_load_tokens:
            return Skip.TOO_SHORT
        loading, computing = self.loading.tokens_per_s, self.computing.tokens_per_s
        if loading is None or computing is None or loading >= computing:
            return None
        self._too_slow += 1
        return None if self._too_slow % _TRY_EVERY == 0 else Skip.TOO_SLOW
