"""The harness: `python -m examples.demo` plays all configurations, shows what came of them, and checks.

Exits with 1 and the list of failed checks when anything is not as it must be. Whatever it starts ends
with it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo import checks, report
from examples.demo.engine import Served
from examples.demo.oracle import Ceiling
from examples.demo.plan import full_plan, quick_plan
from examples.demo.plot import write_plot
from examples.demo.process import DemoError
from examples.demo.runs import Configuration, Plan, Run, play
from examples.demo.servers import Storage
from examples.demo.workload import Script

_STAGES = (
    (Configuration.NO_CACHE, Configuration.L1),  # side by side: each keeps one core busy
    (Configuration.L1_L2,),
    (Configuration.L1_L2_L3,),
)


class _Watch:
    """The progress bar of one configuration."""

    def __init__(self, progress: Progress, configuration: Configuration, plan: Plan) -> None:
        total = plan.rounds(configuration) * plan.sizes.clients
        self._progress, self._page_size = progress, plan.shape.page_size
        self._bar = progress.add_task(configuration.value, total=total, shown="")
        self._name, self._per_round, self._n_served = configuration.value, plan.sizes.clients, 0
        self._prompts = self._hits = 0

    def served(self, served: Served) -> None:
        self._prompts += served.prompt_tokens
        self._hits += served.boundary * self._page_size
        shown = (
            f"{self._hits / self._prompts:6.1%} hit, first token after {1000 * served.first_token_s:.0f} ms"
        )
        self._progress.update(self._bar, advance=1, shown=shown)
        self._n_served += 1
        if not self._progress.console.is_terminal and self._n_served % self._per_round == 0:
            round_number = self._n_served // self._per_round
            self._progress.console.print(f"{self._name}: round {round_number}: {shown}", highlight=False)


def play_all(plan: Plan, script: Script, directory: Path, console: Console) -> list[Run]:
    """All configurations, each in processes of its own. Raises DemoError when one cannot be played."""
    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn())
    runs: list[Run] = []
    with Progress(
        *columns, TimeElapsedColumn(), TextColumn("{task.fields[shown]}"), console=console
    ) as progress:
        for stage in _STAGES:
            watches = [_Watch(progress, configuration, plan) for configuration in stage]
            with ThreadPoolExecutor(len(stage)) as pool:
                playing = [
                    pool.submit(
                        play, configuration, plan, script, directory / configuration.name, watch.served
                    )
                    for configuration, watch in zip(stage, watches, strict=True)
                ]
            runs += [future.result() for future in playing]
    return runs


def lost_before_stored(run: Run) -> int:
    """Frames that host memory had to give up before storage, on a busy machine, had taken them: then no
    cache of this size can reach the ceiling."""
    return sum(counts.get("storage_write_skipped_pages", 0) for counts in run.daemons)


def failed_checks(runs: Sequence[Run], plan: Plan, expected: dict[str, Ceiling]) -> list[str]:
    """Everything that is not as it must be."""
    without, *cached = runs
    size, problems = plan.shape.page_size, [problem for run in runs for problem in run.problems]
    for run in runs:
        problems += checks.computed_what_was_left(run.name, run.rounds, size)
    for run in cached:
        problems += checks.same_answers(run.name, run.rounds, without.rounds)
    largest = cached[-1]
    if not lost_before_stored(largest):
        problems += checks.reached_the_ceiling(largest.name, largest.rounds, expected)
    problems += checks.each_tier_helps([(run.name, run.rounds) for run in runs], plan.sizes.rounds)
    problems += checks.came_from_storage(largest.name, largest.rounds[plan.sizes.rounds :])
    return problems


def demonstrate(plan: Plan, out: Path, console: Console) -> int:
    """Play, show, check. The exit code."""
    started = time.perf_counter()
    script = Script(plan.sizes, plan.shape.vocabulary, plan.seed)
    with tempfile.TemporaryDirectory(prefix="hicache-demo-") as directory:
        try:
            runs = play_all(plan, script, Path(directory), console)
        except DemoError as error:
            console.print(f"[bold red]The demo could not be played:[/] {error}", highlight=False)
            return 1
    expected = checks.ceilings(runs[0].rounds, plan.shape.page_size)
    for run in runs:
        console.print(report.rounds_table(run, plan, expected))
    console.print(report.summary_table(runs, plan))
    problems = failed_checks(runs, plan, expected)
    out.mkdir(parents=True, exist_ok=True)
    write_plot(out / "demo.png", runs, plan, expected)
    report.write_figures(out / "demo.json", runs, plan, expected, problems)
    console.print(f"Plot: {out / 'demo.png'}  figures: {out / 'demo.json'}", highlight=False)
    if problems:
        console.print(f"[bold red]{len(problems)} checks failed:[/]", highlight=False)
        for problem in problems[:20]:
            console.print(f"  {problem}", highlight=False, markup=False)
        return 1
    if lost := lost_before_stored(runs[-1]):
        console.print(
            f"[bold yellow]This machine was too busy for one check:[/] {lost} frames left L2 before L3 had "
            "taken them, so boundaries were not compared with a cache that never forgets.",
            highlight=False,
        )
    ceiling = "" if lost else "with L3 every boundary is that of a cache that never forgets, "
    n_requests, wall_s = len(checks.records_of(runs[-1].rounds)), time.perf_counter() - started
    console.print(
        f"[bold green]All checks passed[/] in {wall_s:.0f} s: answers and logits of all {n_requests} "
        "requests are those of the run without a cache, each prefill computed exactly what the "
        f"joint boundary left, {ceiling}nothing leaked. "
        "Runs without a cache and with L1 alone were played side by side, one core each; the others alone.",
        highlight=False,
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--clients", type=int, help="agents that take turns (default 10)")
    parser.add_argument("--rounds", type=int, help="turns before the restart (default 10)")
    parser.add_argument("--quick", action="store_true", help="a small run, some 15 seconds")
    parser.add_argument(
        "--storage",
        choices=[each.value for each in Storage],
        default=Storage.FILE.value,
        help="what serves as L3 (default file); redis and mooncake run beside the daemon",
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the plot and the JSON")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and of the order of clients")
    options = parser.parse_args(arguments)
    make = quick_plan if options.quick else full_plan
    storage = Storage(options.storage)
    try:
        plan = make(clients=options.clients, rounds=options.rounds, seed=options.seed, storage=storage)
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    return demonstrate(plan, options.out, console if console.is_terminal else Console(width=110))


if __name__ == "__main__":
    sys.exit(main())
