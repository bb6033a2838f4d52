"""HiCache from asyncio: back pages up, look them up, load them into other slots.

hicache serve -c deploy/minimal.yaml &
python examples/async_engine.py unix:/run/hicache/hicache.sock
"""

import asyncio
import sys

import numpy as np

from hicache import Client, ComponentSpec, Kind, Layout, Plane, Pool, SharedRegion
from hicache.client import AsyncClient, Outcome, Placement, Prompt

SLOTS, KV = 16, 4096
layout = Layout(
    page_size=16,
    components=(ComponentSpec("full", Kind.FULL),),
    pools=(Pool("kv", "full", SLOTS, (Plane(region=0, offset=0, stride=KV, nbytes=KV),), format="u8"),),
)


async def main(address: str) -> None:
    region = SharedRegion(SLOTS * KV)
    kv = region.array(np.uint8, (SLOTS, KV))
    connection = Client(address, engine_id="async", model="m", layout=layout, regions=[region])
    async with AsyncClient(connection) as client:
        assert await client.wait_attached(10), client.problem
        prompt, pages = Prompt("r1", np.arange(64, dtype=np.int32)), np.arange(4, dtype=np.int32)
        kv[:4] = pages[:, None] + 1  # stands for the forward pass
        backup = client.start_backup(prompt, {"full": Placement(pages, pages)})
        assert await client.outcome(backup, timeout_s=5) is Outcome.OK, backup.reason
        found = await client.lookup(prompt, device={}, limit_pages=4, timeout_s=1)
        assert found is not None, "acknowledged, so it can be read"
        assert found.lease is not None
        load = client.start_load(found.lease, {"full": Placement(found.load["full"], pages + 8)})
        assert await client.outcome(load, timeout_s=5) is Outcome.OK, load.reason
        client.release(found.lease)
        print(f"{found.boundary} pages came back:", (kv[8:12] == kv[:4]).all())


asyncio.run(main(sys.argv[1]))
