"""`paceline dashboard`: a live page over a folder of runs, for the one who has its address. It reads, and no more."""

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
from paceline.report.watch import LiveRun, Watcher

POLL_SECONDS = 1.0
FIRST_SECONDS = 0.4
"""How long runs are read before a page hears of those that have been."""
SHOWN = 12
"""Runs whose curves are sent at once."""
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
DENIED = "This page needs the address that `paceline dashboard` printed, with its token.\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """The application. Runs are looked at once a second, by one thread, while at least one page is open; at once when a
    page asks for something else."""

    def __init__(self, folder: Path) -> None:
        self.watcher = Watcher(folder)
        self.token = secrets.token_urlsafe(24)
        self._session = secrets.token_urlsafe(24)
        # Cookies know no ports: two dashboards on one machine must not take each other's.
        self._cookie = f"paceline-{secrets.token_hex(4)}"
        self._pages: list[Sent] = []
        self._round = 0
        self._looked = asyncio.Condition()
        self._watching: asyncio.Task[None] | None = None
        self._asked, self._closing = asyncio.Event(), asyncio.Event()

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
        # A name that somebody made to lead here (DNS rebinding) is not one of ours. Any port: it may be a tunnel's.
        name = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdigit() else request.host
        if name not in LOCAL_NAMES:
            return web.Response(status=403, text="This page is served to 127.0.0.1 alone.\n", headers=HEADERS)
        given = request.query.get("token")
        if given is not None and same(given, self.token) and request.path == "/":
            found = web.Response(status=303, headers={**HEADERS, "Location": "/"})  # out of the address and the history
            found.set_cookie(self._cookie, self._session, httponly=True, samesite="Lax", path="/")
            return found
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
            # Megabytes that do not change: the page asks for them with their version.
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
        """Server-sent events: first all there is, then what has changed since."""
        wanted = request.query.getall("show", [])[:SHOWN]
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = Sent(wanted, request.query.get("focus", ""))
        self._pages.append(sent)
        self._asked.set()
        try:
            spoke = time.monotonic()
            while not self._closing.is_set():
                if not (sent.first and self._round):  # what is known already need not wait
                    await self._next_round()
                news = sent.news(self.watcher.runs)
                if news:
                    spoke = time.monotonic()
                    await response.write(f"data: {json.dumps(news, allow_nan=False)}\n\n".encode())
                elif time.monotonic() - spoke >= KEEP_ALIVE_SECONDS:
                    spoke = time.monotonic()
                    await response.write(b": still here\n\n")
        except ConnectionResetError:
            pass  # the page was closed
        finally:
            self._pages.remove(sent)
        return response

    async def _next_round(self) -> None:
        """Wait until the runs have been looked at once more."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        before = self._round
        with contextlib.suppress(TimeoutError):  # a file system that hangs: the page hears that we are still here
            async with asyncio.timeout(KEEP_ALIVE_SECONDS), self._looked:
                await self._looked.wait_for(lambda: self._round > before or self._closing.is_set())

    async def _watch(self) -> None:
        while self._pages and not self._closing.is_set():
            self._asked.clear()
            self.watcher.wanted = frozenset(name for page in self._pages for name in page.shown)
            whole = await asyncio.to_thread(self.watcher.poll, FIRST_SECONDS)
            async with self._looked:
                self._round += 1
                self._looked.notify_all()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), POLL_SECONDS if whole else POLL_SECONDS / 20)

    async def _stop(self, app: web.Application) -> None:
        self._closing.set()
        self._asked.set()
        async with self._looked:
            self._looked.notify_all()


class Sent:
    """What one page has already got."""

    def __init__(self, shown: list[str], focus: str) -> None:
        self.shown, self.focus = shown, focus
        self._versions: dict[str, int] = {}
        self._curves: dict[tuple[str, str], tuple[int, int]] = {}
        self.first = True

    def news(self, runs: dict[str, LiveRun]) -> dict[str, Any] | None:
        known = {name: run for name, run in runs.items() if run.version}
        changed = [run for name, run in known.items() if self._versions.get(name) != run.version]
        gone = [name for name in self._versions if name not in runs]
        if not (changed or gone or self.first):
            return None
        self.first = False
        self._versions = {name: run.version for name, run in known.items()}
        unread = len(runs) - len(known)
        news: dict[str, Any] = {"runs": [run.row() for run in changed], "gone": gone, "unread": unread, "curves": []}
        for run in changed:
            if run.name in self.shown:
                news["curves"] += [self._curve(run, "training"), self._curve(run, "evaluation")]
            if run.name == self.focus:
                news["focus"] = {"name": run.name, **run.details()}
        return news

    def _curve(self, run: LiveRun, kind: str) -> dict[str, Any]:
        curve = run.curve if kind == "training" else run.evaluations
        epoch, count = self._curves.get((run.name, kind), (-1, 0))
        now = curve.epoch  # once: another thread may thin the points meanwhile, and then all are sent again
        begin = count if epoch == now else 0
        points = curve.points[begin:]
        self._curves[run.name, kind] = (now, begin + len(points))
        return {"name": run.name, "kind": kind, "from": begin, "points": points}


def same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def serve(folder: Path, port: int) -> int:
    """Until Ctrl-C or SIGTERM."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give the one that the runs are in, such as runs")
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: a port is 1 to 65535, or 0 for any that is free")
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
            raise UserError(f"--port {port}: {error.strerror}; give another, or none for any that is free") from None
        port = runner.addresses[0][1]
        for line in greeting(folder, port, dashboard.token):
            print(line, flush=True)
        await stopped.wait()
    finally:
        await runner.cleanup()
    print("stopped", flush=True)
    return 0


def greeting(folder: Path, port: int, token: str) -> list[str]:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        user = "USER"
    return [
        f"dashboard  http://127.0.0.1:{port}/?token={token}",
        f"runs       {folder}",
        f"elsewhere  ssh -N -L {port}:127.0.0.1:{port} {user}@{socket.gethostname()}   then open that address there",
        "stop       Ctrl-C",
    ]


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16
