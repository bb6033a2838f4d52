"""The engine: serves requests one at a time over the hybrid model and a prefix cache.

Decides when pages are taken, when recurrent checkpoints are made and when the window lets go of pages;
what is remembered is the cache's decision. Never reads a slot that it was not given.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from examples.demo.memory import FULL, MAMBA, SWA, PagedMemory
from examples.demo.model import HybridModel, Place
from hicache.core.words import NO_SLOT, SlotArray, Tier, TokenArray

_BLOCK_WINDOWS = 2
"""Prefill runs in blocks of so many windows: what SWA holds of a request is bounded by it."""
_ALLOC_TIMEOUT_S = 5.0


class EngineError(RuntimeError):
    """The engine cannot go on; the message says what it lacked."""


class CachedPrefix(Protocol):
    """What the engine reads of a request that a cache has begun."""

    @property
    def boundary(self) -> int: ...

    @property
    def branching_boundary(self) -> int: ...

    @property
    def hit_pages(self) -> Mapping[Tier, int]: ...

    @property
    def slots(self) -> Mapping[str, SlotArray]: ...


R = TypeVar("R", bound=CachedPrefix)


class PrefixCache(Protocol[R]):
    """What the engine needs of a cache: `hicache.UnifiedRadixCache`, or none at all."""

    def alloc(self, component: str, n: int) -> SlotArray | None: ...

    def free(self, component: str, slots: SlotArray) -> None: ...

    def prefetch(self, request_id: str, tokens: TokenArray) -> None: ...

    def begin(self, request_id: str, tokens: TokenArray, *, private: Mapping[str, int]) -> R: ...

    def advance(self, request: R, boundary: int) -> None: ...

    def checkpoint(self, request: R, component: str) -> int: ...

    def insert(self, request: R, tokens: TokenArray, slots: Mapping[str, SlotArray]) -> object: ...

    def finish(self, request: R, tokens: TokenArray, slots: Mapping[str, SlotArray]) -> object: ...

    def abort(self, request: R) -> None: ...

    def poll(self) -> int: ...


@dataclass(frozen=True)
class Ask:
    """One request: go on from this prompt."""

    request_id: str
    prompt: TokenArray
    answer_tokens: int


@dataclass(frozen=True)
class Served:
    """What came of a request, and what it cost."""

    request_id: str
    prompt_tokens: int
    answer: tuple[int, ...]
    logits_digest: str
    """Over the logits, bit for bit, from which the answer was chosen."""
    boundary: int
    branching_boundary: int
    hit_pages: Mapping[Tier, int]
    prefilled_tokens: int
    """Tokens of the prompt that really ran through the model."""
    first_token_s: float
    """From the moment the engine took the request up to its first token."""
    total_s: float


class _Running(Generic[R]):
    """One request under way: its slots, and how many of its pages the cache owns already."""

    def __init__(self, request: R, private: int, n_pages: int) -> None:
        self.request = request
        self.place = Place(
            np.full(n_pages, NO_SLOT, dtype=np.int32), np.full(n_pages, NO_SLOT, dtype=np.int32), private
        )
        self.kv: Mapping[str, SlotArray] = {FULL: self.place.full, SWA: self.place.swa}
        self.handed_over = request.boundary
        self.adopt(request.boundary)

    def adopt(self, n_pages: int) -> None:
        """From now on use the cache's slots for the first pages."""
        for component, slots in self.kv.items():
            slots[:n_pages] = self.request.slots[component][:n_pages]
        self.handed_over = n_pages


