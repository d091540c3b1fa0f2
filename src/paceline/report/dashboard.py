"""`paceline dashboard`: a live page over a folder of runs, protected by a token. Read-only."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import hmac
import json
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from paceline.config import UserError
from paceline.report import assets
from paceline.results.discovery import unreadable_folders
from paceline.results.live_runs import LiveRun, RunWatcher

POLL_SECONDS = 1.0
READ_SECONDS = 0.4
"""How long one poll may read before pages are sent what there is."""
MAX_SHOWN = 12
"""Most runs whose curves one page shows."""
KEEP_ALIVE_SECONDS = 15.0
SHUTDOWN_SECONDS = 2.0
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
DENIED = "Open the address that `paceline dashboard` printed: it holds the token.\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """The web application. While a page is open, one thread polls the runs once a second, and at once when a page asks
    for other runs."""

    def __init__(self, folder: Path) -> None:
        self.watcher = RunWatcher(folder)
        self.token = secrets.token_urlsafe(24)
        self._session = secrets.token_urlsafe(24)
        # Cookies are shared by all ports: two dashboards on one machine need different names.
        self._cookie = f"paceline-{secrets.token_hex(4)}"
        self._pages: list[PageState] = []
        self._polls = 0
        self._polled = asyncio.Condition()
        self._polling: asyncio.Task[None] | None = None
        self._poll_now, self._closing = asyncio.Event(), asyncio.Event()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/events", self._events),
                web.get("/log", self._log),
                web.get("/static/{name}", self._static),
            ]
        )
        app.on_shutdown.append(self._stop)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # Refuse names that were made to resolve to this address (DNS rebinding). Any port: it may be a tunnel's.
        name = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdigit() else request.host
        if name not in LOCAL_NAMES:
            return web.Response(status=403, text="This page is served on 127.0.0.1 only.\n", headers=HEADERS)
        given = request.query.get("token")
        if given is not None and same(given, self.token) and request.path == "/":
            # The redirect removes the token from the address bar and the history.
            redirect = web.Response(status=303, headers={**HEADERS, "Location": "/"})
            redirect.set_cookie(self._cookie, self._session, httponly=True, samesite="Lax", path="/")
            return redirect
        if not same(request.cookies.get(self._cookie, ""), self._session):
            return web.Response(status=403, text=DENIED, headers=HEADERS)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            return web.Response(status=error.status, text=f"{error.reason}\n", headers=HEADERS)
        if not response.prepared:
            response.headers.update({**HEADERS, **response.headers})
        return response

    async def _page(self, request: web.Request) -> web.StreamResponse:
        folder = self.watcher.folder
        text = assets.render("dashboard.html.j2", folder=folder.name, path=str(folder), version=assets.plotly_version())
        return web.Response(text=text, content_type="text/html")

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name == "plotly.min.js":
            # Several megabytes; the page requests them by version, so they may be cached.
            return web.FileResponse(assets.plotly_path(), headers={"Cache-Control": "private, max-age=86400"})
        if name not in assets.SERVED:
            raise web.HTTPNotFound
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return web.Response(text=assets.read(name), content_type=kind, charset="utf-8")

    async def _log(self, request: web.Request) -> web.StreamResponse:
        run = self.watcher.runs.get(request.query.get("run", ""))
        if run is None:
            raise web.HTTPNotFound
        start = request.query.get("from", "")
        found = await asyncio.to_thread(
            run.read_log, request.query.get("file", ""), int(start) if _digits(start) else None
        )
        if found is None:
            raise web.HTTPNotFound
        return web.json_response({"text": found[0], "next": found[1]})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: first everything, then the changes."""
        shown = request.query.getall("show", [])[:MAX_SHOWN]
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        page = PageState(shown, request.query.get("focus", ""))
        self._pages.append(page)
        self._poll_now.set()
        try:
            written = time.monotonic()
            while not self._closing.is_set():
                if not (page.is_new and self._polls):  # a new page gets what is already known at once
                    await self._next_poll()
                changes = page.changes(self.watcher.runs)
                if changes:
                    written = time.monotonic()
                    await response.write(f"data: {json.dumps(changes, allow_nan=False)}\n\n".encode())
                elif time.monotonic() - written >= KEEP_ALIVE_SECONDS:
                    written = time.monotonic()
                    await response.write(b": keep-alive\n\n")
        except ConnectionResetError:
            pass  # the page was closed
        finally:
            self._pages.remove(page)
        return response

    async def _next_poll(self) -> None:
        """Wait until the runs have been polled once more."""
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())
        before = self._polls
        with contextlib.suppress(TimeoutError):  # if the file system hangs, the page still gets its keep-alive
            async with asyncio.timeout(KEEP_ALIVE_SECONDS), self._polled:
                await self._polled.wait_for(lambda: self._polls > before or self._closing.is_set())

    async def _poll(self) -> None:
        while self._pages and not self._closing.is_set():
            self._poll_now.clear()
            self.watcher.shown = frozenset(name for page in self._pages for name in page.shown)
            complete = await asyncio.to_thread(self.watcher.poll, READ_SECONDS)
            async with self._polled:
                self._polls += 1
                self._polled.notify_all()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poll_now.wait(), POLL_SECONDS if complete else POLL_SECONDS / 20)

    async def _stop(self, app: web.Application) -> None:
        self._closing.set()
        self._poll_now.set()
        async with self._polled:
            self._polled.notify_all()


