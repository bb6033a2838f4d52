"""A process that gives memory to a pool: `python -m tests.mooncake.segment_owner MASTER BYTES`.

Says `up`, does what lines on its standard input say (`clear`), ends when that closes.
"""

from __future__ import annotations

import os
import sys

from storage_backends.mooncake.library import Library
from storage_backends.specs import MooncakeSpec


def main() -> None:
    master, segment_bytes = sys.argv[1], int(sys.argv[2])
    store = Library(MooncakeSpec(master=master)).store()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 0, "tcp", "", master)
    print("up" if code == 0 else f"setup failed: {code}", flush=True)
    for line in sys.stdin:
        assert line == "clear\n"
        print(getattr(store, "remove_all")(True), flush=True)  # noqa: B009 - not part of what we use
    os._exit(0)


if __name__ == "__main__":
    main()
