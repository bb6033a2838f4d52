"""The four configurations: which processes each needs, and how the script is played to them.

Starts and ends the processes of one run. Judges nothing (see `examples.demo.checks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from examples.demo.arithmetic import Shape
from examples.demo.daemon import Daemon, DaemonSettings, figures_of, problems_of
from examples.demo.engine import Served
from examples.demo.memory import Slots
from examples.demo.play import Round, Session
from examples.demo.process import EngineProcess, EngineSettings
from examples.demo.servers import Storage, serving
from examples.demo.workload import Script, Sizes
from proto.v1 import hicache_pb2 as pb


class Configuration(Enum):
    """What stands between the model and computing everything anew."""

    NO_CACHE = "no cache"
    L1 = "L1"
    L1_L2 = "L1+L2"
    L1_L2_L3 = "L1+L2+L3"


@dataclass(frozen=True)
class Plan:
    """How large everything is."""

    sizes: Sizes
    rounds_after_restart: int
    shape: Shape
    slots: Slots
    device_bytes: int
    host_bytes: int
    storage: Storage
    storage_bytes: int
    seed: int

    def rounds(self, configuration: Configuration) -> int:
        """Rounds that a configuration plays. Those after the restart are played to the tiers that
        survive it, and without a cache, to have something to compare with."""
        if configuration in (Configuration.NO_CACHE, Configuration.L1_L2_L3):
            return self.sizes.rounds + self.rounds_after_restart
        return self.sizes.rounds


@dataclass(frozen=True)
class Run:
    """What came of one configuration."""

    configuration: Configuration
    rounds: tuple[Round, ...]
    wall_s: float
    counters: Mapping[str, int]
    """What the engine's cache counted."""
    daemons: tuple[Mapping[str, int], ...]
    """What each daemon had counted and held at its end."""
    problems: tuple[str, ...]
    """What the cache's audit, or the daemon's, found at the end."""

    @property
    def name(self) -> str:
        return self.configuration.value


def play(
    configuration: Configuration,
    plan: Plan,
    script: Script,
    directory: Path,
    served: Callable[[Served], None],
) -> Run:
    """Play the script to one configuration in processes of its own; `directory` is for their files.

    Raises DemoError when a process fails or does not answer."""
    with ExitStack() as processes:
        daemon = None
        if configuration in (Configuration.L1_L2, Configuration.L1_L2_L3):
            spec = None
            if configuration is Configuration.L1_L2_L3:
                lent = serving(plan.storage, plan.storage_bytes, directory / "storage")
                spec = processes.enter_context(lent)
            settings = DaemonSettings(plan.host_bytes, spec)
            daemon = processes.enter_context(Daemon(settings, directory / "daemon"))
        engine = processes.enter_context(EngineProcess(_engine_settings(configuration, plan, daemon)))
        if daemon is not None:
            engine.await_daemon()
        pause = (lambda: None) if daemon is None else daemon.settled  # agents read before they ask again
        session = Session(script, engine, served, pause)
        rounds = session.play(range(plan.sizes.rounds))
        statuses: list[pb.StatusReply] = []
        if daemon is not None and configuration is Configuration.L1_L2_L3:
            statuses.append(daemon.settled())
            daemon.stop()
            daemon.start()
            engine.await_daemon()
        rounds += session.play(range(plan.sizes.rounds, plan.rounds(configuration)))
        closed = engine.close()
        problems = [f"engine: {found}" for found in closed.violations]
        if daemon is not None:
            statuses.append(daemon.settled())
        problems += [f"daemon: {found}" for status in statuses for found in problems_of(status)]
        wall_s = sum(played.wall_s for played in rounds)
        return Run(
            configuration,
            tuple(rounds),
            wall_s,
            closed.counters,
            tuple(figures_of(status) for status in statuses),
            tuple(f"{configuration.value}: {problem}" for problem in problems),
        )


def _engine_settings(configuration: Configuration, plan: Plan, daemon: Daemon | None) -> EngineSettings:
    return EngineSettings(
        name=configuration.value.replace(" ", "-"),
        shape=plan.shape,
        slots=plan.slots,
        seed=plan.seed,
        cached=configuration is not Configuration.NO_CACHE,
        socket=daemon.socket if daemon is not None else None,
    )