class PageState:
    """What one open page shows and has been sent."""

    def __init__(self, shown: list[str], focus: str) -> None:
        self.shown, self.focus = shown, focus
        self._versions: dict[str, int] = {}
        self._curves: dict[tuple[str, str], tuple[int, int]] = {}
        self.is_new = True

    def changes(self, runs: dict[str, LiveRun]) -> dict[str, Any] | None:
        """What to send next; None if nothing has changed."""
        known = {name: run for name, run in runs.items() if run.version}
        changed = [run for name, run in known.items() if self._versions.get(name) != run.version]
        gone = [name for name in self._versions if name not in runs]
        if not (changed or gone or self.is_new):
            return None
        self.is_new = False
        self._versions = {name: run.version for name, run in known.items()}
        unread = len(runs) - len(known)
        rows = [run.row() for run in changed]
        found: dict[str, Any] = {"runs": rows, "gone": gone, "unread": unread, "curves": []}
        for run in changed:
            if run.name in self.shown:
                found["curves"] += [self._curve(run, "training"), self._curve(run, "evaluation")]
            if run.name == self.focus:
                found["focus"] = {"name": run.name, **run.details()}
        return found

    def _curve(self, run: LiveRun, kind: str) -> dict[str, Any]:
        curve = run.curve if kind == "training" else run.evaluations
        epoch, count = self._curves.get((run.name, kind), (-1, 0))
        now = curve.epoch  # read once: if another thread thins the points meanwhile, all are sent again
        begin = count if epoch == now else 0
        points = curve.points[begin:]
        self._curves[run.name, kind] = (now, begin + len(points))
        return {"name": run.name, "kind": kind, "from": begin, "points": points}


def same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def serve(folder: Path, port: int) -> int:
    """Serve the dashboard until Ctrl-C or SIGTERM."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give the folder of the runs, such as runs")
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: a port is 1 to 65535, or 0 for any free port")
    unreadable_folders([folder])  # UserError if it holds too many others, as /proc does
    return asyncio.run(_serve(folder.resolve(), port))


async def _serve(folder: Path, port: int) -> int:
    dashboard = Dashboard(folder)
    runner = web.AppRunner(dashboard.application(), access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
        except OSError as error:
            raise UserError(
                f"--port {port}: {error.strerror}; give another port, or omit --port for any free one"
            ) from None
        port = runner.addresses[0][1]
        for line in address_lines(folder, port, dashboard.token):
            print(line, flush=True)
        await stopped.wait()
    finally:
        await runner.cleanup()
    print("stopped", flush=True)
    return 0


def address_lines(folder: Path, port: int, token: str) -> list[str]:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        user = "USER"
    return [
        f"dashboard  http://127.0.0.1:{port}/?token={token}",
        f"runs       {folder}",
        f"elsewhere  ssh -N -L {port}:127.0.0.1:{port} {user}@{socket.gethostname()}   then open the address there",
        "stop       Ctrl-C",
    ]


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16
