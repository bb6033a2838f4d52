"""Configuration: one file, strict, order-free, with complaints that name the key and the remedy."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.daemon import config
from controller.daemon.config import (
    Config,
    ConfigError,
    Storage,
    TierEntry,
    format_size,
    parse,
    parse_size,
    parse_tier,
)
from controller.settings import ControllerSettings
from storage_backends.specs import FileSpec, MemorySpec

DEPLOY = Path(__file__).parents[2] / "deploy"
FILE = "storage: {tiers: [{backend: {kind: file, path: /x}}]}"


def complaint(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return str(caught.value)


def test_an_empty_file_is_all_defaults() -> None:
    assert parse("") == Config()
    assert parse("# only a comment") == Config()


@pytest.mark.parametrize(
    ("text", "path", "remedy"),
    [
        ("sever: {}", "sever", "did you mean `server`"),
        ("server: {sokcet: /a}", "server.sokcet", "did you mean `socket`"),
        ("server: {zzzzzz: 1}", "server.zzzzzz", "known keys here: socket"),
        (
            "storage: {tiers: [{backend: {kind: file, pth: /x}}]}",
            "storage.tiers[0].backend.pth",
            "did you mean `path`",
        ),
        (FILE[:-1] + ", prefx: a}", "storage.prefx", "did you mean `prefix`"),
        ("http: {prot: 1}", "http.prot", "did you mean `port`"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path(text: str, path: str, remedy: str) -> None:
    message = complaint(text)
    assert message.startswith(f"{path}: unknown key")
    assert remedy in message


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("storage: {tiers: [{backend: {kind: rmda, path: /x}}]}", "storage.tiers[0].backend.kind"),
        ("storage: {tiers: [{backend: {path: /x}}]}", "storage.tiers[0].backend.kind"),
        ("storage: {tiers: [{backend: {kind: file}}]}", "storage.tiers[0].backend.path"),
        ("storage: {}", "storage.tiers"),
        ("storage: {tiers: []}", "storage.tiers"),
        ("storage: {tiers: [{name: a}]}", "storage.tiers[0].backend"),
        ("storage: {tiers: [{name: a/b, backend: {kind: memory}}]}", "storage.tiers[0].name"),
        ("storage: {tiers: [{backend: {kind: memory}}, {backend: {kind: memory}}]}", "storage.tiers[1].name"),
        ("storage: {tiers: [{backend: {kind: file, path: ''}}]}", "storage.tiers[0].backend.path"),
        ("storage: {tiers: [{backend: {kind: file, path: store}}]}", "storage.tiers[0].backend.path"),
        ("storage: {tiers: [{backend: {kind: file, path: ../store}}]}", "storage.tiers[0].backend.path"),
        (
            "storage: {tiers: [{backend: {kind: file, path: /x, capacity_bytes: -1}}]}",
            "storage.tiers[0].backend.capacity_bytes",
        ),
        (
            "storage: {tiers: [{backend: {kind: memory, capacity_bytes: 4 gigs}}]}",
            "storage.tiers[0].backend.capacity_bytes",
        ),
        (FILE[:-1] + ", prefix: a/b}", "storage.prefix"),
        (FILE[:-1] + ", prefix: ..}", "storage.prefix"),
        ("host: {capacity: 12}", "host.capacity"),
        ("host: {capacity: true}", "host.capacity"),
        ("host: {lease_s: 0}", "host.lease_s"),
        ("host: {lease_s: .nan}", "host.lease_s"),
        ("host: {lease_s: .inf}", "host.lease_s"),
        ("host: {lease_s: ten}", "host.lease_s"),
        ("host: {mode: direct}", "host.mode"),
        ("host: {mode: staging}", "host.mode"),
        ("host: {mode: staging}\nstorage: {tiers: [{backend: {kind: memory}, write: false}]}", "host.mode"),
        ("host: {floors: {a: 0}}", "host.floors"),
        ("host: {floors: {a: .nan}}", "host.floors"),
        ("host: {floors: {a: 0.5, b: 0.5}}", "host.floors"),
        ("host: {quotas: [{salt: a, capacity: -1}]}", "host.quotas[0].capacity"),
        ("host: {quotas: [{salt: a, capacity: .nan}]}", "host.quotas[0].capacity"),
        ("host: {quotas: [{salt: a, capacity: lots}]}", "host.quotas[0].capacity"),
        ("host: {quotas: [{salt: a, capacity: 5GiB}]}", "host.quotas[0].capacity"),
        ("host: {quotas: [{capacity: 1GiB}]}", "host.quotas[0].salt"),
        ("host: {quotas: [{salt: a, capacity: 1}, {salt: a, capacity: 1}]}", "host.quotas[1].salt"),
        ("host: {quotas: [{salt: a, cap: 1}]}", "host.quotas[0].cap"),
        ("server: {socket: ''}", "server.socket"),
        ("server: {socket: run/x.sock}", "server.socket"),
        (f"server: {{socket: /{'x' * 120}}}", "server.socket"),
        ("server: {tcp: '127.0.0.1'}", "server.tcp"),
        ("server: {tcp: '127.0.0.1:99999'}", "server.tcp"),
        ("server: {max_message_bytes: 1KiB}", "server.max_message_bytes"),
        ("server: {heartbeat_interval_s: 6}", "server.heartbeat_timeout_s"),
        ("transfers: {threads: 0}", "transfers.threads"),
        ("prefetch: {base_s: 60}", "prefetch.base_s"),
        ("prefetch: {host_share: 1.5}", "prefetch.host_share"),
        ("http: {address: nowhere}", "http.address"),
        ("http: {port: 70000}", "http.port"),
        ("log: {level: loud}", "log.level"),
        ("server: 3", "server"),
        ("[1, 2]", "the file"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(text: str, path: str) -> None:
    """CONFIG-01: a wrong kind, an empty address and a negative size are refused at load. SESSION-10: so are
    NaN, negative and unknown quotas."""
    assert complaint(text).startswith(path)


def test_text_that_is_not_yaml_is_refused() -> None:
    assert complaint("server: [").startswith("not YAML")
    assert "unacceptable character" in complaint("a: \0")


def test_a_key_given_twice_is_refused() -> None:
    assert (
        complaint("host: {lease_s: 1}\nhost: {lease_s: 2}") == "host: given twice (line 2); keep one of them"
    )


def test_no_yaml_tag_builds_an_object() -> None:
    """SECURITY-01: the loader builds plain values only."""
    assert complaint("server: !!python/object/apply:os.system ['true']").startswith("not YAML")


@given(st.integers(0, 1 << 60))
def test_a_size_reads_back_as_it_was_written(nbytes: int) -> None:
    written = format_size(nbytes)
    assert (parse_size(written, "x") if isinstance(written, str) else written) == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 << 30),
        ("1.5 MiB", 3 << 19),
        ("512", 512),
        ("10 kB", 10_000),
        ("2TB", 2 * 10**12),
        ("7B", 7),
    ],
)
def test_sizes_have_units(text: str, nbytes: int) -> None:
    assert parse_size(text, "x") == nbytes
    text = f"storage: {{tiers: [{{backend: {{kind: memory, capacity_bytes: {1 << 20}}}}}]}}"
    assert parse(text).storage == Storage(
        tiers=(TierEntry(name="memory", backend=MemorySpec(capacity_bytes=1 << 20)),)
    )


def test_paths_are_expanded_once_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """SECURITY-05: `~` and `..` mean what they say, and never become directories of that name."""
    monkeypatch.setenv("HOME", "/home/me")
    found = parse(
        "server: {socket: ~/a/../s}\nstorage: {tiers: [{backend: {kind: file, path: ~/store//x/..}}]}"
    )
    assert found.server.socket == "/home/me/s"
    assert found.storage is not None
    assert isinstance(found.storage.tiers[0].backend, FileSpec)
    assert found.storage.tiers[0].backend.path == "/home/me/store"


def test_the_default_exposes_nothing() -> None:
    """SECURITY-05, SECURITY-02: a private socket, no TCP for gRPC, loopback for HTTP."""
    default = Config()
    assert default.server.tcp is None
    assert default.http is not None
    assert default.http.address == "127.0.0.1"


@pytest.mark.parametrize("address", ["0.0.0.0:7400", "192.168.1.1:7400", "[::]:7400", "example.org:7400"])
def test_tcp_without_tls_is_loopback_only(address: str) -> None:
    """SECURITY-05"""
    assert "not a loopback address" in complaint(f"server: {{tcp: '{address}'}}")


@pytest.mark.parametrize("address", ["127.0.0.1:7400", "[::1]:7400", "localhost:0"])
def test_tcp_on_loopback_is_accepted(address: str) -> None:
    assert parse(f"server: {{tcp: '{address}'}}").server.tcp == address


def shuffled(value: object, order: random.Random) -> object:
    if not isinstance(value, dict):
        return value
    items = list(value.items())
    order.shuffle(items)
    return {key: shuffled(item, order) for key, item in items}


@settings(deadline=None)
@given(st.integers())
def test_the_order_of_keys_does_not_matter(seed: int) -> None:
    """CONFIG-04: options in every order give the same derived values."""
    raw = yaml.safe_load((DEPLOY / "hicache.yaml").read_text())
    text = yaml.safe_dump(shuffled(raw, random.Random(seed)), sort_keys=False)
    assert parse(text) == config.load(DEPLOY / "hicache.yaml")


def test_the_effective_configuration_loads_to_itself() -> None:
    found = parse("host: {capacity: 123456789, extent: 1MiB}\nhttp: null\n" + FILE)
    assert parse(config.dump(found)) == found


def keys(value: object, path: str = "") -> set[str]:
    if isinstance(value, list | tuple):
        return set().union(*(keys(item, f"{path}[]") for item in value))
    if not isinstance(value, dict):
        return {path}
    return set(itertools.chain.from_iterable(keys(item, f"{path}.{key}") for key, item in value.items()))


def test_the_sample_names_every_key_and_holds_every_default() -> None:
    """CONFIG-02: what is documented is what is there, under the same name."""
    sample = config.load(DEPLOY / "hicache.yaml")
    raw = yaml.safe_load((DEPLOY / "hicache.yaml").read_text())
    assert keys(raw) == keys(msgspec.to_builtins(sample))
    assert msgspec.structs.replace(sample, storage=None) == Config()
    assert sample.storage == Storage(
        tiers=(TierEntry(name="file", backend=FileSpec(path="/var/lib/hicache")),)
    )


def test_the_minimal_sample_differs_only_where_it_says() -> None:
    minimal = config.load(DEPLOY / "minimal.yaml")
    assert minimal == config.load(DEPLOY / "hicache.yaml")


def test_controller_settings_default_to_the_controllers_own() -> None:
    """A default is written once in meaning: both places agree."""
    assert Config().controller_settings() == ControllerSettings()
    assert parse(FILE).controller_settings() == ControllerSettings()


def test_every_controller_setting_can_be_configured() -> None:
    text = """
    host:
        {lease_s: 1, mode: staging, retain_share: 0.1, floors: {a: 0.2}, quotas: [{salt: t, capacity: 1MiB}]}
    transfers: {timeout_s: 2}
    storage:
        {tiers: [{backend: {kind: memory}}], prefix: p, timeout_s: 3, batch_bytes: 1MiB,
         write_queue_bytes: 2MiB, write_attempts: 4}
    prefetch: {threshold_pages: 5, base_s: 6, per_1k_tokens_s: 7, max_s: 8, host_share: 0.9}
    events: {keep_pages: 9}
    """
    changed, default = parse(text).controller_settings(), ControllerSettings()
    for name in ControllerSettings.__dataclass_fields__:
        assert getattr(changed, name) != getattr(default, name), name


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(tmp_path / "none.yaml")


def tier_complaint(backend: str, name: str = "l3") -> str:
    with pytest.raises(ConfigError) as caught:
        parse_tier(name, backend, read=True, write=True, required=True)
    return str(caught.value)


@pytest.mark.parametrize(
    ("backend", "complaint"),
    [
        ("{kind: file, pth: /x}", "backend.pth: unknown key; did you mean `path`"),
        ("{kind: file, path: x}", "backend.path: 'x' is not an absolute path"),
        ("{kind: flie}", "backend.kind: "),
        ("{path: /x}", "backend.kind: missing"),
        ("{kind: memory, capacity_bytes: much}", "backend.capacity_bytes: 'much' is not a size"),
        ("{kind: redis}", "backend: give `addresses`"),
        ("file", "backend: Expected `object`"),
        ("{", "backend: not YAML"),
    ],
)
def test_a_tier_given_at_run_time_is_checked_like_the_file(backend: str, complaint: str) -> None:
    """ATTACH-01's attach, CONFIG-01: one schema; a wrong key is named with its path."""
    assert tier_complaint(backend).startswith(complaint)


