"""Who gets in, what they get, and how it ends."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

WriteRun = Callable[..., Path]
SECONDS = 20.0


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Served:
    process: subprocess.Popen[str]
    said: str
    port: int
    token: str
    cookie: str = ""

    def get(self, path: str, host: str | None = None, cookie: str | None = None) -> Answer:
        with self.stream(path, host, cookie) as answer:
            return Answer(answer.status, dict(answer.headers.items()), answer.read().decode())

    @contextmanager
    def stream(
        self, path: str, host: str | None = None, cookie: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        headers = {"Host": host or f"127.0.0.1:{self.port}", "Cookie": self.cookie if cookie is None else cookie}
        connection.request("GET", path, headers=headers)
        try:
            with connection.getresponse() as answer:
                yield answer
        finally:
            connection.close()


@pytest.fixture
def served(tmp_path: Path, write_run: WriteRun, start: Callable[..., subprocess.Popen[str]]) -> Served:
    run = write_run(tmp_path / "runs" / "one", state="running")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "updated_at": "2999-01-01T00:00:00+00:00"}))
    (run / "logs" / "events.log").write_text("a worker came\n")
    process = start("dashboard", tmp_path / "runs")
    assert process.stdout is not None
    said = "".join(process.stdout.readline() for _ in range(4))
    port, _, token = said.splitlines()[0].partition("127.0.0.1:")[2].partition("/?token=")
    held = Served(process, said, int(port), token)
    answer = held.get(f"/?token={token}")
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    held.cookie = answer.headers["Set-Cookie"].partition(";")[0]
    assert "HttpOnly" in answer.headers["Set-Cookie"]
    return held


def test_only_with_the_token_and_by_its_own_name(served: Served) -> None:
    page = served.get("/")
    assert page.status == 200 and "default-src 'none'" in page.headers["Content-Security-Policy"]
    for path in ("/", "/events", "/log?run=one&file=events.log", "/static/style.css", "/?token=wrong", "/nothing"):
        assert served.get(path, cookie="").status == 403, path
        assert served.get(path, cookie=served.cookie[:-1] + "x").status == 403, path
    for host in ("evil.example", f"evil.example:{served.port}", "127.0.0.1.evil.example"):
        assert served.get("/", host=host).status == 403, host
        assert served.get(f"/?token={served.token}", host=host).status == 403, host
    assert served.get("/", host="localhost:9999").status == 200  # through a tunnel
    assert served.token not in page.text


def test_it_reads_nothing_but_runs(served: Served) -> None:
    with served.stream("/events") as stream:
        stream.readline()  # the runs have been looked at
    answer = served.get("/log?run=one&file=events.log")
    assert json.loads(answer.text) == {"text": "a worker came\n", "next": 14}
    for path in (
        "/log?run=one&file=../config.yaml",
        "/log?run=..&file=events.log",
        "/log?run=one/../one&file=events.log",
        "/static/..%2fpage.py",
        "/static/../../../../etc/passwd",
        "/static/report.html.j2",
        "/static/",
    ):
        assert served.get(path).status == 404, path
    assert served.get("/static/charts.js").status == 200
    assert len(served.get("/static/plotly.min.js").text) > 1e6


def test_events_tell_all_then_what_changed(served: Served, tmp_path: Path) -> None:
    with served.stream("/events?show=one&focus=one") as stream:

        def event() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(next(line for line in stream if line.startswith(b"data: "))[6:])
            return found

        first = event()
        assert [run["name"] for run in first["runs"]] == ["one"]
        assert [len(part["points"]) for part in first["curves"]] == [20, 0]
        assert first["focus"]["logs"] == ["events.log"]
        with (tmp_path / "runs/one/metrics.jsonl").open("a") as file:
            file.write(json.dumps({"env_steps": 21000, "return_mean": 400.0}) + "\n")
        (training, _) = event()["curves"]
        assert (training["from"], training["points"]) == (20, [[21000.0, None, 400.0, None]])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_while_a_page_is_open(served: Served, number: int) -> None:
    with served.stream("/events") as stream:
        assert stream.readline().startswith(b"data: ")
        served.process.send_signal(number)
        out, err = served.process.communicate(timeout=SECONDS)
    assert (served.process.returncode, out, err) == (0, "stopped\n", "")
    assert f"ssh -N -L {served.port}:127.0.0.1:{served.port} " in served.said


def test_bad_input_is_one_line(tmp_path: Path, served: Served, cli: Callable[..., Any]) -> None:
    for words, said in {
        (tmp_path / "absent",): "is not a folder",
        (tmp_path, "--port", 70000): "--port 70000: must be at most 65535",
        (tmp_path, "--port", served.port): "give another",
    }.items():
        result = cli("dashboard", *words)
        assert result.code == 2 and said in result.err and result.err.count("\n") == 1, result
