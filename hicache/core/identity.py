"""Identity: what must be equal before two prompts may share state, and the names that follow from it.

Everything here is reproducible by a router from docs/identity.md alone. Owns no state.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np

from hicache.core.words import HashArray, TokenArray

HASH_BYTES = 32


def framed(*fields: bytes) -> bytes:
    """Concatenate fields, each preceded by its length as little-endian uint64: no two different
    lists of fields give the same bytes."""
    return b"".join(struct.pack("<Q", len(field)) + field for field in fields)


@dataclass(frozen=True)
class Namespace:
    """What must be equal before tokens are compared."""

    model: str
    revision: str
    layout: bytes
    """Layout fingerprint (see `hicache.core.layout`): number formats, shapes, page size, components."""
    page_size: int
    adapter: str = ""
    salt: str = ""

    def seed(self) -> bytes:
        """The 32 bytes that start the chain of page hashes."""
        return hashlib.sha256(
            framed(
                b"hicache namespace 1",
                self.model.encode(),
                self.revision.encode(),
                self.layout,
                struct.pack("<Q", self.page_size),
                self.adapter.encode(),
                self.salt.encode(),
            )
        ).digest()


def page_hashes(previous: bytes, tokens: TokenArray, page_size: int) -> HashArray:
    """Hashes of the whole pages of `tokens`, shape (pages, 32): each is SHA-256 over the hash before
    it (`previous` for the first: a page hash, or a namespace's seed) and the page's packed int32 bytes.
    A tail shorter than a page is left out."""
    n_pages = len(tokens) // page_size
    packed = np.ascontiguousarray(tokens, dtype="<i4").view(np.uint8).data
    width = 4 * page_size
    sha256, digest, out = hashlib.sha256, previous, bytearray()
    for start in range(0, n_pages * width, width):
        state = sha256(digest)
        state.update(packed[start : start + width])
        digest = state.digest()
        out += digest
    return np.frombuffer(bytes(out), dtype=np.uint8).reshape(n_pages, HASH_BYTES)


def media_tokens(digest: bytes, n_tokens: int) -> TokenArray:
    """Token ids to put in the place of an image's (or other medium's) placeholders, so that prompts with
    other media are other prompts. They follow from the whole digest (a collision-resistant one of what the
    model sees), are negative and so never meet a vocabulary's, and carry 31 bits each."""
    stream = b"".join(
        hashlib.sha256(framed(b"hicache media 1", digest, struct.pack("<Q", block))).digest()
        for block in range(-(-n_tokens // 8))
    )
    return np.frombuffer(stream, dtype="<i4")[:n_tokens] | np.int32(-(2**31))


def storage_key(prefix: str, component: str, rank: int, ranks: int, page_hash: bytes) -> str:
    """The storage key of one frame: `prefix/component/rank-of-n/hash`, the hash in lower-case hex."""
    return f"{prefix}/{component}/{rank}-of-{ranks}/{page_hash.hex()}"
