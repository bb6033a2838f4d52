"""The contract of a storage backend as tests that every backend inherits.

A test class of a backend inherits StorageBackendLaws and gives the fixture `backend`: open, empty, nothing
registered. One that keeps a byte capacity inherits BoundedBackendLaws too, one whose objects outlive the
process PersistentBackendLaws. Needs pytest; production code never imports this.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage_backends.base import Item, Outcome, StorageBackend, Usage

BUFFER_BYTES = 4 << 20
OBJECT_BYTES = 4096
BOUNDED_OBJECTS = 10
"""How many objects of OBJECT_BYTES the backend of BoundedBackendLaws has room for."""
DEADLINE_S = 30.0

OK, ABSENT, WRONG_SIZE, FAILED = Outcome.OK, Outcome.ABSENT, Outcome.WRONG_SIZE, Outcome.FAILED


def content_of(key: str, nbytes: int = OBJECT_BYTES) -> bytes:
    """Bytes that no other key has."""
    return random.Random(key).randbytes(nbytes)


class Bench:
    """A backend with a registered buffer: the first half to write from, the second to read into."""

    def __init__(self, backend: StorageBackend) -> None:
        self.backend = backend
        self.buffer = memoryview(bytearray(BUFFER_BYTES))
        backend.register(self.buffer)

    def write(self, *keys: str, nbytes: int = OBJECT_BYTES, base: int = 0) -> list[Outcome]:
        """Write each key's own content in one batch."""
        items = [Item(key, base + place * nbytes, nbytes) for place, key in enumerate(keys)]
        for item in items:
            self.buffer[item.offset : item.offset + nbytes] = content_of(item.key, nbytes)
        return self.backend.write(items)

    def put(self, key: str, content: bytes) -> Outcome:
        self.buffer[: len(content)] = content
        return self.backend.write([Item(key, 0, len(content))])[0]

    def read(
        self, *keys: str, nbytes: int = OBJECT_BYTES, base: int = BUFFER_BYTES // 2
    ) -> list[bytes | Outcome]:
        """Read in one batch; the bytes where they came, else the outcome."""
        items = [Item(key, base + place * nbytes, nbytes) for place, key in enumerate(keys)]
        for item in items:
            self.buffer[item.offset : item.offset + nbytes] = bytes(nbytes)
        return [
            bytes(self.buffer[item.offset : item.offset + nbytes]) if outcome is OK else outcome
            for item, outcome in zip(items, self.backend.read(items), strict=True)
        ]

    def contents(self, *keys: str, nbytes: int = OBJECT_BYTES) -> list[bytes | Outcome]:
        """What `read` answers when all is well."""
        return [content_of(key, nbytes) for key in keys]


def at_once(*tasks: Callable[[], None]) -> None:
    """Run the tasks in threads that start together; raise what any of them raised."""
    start = threading.Barrier(len(tasks))

    def run(task: Callable[[], None]) -> None:
        start.wait(DEADLINE_S)
        task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        for running in [pool.submit(run, task) for task in tasks]:
            running.result(DEADLINE_S)


class BenchOfBackend:
    """Gives the laws a bench over the fixture `backend`."""

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        pytest.fail("give the fixture `backend`")

    @pytest.fixture
    def bench(self, backend: StorageBackend) -> Bench:
        return Bench(backend)


