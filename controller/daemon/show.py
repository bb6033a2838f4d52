"""Status for the terminal: a reply in, rich tables out. Asks nobody and prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from controller.daemon.config import GIB, KIB, MIB, TIB
from proto.v1 import hicache_pb2 as pb

_REASONS = {
    "lookup_miss_no_tokens": "nothing of the prompt was ever backed up",
    "lookup_miss_coverage": "known tokens, but a component has no payload there",
    "backup_refused_host_full_pages": "backup refused: host memory full of pinned pages",
    "backup_refused_quota_pages": "backup refused: the tenant is at its quota",
    "backup_refused_staging_full_pages": "backup refused: the ring is full of unwritten pages",
    "backup_refused_no_storage_pages": "backup refused: direct mode, and no tier takes writes",
    "backup_refused_chain_broken_pages": "backup refused: the prefix before it is missing",
    "prefetch_absent_pages": "prefetch: not in storage",
    "prefetch_failed_pages": "prefetch: storage failed or was late",
    "prefetch_corrupt_pages": "prefetch: damaged in storage, deleted",
    "prefetch_cut_deadline": "prefetches cut by their deadline",
    "prefetch_cut_host_capacity": "prefetches cut by host memory",
    "storage_write_dropped_queue_full_pages": "storage writes dropped: queue full",
    "storage_write_dropped_failed_pages": "storage writes dropped: failed too often",
    "internal_errors": "internal errors: see the daemon's log",
}


def status_view(status: pb.StatusReply, before: pb.StatusReply | None = None) -> RenderableType:
    """Everything on one screen. With an earlier status, rates since then as well."""
    return Group(*_parts(status, before))


def _parts(status: pb.StatusReply, before: pb.StatusReply | None) -> Iterator[RenderableType]:
    yield _headline(status)
    for problem in status.problems:
        yield Text(f"  ! {problem}", style="yellow")
    yield _tiers(status)
    yield _hits(status)
    if before is not None:
        yield _rates(status, before)
    if status.pools:
        yield _pools(status)
    if status.engines:
        yield _engines(status)
    if status.retained:
        yield _retained(status)
    reasons = {text: status.counters[name] for name, text in _REASONS.items() if status.counters[name]}
    if reasons:
        yield _counts("Why not more", reasons)


def _headline(status: pb.StatusReply) -> Text:
    state, style = ("ready", "bold green") if status.ready else (status.progress or "starting", "bold yellow")
    if status.problems:
        state, style = f"{state}, degraded", "bold yellow"
    head = Text.assemble(("HiCache ", "bold"), (status.version, "dim"), "  ", (state, style))
    head.append(f"  up {duration_text(status.uptime_s)}  boot {status.boot_id[:8]}", style="dim")
    return head


def _tiers(status: pb.StatusReply) -> Table:
    table = _table("Tiers", "tier", ">used", ">capacity", "", "state")
    used, capacity = status.host_used_bytes, status.host_capacity_bytes
    table.add_row("host", size_text(used), size_text(capacity), bar_text(used, capacity), Text("ok", "green"))
    for one in status.backends:
        state = Text("ok", "green") if one.healthy else Text(one.problem or "unhealthy", "yellow")
        if one.breaker != "closed":
            state.append(f"  breaker {one.breaker}", style="yellow")
        if one.queued_writes:
            waiting = f"  {one.queued_writes} writes waiting, {size_text(one.queued_bytes)}"
            state.append(waiting, style="dim")
        for off in one.off:
            state.append(f"  {off.partition(';')[0]}", style="dim")
        table.add_row(
            f"storage ({one.name})",
            size_text(one.used_bytes),
            size_text(one.capacity_bytes) if one.capacity_bytes else "-",
            bar_text(one.used_bytes, one.capacity_bytes),
            state,
        )
    if not status.backends:
        table.add_row("storage", "-", "-", "", Text("none configured", "dim"))
    return table


def _hits(status: pb.StatusReply) -> Table:
    count = status.counters
    asked = count["lookup_requested_pages"]
    table = _table(
        "Lookups", ">lookups", ">pages asked", ">from device", ">from host", ">hit rate", ">prefetched"
    )
    hits = count["lookup_hit_device_pages"] + count["lookup_hit_host_pages"]
    table.add_row(
        f"{count['lookups']:,}",
        f"{asked:,}",
        f"{count['lookup_hit_device_pages']:,}",
        f"{count['lookup_hit_host_pages']:,}",
        f"{hits / asked:.1%}" if asked else "-",
        f"{count['prefetch_read_pages']:,}",
    )
    return table


def _rates(status: pb.StatusReply, before: pb.StatusReply) -> Table:
    took_s = max(1e-9, status.uptime_s - before.uptime_s)

    def rate(name: str) -> float:
        return max(0, status.counters[name] - before.counters[name]) / took_s

    table = _table("A second", ">lookups", ">loaded", ">backed up", ">stored", ">prefetched")
    table.add_row(
        f"{rate('lookups'):,.1f}",
        *(
            size_text(round(rate(name)))
            for name in ("load_bytes", "backup_bytes", "storage_written_bytes", "prefetch_read_bytes")
        ),
    )
    return table


def _pools(status: pb.StatusReply) -> Table:
    table = _table(
        "Host pools", "model", "component", ">frame", ">resident", ">inbound", ">pinned", ">stored pages"
    )
    for pool in status.pools:
        pages = (pool.resident_pages, pool.inbound_pages, pool.pinned_pages, pool.stored_pages)
        table.add_row(
            pool.model, pool.component, size_text(pool.frame_bytes), *(f"{count:,}" for count in pages)
        )
    return table


def _engines(status: pb.StatusReply) -> Table:
    table = _table("Engines", "engine", "model", ">attached", ">leases", ">jobs")
    for one in status.engines:
        table.add_row(one.engine_id, one.model, duration_text(one.attached_s), str(one.leases), str(one.jobs))
    return table


def _retained(status: pb.StatusReply) -> Table:
    table = _table("Pinned prefixes", "pin", "model", ">kept", ">asked pages", ">size", ">ends in")
    for one in status.retained:
        kept, asked = f"{one.kept_pages:,}", f"{one.asked_pages:,}"
        table.add_row(one.pin_id, one.model, kept, asked, size_text(one.nbytes), duration_text(one.left_s))
    return table


def _counts(title: str, counts: Mapping[str, int]) -> Table:
    table = _table(title, ">count", "reason")
    for text, count in counts.items():
        table.add_row(f"{count:,}", text)
    return table


def _table(title: str, *columns: str) -> Table:
    """A plain table; columns that begin with > are numbers."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2)
    )
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.lstrip(">"),
            justify="right" if right else "left",
            header_style="dim",
            no_wrap=column != "state",
        )
    return table


def size_text(nbytes: int) -> str:
    """A size for people: three digits and a unit."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes / size < 1000 else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes} B"


def duration_text(seconds: float) -> str:
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def bar_text(used: int, capacity: int, width: int = 20) -> Text:
    if not capacity:
        return Text("")
    share = min(1.0, used / capacity)
    full = round(share * width)
    return Text("█" * full + "░" * (width - full) + f" {share:4.0%}", "cyan")
