"""Retention: prefixes that an operator wants kept in host memory for a time.

A promise that yields: it has an end, which a hit puts off, it has a share of host memory, and it is given up,
the least recently hit first, before running work would get less room because of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from controller.counters import Counters
from controller.host import HostMemory
from controller.models import HOST, Model
from controller.requests import Busy, Gone, InvalidRequest, Prompt, Retain, Retained
from controller.settings import ControllerSettings
from hicache.core.coverage import joint_boundary
from hicache.core.identity import Namespace, page_hashes
from hicache.core.pins import Receipt
from hicache.core.words import Residency, TokenArray

MOST_PINS = 256


@dataclass(eq=False)
class Kept:
    """One retained prefix."""

    pin_id: str
    model: Model
    namespace: Namespace
    tokens: TokenArray
    """Up to its boundary: a prompt that begins with them is a hit."""
    asked: bytes
    """Hash of the last page asked for: the same again is the same pin."""
    asked_pages: int
    nbytes: int
    keep_s: float
    ends_s: float
    hit_s: float
    receipt: Receipt

    @property
    def boundary(self) -> int:
        return len(self.tokens) // self.model.page_size


class Retention:
    """All retained prefixes of one controller. Times are seconds of the clock given; `model_of`
    finds an attached engine's model."""

    def __init__(
        self,
        host: HostMemory,
        settings: ControllerSettings,
        counters: Counters,
        model_of: Callable[[str], Model],
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._settings = settings
        self._counters = counters
        self._model_of = model_of
        self._clock = clock
        self._kept: dict[str, Kept] = {}
        self._ids = itertools.count(1)
        host.yield_retained = self.give_way

    def pin(self, wanted: Retain) -> Retained:
        """Keep as much of a prefix as host memory holds and the share allows: the deepest boundary that
        can be used. Pinned again, it gets its time and share anew. With nothing to keep, nothing is kept and
        the answer has no id. Raises UnknownEngine or InvalidRequest when it names no one model, Busy when
        there are too many."""
        model = self._named(wanted)
        prompt = Prompt("", "", wanted.tokens, wanted.adapter, wanted.salt)
        namespace, tokens = model.namespace(prompt), model.whole_pages(prompt)
        chain = page_hashes(namespace.seed(), tokens, model.page_size)
        asked = chain[-1].tobytes() if len(chain) else b""
        for kept in [one for one in self._kept.values() if one.asked == asked]:
            self._end(kept)
        if len(self._kept) >= MOST_PINS:
            raise Busy(f"pin: {MOST_PINS} prefixes are pinned; unpin one of them")
        asked_pages = len(tokens) // model.page_size
        match = model.index.match(namespace, tokens)
        in_memory = match.boundaries[HOST]
        boundary, nbytes = self._affordable(model, namespace, tokens, in_memory, wanted.host_share)
        if not boundary:
            reason = "budget" if in_memory else "not_in_host_memory"
            return Retained("", model.name, 0, asked_pages, 0, 0.0, reason)
        now_s = self._clock()
        kept = Kept(
            pin_id=f"pin-{next(self._ids)}",
            model=model,
            namespace=namespace,
            tokens=tokens[: boundary * model.page_size].copy(),
            asked=asked,
            asked_pages=asked_pages,
            nbytes=nbytes,
            keep_s=wanted.keep_s,
            ends_s=now_s + wanted.keep_s,
            hit_s=now_s,
            receipt=model.index.pin(match.cursor, boundary, tier=HOST),
        )
        self._kept[kept.pin_id] = kept
        self._counters.retained += 1
        return self._told(kept, in_memory)

    def unpin(self, pin_id: str) -> None:
        """End a retention. Raises Gone when it has ended."""
        kept = self._kept.get(pin_id)
        if kept is None:
            raise Gone(f"pin_id: {pin_id!r} has ended, or never was; `hicache status` lists them")
        self._end(kept)

    def hit(self, namespace: Namespace, tokens: TokenArray) -> None:
        """A prompt was looked up: what it begins with gets its time anew."""
        for kept in self._kept.values():
            if kept.namespace == namespace and np.array_equal(kept.tokens, tokens[: len(kept.tokens)]):
                kept.hit_s = self._clock()
                kept.ends_s = kept.hit_s + kept.keep_s

    def expire(self) -> None:
        """End what is past its time."""
        for kept in [one for one in self._kept.values() if one.ends_s <= self._clock()]:
            self._counters.retained_expired += 1
            self._end(kept)

    def give_way(self, model: Model | None, salt: str | None) -> bool:
        """Running work needs room: end the least recently hit retention (of this model and this tenant, as
        far as they are given). False when there is none."""
        candidates = [
            one
            for one in self._kept.values()
            if model in (None, one.model) and salt in (None, one.namespace.salt)
        ]
        if not candidates:
            return False
        self._counters.retained_gave_way += 1
        self._end(min(candidates, key=lambda one: one.hit_s))
        return True

    def status(self) -> tuple[Retained, ...]:
        return tuple(self._told(kept, kept.boundary) for kept in self._kept.values())

    # -- inside --------------------------------------------------------------------------------------

    def _named(self, wanted: Retain) -> Model:
        if wanted.engine_id:
            return self._model_of(wanted.engine_id)
        models = self._host.named(wanted.model, wanted.revision)
        if len(models) != 1:
            raise InvalidRequest(
                f"model: {len(models)} models are called {wanted.model!r} revision {wanted.revision!r}; name "
                "an attached engine by engine_id instead"
            )
        return models[0]

    def _affordable(
        self, model: Model, namespace: Namespace, tokens: TokenArray, boundary: int, host_share: float
    ) -> tuple[int, int]:
        """The deepest boundary up to this one whose frames fit what is left of the budget, and their
        bytes. Frames that two retentions share count for both."""
        taken_bytes = sum(kept.nbytes for kept in self._kept.values())
        capacity = self._host.capacity_bytes
        budget_bytes = min(
            int(self._settings.retain_share * capacity) - taken_bytes,
            int((host_share or self._settings.retain_share) * capacity),
        )
        cursor = model.index.match(namespace, tokens).cursor
        rules = list(model.coverages.values())
        ready = [model.held(cursor, name, boundary) == Residency.READY for name in model.coverages]
        page_bytes = sum(shelf.slot_bytes for shelf in model.shelves.values())
        while boundary and (nbytes := _coverage_bytes(model, boundary)) > budget_bytes:
            fewer = max(1, (nbytes - budget_bytes) // page_bytes)
            boundary = joint_boundary(rules, ready, max(0, boundary - fewer))
        return boundary, _coverage_bytes(model, boundary)

    def _told(self, kept: Kept, in_memory: int) -> Retained:
        reason = ""
        if kept.boundary < kept.asked_pages:
            reason = "budget" if kept.boundary < in_memory else "not_in_host_memory"
        left_s = kept.ends_s - self._clock()
        return Retained(
            kept.pin_id, kept.model.name, kept.boundary, kept.asked_pages, kept.nbytes, left_s, reason
        )

    def _end(self, kept: Kept) -> None:
        del self._kept[kept.pin_id]
        kept.model.index.unpin(kept.receipt)


def _coverage_bytes(model: Model, boundary: int) -> int:
    """Of all frames that are needed at a boundary."""
    if not boundary:
        return 0
    return sum(
        (boundary - coverage.start(boundary)) * model.shelves[name].slot_bytes
        for name, coverage in model.coverages.items()
    )
