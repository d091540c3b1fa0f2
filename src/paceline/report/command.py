"""`paceline report` and `paceline dashboard` on the command line; what they need is imported when they run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_report(verbs: Any) -> None:
    report = verbs.add_parser(
        "report",
        help="one page about any number of runs, as a file that needs no network",
        description="Write one self-contained page about runs: what came out, how fast and why, what is missing, where "
        "it was made and by which commands.",
    )
    report.add_argument("paths", nargs="+", metavar="DIR|RUN", help="runs, or folders of runs")
    report.add_argument("-o", "--out", metavar="FILE", help="default: report.html, or report.md; - prints Markdown")
    report.add_argument("--format", choices=["html", "md"], help="default: by the ending of --out, else html")
    report.add_argument("--title", metavar="TEXT", help="default: the name of the folder")
    report.add_argument(
        "--timeline", action="append", default=[], metavar="DIR", help="folder of `launch --log`, to be drawn too"
    )
    report.set_defaults(run=_report)


def add_dashboard(verbs: Any) -> None:
    dashboard = verbs.add_parser(
        "dashboard",
        help="a live page over a folder of runs, on 127.0.0.1",
        description="Serve a page that shows the runs in a folder while they train, and after. It listens on 127.0.0.1 "
        "alone, and its address holds a token.",
    )
    dashboard.add_argument("folder", metavar="DIR", help="the folder the runs are in")
    dashboard.add_argument("--port", type=int, default=0, metavar="N", help="default: any that is free")
    dashboard.set_defaults(run=_dashboard)


def _report(options: argparse.Namespace) -> int:
    from paceline.report.page import write_report

    written = write_report(
        [Path(path) for path in options.paths],
        options.out,
        form=options.format,
        title=options.title,
        timelines=[Path(path) for path in options.timeline],
    )
    if written is not None:
        print(written)
    return 0


def _dashboard(options: argparse.Namespace) -> int:
    from paceline.report import assets

    assets.check()
    from paceline.report.dashboard import serve

    return serve(Path(options.folder), options.port)