def test_a_tiers_name_is_checked_too() -> None:
    assert tier_complaint("{kind: memory}", name="a b").startswith("name: ")


def test_a_backends_text_is_filled_in_from_each_nodes_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATTACH-02: one request for all nodes, per-node values resolved where they are used."""
    backend = '{"kind": "file", "path": "/disk/${HC_NODE}/objects", "capacity_bytes": "${HC_ROOM}"}'
    monkeypatch.setenv("HC_ROOM", "2MiB")
    for node in ("one", "two"):
        monkeypatch.setenv("HC_NODE", node)
        entry = parse_tier("l3", backend, read=True, write=False, required=False)
        assert entry.backend == FileSpec(path=f"/disk/{node}/objects", capacity_bytes=2 << 20)
        text = f"storage: {{tiers: [{{backend: {backend}}}]}}"
        found = parse(text).storage
        assert found is not None
        assert found.tiers[0].backend == entry.backend
    monkeypatch.delenv("HC_NODE")
    assert tier_complaint(backend).startswith(
        "backend.path: the daemon's environment has no variable 'HC_NODE'"
    )
    monkeypatch.setenv("HC_NODE", "three")
    assert (
        parse("storage: {prefix: hicache, tiers: [{name: l3, backend: {kind: memory}}]}").storage is not None
    )
    assert parse("host: {lease_s: 1}\nserver: {socket: '/run/${HC_NODE}'}").server.socket == "/run/${HC_NODE}"
