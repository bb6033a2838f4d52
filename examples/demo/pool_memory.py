"""A process that gives memory to a Mooncake pool: `python -m examples.demo.pool_memory MASTER BYTES`.

Says `up`, or what is wrong; ends when its standard input closes, so with whoever started it.
"""

from __future__ import annotations

import os
import sys

from storage_backends.mooncake.library import Library
from storage_backends.specs import MooncakeSpec


def main() -> None:
    """Give it until told to end."""
    master, segment_bytes = sys.argv[1], int(sys.argv[2])
    store = Library(MooncakeSpec(master=master)).store()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 0, "tcp", "", master)
    print("up" if code == 0 else f"setup failed with code {code}", flush=True)
    sys.stdin.read()
    os._exit(0)  # the library's threads would hold it up


if __name__ == "__main__":
    main()
