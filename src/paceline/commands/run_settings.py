"""The flags by which `train`, `tune` and `bench throughput` take the settings of a run."""

from __future__ import annotations

from typing import Annotated, Any

from paceline.commands.flags import Flag, SettingFlags, Verb

METAVARS = {"env.id": "ENV", "stop.max_time": "TIME", "stop.return_mean": "R", "out": "DIR"}


def run_flags(only: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> SettingFlags:
    """The flags of frequent settings. Annotations call this; they are evaluated only for the verb that runs."""
    from paceline.config import RunConfig
    from paceline.config.train_flags import FLAGS

    chosen = {key: (flag,) for key, flag in FLAGS.items() if key not in without and (not only or key in only)}
    return SettingFlags(RunConfig, chosen, metavars=METAVARS)


class SettingsVerb(Verb):
    settings: Annotated[dict[str, Any], run_flags()]
    config: Annotated[str | None, Flag("FILE")] = None
    """A YAML file of settings."""
    set: Annotated[tuple[str, ...], Flag("KEY=VALUE")] = ()
    """Any setting."""
    preset: Annotated[str | None, Flag("NAME")] = None
    """Preset to start from, instead of the environment's own; `none` starts from the defaults."""

    def given(self) -> dict[str, Any]:
        """The settings of the file, `--set` and flags as one tree; later ones win."""
        from paceline.config.resolve import parse_sets, put, read_file

        tree = parse_sets(self.set, None if self.config is None else read_file(self.config))
        for key, value in self.settings.items():
            put(tree, key, value)
        return tree
