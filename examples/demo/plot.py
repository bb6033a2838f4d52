"""The picture of the demo's result: hit rates, time to first token and throughput over the rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files, needs no display

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from examples.demo.oracle import Ceiling
from examples.demo.play import Round
from examples.demo.report import ceiling_rate
from examples.demo.runs import Configuration, Plan, Run
from hicache.core.words import Tier

_COLOURS = {
    Configuration.NO_CACHE: "#8c8c8c",
    Configuration.L1: "#d1495b",
    Configuration.L1_L2: "#edae49",
    Configuration.L1_L2_L3: "#00798c",
}
_TIERS = {
    Tier.DEVICE: ("hit in L1", "#003d5b"),
    Tier.HOST: ("hit in L2", "#30638e"),
    Tier.STORAGE: ("hit in L3", "#7fb7be"),
}
_MARKERS = {
    Configuration.NO_CACHE: "x",
    Configuration.L1: "v",
    Configuration.L1_L2: "s",
    Configuration.L1_L2_L3: "o",
}


def write_plot(path: Path, runs: Sequence[Run], plan: Plan, expected: Mapping[str, Ceiling]) -> None:
    """Write the four panels as PNG."""
    size = plan.shape.page_size
    figure, panels = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    hits, tiers, waits, rates = panels.flat
    longest = next(run for run in runs if run.configuration is Configuration.L1_L2_L3)

    numbers = [played.number + 1 for played in longest.rounds]
    ceiling = [ceiling_rate(played, expected, size) for played in longest.rounds]
    _lines(hits, runs[1:], lambda played: played.hit_rate(size, *Tier))
    (ceiling_line,) = hits.plot(
        numbers,
        ceiling,
        color="black",
        ls=(0, (2, 3)),
        lw=1.4,
        label="ceiling: a cache that never forgets",
        zorder=3,
    )
    hits.set(ylabel="share of prompt tokens not computed", ylim=(0, 1))

    bottom, bars = [0.0] * len(numbers), []
    for tier, (label, colour) in _TIERS.items():
        shares = [played.hit_rate(size, tier) for played in longest.rounds]
        bars.append(tiers.bar(numbers, shares, bottom=bottom, color=colour, label=label, width=0.75))
        bottom = [under + share for under, share in zip(bottom, shares, strict=True)]
    tiers.set(ylabel="share of prompt tokens not computed", ylim=(0, 1))

    _lines(waits, runs, lambda played: 1000 * played.first_token_s)
    waits.set(ylabel="milliseconds", ylim=(0, None))
    _lines(rates, runs, lambda played: played.input_tokens_per_s / 1000)
    rates.set(ylabel="thousand tokens per second", ylim=(0, None))

    hits.set_title("Hit rate", loc="left")
    tiers.set_title("L1+L2+L3: where the hits came from", loc="left")
    waits.set_title("Time to first token (median)", loc="left")
    rates.set_title("Effective input (prompt tokens / wall time)", loc="left")
    for panel in (hits, tiers, waits, rates):
        _finish(panel, plan)
    for panel in (hits, tiers):
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    sizes = plan.sizes
    stored = longest.daemons[-1].get("storage_used_bytes", 0)
    figure.suptitle(
        f"HiCache demo: {sizes.clients} agents read source files through a hybrid model "
        f"(full attention, sliding window, recurrent), prompts up to {_longest_prompt(runs):,} tokens\n"
        f"L1 {_mib(plan.device_bytes)}, L2 {_mib(plan.host_bytes)}, L3 {_mib(stored)} used: "
        f"{plan.storage.title}",
        fontsize=11,
    )
    handles = [*waits.get_legend_handles_labels()[0], ceiling_line, *bars]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _lines(panel: Axes, runs: Sequence[Run], value: Callable[[Round], float]) -> None:
    for run in runs:
        panel.plot(
            [played.number + 1 for played in run.rounds],
            [value(played) for played in run.rounds],
            color=_COLOURS[run.configuration],
            marker=_MARKERS[run.configuration],
            ms=5,
            lw=1.8,
            label=run.name,
        )


def _finish(panel: Axes, plan: Plan) -> None:
    restart = plan.sizes.rounds + 0.5
    panel.axvline(restart, color="#555555", ls=":", lw=1.4)
    panel.text(
        restart,
        1.0,
        "daemon restarted,\nL2 empty",
        transform=panel.get_xaxis_transform(),
        ha="center",
        va="bottom",
        fontsize=8,
        color="#333333",
    )
    panel.set_xlabel("round (turn of every client)")
    panel.set_xlim(0.4, plan.sizes.rounds + plan.rounds_after_restart + 0.6)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(axis="y", alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_axisbelow(True)


def _longest_prompt(runs: Sequence[Run]) -> int:
    return max(
        record.served.prompt_tokens for run in runs for played in run.rounds for record in played.records
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
