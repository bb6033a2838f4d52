"""The parts of the Mooncake backend by themselves, with a store that is a double."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.base import Item, Outcome, StorageError
from storage_backends.messages import Open as OpenMessage
from storage_backends.messages import framed, parse_request
from storage_backends.mooncake import codes, keeper
from storage_backends.mooncake.backend import MooncakeBackend
from storage_backends.mooncake.client import Client
from storage_backends.mooncake.keeper import STUCK_CALLS, Keeper
from storage_backends.mooncake.library import environment
from storage_backends.mooncake.queries import Queries
from storage_backends.mooncake.slices import MOST_BYTES, MOST_SLICES, SliceBudget, parts
from storage_backends.specs import BackendSpec, MooncakeSpec
from tests.mooncake.conftest import until
from tests.mooncake.servers import require_mooncake
from tests.storage.conftest import DEADLINE_S

OK, ABSENT, WRONG_SIZE, FULL, FAILED = (
    Outcome.OK,
    Outcome.ABSENT,
    Outcome.WRONG_SIZE,
    Outcome.FULL,
    Outcome.FAILED,
)
ROOT = Path(__file__).parents[2]


class Double:
    """A store whose answers are chosen; it fails the test where the real one would crash the process."""

    def __init__(self) -> None:
        self.health = 0
        self.answers = True
        self.asked = 0
        self.transfer: Callable[[list[str], list[int]], list[int]] = lambda _keys, sizes: sizes
        self.transfers: list[tuple[list[str], list[int], list[int]]] = []
        self.registered: list[tuple[int, int]] = []
        self.closed = False
        self.inside = 0
        self.gate = threading.Event()
        self.gate.set()

    def takes_connections(self) -> bool:
        self.asked += 1
        return self.answers

    def setup(self, *_: object) -> int:
        return 0

    def register_buffer(self, address: int, nbytes: int, /) -> int:
        self.registered.append((address, nbytes))
        return 0

    def batch_is_exist(self, keys: list[str], /) -> list[int]:
        assert not self.closed
        assert self.gate.wait(DEADLINE_S)
        return [1] * len(keys)

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int], /) -> list[int]:
        assert not self.closed
        self.transfers.append((keys, addresses, sizes))
        self.inside += 1
        assert self.gate.wait(DEADLINE_S)
        assert not self.closed
        return self.transfer(keys, sizes)

    def batch_put_from(
        self, keys: list[str], addresses: list[int], sizes: list[int], config: object, /
    ) -> list[int]:
        return [min(code, 0) for code in self.batch_get_into(keys, addresses, sizes)]

    def batch_remove(self, keys: list[str], force: bool, /) -> list[int]:
        assert not self.closed
        assert force
        return [0] * len(keys)

    def get_size(self, key: str, /) -> int:
        return 7

    def health_check(self) -> int:
        assert not self.closed
        return self.health

    def close(self) -> int:
        alive = self.health == 0 and self.answers
        assert alive, "closing with a dead master holds the GIL for 17 s"
        self.closed = True
        return 0


def fails(_keys: list[str], sizes: list[int]) -> list[int]:
    return [codes.TRANSFER_FAILED] * len(sizes)


@pytest.fixture
def double() -> Double:
    return Double()


def backend_on(*doubles: Double) -> MooncakeBackend:
    """Its clients are these, one after the other."""
    require_mooncake()
    following = iter(doubles)

    def connect() -> Client:
        try:
            return client_on(next(following))
        except StopIteration:
            raise StorageError("there is no other client") from None

    spec = MooncakeSpec(master="127.0.0.1:1", op_timeout_s=2.0)
    return MooncakeBackend(spec, connect, lambda: all(double.takes_connections() for double in doubles))


def client_on(double: Double) -> Client:
    return Client(double, None, double.takes_connections)


# configuration


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "give `master`"),
        ({"master": ""}, "give `master`"),
        ({"master": "node"}, "no address"),
        ({"master": "node:0"}, "no address"),
        ({"master": "node:65536"}, "no address"),
        ({"master": "http://node:1"}, "no address"),
        ({"master": "etcd://a:1;b"}, "no address"),
        ({"master": "node:1", "protocol": "rmda"}, "Invalid enum value 'rmda'"),
        ({"master": "node:1", "metadata": "redis://node:1"}, "write P2PHANDSHAKE, http://"),
        ({"master": "node:1", "metadata": "p2phandshake"}, "write P2PHANDSHAKE, http://"),
        ({"master": "node:1", "metadata": ""}, "write P2PHANDSHAKE, http://"),
        ({"master": "node:1", "segment_bytes": -1}, ">= 0"),
        ({"master": "node:1", "segment_bytes": 1 << 30}, "needs `local_hostname`"),
        ({"master": "node:1", "local_hostname": "me:1"}, "a host name"),
        ({"master": "node:1", "replicas": 0}, ">= 1"),
        ({"master": "node:1", "rdma_devices": ["mlx5_0"]}, "needs `protocol: rdma`"),
        ({"master": "node:1", "protocol": "rdma", "rdma_devices": ["mlx5_0,"]}, "names as mlx5_0"),
        ({"master": "node:1", "soft_pin_ttl_s": 5}, "needs `soft_pin: true`"),
        ({"master": "node:1", "metrics": "9003"}, "no address"),
        ({"master": "node:1", "embedded": True}, "has its own master"),
        ({"embedded": True, "protocol": "rdma"}, "leave `protocol` out"),
        ({"embedded": True, "replicas": 2}, "leave `replicas` out"),
        ({"master": "node:1", "segment": 1}, "unknown field `segment`"),
    ],
)
def test_what_cannot_work_is_refused_at_load(fields: dict[str, object], complaint: str) -> None:
    """CONFIG-01: a slip in the protocol, an empty master or a negative size is named at once; an unknown
    metadata server would end the process."""
    with pytest.raises(msgspec.ValidationError, match=complaint):
        msgspec.convert({"kind": "mooncake", **fields}, BackendSpec)


@pytest.mark.parametrize(
    "fields",
    [
        {"master": "node:50051"},
        {"master": "[fe80::1]:50051"},
        {"master": "etcd://a:2379;b:2379", "metadata": "etcd://a:2379"},
        {"master": "node:1", "metadata": "http://node:8080/metadata"},
        {"master": "node:1", "segment_bytes": 1 << 30, "local_hostname": "me", "replicas": 2},
        {"master": "127.0.0.1:1", "segment_bytes": 1 << 30},
        {"master": "node:1", "protocol": "rdma", "rdma_devices": ["mlx5_0", "mlx5_1"]},
        {"master": "node:1", "soft_pin": True, "soft_pin_ttl_s": 60, "preferred_segment": "me:12345"},
        {"embedded": True, "capacity_bytes": 64 << 20},
    ],
)
def test_what_can_work_is_taken_and_goes_to_the_worker(fields: dict[str, object]) -> None:
    spec = msgspec.convert({"kind": "mooncake", **fields}, BackendSpec)
    first = OpenMessage(spec, 1 << 20, 2)
    assert parse_request(framed(first)[4:]) == first


def test_the_sample_of_a_pool_loads() -> None:
    samples = yaml.safe_load((ROOT / "deploy" / "mooncake.yaml").read_text())
    assert samples["storage"]["tiers"][0]["backend"]["kind"] == "mooncake"


def test_the_environment_bounds_what_the_library_waits_for() -> None:
    found = environment(MooncakeSpec(master="node:1", master_timeout_s=1.5, transfer_timeout_s=3))
    assert found["MC_RPC_TIMEOUT_MS"] == "1500"
    assert found["MC_TCP_STATUS_TIMEOUT_SEC"] == "3"
    assert found["MC_STORE_CLIENT_SETUP_RETRIES"] == "1"


def test_placement_is_what_the_spec_says() -> None:
    require_mooncake()
    from storage_backends.mooncake.library import Library

    spec = MooncakeSpec(
        master="node:1", replicas=3, preferred_segment="a:1", soft_pin=True, soft_pin_ttl_s=1.5
    )
    config = Library(spec).replicate_config(spec)
    wanted = {"replica_num": 3, "preferred_segment": "a:1", "soft_pin_ttl_ms": 1500}
    assert {name: getattr(config, name) for name in wanted} == wanted


# codes


def test_codes_become_outcomes() -> None:
    """L3-01, L3-02, L3-03: absent, shorter, longer, expired, full and there already are told apart."""
    said = [4096, 4095, 4097, 0, codes.NOT_FOUND, codes.BEING_WRITTEN, -707, codes.TRANSFER_FAILED, -12345]
    assert [codes.of_read(code, 4096) for code in said] == [
        OK, *[WRONG_SIZE] * 3, ABSENT, ABSENT, FAILED, FAILED, FAILED
    ]  # fmt: skip
    written = [0, codes.EXISTS, codes.NO_SPACE, codes.TRANSFER_FAILED, -900]
    assert [codes.of_write(code) for code in written] == [OK, OK, FULL, FAILED, FAILED]
    assert [codes.of_presence(code) for code in (1, 0, -1, -900)] == [OK, ABSENT, FAILED, FAILED]
    assert [codes.of_removal(code) for code in (0, codes.NOT_FOUND, -706, -900)] == [
        OK,
        ABSENT,
        FAILED,
        FAILED,
    ]


def test_a_lease_that_runs_out_in_the_middle_fails_its_own_items(double: Double) -> None:
    """L3-02."""
    with backend_on(double) as backend:
        backend.register(memoryview(bytearray(4096)))
        double.transfer = lambda _keys, sizes: [*sizes[:6], *[-707] * 4]
        items = [Item(f"k{number}", 0, 100) for number in range(10)]
        assert backend.read(items) == [OK] * 6 + [FAILED] * 4


def test_fewer_codes_than_objects_are_no_answer(double: Double) -> None:
    """L3-11: a missing element would give each later object its neighbour's outcome."""
    with backend_on(double) as backend:
        backend.register(memoryview(bytearray(4096)))
        double.transfer = lambda _keys, sizes: sizes[:-1]
        with pytest.raises(StorageError, match="1 codes for 2 objects"):
            backend.read([Item("a", 0, 100), Item("b", 0, 100)])


