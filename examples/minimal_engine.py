"""An engine reduced to its talk with HiCache: reuse what is cached, compute the rest, hand it over.

hicache serve -c deploy/minimal.yaml &
python examples/minimal_engine.py unix:/run/hicache/hicache.sock
"""

import os
import sys
import time

import numpy as np

from hicache import Client, ComponentSpec, Kind, Layout, Plane, Pool, SharedRegion, UnifiedRadixCache

PAGE, SLOTS, KV = 16, 96, 4096  # tokens a page, pages in L1, bytes of one page's keys and values

layout = Layout(
    page_size=PAGE,
    components=(ComponentSpec("full", Kind.FULL),),
    pools=(Pool("kv", "full", SLOTS, (Plane(region=0, offset=0, stride=KV, nbytes=KV),), format="u8"),),
)
region = SharedRegion(SLOTS * KV)  # L1: this process computes in it, the daemon copies from and to it
kv = region.array(np.uint8, (SLOTS, KV))
address = sys.argv[1] if len(sys.argv) > 1 else "unix:/run/hicache/hicache.sock"
client = Client(address, engine_id=f"demo:{os.getpid()}", model="m", layout=layout, regions=[region])
cache = UnifiedRadixCache(layout, model="m", client=client, lookup_timeout_s=1.0)


def serve(name: str, tokens: np.ndarray) -> None:
    request = cache.begin(name, tokens)  # request.slots: pages that need no computing, safe until finish
    n_pages = len(tokens) // PAGE
    fresh = cache.alloc("full", n_pages - request.boundary)
    assert fresh is not None, "L1 is too small"
    for page, slot in enumerate(fresh, start=request.boundary):
        kv[slot] = tokens[page * PAGE] % 251  # stands for the forward pass
    slots = np.concatenate((request.slots["full"], fresh))
    assert all((kv[slots[page]] == tokens[page * PAGE] % 251).all() for page in range(n_pages))
    cache.finish(request, tokens, {"full": slots})  # the slots are the cache's now; backup begins
    print(f"{name}: {n_pages} pages,", ", ".join(f"{n} {t.name}" for t, n in request.hit_pages.items()))


client.wait_attached(timeout_s=2)  # only so that the first request is backed up too: nothing depends on it
prompts = [np.random.default_rng(seed).integers(0, 50_000, 40 * PAGE + 5, np.int32) for seed in range(3)]
for turn in (1, 2):
    for n, prompt in enumerate(prompts):  # 120 pages go through an L1 of 96
        serve(f"turn {turn}, prompt {n}", prompt)
        for _ in range(10):
            time.sleep(0.01)
            cache.poll()  # an idle engine looks after its transfers
cache.close()
