"""What the demo tells: tables for the terminal, figures as JSON. Computes nothing that it does not show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from examples.demo.checks import records_of
from examples.demo.oracle import Ceiling
from examples.demo.play import Round
from examples.demo.runs import Configuration, Plan, Run
from hicache.core.words import Tier


def ceiling_rate(played: Round, expected: Mapping[str, Ceiling], page_size: int) -> float:
    """The hit rate that a cache which never forgets would have had in a round."""
    pages = sum(expected[record.served.request_id].boundary for record in played.records)
    return pages * page_size / played.prompt_tokens


def rounds_table(run: Run, plan: Plan, expected: Mapping[str, Ceiling]) -> Table:
    """One line a round; hit rates in percent of the prompts' tokens."""
    headings = ("round", "prompt\ntokens", " L1\nhit %", " L2\nhit %", " L3\nhit %", " all\nhit %")
    table = _table(
        f"{run.name}: {plan.sizes.clients} clients, round by round",
        *headings,
        "   never\nforgets %",
        " prefilled\ntokens",
        "1st token\nmedian ms",
        "   input\ntokens/s",
    )
    size = plan.shape.page_size
    for played in run.rounds:
        if played.number == plan.sizes.rounds and run.configuration is Configuration.L1_L2_L3:
            table.add_section()
        table.add_row(
            str(played.number + 1),
            f"{played.prompt_tokens:,}",
            *(_percent(played.hit_rate(size, tier)) for tier in Tier),
            _percent(played.hit_rate(size, *Tier)),
            _percent(ceiling_rate(played, expected, size)),
            f"{played.prefilled_tokens:,}",
            f"{1000 * played.first_token_s:.0f}",
            f"{played.input_tokens_per_s:,.0f}",
        )
    if run.configuration is Configuration.L1_L2_L3:
        table.caption = (
            f"Before round {plan.sizes.rounds + 1} the daemon was restarted: its L2 was empty. "
            f"Its L3 is {plan.storage.title}."
        )
        table.caption_justify = "left"
    return table


def summary_table(runs: Sequence[Run], plan: Plan) -> Table:
    """All configurations over the rounds that all of them played."""
    table = _table(
        f"All together, rounds 1 to {plan.sizes.rounds}",
        "",
        "hit %",
        " prefilled\ntokens",
        "1st token\nmedian ms",
        "   input\ntokens/s",
        "   wall\nseconds",
        " faster than\nno cache",
    )
    slowest = _wall_s(runs[0].rounds[: plan.sizes.rounds])
    for run in runs:
        rounds = run.rounds[: plan.sizes.rounds]
        figures = figures_of(rounds, plan.shape.page_size)
        table.add_row(
            run.name,
            _percent(figures["hit_rate"]),
            f"{figures['prefilled_tokens']:,.0f}",
            f"{1000 * figures['first_token_s']:.0f}",
            f"{figures['input_tokens_per_s']:,.0f}",
            f"{_wall_s(rounds):.1f}",
            f"{slowest / _wall_s(rounds):.1f} x",
        )
    return table


def figures_of(rounds: Sequence[Round], page_size: int) -> dict[str, float]:
    """The figures of some rounds taken together."""
    served = [record.served for record in records_of(rounds)]
    prompt_tokens = sum(answer.prompt_tokens for answer in served)
    return {
        "prompt_tokens": prompt_tokens,
        "prefilled_tokens": sum(answer.prefilled_tokens for answer in served),
        "hit_rate": sum(answer.boundary for answer in served) * page_size / prompt_tokens,
        "first_token_s": float(np.median([answer.first_token_s for answer in served])),
        "input_tokens_per_s": prompt_tokens / _wall_s(rounds),
    }


def write_figures(
    path: Path, runs: Sequence[Run], plan: Plan, expected: Mapping[str, Ceiling], problems: Sequence[str]
) -> None:
    """Everything that the tables show, and the failed checks, as JSON."""
    size = plan.shape.page_size
    document = {
        "clients": plan.sizes.clients,
        "rounds": plan.sizes.rounds,
        "rounds_after_restart": plan.rounds_after_restart,
        "page_tokens": size,
        "seed": plan.seed,
        "storage": plan.storage.value,
        "passed": not problems,
        "failed_checks": list(problems),
        "configurations": {
            run.name: {
                "wall_s": run.wall_s,
                "engine_counters": run.counters,
                "daemons": run.daemons,
                "rounds": [
                    {
                        "round": played.number + 1,
                        "wall_s": played.wall_s,
                        **figures_of([played], size),
                        **{f"hit_rate_l{tier + 1}": played.hit_rate(size, tier) for tier in Tier},
                        "hit_rate_never_forgets": ceiling_rate(played, expected, size),
                    }
                    for played in run.rounds
                ],
            }
            for run in runs
        },
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _wall_s(rounds: Sequence[Round]) -> float:
    return sum(played.wall_s for played in rounds)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if share else "–"
