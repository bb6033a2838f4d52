"""Which server a key lives on: the one named, the primary that Sentinels name, or the owner of its slot.

Owns the knowledge of the servers and the connections to them. Decides; sends no key anywhere. What it knows
may be out of date: whoever learns so from a server says `mark_stale`, and the next look is a fresh one.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from binascii import crc_hqx
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage_backends.redis.address import Address
from storage_backends.redis.connection import Reply, key_bytes
from storage_backends.redis.connector import Connector
from storage_backends.redis.deadline import Deadline
from storage_backends.redis.errors import ErrorReply, Garbled, Late, Lost, RedisTrouble
from storage_backends.redis.pool import Node

Groups: TypeAlias = dict[Node, list[int]]
"""Places in a batch by the server that they go to."""

N_SLOTS = 16384
_ASK_SHARE = 3
"""Of several sources of knowledge, a silent one costs at most this part of the time that is left."""


class Routes(ABC):
    """All calls may come from several threads at once."""

    def __init__(self, connector: Connector, n_connections: int) -> None:
        self._connector = connector
        self._n_connections = n_connections
        self._known: dict[Address, Node] = {}
        self._mutex = threading.Lock()

    @abstractmethod
    def group(self, keys: Sequence[str], places: Sequence[int], deadline: Deadline) -> Groups:
        """The places of the batch `keys` by server. Raises Lost or Late when no server is known."""

    @abstractmethod
    def primaries(self, deadline: Deadline) -> list[Node]:
        """Every server that holds keys. Raises Lost or Late when none is known."""

    @abstractmethod
    def mark_stale(self) -> None:
        """What is known of the servers may be wrong."""

    def node(self, address: Address) -> Node:
        with self._mutex:
            if address not in self._known:
                self._known[address] = Node(address, self._connector.open, self._n_connections)
            return self._known[address]

    def close(self) -> None:
        self._keep_only([])

    def _keep_only(self, addresses: Sequence[Address]) -> None:
        """Forget the servers that are none any more."""
        with self._mutex:
            gone = [node for address, node in self._known.items() if address not in addresses]
            self._known = {address: node for address, node in self._known.items() if address in addresses}
        for node in gone:
            node.close()


class OneServer(Routes):
    """Always the same address."""

    def __init__(self, connector: Connector, n_connections: int, address: Address) -> None:
        super().__init__(connector, n_connections)
        self._address = address

    def group(self, keys: Sequence[str], places: Sequence[int], deadline: Deadline) -> Groups:
        return {self.node(self._address): list(places)}

    def primaries(self, deadline: Deadline) -> list[Node]:
        return [self.node(self._address)]

    def mark_stale(self) -> None:
        """There is nothing else to know."""


class SentinelPrimary(Routes):
    """The primary of a service that Sentinels watch."""

    def __init__(
        self, connector: Connector, n_connections: int, sentinels: Sequence[Address], service: str
    ) -> None:
        super().__init__(connector, n_connections)
        self._sentinels = list(sentinels)
        self._service = service
        self._primary: Address | None = None

    def group(self, keys: Sequence[str], places: Sequence[int], deadline: Deadline) -> Groups:
        return {self._current(deadline): list(places)}

    def primaries(self, deadline: Deadline) -> list[Node]:
        """Asks anew: an old primary takes writes for seconds after another was chosen, and says nothing."""
        known = self._primary
        try:
            return [self._asked_node(deadline)]
        except RedisTrouble:
            if known is None:
                raise
            return [self.node(known)]  # Sentinels that are down do no harm while the primary serves

    def mark_stale(self) -> None:
        self._primary = None

    def _current(self, deadline: Deadline) -> Node:
        known = self._primary
        return self._asked_node(deadline) if known is None else self.node(known)

    def _asked_node(self, deadline: Deadline) -> Node:
        address = self._primary = self._asked(deadline)
        self._keep_only([address])
        return self.node(address)

    def _asked(self, deadline: Deadline) -> Address:
        """What the first Sentinel that answers says; that one is asked first the next time."""
        troubles: list[str] = []
        for sentinel in list(self._sentinels):
            try:
                address = self._ask(sentinel, _part_of(deadline, len(self._sentinels)))
            except RedisTrouble as trouble:
                troubles.append(str(trouble))
                continue
            self._sentinels = [sentinel, *(other for other in self._sentinels if other != sentinel)]
            return address
        raise Lost(f"no Sentinel names a primary of {self._service!r}: {'; '.join(troubles)}")

    def _ask(self, sentinel: Address, deadline: Deadline) -> Address:
        connection = self._connector.open_sentinel(sentinel, deadline)
        try:
            reply = connection.ask(deadline, "SENTINEL", "get-master-addr-by-name", self._service)
        finally:
            connection.close()
        match reply:
            case [bytes(host), bytes(port)]:
                return Address(host.decode(), int(port))
            case None:
                raise Lost(f"{sentinel} knows no service {self._service!r}: correct `sentinel_service`")
            case ErrorReply():
                raise Lost(f"{sentinel}: {reply.explained()}")
            case _:
                raise Garbled(f"{sentinel} names the primary in words we do not know")


class ClusterSlots(Routes):
    """The owner of each key's slot."""

    def __init__(self, connector: Connector, n_connections: int, seeds: Sequence[Address]) -> None:
        super().__init__(connector, n_connections)
        self._seeds = list(seeds)
        self._owners: tuple[list[Address], NDArray[np.int16]] | None = None
        """Primaries, and for each slot which of them owns it, -1 where none does."""
        self._answered: list[Address] = []
        """Who told the slots last: most likely neither frozen nor dead."""
        self._stale = True
        self._asking = threading.Lock()

    def group(self, keys: Sequence[str], places: Sequence[int], deadline: Deadline) -> Groups:
        addresses, owner_of = self._current(deadline)
        groups: Groups = {}
        unowned: list[int] = []
        for place in places:
            owner = int(owner_of[slot_of(keys[place])])
            if owner < 0:
                unowned.append(place)
            else:
                groups.setdefault(self.node(addresses[owner]), []).append(place)
        if unowned and not groups:
            raise Lost(
                "no node of the cluster owns these keys' slots: see `CLUSTER INFO` for what has failed"
            )
        return groups

    def primaries(self, deadline: Deadline) -> list[Node]:
        addresses, owner_of = self._current(deadline)
        if (owner_of < 0).any():
            raise Lost(
                "some slots of the cluster are owned by no node: see `CLUSTER INFO` for what has failed"
            )
        return [self.node(address) for address in addresses]

    def mark_stale(self) -> None:
        self._stale = True

    def _current(self, deadline: Deadline) -> tuple[list[Address], NDArray[np.int16]]:
        if self._stale and self._asking.acquire(timeout=deadline.remaining_s("the cluster")):
            try:
                if self._stale:  # else another thread has asked meanwhile
                    self._owners = self._asked(deadline)
                    self._stale = False
                    self._keep_only(self._owners[0])
            except RedisTrouble:
                if self._owners is None:
                    raise  # else the old knowledge is better than none
            finally:
                self._asking.release()
        if self._owners is None:
            raise Late("the nodes of the cluster are not known yet")
        return self._owners

    def _asked(self, deadline: Deadline) -> tuple[list[Address], NDArray[np.int16]]:
        """What the first node that answers says: who told last, else those known to serve, else the seeds."""
        known = self._owners[0] if self._owners else []
        sources = list(dict.fromkeys([*self._answered, *known, *self._seeds]))
        troubles: list[str] = []
        for source in sources:
            try:
                found = self._ask(source, _part_of(deadline, len(sources)))
            except RedisTrouble as trouble:
                troubles.append(str(trouble))
                continue
            self._answered = [source]
            return found
        raise Lost(f"no node of the cluster tells its slots: {'; '.join(troubles)}")

    def _ask(self, source: Address, deadline: Deadline) -> tuple[list[Address], NDArray[np.int16]]:
        connection = self._connector.open(source, deadline)
        try:
            reply = connection.ask(deadline, "CLUSTER", "SLOTS")
        finally:
            connection.close()
        if isinstance(reply, ErrorReply):
            raise Lost(f"{source}: {reply.explained()}")
        return _parsed_slots(reply, source)


