"""A process that opens a directory and, told to, writes keys that all share and keys of its own.

`python sharing_writer.py PATH RANK CAPACITY_BYTES N`; says "open" and "done", goes on at each line of input.
"""

import sys

from storage_backends.base import Outcome
from storage_backends.file import FileBackend
from storage_backends.specs import FileSpec
from storage_backends.testing import Bench


def main(path: str, rank: str, capacity_bytes: int, n: int) -> None:
    with FileBackend(FileSpec(path=path, capacity_bytes=capacity_bytes)) as backend:
        bench = Bench(backend)
        print("open", flush=True)
        sys.stdin.readline()
        for number in range(n):
            keys = [f"shared/{number}", f"rank-{rank}/{number}"]
            assert bench.write(*keys) == [Outcome.OK] * 2, keys
            for got, content in zip(bench.read(*keys), bench.contents(*keys), strict=True):
                assert got == content or (got is Outcome.ABSENT and capacity_bytes < 1 << 20), keys
        print("done", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
