"""The report as text: what it says of good runs, bad ones and none; the browser has a file of its own."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import UserError
from paceline.report import markdown
from paceline.report.blocks import Page
from paceline.report.page import build, render_html, write_report
from paceline.results.runs import load_runs

WriteRun = Callable[..., Path]
Cli = Callable[..., Any]


def cells(page: Any, section: str) -> list[list[str]]:
    """All rows of the tables of a section, as `text small`."""
    found = next(one for one in page.sections if one.id == section)
    tables = [block for block in found.blocks if block.kind == "table"]
    return [[f"{cell.text} {cell.small}".strip() for cell in row] for table in tables for row in table.rows]


def test_a_study_of_forty_runs(study: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "report.html"
    result = cli("report", study, "-o", out)
    assert (result.code, result.out) == (0, f"{out}\n")
    text = out.read_text()
    assert len(text) < 6e6
    assert "35 of 40" not in text and "36 of 40" in text
    assert "4 of 40 runs did not finish: 3 failed, 1 interrupted" in text
    assert "1 run interrupted and resumed, counted once: ray-w2-s4 (1×)" in text
    for name in ("ray-w1-s5", "ray-w4-s3", "rllib-w4-s0", "rllib-w1-s1"):
        assert f"{name}" in text
    # What runs say is text, and nothing is fetched.
    assert "<script>alert" not in text
    assert "Lost: &lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)


def test_figures_are_those_of_the_raw_metrics(study: Path, study_page: Page) -> None:
    page = study_page
    rates: dict[str, list[float]] = {}
    for path in sorted(study.iterdir()):
        if json.loads((path / "status.json").read_text())["state"] == "done":
            last = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
            rates.setdefault(path.name.rpartition("-")[0], []).append(last["env_steps"] / last["train_seconds"])
    rows = {row[0]: row for row in cells(page, "results") if len(row) > 6}
    assert len(rows) == 6
    for name, values in rates.items():
        engine, _, workers = name.partition("-w")
        row = next(
            row for label, row in rows.items() if label.startswith(f"{engine}, ") and f" {workers} worker" in label
        )
        assert row[1].startswith(f"{len(values)} of ")
        mean = statistics.fmean(values)
        assert row[3].startswith(f"{mean:,.0f} ")
        if workers != "1":
            gain = mean / statistics.fmean(rates[f"{engine}-w1"])
            assert row[7].startswith(f"{gain:.2f}× ")
            assert row[8].startswith(f"{100 * gain / int(workers):.0f} % ")
    assert page.headline.startswith("ppo, ray: 4 workers are 3.4")
    assert any("rllib" in text for text in page.findings)
    assert any(text.startswith("Its 4 workers are learner-bound: 60 % of the") for text in page.findings)


def test_the_same_in_markdown(study_page: Page) -> None:
    text = markdown.render(study_page)
    assert "## What is missing" in text and "36 of 40" in text
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text
    assert {line.count(" | ") for line in text.splitlines() if line.startswith("| setting")} == {6}


def test_two_environments_are_never_one_figure(tmp_path: Path, write_run: WriteRun) -> None:
    for env, best in (("CartPole-v1", 490.0), ("Acrobot-v1", -80.0)):
        for seed in range(2):
            write_run(tmp_path / "both" / f"{env}-{seed}", env=env, seed=seed, best=best)
    page = build([tmp_path / "both"], load_runs([tmp_path / "both"]))
    curves = next(section for section in page.sections if section.id == "learning").blocks
    assert sorted(block.title for block in curves if block.kind == "chart") == ["Acrobot-v1", "CartPole-v1"]
    assert all(len(block.data["series"]) == 1 for block in curves if block.kind == "chart")
    assert not any(section.id == "scaling" for section in page.sections)


def test_damaged_files_are_named(tmp_path: Path, write_run: WriteRun) -> None:
    run = write_run(tmp_path / "runs" / "torn")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 21, "env_st')
    write_run(tmp_path / "runs" / "empty", state="failed", reason="out of memory", rows=0, seed=1)
    page = build([tmp_path / "runs"], load_runs([tmp_path / "runs"]))
    rows = cells(page, "missing")
    assert ["empty", "failed", "0", "out of memory"] in rows
    assert any(row[0] == "torn" and "incomplete" in row[1] for row in rows)


def test_runs_that_are_not_finished_are_drawn(tmp_path: Path, write_run: WriteRun) -> None:
    write_run(tmp_path / "runs" / "one", state="stopped", reason="SIGTERM", rows=6)
    page = build([tmp_path / "runs"], load_runs([tmp_path / "runs"]))
    (chart,) = (block for section in page.sections if section.id == "learning" for block in section.blocks)
    assert [one["label"] for one in chart.data["series"]] == ["one"]
    assert "no run has finished yet" in page.headline
    assert any("--resume" in row[3] for row in cells(page, "missing"))


def test_nodes_and_the_timeline_of_their_start(tmp_path: Path, write_run: WriteRun) -> None:
    hosts = [
        {"host": name, "address": f"10.0.0.{index}", "cores": 2, "workers": 1, "env_steps": 10, "cpu_seconds": 22.0}
        for index, name in enumerate(("a", "b"))
    ]
    folder = write_run(tmp_path / "study" / "run", workers=2, summary={"hosts": hosts}).parent
    log = tmp_path / "log"
    log.mkdir()
    events = [(0.0, "launcher", "listening"), (1.5, "a", "starting"), (4.0, "a", "ready"), (5.0, "launcher", "formed")]
    lines = [json.dumps({"seconds": s, "host": host, "phase": phase, "detail": ""}) for s, host, phase in events]
    (log / "timeline.jsonl").write_text("\n".join(lines) + "\n")
    page = build([folder], load_runs([folder]), timelines=[log])
    ids = re.findall(r' id="([^"]+)"', render_html(page))
    assert len(ids) == len(set(ids))
    load = [row[1:] for row in cells(page, "load")]
    assert [row[0] for row in load] == ["a 10.0.0.0", "b 10.0.0.1"]
    assert load[0][4] == "50 %"  # 22 s of CPU in 22 s with 2 cores
    chart = next(block for section in page.sections if section.id == "cluster" for block in section.blocks)
    assert chart.data["rows"] == ["launcher", "a"]
    starting = next(span for span in chart.data["spans"] if span["phase"] == "starting")
    assert (starting["from"], starting["to"]) == (1.5, 4.0)


def test_a_return_before_the_end_says_where(tmp_path: Path, write_run: WriteRun) -> None:
    write_run(tmp_path / "runs" / "long", rows=20)
    write_run(tmp_path / "runs" / "short", rows=5, workers=2, best=80.0)
    page = build([tmp_path / "runs"], load_runs([tmp_path / "runs"]))
    (tile,) = (one for one in page.tiles if one.label.startswith("best return"))
    assert tile.label == "best return at 5,000 steps" and tile.value == "349.6"
    assert any("1 worker has the highest return, 349.6 at 5,000 steps" in text for text in page.findings)
    page = build([tmp_path / "runs" / "long"], load_runs([tmp_path / "runs" / "long"]))
    assert any(one.label == "best return" for one in page.tiles) and " steps" not in page.headline


def test_the_headline_is_as_sure_as_the_table_of_probabilities(tmp_path: Path, write_run: WriteRun) -> None:
    folder = tmp_path / "runs"
    for seed in range(3):
        write_run(folder / f"a{seed}", seed=seed, best=490.0 + seed)
        write_run(folder / f"b{seed}", seed=seed, best=300.0 + seed, config={"ppo": {"gamma": 0.5}})
    page = build([folder], load_runs([folder]))
    assert "gamma=0.98 has the highest return" in page.headline
    assert page.headline.endswith("; with fewer than 5 runs in a group that is a hint, not a proof.")
    write_run(folder / "b3", seed=3, best=480.0, config={"ppo": {"gamma": 0.5}})
    for seed in (3, 4):  # the mean is still higher, a run is not surely better
        write_run(folder / f"a{seed}", seed=seed, best=299.0)
    page = build([folder], load_runs([folder]))
    (row,) = (row for row in cells(page, "results") if len(row) == 3)
    assert row[:2] == ["gamma=0.98", "gamma=0.5"] and re.search(r"\d+ % \d\d? % to", row[2])
    assert page.headline.endswith("whether it is better than gamma=0.5 is not certain.")


def test_bad_input_is_one_line(tmp_path: Path, write_run: WriteRun, cli: Cli) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "nothing").mkdir()
    for words, said in {
        (tmp_path / "nothing",): "no run in it",
        (tmp_path / "absent",): "there is no run at",
        (run, "-o", tmp_path / "page.txt"): "ends in .html or .md",
        (run, "-o", tmp_path / "page.html", "--format", "md"): "do not agree",
        (run, "-o", tmp_path / "no" / "folder.html"): "cannot be written",
        (run, "--timeline", tmp_path, "-o", "-"): "no timeline.jsonl",
    }.items():
        result = cli("report", *words)
        assert result.code == 2 and said in result.err and result.err.count("\n") == 1, result
    assert not list(tmp_path.glob("*.html"))


def test_a_format_without_a_name(here: Path, write_run: WriteRun) -> None:
    write_run(here / "run")
    assert write_report([here / "run"], form="md") == Path("report.md")
    with pytest.raises(UserError, match="do not agree"):
        write_report([here / "run"], "-", form="html")
