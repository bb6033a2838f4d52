"""What must hold after the runs: the proof. Each check lists what is wrong; an empty list is a pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from examples.demo.oracle import Ceiling, InfiniteCache
from examples.demo.play import Record, Round
from hicache.core.words import Tier


def records_of(rounds: Iterable[Round]) -> list[Record]:
    """All requests in the order in which they were served."""
    return [record for played in rounds for record in played.records]


def ceilings(rounds: Iterable[Round], page_size: int) -> dict[str, Ceiling]:
    """For each request id, what a cache that never forgets could have served."""
    cache, found = InfiniteCache(page_size), {}
    for record in records_of(rounds):
        found[record.served.request_id] = cache.serve(record.prompt)
        answer = np.array(record.served.answer[:-1], dtype=np.int32)
        cache.finish(np.concatenate((record.prompt, answer)))
    return found


def same_answers(name: str, rounds: Sequence[Round], reference: Sequence[Round]) -> list[str]:
    """Every prompt, generated token and logit is the one of the run without a cache."""
    expected = {record.served.request_id: record for record in records_of(reference)}
    wrong = []
    for record in records_of(rounds):
        right = expected.get(record.served.request_id)
        if right is None:
            wrong.append(f"{name}: {record.served.request_id}: nothing to compare with")
        elif not np.array_equal(record.prompt, right.prompt):
            wrong.append(
                f"{name}: {record.served.request_id}: another prompt, after another answer before it"
            )
        elif record.served.answer != right.served.answer:
            wrong.append(
                f"{name}: {record.served.request_id}: answered {record.served.answer}, "
                f"without a cache {right.served.answer} (boundary {record.served.boundary})"
            )
        elif record.served.logits_digest != right.served.logits_digest:
            wrong.append(f"{name}: {record.served.request_id}: same answer from other logits")
    return wrong


def computed_what_was_left(name: str, rounds: Sequence[Round], page_size: int) -> list[str]:
    """Each prefill ran exactly the tokens beyond the joint boundary through the model."""
    wrong = []
    for record in records_of(rounds):
        served = record.served
        left = len(record.prompt) - served.boundary * page_size
        if served.prefilled_tokens != left:
            wrong.append(
                f"{name}: {served.request_id}: {served.prefilled_tokens} tokens computed, {left} left"
            )
        if sum(served.hit_pages.values()) != served.boundary:
            wrong.append(
                f"{name}: {served.request_id}: tiers {served.hit_pages} are not {served.boundary} pages"
            )
    return wrong


def reached_the_ceiling(name: str, rounds: Sequence[Round], expected: dict[str, Ceiling]) -> list[str]:
    """Each boundary is the one of a cache that never forgets."""
    wrong = []
    for record in records_of(rounds):
        served, ceiling = record.served, expected[record.served.request_id]
        if served.boundary != ceiling.boundary:
            wrong.append(
                f"{name}: {served.request_id}: boundary {served.boundary} pages, a cache that never forgets "
                f"serves {ceiling.boundary}"
            )
    return wrong


def each_tier_helps(runs: Sequence[tuple[str, Sequence[Round]]], rounds: int) -> list[str]:
    """Over the rounds that all played, each run has more hits than the one before."""
    hits = [
        (name, sum(record.served.boundary for record in records_of(played[:rounds]))) for name, played in runs
    ]
    return [
        f"{name}: {pages} pages hit, no more than {before} with {fewer}"
        for (fewer, before), (name, pages) in pairwise(hits)
        if pages <= before
    ]


def came_from_storage(name: str, restarted: Sequence[Round]) -> list[str]:
    """In the first round after the restart every hit beyond what L1 still has comes from storage."""
    return [
        f"{name}: {served.request_id}: nothing from storage after the restart ({served.hit_pages})"
        for served in (record.served for record in restarted[0].records)
        if not served.hit_pages.get(Tier.STORAGE, 0)
        and served.hit_pages.get(Tier.DEVICE, 0) < served.boundary
    ]
