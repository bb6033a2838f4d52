"""Metrics, probes and the status page: what is exported, from when on, and that nothing runs for anybody."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from controller.counters import Counters
from controller.daemon.http import HttpServer
from controller.daemon.readiness import Phase
from tests.daemon.rig import Rig


class Page:
    """The HTTP port of a rig."""

    def __init__(self, rig: Rig, session: aiohttp.ClientSession, port: int) -> None:
        self.rig = rig
        self.session = session
        self.url = f"http://127.0.0.1:{port}"

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as reply:
            return reply.status, await reply.text()

    async def samples(self) -> dict[str, float]:
        """Every sample of /metrics without labels."""
        _, text = await self.get("/metrics")
        families = text_string_to_metric_families(text)
        return {s.name: s.value for family in families for s in family.samples if not s.labels}


@pytest.fixture
async def page(rig: Rig) -> AsyncIterator[Page]:
    server = HttpServer(rig.snapshot, rig.registry, rig.faults)
    port = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        yield Page(rig, session, port)
    await server.stop()


async def test_every_series_exists_from_the_start(page: Page) -> None:
    """OBS-03: a dead tier does not look like an idle one; then the right number."""
    samples = await page.samples()
    for name in Counters.__dataclass_fields__:
        assert samples[f"hicache_{name}_total"] == 0
    for name in ("ready", "problems", "engines", "host_used_bytes", "host_capacity_bytes"):
        assert f"hicache_{name}" in samples
    page.rig.controller.counters.loads += 1
    page.rig.controller.counters.load_bytes += 4096
    samples = await page.samples()
    assert (samples["hicache_loads_total"], samples["hicache_load_bytes_total"]) == (1, 4096)


async def test_hit_rates_follow_from_counters_that_only_grow(page: Page) -> None:
    """OBS-01, OBS-02: requested and hit pages are counters, which no batch and no probe can overwrite."""
    counters = page.rig.controller.counters
    counters.lookup_requested_pages, counters.lookup_hit_host_pages = 9000 + 1, 9000
    for _ in range(3):
        await page.get("/healthz")
        samples = await page.samples()
        assert samples["hicache_lookup_hit_host_pages_total"] == 9000
        assert samples["hicache_lookup_requested_pages_total"] == 9001
    _, text = await page.get("/metrics")
    assert not re.search(r"^hicache_\w*(rate|ratio)", text, re.M)
    kinds = dict(re.findall(r"^# TYPE (hicache_\w*(?:hit|requested)\w*) (\w+)$", text, re.M))
    assert kinds
    assert set(kinds.values()) == {"counter"}


async def test_pools_and_problems_are_shown(page: Page) -> None:
    page.rig.controller.problems.append("a copy thread died")
    _, text = await page.get("/metrics")
    assert 'hicache_pool_resident_pages{component="full",model="model"} 3.0' in text
    assert (await page.samples())["hicache_problems"] == 1


async def test_live_while_starting_ready_when_ready(page: Page) -> None:
    """MEMORY-07: liveness true, readiness false until requests are served, with the progress."""
    page.rig.readiness.phase = Phase.STARTING
    page.rig.readiness.starting("host memory: 3 of 9 MiB ready")
    assert await page.get("/healthz") == (200, "ok\n")
    assert await page.get("/readyz") == (503, "host memory: 3 of 9 MiB ready\n")
    assert (await page.samples())["hicache_ready"] == 0
    page.rig.readiness.serve()
    assert await page.get("/readyz") == (200, "ready\n")
    page.rig.readiness.stop()
    assert await page.get("/readyz") == (503, "stopping\n")


async def test_health_says_what_is_wrong(page: Page) -> None:
    page.rig.controller.problems.append("storage file: the worker was killed")
    assert await page.get("/healthz") == (200, "degraded\nstorage file: the worker was killed\n")


async def test_the_status_page_needs_nothing_from_outside(page: Page) -> None:
    status, text = await page.get("/")
    assert status == 200
    assert not re.search(r"(src|href)=\"(https?:)?//|url\(|@import|import\(", text)
    assert "status.json" in text
    assert "innerHTML" not in text  # names that engines choose are text, never markup


async def test_status_json_tells_the_same_as_grpc(page: Page) -> None:
    async with page.session.get(page.url + "/status.json") as reply:
        assert reply.headers["Content-Type"].startswith("application/json")
        found = await reply.json()
    assert found["boot_id"] == "boot-1"
    assert found["controller"]["pools"][0]["component"] == "full"
    assert found["counters"]["lookups"] == 0


@pytest.mark.parametrize("path", ["/run", "/debug", "/exec", "/../etc/passwd", "/page.html", "/flush"])
async def test_there_is_nothing_else(page: Page, path: str) -> None:
    """SECURITY-02: five read-only paths, and no way to make the daemon run or change something."""
    assert (await page.get(path))[0] == 404
    for method in ("POST", "PUT", "DELETE"):
        async with page.session.request(method, page.url + "/status.json") as reply:
            assert reply.status == 405


async def test_a_broken_status_is_an_internal_error_without_its_text(page: Page) -> None:
    def broken() -> object:
        raise ZeroDivisionError("tenant secret")

    page.rig.controller.status = broken
    status, text = await page.get("/status.json")
    assert status == 500
    assert "secret" not in text
    assert page.rig.faults.count == 1
    del page.rig.controller.status
    assert (await page.get("/status.json"))[0] == 200
