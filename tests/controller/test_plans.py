"""The controller's pure decisions: what a backup takes, what a prefetch reads, how long it may last."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from controller.backups import plan_backup
from controller.prefetches import choose, deadline_s
from controller.requests import Lookup, Placement, Prefetch, PrefetchPolicy, Prompt
from controller.settings import ControllerSettings
from hicache.core.coverage import Checkpoint, Coverage, SlidingWindow, WholePath

RULES: dict[str, Coverage] = {"full": WholePath(), "swa": SlidingWindow(2), "mamba": Checkpoint()}
WHOLE = {name: rule.whole_path for name, rule in RULES.items()}


def row(n_pages: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.booleans(), min_size=n_pages, max_size=n_pages).map(np.array)


def rows(n_pages: int) -> st.SearchStrategy[dict[str, np.ndarray]]:
    return st.fixed_dictionaries({name: row(n_pages) for name in RULES})


def placement(offered: np.ndarray) -> Placement:
    pages = np.flatnonzero(offered).astype(np.int32)
    return Placement(pages, pages + 100)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(rows(n), rows(n))))
def test_a_backup_takes_a_page_only_with_everything_before_it(
    case: tuple[dict[str, np.ndarray], dict[str, np.ndarray]],
) -> None:
    """TREE-10, SWA-09: a child is never backed up while a parent is not."""
    present, offered = case
    n_pages = len(present["full"])
    plans = plan_backup(present, {name: placement(row) for name, row in offered.items()}, WHOLE)
    chain = 0  # by the definition, one page at a time
    while chain < n_pages and (present["full"][chain] or offered["full"][chain]):
        chain += 1
    for name, plan in plans.items():
        expected = [p for p in range(chain) if offered[name][p] and not present[name][p]]
        assert plan.wanted.tolist() == expected
        assert plan.sources.tolist() == [p + 100 for p in expected]
        assert plan.present_pages == int((present[name] & offered[name]).sum())
        outcome = plan.outcome()
        asked = int(offered[name].sum())
        assert outcome.stored_pages + outcome.present_pages + outcome.refused_pages == asked
        assert (outcome.reason == "chain_broken") == (outcome.refused_pages > 0)


def valid(have: dict[str, np.ndarray], boundary: int) -> bool:
    return boundary == 0 or all(
        have[name][rule.start(boundary) : boundary].all() for name, rule in RULES.items()
    )


@given(
    st.integers(1, 8).flatmap(lambda n: st.tuples(rows(n), rows(n))),
    st.integers(0, 3),
    st.integers(0, 30),
)
def test_a_prefetch_reads_just_what_its_boundary_needs(
    case: tuple[dict[str, np.ndarray], dict[str, np.ndarray]], threshold: int, room: int
) -> None:
    """MAMBA-12, PREFETCH-02, PREFETCH-10: never more than the boundary needs, never more than fits."""
    have, stored = case
    n_pages = len(have["full"])
    choice = choose(RULES, have, stored, threshold, dict.fromkeys(RULES, 1), room)
    both = {name: have[name] | stored[name] for name in RULES}
    now = max(b for b in range(n_pages + 1) if valid(have, b))
    deepest = max(b for b in range(n_pages + 1) if valid(both, b))
    assert choice.storage_boundary == deepest
    assert now <= choice.boundary <= deepest
    after = {name: have[name].copy() for name in RULES}
    for name, pages in choice.wanted.items():
        assert not have[name][pages].any()
        assert stored[name][pages].all()
        after[name][pages] = True
    assert valid(after, choice.boundary)
    n_wanted = sum(map(len, choice.wanted.values()))
    assert n_wanted <= room
    if choice.boundary > now:
        assert choice.boundary - now >= max(1, threshold)
        for name, pages in choice.wanted.items():
            assert (pages >= RULES[name].start(choice.boundary)).all()
            assert (pages < choice.boundary).all()
    else:
        assert n_wanted == 0

    def cost(boundary: int) -> int:
        return sum(int((~have[name][rule.start(boundary) : boundary]).sum()) for name, rule in RULES.items())

    fitting = [b for b in range(now + max(1, threshold), n_pages + 1) if valid(both, b) and cost(b) <= room]
    assert choice.boundary == max(fitting, default=now)


def asked(n_tokens: int, policy: PrefetchPolicy, timeout_s: float = 0.0) -> Prefetch:
    prompt = Prompt("e", "r", np.zeros(n_tokens, dtype=np.int32))
    return Prefetch(Lookup(prompt), policy, timeout_s)


def test_a_deadline_grows_with_the_prompt_and_is_capped() -> None:
    """PREFETCH-13: base 2, 0.1 per 1024 tokens, at most 30."""
    settings = ControllerSettings(prefetch_base_s=2, prefetch_per_1k_tokens_s=0.1, prefetch_max_s=30)
    by_tokens = {n: deadline_s(asked(n, PrefetchPolicy.TIMEOUT), settings) for n in (1024, 102400, 1 << 20)}
    assert by_tokens == {1024: 2.1, 102400: 12.0, 1 << 20: 30}
    assert deadline_s(asked(1024, PrefetchPolicy.TIMEOUT, 0.3), settings) == 0.3
    assert deadline_s(asked(1024, PrefetchPolicy.TIMEOUT, 300), settings) == 30
    assert deadline_s(asked(1024, PrefetchPolicy.WAIT_COMPLETE), settings) == 30