# batches


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 3 << 20)), max_size=60),
    st.integers(0, 1500),
)
def test_parts_are_the_batch_in_order_and_bounded(draws: list[tuple[int, int]], n_small: int) -> None:
    items = [Item(str(key), 0, nbytes) for key, nbytes in draws]
    items += [Item(f"small{number}", 0, 1) for number in range(n_small)]
    numbered = list(enumerate(items))
    found = [list(part) for part in parts(numbered)]
    assert [entry for part in found for entry in part] == numbered
    for part in found:
        assert 0 < len(part) <= MOST_SLICES
        assert len(part) == 1 or sum(item.nbytes for _, item in part) <= MOST_BYTES
        assert len({item.key for _, item in part}) == len(part)


def test_the_library_gets_no_pointer_outside_the_registered_buffer(double: Double) -> None:
    """Over TCP it would move those bytes without a word."""
    buffer = bytearray(8192)
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    with backend_on(double) as backend:
        assert backend.write([Item("early", 0, 1)]) == [FAILED]
        backend.register(memoryview(buffer))
        offsets = [-1, 0, 4096, 8092, 8093, 8192, 1 << 62, -(1 << 62)]
        items = [Item(f"k{place}", offset, 100) for place, offset in enumerate(offsets)]
        expected = [OK if 0 <= offset <= 8092 else FAILED for offset in offsets]
        assert backend.read(items) == expected
        assert backend.write(items) == expected
    assert (start, 8192) in double.registered
    for _, addresses, sizes in double.transfers:
        for address, nbytes in zip(addresses, sizes, strict=True):
            assert start <= address
            assert address + nbytes <= start + 8192


