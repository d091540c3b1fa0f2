"""Callbacks: a user's code that watches a run and steers it, in the process that started the run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from paceline.config import EnvConfig, RunConfig, UserError
from paceline.config.keys import one_line
from paceline.config.plugins import load_attribute
from paceline.run.directory import plain

if TYPE_CHECKING:
    from paceline.rollout.batch import Episode
    from paceline.training.loop import Loop


class Callback:
    """Override the methods you need. An error in one of them ends the run, which is saved first."""

    _steering: Steering | None = None

    def on_start(self) -> None:
        """Training begins, or continues after a resume."""

    def on_episode(self, episode: Episode) -> None:
        """An episode of this iteration has ended: `episode.total` is its return, `episode.length` its steps."""

    def on_iteration(self, metrics: dict[str, Any]) -> None:
        """An iteration has ended. `metrics`: its row of metrics, before it is written."""

    def on_evaluation(self, metrics: dict[str, Any]) -> None:
        """An evaluation has ended. `metrics`: its row of `eval.jsonl`."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint was written."""

    def on_end(self, reason: str) -> None:
        """Training has ended without an error. `reason`: the budget or goal that was reached, or what stopped it."""

    def set(self, key: str, value: Any) -> None:
        """Change a setting from the next iteration on. `key`: a setting of the algorithm that may change, such as
        `ppo.learning_rate`, or `env.NAME` for the attribute NAME of all training environments, those of workers
        included. Evaluation keeps the environments as they were made. A resumed run has the changed values."""
        self._steers.set(key, value)

    def get(self, key: str) -> Any:
        """The present value of a setting of the algorithm; of `env.NAME`, what was set last, or None."""
        return self._steers.get(key)

    def log(self, name: str, value: float) -> None:
        """Add the metric `callback/NAME` to this row of metrics and to all later ones."""
        self._steers.logged[f"callback/{name}"] = value

    def stop(self, reason: str) -> None:
        """End the run after this iteration."""
        self._steers.stop_reason = reason

    @property
    def run(self) -> Path:
        """The run directory."""
        return self._steers.loop.run_directory.path

    @property
    def _steers(self) -> Steering:
        if self._steering is None:
            raise RuntimeError(f"{type(self).__name__} is not part of a run: give it to paceline.train(callbacks=[…])")
        return self._steering


class Steering:
    """The callbacks of a run, and what they asked for."""

    def __init__(self, members: Iterable[Callback], loop: Loop) -> None:
        self.members, self.loop = list(members), loop
        self.changes: dict[str, Any] = {}
        self.logged: dict[str, float] = {}
        self.stop_reason: str | None = None
        self.failed_in = ""
        """The method that raised an error, if one did."""
        for member in self.members:
            member._steering = self

    def tell(self, method: str, *arguments: Any) -> None:
        for member in self.members if not self.failed_in else ():
            try:
                getattr(member, method)(*arguments)
            except Exception:
                self.failed_in = method
                raise

    def set(self, key: str, value: Any) -> None:
        config = self.loop.config
        section, _, name = key.partition(".")
        if section == "env" and name.isidentifier() and name not in EnvConfig.model_fields:
            try:
                plain(value)
            except TypeError:
                raise UserError(f"{key}={value!r}: only numbers, texts and lists of them can be set") from None
        elif section == config.algorithm_name and name in config.hyper.changeable:
            value = self._validated(section, name, value)
        else:
            able = ", ".join(f"{config.algorithm_name}.{one}" for one in config.hyper.changeable)
            raise UserError(
                f"set({key!r}, …): it cannot change while a run trains; {able} can, and env.NAME, an attribute NAME "
                "of the environments"
            )
        self.changes[key] = value
        self.loop.engine.change({key: value})

    def get(self, key: str) -> Any:
        section, _, name = key.partition(".")
        default = getattr(self.loop.config.hyper, name, None) if section == self.loop.config.algorithm_name else None
        return self.changes.get(key, default)

    def _validated(self, section: str, name: str, value: Any) -> Any:
        hyper = self.loop.config.hyper
        try:
            return getattr(type(hyper).model_validate(hyper.model_dump() | {name: plain(value)}), name)
        except ValidationError as error:
            raise UserError(one_line(error, section, self.loop.config.algo)) from None

    def state(self) -> dict[str, Any]:
        return {"names": [type(member).__name__ for member in self.members], "changes": self.changes}

    def restore(self, state: dict[str, Any]) -> list[str]:
        """Make the changes of an earlier session again. Returns a warning if its callbacks are missing now."""
        self.changes = dict(state["changes"])
        if self.changes:
            self.loop.engine.change(self.changes)
        missing = [name for name in state["names"] if name not in self.state()["names"]]
        return [f"warning    trained so far with {', '.join(missing)}, without it from now on"] if missing else []


def make_callbacks(config: RunConfig, given: Iterable[Any] = ()) -> list[Callback]:
    """Those that the settings name, then those given as objects."""
    made: list[Any] = []
    for entry in config.callbacks:
        name, arguments = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
        made.append(_make(load_attribute(name, "callbacks"), name, arguments))
    made += [_make(one, one.__name__, {}) if isinstance(one, type) else one for one in given]
    for one in made:
        if not isinstance(one, Callback):
            raise UserError(
                f"callbacks: expected objects of a subclass of paceline.Callback, not a {type(one).__name__}"
            )
    return made


def _make(cls: Any, name: str, arguments: dict[str, Any]) -> Any:
    try:
        return cls(**arguments)
    except Exception as error:  # the user's constructor may raise anything, and counts as input
        raise UserError(f"callbacks={name} could not be made: {type(error).__name__}: {error}") from error
