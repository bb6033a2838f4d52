"""An engine that backs up without end until it is killed: `python -m tests.cuda.gpu_engine SOCKET`."""

from __future__ import annotations

import sys
from itertools import count

from tests.cuda.gpu import Gpu, GpuEngine, layered, placement
from tests.tagged import prompt

N_PAGES = 32


def main(address: str) -> None:
    engine = GpuEngine(Gpu(), address, layered(8, 256 << 10, 2 * N_PAGES), engine_id="doomed")
    slots = {page: page for page in range(N_PAGES)}
    print("attached", flush=True)
    for round_ in count():
        tokens = prompt(round_, 16 * N_PAGES)
        ready = engine.ready.record(engine.stream)
        engine.client.start_backup(engine.prompt(tokens), placement(slots), ready=ready).wait(60)
        engine.ready.settled(ready)
        print(round_, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