def test_empty_objects_and_keys_that_are_no_text_are_not_asked_for(double: Double) -> None:
    with backend_on(double) as backend:
        backend.register(memoryview(bytearray(4096)))
        items = [Item("a", 0, 0), Item("", 0, 10), Item("\ud800", 0, 10), Item("ключ", 0, 10)]
        assert backend.write(items) == [FAILED, FAILED, FAILED, OK]
        assert backend.contains(["", "\ud800", "ключ"]) == [FAILED, FAILED, OK]
    assert [keys for keys, _, _ in double.transfers] == [["ключ"]]


def test_a_master_lost_in_the_middle_of_a_batch_fails_the_rest(double: Double) -> None:
    with backend_on(double) as backend:
        backend.register(memoryview(bytearray(4096)))

        def then_dies(_keys: list[str], sizes: list[int]) -> list[int]:
            double.health = 2
            return sizes

        double.transfer = then_dies
        items = [Item(f"k{number}", 0, 1) for number in range(MOST_SLICES + 3)]
        assert backend.read(items) == [OK] * MOST_SLICES + [FAILED] * 3
        double.health = 0


def test_the_slice_budget_is_taken_whole_or_not_at_all() -> None:
    budget = SliceBudget(10)
    assert budget.take(6, 0.0)
    assert not budget.take(5, 0.0)
    assert budget.take(4, 0.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(budget.take, 8, DEADLINE_S)
        budget.give_back(6)
        budget.give_back(4)
        assert waiting.result(DEADLINE_S)
    assert budget.take(2, 0.0)
    assert not budget.take(1, 0.0)


# deadlines


def test_a_late_query_raises_at_its_deadline_and_stuck_threads_shed_load() -> None:
    """CONFIG-07."""
    gate = threading.Event()
    queries = Queries(0.05)
    try:
        for _ in range(4):
            with pytest.raises(StorageError, match="did not answer within"):
                queries.ask(lambda: gate.wait(DEADLINE_S))
        with pytest.raises(StorageError, match="4 earlier queries"):
            queries.ask(lambda: True)
    finally:
        gate.set()
        queries.close()


def test_a_read_returns_only_when_the_library_has(double: Double) -> None:
    """Until then bytes may land: whoever waits gives up by itself, and keeps the range."""
    with backend_on(double) as backend, ThreadPoolExecutor(1) as pool:
        backend.register(memoryview(bytearray(4096)))
        double.gate.clear()
        reading = pool.submit(backend.read, [Item("a", 0, 100)])
        until(lambda: double.inside)
        assert not reading.done()
        double.gate.set()
        assert reading.result(DEADLINE_S) == [OK]


# the client's gate and its keeper


def test_nobody_gets_into_a_client_that_leaves_and_it_is_closed_when_all_are_out(double: Double) -> None:
    client = client_on(double)
    double.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        inside = pool.submit(client.get, ["a"], [1], [1])
        until(lambda: double.inside)
        closing = pool.submit(client.close, DEADLINE_S)
        until(lambda: left(client))
        assert not double.closed
        double.gate.set()
        assert inside.result(DEADLINE_S) == [1]
        assert closing.result(DEADLINE_S)
    assert double.closed


def left(client: Client) -> bool:
    try:
        client.presence(["a"])
    except StorageError:
        return True
    return False


@pytest.mark.parametrize(("health", "answers"), [(2, True), (0, False), (2, False)])
def test_a_client_of_a_dead_master_is_left_to_the_exit(double: Double, health: int, answers: bool) -> None:
    """The library may not have noticed."""
    client = client_on(double)
    double.health, double.answers = health, answers
    assert not client.close(0.0)
    assert not double.closed
    with pytest.raises(StorageError, match="being replaced"):
        client.presence(["a"])


def test_a_dead_master_refuses_at_once(double: Double) -> None:
    with backend_on(double) as backend:
        backend.register(memoryview(bytearray(4096)))
        double.answers = False
        until(lambda: refused(backend))
        for call in (lambda: backend.read([Item("a", 0, 1)]), lambda: backend.contains(["a"]), backend.ping):
            with pytest.raises(StorageError, match="see whether it runs"):
                call()
        double.answers = True
        until(lambda: not refused(backend))
        backend.ping()
    assert double.closed


def refused(backend: MooncakeBackend) -> bool:
    try:
        backend.contains(["a"])
    except StorageError:
        return True
    return False


def test_a_stuck_transport_is_replaced_while_a_straggler_is_inside() -> None:
    """The next client first: the old one is closed when its last call has left."""
    stuck, fresh = Double(), Double()
    with backend_on(stuck, fresh) as backend, ThreadPoolExecutor(1) as pool:
        backend.register(memoryview(bytearray(4096)))
        stuck.gate.clear()
        straggler = pool.submit(backend.read, [Item("straggler", 0, 100)])
        until(lambda: stuck.inside == 1)
        stuck.transfer = fails
        hold, stuck.gate = stuck.gate, threading.Event()
        stuck.gate.set()
        for _ in range(STUCK_CALLS):
            assert backend.read([Item("a", 0, 100)]) == [FAILED]
        until(lambda: backend._keeper.replacements)
        assert backend.read([Item("a", 0, 100)]) == [OK]
        assert fresh.registered[-1] == stuck.registered[-1]
        assert not stuck.closed
        assert not straggler.done()
        hold.set()
        assert straggler.result(DEADLINE_S) == [FAILED]
        until(lambda: stuck.closed)
        backend.ping()


def test_failed_reads_of_a_lost_node_do_not_replace_a_client_that_still_works(double: Double) -> None:
    """It would take its own memory out of the pool, and with it everybody's objects there."""
    with backend_on(double) as backend:
        backend.register(memoryview(bytearray(4096)))
        probes: list[str] = []

        def only_probes_work(keys: list[str], sizes: list[int]) -> list[int]:
            if keys[0].startswith("hicache-probe/"):
                probes.extend(keys)
                return [codes.NO_SPACE]
            return fails(keys, sizes)

        double.transfer = only_probes_work
        for _ in range(STUCK_CALLS):
            assert backend.read([Item("a", 0, 100)]) == [FAILED]
        until(lambda: probes)
        double.transfer = lambda _keys, sizes: sizes
        assert backend.read([Item("a", 0, 100)]) == [OK]
        assert backend._keeper.replacements == 0


def test_a_client_that_does_not_find_its_master_again_is_replaced_and_left_to_the_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only when the master takes connections: as long as it is away the library may still find it again."""
    monkeypatch.setattr(keeper, "UNHEALTHY_S", 0.0)
    lost, fresh = Double(), Double()
    with backend_on(lost, fresh) as backend:
        backend.register(memoryview(bytearray(4096)))
        lost.health, lost.answers = 2, False
        looks = lost.asked
        until(lambda: lost.asked >= looks + 3)
        assert backend._keeper.replacements == 0
        lost.answers = True
        until(lambda: backend._keeper.replacements)
        assert backend.read([Item("a", 0, 100)]) == [OK]
        assert not lost.closed


def test_a_first_client_that_cannot_be_made_is_an_error_with_its_reason() -> None:
    def connect() -> Client:
        raise StorageError("because")

    with pytest.raises(StorageError, match="because"):
        Keeper(connect, lambda: False)
