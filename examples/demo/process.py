"""The engine's process, and the harness's end of it.

Owns the pipe between them, the process's life and every deadline on it. Decides nothing about requests.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import torch

from examples.demo.arithmetic import Shape
from examples.demo.engine import Ask, Engine, R, Served
from examples.demo.memory import PagedMemory, Slots, layout_of
from examples.demo.model import HybridModel
from examples.demo.nocache import NoCache
from hicache.client import Client, PrefetchPolicy, SharedRegion
from hicache.core.layout import Layout, component_slots

MODEL_NAME = "hicache-demo"
_ATTACH_TIMEOUT_S = 20.0
_CLOSE_TIMEOUT_S = 20.0
_PATIENCE_S = 10.0
"""Longest wait for the daemon. A server would rather compute anew; the demo compares boundaries exactly,
also on a machine that is busy with other things."""
_IDLE_S = 0.005
"""How often an engine without requests looks after its transfers."""


class DemoError(RuntimeError):
    """The demo cannot go on; the message says which part failed and how."""


@dataclass(frozen=True)
class EngineSettings:
    """What an engine process is made of."""

    name: str
    shape: Shape
    slots: Slots
    seed: int
    cached: bool
    """Whether there is a cache at all; without one every prompt is computed from its first token."""
    socket: Path | None = None
    """The daemon's socket, for L2 and L3."""


@dataclass(frozen=True)
class AwaitDaemon:
    """Wait until the engine is attached to a daemon that is not the one with this epoch."""

    epoch: int
    timeout_s: float = _ATTACH_TIMEOUT_S


@dataclass(frozen=True)
class Attached:
    """How the engine's connection stands."""

    epoch: int
    problem: str


@dataclass(frozen=True)
class Close:
    """Serve nothing more; audit and end."""


@dataclass(frozen=True)
class Closed:
    """The cache's audit after the last request, and what it counted."""

    violations: tuple[str, ...]
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """The engine died of this."""

    report: str


class EngineProcess:
    """A running engine, seen from the harness. Use it as a context; it is ended with it, whatever happens."""

    def __init__(self, settings: EngineSettings) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._name = settings.name
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_main, args=(theirs, settings), name=settings.name, daemon=True)
        self._process.start()
        theirs.close()
        self.epoch = 0

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(timeout=_CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def ask(self, ask: Ask) -> None:
        """Queue a request; `served` gives the answers in the same order."""
        self._pipe.send(ask)

    def served(self, timeout_s: float = 120.0) -> Served:
        """The next answer. Raises DemoError when the engine fails or takes too long."""
        answer = self._receive(timeout_s)
        if not isinstance(answer, Served):
            raise DemoError(f"engine {self._name!r}: expected an answer, got {answer!r}")
        return answer

    def await_daemon(self) -> None:
        """Wait until the engine is attached to another daemon than before; DemoError when it is not."""
        message = AwaitDaemon(self.epoch)
        self._pipe.send(message)
        answer = self._receive(message.timeout_s + 30.0)
        if not isinstance(answer, Attached) or answer.epoch == self.epoch:
            raise DemoError(f"engine {self._name!r} did not attach to the daemon: {answer!r}")
        self.epoch = answer.epoch

    def kill(self) -> None:
        """End it at once, as a crash would. For tests."""
        self._process.kill()

    def close(self) -> Closed:
        """Audit the cache and end the engine."""
        self._pipe.send(Close())
        answer = self._receive(_CLOSE_TIMEOUT_S)
        if not isinstance(answer, Closed):
            raise DemoError(f"engine {self._name!r}: expected its audit, got {answer!r}")
        return answer

    def _receive(self, timeout_s: float) -> object:
        try:
            if not self._pipe.poll(timeout_s):
                raise DemoError(f"engine {self._name!r}: no answer within {timeout_s} s")
            answer: object = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(timeout=1.0)
            raise DemoError(f"engine {self._name!r} ended, exit code {self._process.exitcode}") from error
        if isinstance(answer, Failed):
            raise DemoError(f"engine {self._name!r} failed:\n{answer.report}")
        return answer


# ---- inside the process -------------------------------------------------------------------------------


def _main(pipe: Connection, settings: EngineSettings) -> None:
    torch.set_num_threads(1)
    logging.getLogger("hicache").setLevel(logging.ERROR)  # that the daemon goes away is in the script
    try:
        _run(pipe, settings)
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return  # the harness is gone, or told everybody to stop
    except Exception:  # noqa: BLE001 - the process's last line of defence: the harness shows it
        pipe.send(Failed(traceback.format_exc()))


def _run(pipe: Connection, settings: EngineSettings) -> None:
    layout, nbytes = layout_of(settings.shape, settings.slots)
    with SharedRegion(nbytes) as region:
        memory = PagedMemory(settings.shape, layout, region.buffer)
        model = HybridModel(settings.shape, memory, settings.seed)
        if not settings.cached:
            without = NoCache(component_slots(layout))
            _loop(pipe, Engine(model, memory, without), None)
            pipe.send(Closed(tuple(without.audit())))
            return
        from hicache.cache import UnifiedRadixCache

        client = _client(settings, layout, region)
        cache = UnifiedRadixCache(
            layout,
            model=MODEL_NAME,
            revision=str(settings.seed),
            client=client,
            copy_slot=memory.copy_slot,
            lookup_timeout_s=_PATIENCE_S,
            load_timeout_s=_PATIENCE_S,
            prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
            prefetch_wait_s=_PATIENCE_S,
        )
        _loop(pipe, Engine(model, memory, cache), client)
        pipe.send(Closed(tuple(cache.audit()), vars(cache.counters)))
        cache.close()


def _client(settings: EngineSettings, layout: Layout, region: SharedRegion) -> Client | None:
    if settings.socket is None:
        return None
    return Client(
        f"unix:{settings.socket}",
        engine_id=settings.name,
        model=MODEL_NAME,
        revision=str(settings.seed),
        layout=layout,
        regions=[region],
    )


def _loop(pipe: Connection, engine: Engine[R], client: Client | None) -> None:
    """Serve until told to close: requests in the order of their arrival, each announced to the cache when
    it arrives."""
    waiting: deque[Ask] = deque()
    while True:
        while pipe.poll(0 if waiting else _IDLE_S):
            message = pipe.recv()
            if isinstance(message, Ask):
                engine.queue(message)
                waiting.append(message)
            elif isinstance(message, AwaitDaemon):
                pipe.send(_await_daemon(client, message))
            else:
                return
        if waiting:
            pipe.send(engine.serve(waiting.popleft()))
        else:
            engine.idle()


def _await_daemon(client: Client | None, message: AwaitDaemon) -> Attached:
    if client is None:
        return Attached(message.epoch, "this engine uses no daemon")
    deadline = time.monotonic() + message.timeout_s
    while (client.epoch == message.epoch or not client.ready) and time.monotonic() < deadline:
        time.sleep(0.01)
    return Attached(client.epoch if client.ready else message.epoch, client.problem)
