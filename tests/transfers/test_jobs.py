"""Jobs move along their table and nowhere else."""

from __future__ import annotations

from itertools import product

import pytest

from controller.transfers.jobs import IllegalMove, Job, JobKind, JobState, JobTable

Q, R, D, F, C = JobState.QUEUED, JobState.RUNNING, JobState.DONE, JobState.FAILED, JobState.CANCELLED
LEGAL = {(Q, R), (Q, C), (R, D), (R, F), (R, C)}
WAY_TO = {Q: [], R: [R], D: [R, D], F: [R, F], C: [C]}


def job_in(table: JobTable, state: JobState) -> Job:
    job = table.open(JobKind.LOAD, "engine")
    for step in WAY_TO[state]:
        job.move(step)
    return job


@pytest.mark.parametrize(("state", "to"), product(JobState, JobState))
def test_a_move_is_legal_or_raises_and_changes_nothing(state: JobState, to: JobState) -> None:
    table = JobTable()
    job = job_in(table, state)
    ended = {other: table.n_ended(JobKind.LOAD, other) for other in JobState}
    if (state, to) in LEGAL:
        job.move(to)
        assert job.state is to
    else:
        with pytest.raises(IllegalMove, match=f"{state.name} -> {to.name}"):
            job.move(to)
        assert job.state is state
        assert ended == {other: table.n_ended(JobKind.LOAD, other) for other in JobState}


@pytest.mark.parametrize(("state", "finished"), [(Q, False), (R, False), (D, True), (F, True), (C, True)])
def test_a_finished_job_leaves_the_table_and_is_counted(state: JobState, finished: bool) -> None:
    table = JobTable()
    job = job_in(table, state)
    assert job.finished == finished
    assert table.of("engine") == (() if finished else (job,))
    assert table.n_open() == (0 if finished else 1)
    assert sum(table.n_ended(kind, s) for kind in JobKind for s in JobState) == (1 if finished else 0)


def test_engines_do_not_see_each_others_jobs() -> None:
    table = JobTable()
    first, second = table.open(JobKind.BACKUP, "a"), table.open(JobKind.LOAD, "a")
    other = table.open(JobKind.PREFETCH, "b")
    assert table.of("a") == (first, second)
    assert table.of("b") == (other,)
    assert table.of("nobody") == ()
    assert len({job.job_id for job in (first, second, other)}) == 3
    first.move(R)
    first.move(F)
    assert (table.n_open("a"), table.n_open("b"), table.n_open()) == (1, 1, 2)
    assert table.n_ended(JobKind.BACKUP, F) == 1
    assert table.n_ended(JobKind.LOAD, F) == 0
