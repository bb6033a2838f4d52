"""How large a demo is: memory is set from the prompts, so that each tier has something to do at any size.

L1 holds the two longest requests (while one is served, the other's pages are still being backed up); L2
half of what all conversations need in the end; L3 everything.
"""

from __future__ import annotations

from examples.demo.arithmetic import Shape
from examples.demo.memory import Slots, layout_of
from examples.demo.runs import Plan
from examples.demo.servers import Storage
from examples.demo.workload import Sizes

_TURN_OVERHEAD_TOKENS = 64
"""Heading and question of a turn, at most."""


def full_plan(*, clients: int | None, rounds: int | None, seed: int, storage: Storage = Storage.FILE) -> Plan:
    """The demo as it is meant to be seen: about two minutes on two cores."""
    return _plan(Sizes(clients or 10, rounds or 10), 3, seed, storage)


def quick_plan(
    *, clients: int | None, rounds: int | None, seed: int, storage: Storage = Storage.FILE
) -> Plan:
    """The same in small, for tests."""
    sizes = Sizes(clients or 6, rounds or 4, system_tokens=512, chunk_tokens=256, answer_tokens=8)
    return _plan(sizes, 1, seed, storage)


def _plan(sizes: Sizes, rounds_after_restart: int, seed: int, storage: Storage) -> Plan:
    if sizes.clients < 2 or sizes.rounds < 2:
        raise ValueError("clients and rounds: at least 2 of each, or there is nothing to share")
    shape = Shape()
    turn = sizes.chunk_tokens + _TURN_OVERHEAD_TOKENS + sizes.answer_tokens
    longest = sizes.system_tokens + (sizes.rounds + rounds_after_restart) * turn
    if longest > shape.max_tokens:
        raise ValueError(f"rounds: prompts would reach {longest} tokens, the model takes {shape.max_tokens}")
    window_pages = shape.window_tokens // shape.page_size
    longest_pages = -(-longest // shape.page_size)
    slots = Slots(full=2 * longest_pages, swa=8 * window_pages, mamba=16)
    layout, device_bytes = layout_of(shape, slots)
    page_bytes = {pool.component: pool.page_bytes for pool in layout.pools if pool.name.endswith("kv")}
    before_restart = sizes.clients * (sizes.system_tokens + sizes.rounds * turn) // shape.page_size
    return Plan(
        sizes=sizes,
        rounds_after_restart=rounds_after_restart,
        shape=shape,
        slots=slots,
        device_bytes=device_bytes,
        host_bytes=before_restart * page_bytes["full"] * 7 // 10,
        storage=storage,
        storage_bytes=1 << 30,
        seed=seed,
    )