class Engine(Generic[R]):
    """Serves requests over `model`; `cache` owns the memory's slots."""

    def __init__(self, model: HybridModel, memory: PagedMemory, cache: PrefixCache[R]) -> None:
        self._model = model
        self._memory = memory
        self._cache = cache
        self._page_size = model.shape.page_size

    def queue(self, ask: Ask) -> None:
        """Tell the cache of a request that will be served soon."""
        self._cache.prefetch(ask.request_id, ask.prompt)

    def idle(self) -> None:
        """Nothing to serve: look after transfers."""
        self._cache.poll()

    def serve(self, ask: Ask) -> Served:
        """Prefill what the cache does not have, decode greedily, hand everything computed to the cache.

        Raises EngineError when the model or the memory cannot hold the request."""
        n_tokens, most = len(ask.prompt) + ask.answer_tokens, self._model.shape.max_tokens
        if not len(ask.prompt) or ask.answer_tokens < 1 or n_tokens > most:
            raise EngineError(f"{ask.request_id}: prompt and answer take 1 to {most} tokens, not {n_tokens}")
        started, tokens_before = time.perf_counter(), self._model.n_tokens
        running = self._begin(ask)
        try:
            logits = self._prefill(running, ask.prompt)
            prefilled = self._model.n_tokens - tokens_before
            answer = [self._model.greedy(logits)]
            first_token_s = time.perf_counter() - started
            digest = hashlib.blake2b(_bytes(logits), digest_size=8)
            while len(answer) < ask.answer_tokens:
                position = len(ask.prompt) + len(answer) - 1
                logits = self._forward(running, np.array(answer[-1:], dtype=np.int32), position)
                digest.update(_bytes(logits))
                answer.append(self._model.greedy(logits))
        except BaseException:
            self._give_back(running)
            self._cache.abort(running.request)
            raise
        self._finish(running, np.concatenate((ask.prompt, np.array(answer[:-1], dtype=np.int32))))
        request = running.request
        return Served(
            request_id=ask.request_id,
            prompt_tokens=len(ask.prompt),
            answer=tuple(answer),
            logits_digest=digest.hexdigest(),
            boundary=request.boundary,
            branching_boundary=request.branching_boundary,
            hit_pages=dict(request.hit_pages),
            prefilled_tokens=prefilled,
            first_token_s=first_token_s,
            total_s=time.perf_counter() - started,
        )

    def _begin(self, ask: Ask) -> _Running[R]:
        private = int(self._alloc(MAMBA, 1)[0])
        self._memory.clear_slot(MAMBA, private)
        request = self._cache.begin(ask.request_id, ask.prompt, private={MAMBA: private})
        return _Running(request, private, -(-(len(ask.prompt) + ask.answer_tokens) // self._page_size))

    def _prefill(self, running: _Running[R], prompt: TokenArray) -> torch.Tensor:
        """Run the prompt from the boundary on, with checkpoints at the branching boundary and at the end of
        the whole pages; the logits of its last token."""
        size, start = self._page_size, running.request.boundary
        whole, branching = len(prompt) // size, running.request.branching_boundary
        position = start * size
        for boundary in sorted({whole, branching}):
            if start < boundary <= whole:
                logits = self._run(running, prompt, position, boundary * size)
                position = boundary * size
                self._checkpoint(running, prompt, boundary)
        if position < len(prompt):
            logits = self._run(running, prompt, position, len(prompt))
        return logits

    def _run(self, running: _Running[R], prompt: TokenArray, start: int, stop: int) -> torch.Tensor:
        block = _BLOCK_WINDOWS * self._model.shape.window_tokens
        for at in range(start, stop, block):
            logits = self._forward(running, prompt[at : min(stop, at + block)], at)
        return logits

    def _forward(self, running: _Running[R], tokens: TokenArray, start: int) -> torch.Tensor:
        self._provide(running, start, start + len(tokens))
        logits = self._model.forward(tokens, start, running.place)
        self._leave_behind(running, start + len(tokens))
        return logits

    def _provide(self, running: _Running[R], start: int, stop: int) -> None:
        """Slots for the pages of positions [start, stop)."""
        pages = np.arange(start // self._page_size, -(-stop // self._page_size))
        for component, slots in running.kv.items():
            missing = pages[slots[pages] == NO_SLOT]
            if len(missing):
                slots[missing] = self._alloc(component, len(missing))

    def _leave_behind(self, running: _Running[R], position: int) -> None:
        """Let go of window pages that no token from `position` on can see. Those that the cache owns are
        only forgotten here."""
        seen = max(0, position - self._model.shape.window_tokens + 1) // self._page_size
        slots = running.place.swa
        if not seen or (slots[:seen] == NO_SLOT).all():
            return
        self._cache.free(SWA, _held(slots[running.handed_over : seen]))
        slots[:seen] = NO_SLOT
        self._cache.advance(running.request, position // self._page_size)

    def _checkpoint(self, running: _Running[R], prompt: TokenArray, boundary: int) -> None:
        """Hand the first pages to the cache, with a copy of the state after them."""
        states = np.full(boundary, NO_SLOT, dtype=np.int32)
        states[-1] = self._cache.checkpoint(running.request, MAMBA)
        offered = {component: slots[:boundary].copy() for component, slots in running.kv.items()}
        self._cache.insert(running.request, prompt[: boundary * self._page_size], {**offered, MAMBA: states})
        running.adopt(boundary)

    def _finish(self, running: _Running[R], computed: TokenArray) -> None:
        whole = len(computed) // self._page_size
        for component, slots in running.kv.items():
            self._cache.free(component, _held(slots[whole:]))
        offered = {component: slots[:whole].copy() for component, slots in running.kv.items()}
        offered[MAMBA] = np.full(whole, NO_SLOT, dtype=np.int32)
        self._cache.finish(running.request, computed[: whole * self._page_size], offered)

    def _give_back(self, running: _Running[R]) -> None:
        """Free what the cache does not own."""
        for component, slots in running.kv.items():
            self._cache.free(component, _held(slots[running.handed_over :]))

    def _alloc(self, component: str, n: int) -> SlotArray:
        """Slots, waited for while backups hold them; EngineError when none come free in time."""
        deadline = time.monotonic() + _ALLOC_TIMEOUT_S
        while (slots := self._cache.alloc(component, n)) is None:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{component}: no {n} slots within {_ALLOC_TIMEOUT_S} s; give it more memory"
                )
            self._cache.poll()
            time.sleep(0.001)
        return slots


def _held(slots: SlotArray) -> SlotArray:
    return slots[np.flatnonzero(slots != NO_SLOT)]


def _bytes(logits: torch.Tensor) -> bytes:
    return logits.numpy().tobytes()
