"""One batch, carried to the servers in rounds until each of its places has a reply or no hope of one.

Owns what is tried again: what went to the wrong server, or was lost with its connection, goes out again with
fresh knowledge of the servers; what was late does not. Never outlives the batch's deadline, and when it
returns no byte of the batch moves any more. Judges no reply.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from storage_backends.redis.deadline import Deadline
from storage_backends.redis.errors import ErrorReply, Late, Lost, RedisTrouble
from storage_backends.redis.exchanges import Exchange, Replies
from storage_backends.redis.pool import Node
from storage_backends.redis.routes import Routes, moved_to

NOT_TRIED = ValueError("nothing that a server could be asked for")
"""Stands at the places that were never to be asked."""
_UNASKED = Late("there was no time left to ask, or no server to ask")
_MOST_ROUNDS, _ROUNDS_TOGETHER = 4, 2
_ELSEWHERE = frozenset({"MOVED", "ASK", "READONLY", "TRYAGAIN", "MASTERDOWN"})
"""Errors that another round may cure."""
_TROUBLE = (ErrorReply, Exception)


@dataclass(frozen=True)
class Batch:
    keys: Sequence[str]
    exchange: Exchange
    deadline: Deadline
    bulk: bool
    """Whether values are moved."""

    def carry_out(self, places: Sequence[int], routes: Routes, servers: Executor) -> Replies:
        """By place, a reply, or why there is none. `servers` runs a task for each of several servers."""
        replies: Replies = [NOT_TRIED] * len(self.keys)
        left = list(places)
        for number in range(_MOST_ROUNDS):
            if not left:
                break
            for place in left:
                replies[place] = _UNASKED
            try:
                groups = routes.group(self.keys, left, self.deadline)
            except RedisTrouble as trouble:
                for place in left:
                    replies[place] = trouble
                break
            ask = self._ask_singly if self.bulk and number >= _ROUNDS_TOGETHER else self._ask
            if len(groups) == 1:
                for node, group in groups.items():
                    ask(node, group, replies)
            else:
                tasks = [servers.submit(ask, node, group, replies) for node, group in groups.items()]
                for task in tasks:
                    task.result()
            left = self._left(left, replies, routes)
        return replies

    def _ask(self, node: Node, places: Sequence[int], replies: Replies) -> None:
        try:
            with (node.bulk if self.bulk else node.small).lend(self.deadline) as connection:
                self.exchange(connection, places, replies, self.deadline)
        except RedisTrouble as trouble:
            for place in places:
                if replies[place] is _UNASKED:
                    replies[place] = trouble

    def _ask_singly(self, node: Node, places: Sequence[int], replies: Replies) -> None:
        """A value on which the server hangs up must not take its neighbours with it."""
        for place in places:
            self._ask(node, [place], replies)

    def _left(self, asked: Sequence[int], replies: Replies, routes: Routes) -> list[int]:
        """The places for the next round."""
        left: list[int] = []
        for place in [place for place in asked if isinstance(replies[place], _TROUBLE)]:
            reply = replies[place]
            if isinstance(reply, ErrorReply):
                if reply.code == "ASK":
                    self._ask_importer(reply, place, replies, routes)
                    reply = replies[place]
                if isinstance(reply, ErrorReply) and reply.code in _ELSEWHERE:
                    left.append(place)
            elif isinstance(reply, Lost):
                left.append(place)
            elif isinstance(reply, Late):
                routes.mark_stale()
        if left:
            routes.mark_stale()
        return left

    def _ask_importer(self, redirection: ErrorReply, place: int, replies: Replies, routes: Routes) -> None:
        """A key of a slot that is on the move may be at its next owner already."""
        address = moved_to(redirection)
        if address is None:
            return
        importer = routes.node(address)
        # where this fails, ASK stands as the reply, for another round
        with contextlib.suppress(RedisTrouble), importer.bulk.lend(self.deadline) as connection:
            connection.ask(self.deadline, "ASKING")
            self.exchange(connection, [place], replies, self.deadline)