class ObjectLaws(BenchOfBackend):
    """Bytes come back as they went; writing again and deleting mean what they say."""

    def test_what_was_written_is_read_byte_for_byte(self, bench: Bench) -> None:
        assert bench.write("a", "b", "c") == [OK, OK, OK]
        assert bench.read("c", "a", "b") == bench.contents("c", "a", "b")

    @pytest.mark.parametrize("nbytes", [1, 127, 4095, 4097, 65536, (1 << 20) + 1])
    def test_objects_of_any_length(self, bench: Bench, nbytes: int) -> None:
        assert bench.write("k", nbytes=nbytes) == [OK]
        assert bench.read("k", nbytes=nbytes) == bench.contents("k", nbytes=nbytes)

    def test_an_object_is_a_copy_of_what_the_buffer_held_then(self, bench: Bench) -> None:
        bench.write("k")
        bench.buffer[: BUFFER_BYTES // 2] = bytes(BUFFER_BYTES // 2)
        assert bench.read("k") == bench.contents("k")

    def test_writing_leaves_the_buffer_as_it_was(self, bench: Bench) -> None:
        bench.write("a", "b")
        assert bytes(bench.buffer[: 2 * OBJECT_BYTES]) == content_of("a") + content_of("b")

    def test_reading_touches_nothing_but_its_ranges(self, bench: Bench) -> None:
        bench.write("a")
        bench.buffer[OBJECT_BYTES:] = b"\xa5" * (BUFFER_BYTES - OBJECT_BYTES)
        items = [Item("a", 3 * OBJECT_BYTES, OBJECT_BYTES), Item("absent", 8 * OBJECT_BYTES, OBJECT_BYTES)]
        assert bench.backend.read(items) == [OK, ABSENT]
        assert set(bench.buffer[OBJECT_BYTES : 3 * OBJECT_BYTES]) == {0xA5}
        assert set(bench.buffer[4 * OBJECT_BYTES : 8 * OBJECT_BYTES]) == {0xA5}
        assert set(bench.buffer[9 * OBJECT_BYTES : 10 * OBJECT_BYTES]) == {0xA5}

    def test_one_object_into_several_ranges(self, bench: Bench) -> None:
        bench.write("a")
        assert bench.read("a", "a", "a") == bench.contents("a", "a", "a")

    def test_bytes_that_look_like_code_are_bytes(self, bench: Bench) -> None:
        """SECURITY-01: a pickle that would run a command is stored and returned, never loaded."""
        poison = b"\x80\x04cposix\nsystem\n(S'false'\ntR."
        assert bench.put("poison", poison) is OK
        assert bench.read("poison", nbytes=len(poison)) == [poison]

    def test_writing_what_is_there_is_a_success(self, bench: Bench) -> None:
        """L3-03: keys are content addresses, so a duplicate is normal, and there is one object."""
        assert [bench.write("k"), bench.write("k"), bench.write("k", "k")] == [[OK], [OK], [OK, OK]]
        assert bench.read("k") == bench.contents("k")
        assert bench.backend.usage().n_objects == 1

    def test_a_deleted_object_is_absent_and_can_be_written_again(self, bench: Bench) -> None:
        bench.write("a", "b")
        assert bench.backend.delete(["a"]) == [OK]
        assert bench.backend.contains(["a", "b"]) == [ABSENT, OK]
        assert bench.read("a", "b") == [ABSENT, content_of("b")]
        assert bench.backend.delete(["a"]) == [ABSENT]
        assert bench.write("a") == [OK]
        assert bench.read("a") == bench.contents("a")

    def test_an_object_deleted_twice_in_a_batch_is_absent_the_second_time(self, bench: Bench) -> None:
        bench.write("a")
        assert bench.backend.delete(["a", "a"]) == [OK, ABSENT]


class OutcomeLaws(BenchOfBackend):
    """Each item has its own outcome, in its own place."""

    def test_absent_is_not_failed(self, bench: Bench) -> None:
        assert bench.backend.contains(["never"]) == [ABSENT]
        assert bench.read("never") == [ABSENT]
        assert bench.backend.delete(["never"]) == [ABSENT]

    def test_contains_tells_what_is_there(self, bench: Bench) -> None:
        bench.write("a", "c")
        assert bench.backend.contains(["a", "b", "c", "a"]) == [OK, ABSENT, OK, OK]

    @pytest.mark.parametrize("asked_bytes", [0, 1, OBJECT_BYTES - 1, OBJECT_BYTES + 1, 2 * OBJECT_BYTES])
    def test_an_object_of_another_length_is_wrong_size(self, bench: Bench, asked_bytes: int) -> None:
        """L3-01: short bytes, long bytes and none at all are told apart from an object that is absent."""
        bench.write("k")
        assert bench.read("k", nbytes=asked_bytes) == [WRONG_SIZE]

    def test_one_bad_item_spoils_no_neighbour(self, bench: Bench) -> None:
        """L3-01, L3-11: five pages of which the third is not there, or of another length."""
        keys = ["p0", "p1", "p2", "p3", "p4"]
        bench.write("p0", "p1", "p3", "p4")
        assert bench.read(*keys) == [*bench.contents("p0", "p1"), ABSENT, *bench.contents("p3", "p4")]
        bench.write("p2", nbytes=100)
        assert bench.read(*keys) == [*bench.contents("p0", "p1"), WRONG_SIZE, *bench.contents("p3", "p4")]

    @pytest.mark.parametrize(
        "offset", [-1, -OBJECT_BYTES, BUFFER_BYTES - OBJECT_BYTES + 1, BUFFER_BYTES, 1 << 62]
    )
    def test_a_range_outside_the_buffer_fails_alone(self, bench: Bench, offset: int) -> None:
        bench.write("a", "b")
        outside, inside = Item("a", offset, OBJECT_BYTES), Item("b", 0, OBJECT_BYTES)
        assert bench.backend.read([outside, inside]) == [FAILED, OK]
        assert bench.backend.write([Item("c", offset, OBJECT_BYTES), inside]) == [FAILED, OK]
        assert bench.backend.contains(["c"]) == [ABSENT]

    def test_an_empty_batch_has_an_empty_answer(self, bench: Bench) -> None:
        backend = bench.backend
        assert [backend.contains([]), backend.read([]), backend.write([]), backend.delete([])] == [[]] * 4

    def test_outcomes_come_in_the_order_of_the_items(self, bench: Bench) -> None:
        keys = [f"k{number}" for number in range(200)]
        bench.write(*keys[::2], nbytes=64)
        shuffled = random.Random(7).sample(keys, len(keys))
        expected = [OK if int(key[1:]) % 2 == 0 else ABSENT for key in shuffled]
        assert bench.backend.contains(shuffled) == expected
        items = [Item(key, BUFFER_BYTES // 2 + place * 64, 64) for place, key in enumerate(shuffled)]
        assert bench.backend.read(items) == expected
        assert bench.backend.delete(shuffled) == expected

    def test_a_thousand_keys_in_a_batch(self, bench: Bench) -> None:
        keys = [f"component/0-of-1/{number:064x}" for number in range(1000)]
        assert set(bench.write(*keys, nbytes=256)) == {OK}
        assert set(bench.backend.contains(keys)) == {OK}
        assert bench.read(*keys, nbytes=256) == bench.contents(*keys, nbytes=256)


class KeyLaws(BenchOfBackend):
    """Keys are opaque."""

    @pytest.mark.parametrize("length", [1, 100, 255, 256, 4096])
    def test_keys_of_unusual_length(self, bench: Bench, length: int) -> None:
        key, neighbour = "k" * length, "k" * (length - 1) + "x"
        assert bench.write(key, neighbour) == [OK, OK]
        assert bench.read(key, neighbour) == bench.contents(key, neighbour)
        assert bench.backend.delete([key]) == [OK]
        assert bench.backend.contains([key, neighbour]) == [ABSENT, OK]

    def test_keys_are_opaque(self, bench: Bench) -> None:
        """SECURITY-05: what looks like a path, a pattern or two spellings of one place is a key like any."""
        keys = [
            "..",
            ".",
            "../../etc/passwd",
            "/etc/passwd",
            "a/b",
            "a//b",
            "a/./b",
            "/a/b",
            "a/b/",
            "~",
            "~/a",
        ]
        keys += [
            "a\\b",
            "a b",
            " a",
            "*",
            "a*",
            "[a]",
            "a\0b",
            "a\nb",
            "a\r\nb",
            "ключ",
            "é",
            "e\u0301",
            "%2e%2e",
        ]
        keys += ["KEY", "key", "Key"]
        assert bench.write(*keys) == [OK] * len(keys)
        assert bench.read(*keys) == bench.contents(*keys)
        assert bench.backend.usage().n_objects == len(keys)

    def test_keys_under_different_prefixes_are_different_objects(self, bench: Bench) -> None:
        """L3-09, L3-10: deployments and ranks share a backend; each reads, asks and deletes its own."""
        ours, theirs = "one/full/0-of-2/abc", "two/full/0-of-2/abc"
        rank = "one/full/1-of-2/abc"
        bench.write(ours, rank)
        assert bench.backend.contains([ours, theirs, rank]) == [OK, ABSENT, OK]
        assert bench.read(ours, theirs, rank) == [content_of(ours), ABSENT, content_of(rank)]
        bench.write(theirs)
        assert bench.backend.delete([ours]) == [OK]
        assert bench.read(ours, theirs, rank) == [ABSENT, content_of(theirs), content_of(rank)]


class ThreadLaws(BenchOfBackend):
    """All calls may come from several threads at once."""

    def test_threads_work_on_different_keys_at_once(self, bench: Bench) -> None:
        def work(thread: int) -> None:
            base = thread * 16 * OBJECT_BYTES
            for turn in range(20):
                keys = [f"{thread}.{turn}.{number}" for number in range(4)]
                assert bench.write(*keys, base=base) == [OK] * 4
                assert bench.read(*keys, base=BUFFER_BYTES // 2 + base) == bench.contents(*keys)
                assert bench.backend.delete(keys[:2]) == [OK, OK]

        at_once(*[lambda thread=thread: work(thread) for thread in range(6)])
        assert bench.backend.usage() == Usage(
            6 * 20 * 2, 6 * 20 * 2 * OBJECT_BYTES, bench.backend.usage().capacity_bytes
        )

    def test_threads_that_write_one_key_all_succeed(self, bench: Bench) -> None:
        """L3-03: two instances back up the same page at the same time; both succeed, one copy is kept."""
        bench.buffer[: 1 << 20] = content_of("k", 1 << 20)

        def write() -> None:
            assert bench.backend.write([Item("k", 0, 1 << 20)]) == [OK]

        for _ in range(5):
            bench.backend.delete(["k"])
            at_once(write, write, write, write)
            assert bench.read("k", nbytes=1 << 20) == bench.contents("k", nbytes=1 << 20)
            assert bench.backend.usage().n_objects == 1

    def test_an_object_is_visible_whole_or_not_at_all(self, bench: Bench) -> None:
        """L3-08: whoever reads while another writes and deletes gets every byte or ABSENT."""
        nbytes = 1 << 19
        whole: list[bytes | Outcome] = bench.contents("k", nbytes=nbytes)
        ended = threading.Event()
        bench.buffer[:nbytes] = content_of("k", nbytes)
        item = Item("k", 0, nbytes)

        def write() -> None:
            try:
                for _ in range(40):
                    assert bench.backend.write([item]) == [OK]
                    assert bench.backend.delete(["k"]) == [OK]
            finally:
                ended.set()

        def read() -> None:
            while not ended.is_set():
                assert bench.read("k", nbytes=nbytes) in ([ABSENT], whole)

        at_once(write, read)


class StorageBackendLaws(ObjectLaws, OutcomeLaws, KeyLaws, ThreadLaws):
    """What holds for every backend."""

    def test_usage_counts_objects_and_bytes(self, bench: Bench) -> None:
        before = bench.backend.usage()
        assert (before.n_objects, before.used_bytes) == (0, 0)
        bench.write("a", "b", nbytes=1000)
        bench.write("c", nbytes=24)
        bench.backend.delete(["b"])
        after = bench.backend.usage()
        assert (after.n_objects, after.used_bytes) == (2, 1024)
        assert after.capacity_bytes == before.capacity_bytes

    def test_an_open_backend_answers_ping(self, bench: Bench) -> None:
        bench.backend.ping()
        assert bench.backend.usage().n_objects == 0

    def test_a_second_close_does_nothing(self, bench: Bench) -> None:
        bench.write("a")
        bench.backend.close()
        bench.backend.close()


class BoundedBackendLaws:
    """What holds for a backend that keeps a byte capacity by giving up the least recently used."""

    @pytest.fixture
    def bounded(self) -> Iterator[StorageBackend]:
        """Open, empty, with room for BOUNDED_OBJECTS objects of OBJECT_BYTES and no more."""
        pytest.fail("give the fixture `bounded`")

    @pytest.fixture
    def full(self, bounded: StorageBackend) -> Bench:
        """Filled to the brim with k0, k1, ... in this order."""
        bench = Bench(bounded)
        for key in numbered(BOUNDED_OBJECTS):
            assert bench.write(key) == [OK]
        return bench

    def test_usage_never_exceeds_the_capacity(self, full: Bench) -> None:
        for number in range(3 * BOUNDED_OBJECTS):
            assert full.write(f"more{number}", nbytes=OBJECT_BYTES - 7 * number) == [OK]
            usage = full.backend.usage()
            assert usage.used_bytes <= usage.capacity_bytes < (BOUNDED_OBJECTS + 1) * OBJECT_BYTES

    def test_the_least_recently_used_goes_first_and_no_more_than_needed(self, full: Bench) -> None:
        full.write("x", "y")
        assert full.backend.contains(numbered(BOUNDED_OBJECTS)) == [ABSENT] * 2 + [OK] * (BOUNDED_OBJECTS - 2)
        assert full.read("x", "y") == full.contents("x", "y")

    def test_reading_an_object_keeps_it(self, full: Bench) -> None:
        full.read("k0")
        full.write("x")
        assert full.backend.contains(["k0", "k1", "k2"]) == [OK, ABSENT, OK]

    def test_writing_an_object_again_keeps_it(self, full: Bench) -> None:
        full.write("k0")
        full.write("x")
        assert full.backend.contains(["k0", "k1", "k2"]) == [OK, ABSENT, OK]

    def test_asking_for_an_object_does_not_keep_it(self, full: Bench) -> None:
        full.backend.contains(["k0"])
        full.write("x")
        assert full.backend.contains(["k0", "k1"]) == [ABSENT, OK]

    def test_an_object_above_the_capacity_is_full_and_evicts_nothing(self, full: Bench) -> None:
        too_large = (BOUNDED_OBJECTS + 1) * OBJECT_BYTES
        assert full.backend.write([Item("large", 0, too_large)]) == [Outcome.FULL]
        assert (
            full.backend.contains(["large", *numbered(BOUNDED_OBJECTS)]) == [ABSENT] + [OK] * BOUNDED_OBJECTS
        )

    def test_deleting_makes_room(self, full: Bench) -> None:
        full.backend.delete(["k5"])
        full.write("x")
        kept = [key for key in numbered(BOUNDED_OBJECTS) if key != "k5"]
        assert set(full.backend.contains([*kept, "x"])) == {OK}

    def test_threads_that_overfill_it_stay_within_the_capacity(self, full: Bench) -> None:
        def work(thread: int) -> None:
            base = thread * OBJECT_BYTES
            for turn in range(30):
                # FULL is right only while the others' objects under way take all the room there is
                assert full.write(f"{thread}.{turn}", base=base)[0] in (OK, Outcome.FULL)
                usage = full.backend.usage()
                assert usage.used_bytes <= usage.capacity_bytes

        at_once(*[lambda thread=thread: work(thread) for thread in range(4)])
        assert full.write("last") == [OK]
        assert full.read("last") == full.contents("last")


class PersistentBackendLaws:
    """What holds for a backend whose objects outlive it."""

    @pytest.fixture
    def reopened(self) -> Callable[[], Bench]:
        """Each call opens the same storage, with room for BOUNDED_OBJECTS objects of OBJECT_BYTES, after
        closing what the last call opened."""
        pytest.fail("give the fixture `reopened`")

    def test_objects_and_usage_survive_reopening(self, reopened: Callable[[], Bench]) -> None:
        """L3-05: what was stored before a restart is found after it, by the same keys."""
        bench = reopened()
        bench.write("a", "b", "c")
        bench.backend.delete(["b"])
        usage = bench.backend.usage()
        bench = reopened()
        assert bench.backend.usage() == usage
        assert bench.backend.contains(["a", "b", "c"]) == [OK, ABSENT, OK]
        assert bench.read("a", "c") == bench.contents("a", "c")

    def test_the_order_of_use_survives_reopening(self, reopened: Callable[[], Bench]) -> None:
        bench = reopened()
        for key in numbered(BOUNDED_OBJECTS):
            bench.write(key)
        bench.read("k0")
        bench.write("k2")
        bench = reopened()
        bench.write("x", "y")
        assert bench.backend.contains(["k0", "k1", "k2", "k3", "k4"]) == [OK, ABSENT, OK, ABSENT, OK]


def numbered(n: int) -> Sequence[str]:
    return [f"k{number}" for number in range(n)]
