"""Laws of identity: namespaces, page hashes, storage keys (KEY scenarios, as far as names decide them)."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.core import structure
from hicache.core.coverage import WholePath
from hicache.core.identity import HASH_BYTES, Namespace, framed, media_tokens, page_hashes, storage_key
from hicache.core.layout import ComponentSpec, Kind, Layout, Plane, Pool
from hicache.core.words import HashArray, Tier, TokenArray

from .rig import Rig

BASE = Namespace("model", "rev", b"layout", 16, adapter="", salt="")


@given(one=st.lists(st.binary(max_size=12), max_size=5), other=st.lists(st.binary(max_size=12), max_size=5))
def test_framing_never_confuses_two_lists(one: list[bytes], other: list[bytes]) -> None:
    assert (framed(*one) == framed(*other)) == (one == other)


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, model="other"),
        replace(BASE, revision="rev2"),
        replace(BASE, layout=b"fp8"),
        replace(BASE, page_size=32),
        replace(BASE, adapter="lora"),
        replace(BASE, salt="tenant"),
        replace(BASE, model="modelr", revision="ev"),
        replace(BASE, adapter="x", salt="y"),
        replace(BASE, adapter="xy"),
    ],
)
def test_every_field_of_a_namespace_counts(other: Namespace) -> None:
    """KEY-03, KEY-04: number format, model, revision, page size, adapter and salt each change every key."""
    tokens = np.arange(64, dtype=np.int32)
    one = {bytes(row) for row in page_hashes(BASE.seed(), tokens, 16)}
    assert one.isdisjoint(bytes(row) for row in page_hashes(other.seed(), tokens, 16))


def test_keys_can_be_computed_from_the_description_alone() -> None:
    """The bytes are those that docs/identity.md prescribes, written out here by hand."""
    parts = [b"hicache namespace 1", b"model", b"rev", b"layout", struct.pack("<Q", 16), b"lora", b"tenant"]
    seed = hashlib.sha256(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()
    namespace = replace(BASE, adapter="lora", salt="tenant")
    assert namespace.seed() == seed
    tokens = np.arange(40, dtype=np.int32)
    first = hashlib.sha256(seed + struct.pack("<16i", *range(16))).digest()
    second = hashlib.sha256(first + struct.pack("<16i", *range(16, 32))).digest()
    assert [bytes(row) for row in page_hashes(seed, tokens, 16)] == [first, second]
    assert storage_key("p", "full", 1, 4, first) == "p/full/1-of-4/" + first.hex()


_KEYS = """
import random
import numpy as np
from hicache.core.identity import Namespace, page_hashes
rng = random.Random(5)
for n in range(1000):
    tokens = np.array([rng.randrange(2**31) for _ in range(8)], dtype=np.int32)
    name = Namespace("m", "r", b"l", 4, salt=str(n % 3) if n % 2 else "")
    print(page_hashes(name.seed(), tokens, 4).tobytes().hex())
"""


def test_keys_are_the_same_in_every_process() -> None:
    """KEY-05: fresh processes with different hash seeds."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _KEYS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1", "77", "random")
    ]
    printed = {process.communicate(timeout=60)[0] for process in running}
    assert len(printed) == 1
    assert len(set(printed.pop().split())) == 1000


def test_equal_pages_have_different_names_by_position_and_salt(rigs: list[Rig]) -> None:
    """KEY-05, KEY-08: six equal pages under two salts are twelve names, also after a division."""
    rig = Rig({"full": WholePath()}, page_size=4)
    rigs.append(rig)
    names = []
    for salt in ("one", "two"):
        cursor = rig.insert("aaaaaa", salt=salt).cursor
        names += [bytes(row) for row in rig.index.hashes(cursor, 0, 6)]
        rig.insert("aaab", salt=salt)
        again = rig.index.match(rig.namespace(salt), rig.tokens("aaaaaa")).cursor
        assert [bytes(row) for row in rig.index.hashes(again, 0, 6)] == names[-6:]
        assert [bytes(row) for row in rig.index.hashes(cursor, 2, 5)] == names[-4:-1]
    assert len(set(names)) == 12


@given(data=st.data())
def test_hashes_kept_in_the_tree_are_those_of_the_tokens(data: st.DataObject) -> None:
    """Whatever was asked for first, and however the nodes were divided and lengthened since."""
    rig = Rig({"full": WholePath()}, page_size=2)
    prompts = st.text(alphabet="ab", min_size=1, max_size=8)
    for prompt in data.draw(st.lists(prompts, min_size=1, max_size=6)):
        cursor = rig.insert(prompt).cursor
        start = data.draw(st.integers(0, len(prompt)))
        expected = page_hashes(rig.namespace().seed(), rig.tokens(prompt), 2)
        assert np.array_equal(rig.index.hashes(cursor, start, len(prompt)), expected[start:])


