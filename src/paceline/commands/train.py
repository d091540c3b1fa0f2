"""`paceline train`."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Annotated

from paceline.commands import BEGAN
from paceline.commands.flags import Flag, words
from paceline.commands.run_settings import SettingsVerb
from paceline.training.signals import StartSignals, interrupted_by

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class TrainVerb(SettingsVerb):
    """Train an agent.

    Train an agent. Every setting has a key: --set KEY=VALUE sets it, --config reads a YAML file.
    """

    resume: Annotated[str | None, Flag("RUN|auto")] = None
    """Continue a run, or one of its checkpoints; `auto`: the run with this --name, if it exists."""
    keep_schedule: bool = False
    """With --resume and another budget: keep the schedules of the old one. They stay at their last values when it is
    used up."""
    init_from: Annotated[str | None, Flag("RUN")] = None
    """Start a new run from the weights of another."""
    seeds: Annotated[str | None, Flag("A,B|A-B")] = None
    """Train once for each seed, one run after the other; the same command later continues them. The runs are named
    --name and their seed."""
    quiet: bool = False
    """Print only the run directory."""

    def run(self) -> int:
        if self.seeds is not None:
            return self._train_seeds(self.seeds)
        with StartSignals() as signals:
            try:
                return self._train()
            except BaseException:
                if (name := interrupted_by()) is None:
                    raise
                print(f"paceline: {name} before training began; nothing was written", file=sys.stderr)
                return signals.exit_code

    def _train(self) -> int:
        from paceline.config.resolve import resolve_tree, tidy, validate

        given, resolved = self.given(), None
        if self.resume is None:
            resolved = resolve_tree(given, preset=self.preset)  # reports bad input before torch is imported
            threads = resolved[0].engine.threads
        else:
            threads = validate({key: value for key, value in tidy(given).items() if key == "engine"}).engine.threads
        if threads:
            os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))  # torch reads them when it is imported

        from paceline.api import train

        run = train(
            given,
            preset=self.preset,
            resume=self.resume,
            init_from=self.init_from,
            keep_schedule=self.keep_schedule,
            quiet="run" if self.quiet else False,
            began=BEGAN,
            resolved=resolved,
        )
        return run.outcome.exit_code

    def _train_seeds(self, seeds: str) -> int:
        from paceline.bench.seeds import train_seeds
        from paceline.config import UserError
        from paceline.schedulers.train_command import parse_seeds

        if "seed" in self.settings:
            raise UserError(f"--seed {self.settings['seed']} and --seeds {seeds}: give one of them")
        if self.resume not in (None, "auto"):
            raise UserError(f"--resume {self.resume} continues one run; --seeds {seeds} continues its own")
        shared = words(self, "config", "preset", "settings", "set", "init_from", "keep_schedule", "quiet")
        return train_seeds(self.given(), parse_seeds(seeds), shared, preset=self.preset, quiet=self.quiet)

    @classmethod
    def epilog(cls, arguments: Sequence[str]) -> str:
        """Every key with its default and meaning, with the settings of a user's own algorithm if one is given."""
        from paceline.config.keys import keys

        parser = ArgumentParser(add_help=False, exit_on_error=False)
        parser.add_argument("--algo")
        algo = parser.parse_known_args(arguments)[0].algo
        lines = ["", "keys (--set KEY=VALUE, or nested in a YAML file), [default], meaning:"]
        for key, kind, default, meaning in keys(algo):
            lines.append(f"  {key}  [{default}]  {kind}\n      {meaning}")
        return "\n".join(lines) + "\n"
