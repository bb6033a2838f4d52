"""HTTP: metrics, liveness, readiness, and a status page for people. Read-only; runs nothing for anybody.

Shows what a status snapshot says and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from controller.daemon.faults import Faults
from controller.daemon.wire import DaemonStatus

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
}


class HttpServer:
    """The daemon's HTTP port."""

    def __init__(
        self, snapshot: Callable[[], DaemonStatus], registry: CollectorRegistry, faults: Faults
    ) -> None:
        self._snapshot = snapshot
        self._faults = faults
        self._registry = registry
        self._page = resources.files("controller.daemon").joinpath("page.html").read_text(encoding="utf-8")
        self._runner: web.AppRunner | None = None

    async def start(self, address: str, port: int) -> int:
        """Listen; the port, which matters when 0 was asked for. Raises OSError when it is taken."""
        app = web.Application(middlewares=[self._guarded])
        app.add_routes(
            [
                web.get("/", self._show),
                web.get("/status.json", self._status),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthy),
                web.get("/readyz", self._ready),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, address, port, reuse_address=True).start()
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException:
            raise
        except Exception as error:  # noqa: BLE001 - last line of defence: counted, logged, in health
            self._faults.caught(f"http {request.path}", error)
            return web.Response(status=500, text="internal error; the daemon's log has the trace\n")

    async def _show(self, request: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html", headers=_HEADERS)

    async def _status(self, request: web.Request) -> web.Response:
        body = msgspec.json.encode(self._snapshot())
        return web.Response(body=body, content_type="application/json", headers=_HEADERS)

    async def _metrics(self, request: web.Request) -> web.Response:
        headers = {**_HEADERS, "Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=generate_latest(self._registry), headers=headers)

    async def _healthy(self, request: web.Request) -> web.Response:
        """200 as long as the process answers, also while it starts; problems are told, not hidden."""
        problems = self._snapshot().problems
        text = "\n".join(["degraded", *problems]) if problems else "ok"
        return web.Response(text=text + "\n", headers=_HEADERS)

    async def _ready(self, request: web.Request) -> web.Response:
        """200 when requests are served, else 503 with what the daemon is doing."""
        daemon = self._snapshot()
        text = "ready" if daemon.ready else daemon.progress
        return web.Response(status=200 if daemon.ready else 503, text=text + "\n", headers=_HEADERS)
