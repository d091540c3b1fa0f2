"""`paceline envs`."""

from __future__ import annotations

from typing import Annotated, Literal

from paceline.commands.flags import Argument, Flag, Verb


class EnvsVerb(Verb):
    """List the installed environments; `envs check ID` tests one."""

    action: Annotated[Literal["check"] | None, Argument("check")] = None
    """Test one environment: Gymnasium's interface, a random episode, steps per second."""
    id: Annotated[str | None, Argument("ID")] = None
    """The environment to check."""
    set: Annotated[tuple[str, ...], Flag("KEY=VALUE")] = ()
    """A setting of the environment, such as env.kwargs={a: 1}."""

    def run(self) -> int:
        from paceline.config import UserError
        from paceline.envs import catalog

        if self.action is None:
            print(catalog.render(catalog.families()))
            return 0
        if self.id is None:
            raise UserError("envs check needs an environment: paceline envs check CartPole-v1")
        from paceline.config.resolve import parse_sets, put, validate
        from paceline.envs.check import check

        tree = parse_sets(self.set)
        put(tree, "env.id", self.id)
        validate(tree)  # all of it: only its section `env` is used
        report = check(self.id, **{key: value for key, value in tree["env"].items() if key != "id"})
        print(report.text())
        return 1 if report.problems else 0
