"""One rank of a group, in a process of its own: serves prompts when told to, in its own time."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection

from hicache import RankPlace
from hicache.core.words import Tier
from tests.live import LiveEngine
from tests.tagged import make_layout, prompt

SLOTS = {"full": 80, "swa": 80, "mamba": 16}
REPLICATED = ("full1", "mamba0", "mamba1")
RANKS = 4


def live(address: str, rank: int, orders: Connection) -> None:
    """Serve each prompt whose seed comes; answer with the pages found per tier. Ends with the pipe."""
    times = random.Random(rank)
    layout, nbytes = make_layout(SLOTS, replicated=REPLICATED)
    place = RankPlace("group", rank, RANKS)
    engine = LiveEngine(address, layout, nbytes, engine_id=f"rank {rank}", place=place)
    orders.send("attached")
    while True:
        try:
            number, seed = orders.recv()
        except EOFError:
            break
        time.sleep(times.random() * 0.02)  # ranks ask at different times
        request = engine.serve(f"request {number}", prompt(seed, 43))
        engine.settle()
        evicted = engine.cache.evict("full", 80)  # L1 forgets, all ranks alike
        for name in ("swa", "mamba"):
            engine.cache.evict(name, 80)
        orders.send((tuple(request.hit_pages[tier] for tier in Tier), evicted))
    engine.close()