def _part_of(deadline: Deadline, n_sources: int) -> Deadline:
    """Time for one source, so that a silent one leaves time for the others."""
    share = min(n_sources, _ASK_SHARE)
    return deadline.sooner(deadline.remaining_s("whoever knows the servers") / share)


def _parsed_slots(reply: Reply, source: Address) -> tuple[list[Address], NDArray[np.int16]]:
    addresses: list[Address] = []
    owner_of = np.full(N_SLOTS, -1, dtype=np.int16)
    for entry in reply if isinstance(reply, list) else []:
        match entry:
            case [int(first), int(last), [bytes() | None as host, int(port), *_], *_]:
                address = Address(host.decode() if host else source.host, port)
            case _:
                raise Garbled(f"{source} tells its slots in words we do not know")
        if address not in addresses:
            addresses.append(address)
        owner_of[first : last + 1] = addresses.index(address)
    if not addresses:
        raise Lost(f"{source} knows of no slots: the cluster is not set up yet")
    return addresses, owner_of


def slot_of(key: str) -> int:
    """The cluster's rule: CRC16 of the key, or of what stands between its first braces if anything does."""
    raw = key_bytes(key)
    start = raw.find(b"{")
    if start >= 0:
        stop = raw.find(b"}", start + 1)
        if stop > start + 1:
            raw = raw[start + 1 : stop]
    return crc_hqx(raw, 0) % N_SLOTS


def moved_to(error: ErrorReply) -> Address | None:
    """Where ASK or MOVED sends us; None when it does not say."""
    words = error.text.split()
    try:
        return Address.parse(words[2])
    except (IndexError, ValueError):
        return None