def layout_of(**changes: object) -> Layout:
    """A layout that differs from the plain one as told."""
    form = {"format": "bf16 k,v", "nbytes": 64, "layer": 0, "page_size": 16, "tokens": 32, "name": "full"}
    form |= changes
    return Layout(
        page_size=int(str(form["page_size"])),
        components=(
            ComponentSpec(str(form["name"]), Kind.FULL),
            ComponentSpec("swa", Kind.SWA, int(str(form["tokens"]))),
        ),
        pools=(
            Pool(
                "kv",
                str(form["name"]),
                8,
                (Plane(0, 0, 128, int(str(form["nbytes"])), int(str(form["layer"]))),),
                str(form["format"]),
            ),
            Pool("window", "swa", 8, (Plane(1, 0, 64, 64),), "bf16"),
        ),
    )


@pytest.mark.parametrize(
    "change",
    [{"format": "fp8 k,v"}, {"nbytes": 32}, {"layer": 1}, {"page_size": 32}, {"tokens": 64}, {"name": "f"}],
)
def test_whatever_changes_the_meaning_of_bytes_changes_the_fingerprint(change: dict[str, object]) -> None:
    """KEY-03, KEY-09, KEY-10."""
    assert layout_of(**change).fingerprint() != layout_of().fingerprint()
    assert layout_of().fingerprint() == layout_of().fingerprint()


def test_two_tenants_share_nothing_in_any_tier(rigs: list[Rig]) -> None:
    """KEY-01: neither in memory nor by storage key; the default namespace keeps its keys."""
    rig = Rig({"full": WholePath()}, tiers=(Tier.HOST, Tier.STORAGE))
    rigs.append(rig)
    cursor = rig.insert("abcd", salt="t1").cursor
    rig.index.mark_stored(cursor, "full", np.arange(4, dtype=np.int32))
    rig.free(rig.index.drop(Tier.HOST).freed, Tier.HOST)
    assert rig.boundary("abcd", salt="t1") == 4
    assert rig.boundary("abcd", salt="t2") == 0
    assert rig.boundary("abcd") == 0


def test_other_media_are_another_prompt_from_the_first_page_they_touch(rigs: list[Rig]) -> None:
    """KEY-06: the boundary stops before the first page that overlaps the picture; digests that agree in
    all but the first byte differ all the same; text before the picture is shared."""
    rig = Rig({"full": WholePath()}, page_size=4)
    rigs.append(rig)
    digests = [bytes([n]) + bytes(31) for n in range(200)]

    def prompt(digest: bytes) -> TokenArray:
        """Six tokens of text, a picture of nine, text again."""
        return np.concatenate(
            [np.arange(6, dtype=np.int32), media_tokens(digest, 9), np.arange(9, dtype=np.int32)]
        )

    for n, digest in enumerate(digests):
        slots = rig.pools["full", Tier.DEVICE].alloc(6)
        assert slots is not None
        assert rig.index.match(rig.namespace(), prompt(digest)).n_pages == (1 if n else 0)
        done = rig.index.insert(rig.namespace(), prompt(digest), {"full": slots}, tier=Tier.DEVICE)
        rig.free(done.redundant, Tier.DEVICE)
    assert all(rig.index.match(rig.namespace(), prompt(digest)).n_pages == 6 for digest in digests)
    assert (media_tokens(digests[0], 9) < 0).all()
    assert np.array_equal(media_tokens(digests[0], 20)[:9], media_tokens(digests[0], 9))
    assert len(media_tokens(b"", 0)) == 0


def test_a_match_compares_tokens_and_no_digest(rigs: list[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """KEY-07: with a hash under which all pages collide, a thousand prompts are told apart as before."""

    def colliding(previous: bytes, tokens: TokenArray, page_size: int) -> HashArray:
        return np.zeros((len(tokens) // page_size, HASH_BYTES), dtype=np.uint8)

    monkeypatch.setattr(structure, "page_hashes", colliding)
    rig = Rig({"full": WholePath()}, page_size=2, n_slots=8000)
    rigs.append(rig)
    rng = np.random.default_rng(7)
    prompts = rng.integers(0, 4, size=(1000, 12), dtype=np.int32)
    owner: dict[bytes, int] = {}
    for prompt in prompts:
        slots = rig.pools["full", Tier.DEVICE].alloc(6)
        assert slots is not None
        done = rig.index.insert(rig.namespace(), prompt, {"full": slots}, tier=Tier.DEVICE)
        rig.index.hashes(done.cursor, 0, 6)
        rig.free(done.redundant, Tier.DEVICE)
        for page, slot in enumerate(done.canonical["full"].tolist()):
            assert owner.setdefault(prompt[: 2 * page + 2].tobytes(), slot) == slot
    assert len(set(owner.values())) == len(owner)
    for prompt in prompts:
        cursor = rig.index.match(rig.namespace(), prompt).cursor
        found = rig.index.slots(cursor, "full", Tier.DEVICE, 0, 6).tolist()
        assert found == [owner[prompt[: 2 * page + 2].tobytes()] for page in range(6)]
