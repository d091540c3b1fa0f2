"""`paceline dashboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from paceline.commands.flags import Argument, Flag, Verb


class DashboardVerb(Verb):
    """Serve a live page that shows a folder of runs, on 127.0.0.1.

    Serve a page that shows the runs in a folder, during training and after. It listens on 127.0.0.1 only, and its
    address contains a token.
    """

    folder: Annotated[str, Argument("DIR")]
    """The folder that contains the runs."""
    port: Annotated[int, Flag("N", least=0, most=65535)] = 0
    """Default: any free port."""

    def run(self) -> int:
        from paceline.report import assets

        assets.check()
        from paceline.report.dashboard import serve

        return serve(Path(self.folder), self.port)
