"""A hundred environments that are unusual or wrong, each named by what is odd about it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Step = tuple[Any, ...]


class Plain(gymnasium.Env[Any, Any]):
    """Nothing is odd about this one: episodes of five steps, samples of its space, reward 1."""

    observation_space: spaces.Space[Any] = spaces.Box(-1, 1, (3,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps >= 5, False, {}


def box(*shape: int, low: float = -1.0, high: float = 1.0, dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(low, high, shape, dtype)


OBSERVATIONS: dict[str, Callable[[], spaces.Space[Any]]] = {
    "SeesScalar": lambda: box(),
    "SeesNothing": lambda: box(0),
    "SeesEmptyMatrix": lambda: box(3, 0),
    "SeesMatrix": lambda: box(3, 4),
    "SeesFourAxes": lambda: box(2, 2, 2, 2),
    "SeesFloat64": lambda: box(3, dtype=np.float64),
    "SeesFloat16": lambda: box(3, dtype=np.float16),
    "SeesInt8": lambda: box(3, low=-128, high=127, dtype=np.int8),
    "SeesInt64": lambda: box(3, low=-(2**40), high=2**40, dtype=np.int64),
    "SeesUnbounded": lambda: box(3, low=-np.inf, high=np.inf),
    "SeesHalfBounded": lambda: box(3, low=0, high=np.inf),
    "SeesFloatMax": lambda: box(3, low=-3.4e38, high=3.4e38),
    "SeesPoint": lambda: box(3, low=0, high=0),
    "SeesImage": lambda: box(16, 16, 3, low=0, high=255, dtype=np.uint8),
    "SeesImageChannelsFirst": lambda: box(3, 16, 16, low=0, high=255, dtype=np.uint8),
    "SeesAmbiguousImage": lambda: box(8, 16, 16, low=0, high=255, dtype=np.uint8),
    "SeesTinyImage": lambda: box(2, 2, 1, low=0, high=255, dtype=np.uint8),
    "SeesOnePixel": lambda: box(1, 1, 1, low=0, high=255, dtype=np.uint8),
    "SeesWide": lambda: box(50_000),
    "SeesTooWide": lambda: box(2_000_000_000),
    "SeesDiscrete": lambda: spaces.Discrete(7),
    "SeesOneState": lambda: spaces.Discrete(1),
    "SeesDiscreteFromMinusFive": lambda: spaces.Discrete(4, start=-5),
    "SeesTwoBillionStates": lambda: spaces.Discrete(2_000_000_000),
    "SeesMultiDiscrete": lambda: spaces.MultiDiscrete([3, 2]),
    "SeesMultiDiscreteGrid": lambda: spaces.MultiDiscrete([[3, 2], [2, 2]]),
    "SeesMultiBinary": lambda: spaces.MultiBinary(4),
    "SeesMultiBinaryGrid": lambda: spaces.MultiBinary([2, 3]),
    "SeesTuple": lambda: spaces.Tuple((box(2), spaces.Discrete(3))),
    "SeesEmptyTuple": lambda: spaces.Tuple(()),
    "SeesDict": lambda: spaces.Dict({"a": box(2), "b": spaces.Discrete(3)}),
    "SeesEmptyDict": lambda: spaces.Dict({}),
    "SeesNestedDict": lambda: spaces.Dict({"a": spaces.Dict({"b": spaces.Tuple((box(2), spaces.MultiBinary(2)))})}),
    "SeesDictOfImages": lambda: spaces.Dict({"eye": box(16, 16, 3, low=0, high=255, dtype=np.uint8), "speed": box(1)}),
    "SeesText": lambda: spaces.Text(5),
    "SeesTextAmongNumbers": lambda: spaces.Dict({"a": box(2), "t": spaces.Text(5)}),
    "SeesSequence": lambda: spaces.Sequence(box(2)),
    "SeesGraph": lambda: spaces.Graph(box(2), None),
    "SeesOneOf": lambda: spaces.OneOf((box(2), spaces.Discrete(2))),
}
ACTIONS: dict[str, Callable[[], spaces.Space[Any]]] = {
    "DoesOneThing": lambda: spaces.Discrete(1),
    "DoesDiscreteFromThree": lambda: spaces.Discrete(3, start=3),
    "DoesThousands": lambda: spaces.Discrete(5_000),
    "DoesTwoBillion": lambda: spaces.Discrete(2_000_000_000),
    "DoesScalar": lambda: box(),
    "DoesNothing": lambda: box(0),
    "DoesBox": lambda: box(2),
    "DoesMatrix": lambda: box(2, 2),
    "DoesFloat64": lambda: box(2, dtype=np.float64),
    "DoesInt": lambda: box(2, low=0, high=5, dtype=np.int32),
    "DoesUnbounded": lambda: box(2, low=-np.inf, high=np.inf),
    "DoesHalfBounded": lambda: box(2, low=0, high=np.inf),
    "DoesFloatMax": lambda: box(2, low=-3.4e38, high=3.4e38),
    "DoesPoint": lambda: box(2, low=1, high=1),
    "DoesMultiDiscrete": lambda: spaces.MultiDiscrete([2, 3]),
    "DoesMultiDiscreteGrid": lambda: spaces.MultiDiscrete([[2, 3], [2, 2]]),
    "DoesMultiBinary": lambda: spaces.MultiBinary(3),
    "DoesTuple": lambda: spaces.Tuple((spaces.Discrete(2), box(1))),
    "DoesDict": lambda: spaces.Dict({"a": spaces.Discrete(2), "b": box(1)}),
    "DoesTupleOfChoices": lambda: spaces.Tuple((spaces.Discrete(2, start=1), spaces.MultiBinary(2))),
    "DoesDictOfBoxes": lambda: spaces.Dict({"a": box(2), "b": spaces.Dict({"c": box(1, low=50, high=np.inf)})}),
    "DoesText": lambda: spaces.Text(3),
}


def _exit(code: int) -> Any:
    sys.exit(code)


def _raise(error: BaseException) -> Any:
    raise error


STEPS: dict[str, Callable[[Any], Any]] = {
    # what `step` returns, given what it should
    "StepRaises": lambda given: _raise(RuntimeError("the simulator\nexploded \x1b[31m")),
    "StepRaisesNothing": lambda given: _raise(ValueError()),
    "StepRaisesKey": lambda given: _raise(KeyError("joint")),
    "StepExits": lambda given: _exit(0),
    "StepExitsWithText": lambda given: sys.exit("bye"),
    "StepIsInterrupted": lambda given: _raise(KeyboardInterrupt()),
    "StepNotImplemented": lambda given: _raise(NotImplementedError()),
    "StepOutOfMemory": lambda given: _raise(MemoryError()),
    "StepGivesNothing": lambda given: None,
    "StepGivesThree": lambda given: given[:3],
    "StepGivesFour": lambda given: (given[0], given[1], given[2], given[4]),
    "StepGivesSix": lambda given: (*given, 1),
    "StepGivesList": lambda given: list(given),
    "SeesNan": lambda given: (np.full(3, np.nan, np.float32), *given[1:]),
    "SeesInfinity": lambda given: (np.full(3, np.inf, np.float32), *given[1:]),
    "SeesBeyondItsBounds": lambda given: (np.full(3, 1e6, np.float32), *given[1:]),
    "SeesNone": lambda given: (None, *given[1:]),
    "SeesWords": lambda given: ("left", *given[1:]),
    "SeesList": lambda given: ([0.0, 0.5, 1.0], *given[1:]),
    "SeesLonger": lambda given: (np.zeros(5, np.float32), *given[1:]),
    "SeesShorter": lambda given: (np.zeros(2, np.float32), *given[1:]),
    "SeesColumn": lambda given: (np.zeros((3, 1), np.float32), *given[1:]),
    "SeesDoubles": lambda given: (np.zeros(3), *given[1:]),
    "SeesObjects": lambda given: (np.array([1, "a", None], object), *given[1:]),
    "SeesComplex": lambda given: (np.zeros(3, np.complex64), *given[1:]),
    "RewardNone": lambda given: (given[0], None, *given[2:]),
    "RewardNan": lambda given: (given[0], float("nan"), *given[2:]),
    "RewardInfinite": lambda given: (given[0], float("inf"), *given[2:]),
    "RewardHuge": lambda given: (given[0], 1e308, *given[2:]),
    "RewardText": lambda given: (given[0], "1", *given[2:]),
    "RewardArray": lambda given: (given[0], np.ones(1), *given[2:]),
    "RewardPair": lambda given: (given[0], np.ones(2), *given[2:]),
    "RewardTrue": lambda given: (given[0], True, *given[2:]),
    "DoneNone": lambda given: (*given[:2], None, None, given[4]),
    "DoneText": lambda given: (*given[:2], "no", False, given[4]),
    "DoneArray": lambda given: (*given[:2], np.array([False]), False, given[4]),
    "DonePair": lambda given: (*given[:2], np.array([False, True]), False, given[4]),
    "DoneAtOnce": lambda given: (*given[:2], True, False, given[4]),
    "DoneBoth": lambda given: (*given[:2], True, True, given[4]),
    "DoneNever": lambda given: (*given[:2], False, False, given[4]),
    "InfoNone": lambda given: (*given[:4], None),
    "InfoList": lambda given: (*given[:4], []),
    "InfoMetricsNumber": lambda given: (*given[:4], {"metrics": 5}),
    "InfoMetricsText": lambda given: (*given[:4], {"metrics": {"a": "high"}}),
    "InfoMetricsNan": lambda given: (*given[:4], {"metrics": {"a": float("nan")}}),
    "InfoMetricsNested": lambda given: (*given[:4], {"metrics": {"a": {"b": [1]}}}),
    "InfoMetricsOddNames": lambda given: (*given[:4], {"metrics": {"a b/\n\x1b[2J": 1, 7: 2, None: 3}}),
    "InfoMask": lambda given: (*given[:4], {"action_mask": np.ones(2, np.int8)}),
    "Wanders": lambda given: (os.chdir("/"), given)[1],
    "Shouts": lambda given: (print("\x1b[2Jhello \ud800".encode(errors="replace")), given)[1],
}


def _made(name: str, base: type[Any] = Plain, **members: Any) -> type[Any]:
    return type(name, (base,), {"__module__": __name__, "__qualname__": name, **members})


def _step_of(change: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, action: change(Plain.step(self, action))


def _reset_of(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self, *, seed=None, options=None: change(Plain.reset(self, seed=seed))


class OldApi(Plain):
    """gym before 0.26: no seed, no info at reset, four results of a step."""

    def reset(self) -> Any:  # type: ignore[override]
        self.steps = 0
        return self.observation_space.sample()

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps >= 5, {}


class NeedsArguments(Plain):
    def __init__(self, scenario: str) -> None:
        self.scenario = scenario


class RllibStyle(Plain):
    def __init__(self, env_config: dict[str, Any]) -> None:
        self.env_config = env_config


class NoGymnasium:
    observation_space, action_space = Plain.observation_space, Plain.action_space

    def reset(self) -> Any:
        return np.zeros(3, np.float32), {}


class NoSpaces(gymnasium.Env[Any, Any]):
    pass


class ChangesItsMind(Plain):
    """Another space after each reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.observation_space = box(int(np.random.randint(1, 5)))
        return super().reset(seed=seed)


class MasksByMethod(Plain):
    def action_masks(self) -> Any:
        return np.ones(2, bool)


def _masks(name: str, *masks: Any) -> type[Any]:
    """An env whose `info` has these masks in turn; None: it has none."""

    def info(self: Any) -> dict[str, Any]:
        mask = masks[self.steps % len(masks)]
        return {} if mask is None else {"action_mask": mask}

    return _made(
        name,
        reset=lambda self, *, seed=None, options=None: (Plain.reset(self, seed=seed)[0], info(self)),
        step=lambda self, action: (*Plain.step(self, action)[:4], info(self)),
    )


def function_env(**kwargs: Any) -> Plain:
    return Plain()


def no_env() -> int:
    return 5


class Team:
    """Several agents, and nothing odd about them."""

    def __init__(self) -> None:
        self.possible_agents: Any = ["a", "b"]
        self.observation_spaces: Any = dict.fromkeys(self.possible_agents, box(3))
        self.action_spaces: Any = dict.fromkeys(self.possible_agents, spaces.Discrete(2))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)}, {}

    def step(self, actions: Any) -> Any:
        self.steps += 1
        ends = {name: self.steps >= 4 or name == "b" for name in actions}
        seen = {name: np.ones(3, np.float32) for name in actions}
        return seen, dict.fromkeys(actions, 1.0), ends, dict.fromkeys(actions, False), {}

    def close(self) -> None:
        return


def _with_masks(name: str, *masks: Any, key: bool = False) -> type:
    """A team whose agents have these masks in turn, in their infos or, with `key`, in their observations."""

    def init(self: Any) -> None:
        Team.__init__(self)
        if key:
            seen = spaces.Dict({"x": box(3), "action_mask": spaces.MultiBinary(2)})
            self.observation_spaces = dict.fromkeys(self.possible_agents, seen)

    def masked(self: Any, seen: Any) -> tuple[Any, Any]:
        mask = masks[self.steps % len(masks)]
        if key:
            return {agent: {"x": x, "action_mask": mask} for agent, x in seen.items()}, {}
        return seen, {} if mask is None else {agent: {"action_mask": mask} for agent in seen}

    def step(self: Any, actions: Any) -> Any:
        seen, *others, _ = Team.step(self, actions)
        seen, infos = masked(self, seen)
        return seen, *others, infos

    return _team(
        name, __init__=init, step=step, reset=lambda self, seed=None: masked(self, Team.reset(self, seed=seed)[0])
    )


TEAM_STEPS: dict[str, Callable[[Any, Step], Any]] = {
    "TeamStepRaises": lambda self, given: _raise(RuntimeError("broken")),
    "TeamSeesStrangers": lambda self, given: ({"z": 1}, *given[1:]),
    "TeamSeesNothing": lambda self, given: ({}, *given[1:]),
    "TeamWithoutRewards": lambda self, given: (given[0], {}, *given[2:]),
    "TeamWithOneReward": lambda self, given: (given[0], 1.0, *given[2:]),
    "TeamWithOneFlag": lambda self, given: (*given[:2], self.steps >= 3, False, {}),
    "TeamWithoutFlags": lambda self, given: (*given[:2], {}, {}, {}),
    "TeamOfFour": lambda self, given: given[:4],
    "TeamSeesNan": lambda self, given: (dict.fromkeys(given[0], np.full(3, np.nan)), *given[1:]),
    "TeamSeesLonger": lambda self, given: (dict.fromkeys(given[0], np.zeros(5)), *given[1:]),
}


def _team(name: str, **parts: Any) -> type:
    return type(name, (Team,), {"__module__": __name__, **parts})


class TeamWithOwnSpaces(Team):
    """Each agent has its own spaces; that of `b` is a mixture of choices and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.action_spaces = {"a": spaces.Discrete(2), "b": spaces.Dict({"x": spaces.Discrete(3), "y": box(2)})}


ODD: dict[str, Any] = {
    "Plain": Plain,
    "Team": Team,
    "TeamWithOwnSpaces": TeamWithOwnSpaces,
    "TeamWithMasks": _with_masks("TeamWithMasks", [1, 0], [0, 1]),
    "TeamWithMasksInObservations": _with_masks("TeamWithMasksInObservations", np.array([1, 0], np.int8), key=True),
    "TeamMasksAllowNothing": _with_masks("TeamMasksAllowNothing", [1, 1], [0, 0]),
    "TeamMasksMissing": _with_masks("TeamMasksMissing", [1, 1], None),
    "TeamMasksTooLong": _with_masks("TeamMasksTooLong", [1, 1, 1]),
    "TeamOfNobody": _team("TeamOfNobody", __init__=lambda self: setattr(self, "possible_agents", [])),
    "TeamWithoutSpaces": _team("TeamWithoutSpaces", __init__=lambda self: setattr(self, "possible_agents", ["a"])),
    "TeamResetGivesNothing": _team("TeamResetGivesNothing", reset=lambda self, seed=None: None),
    "TeamBeginsEmpty": _team("TeamBeginsEmpty", reset=lambda self, seed=None: (setattr(self, "steps", 0) or {}, {})),
    **{
        name: _team(name, step=lambda self, actions, change=change: change(self, Team.step(self, actions)))
        for name, change in TEAM_STEPS.items()
    },
    "OldApi": OldApi,
    "NeedsArguments": NeedsArguments,
    "RllibStyle": RllibStyle,
    "NoGymnasium": NoGymnasium,
    "NoSpaces": NoSpaces,
    "ChangesItsMind": ChangesItsMind,
    "MasksByMethod": MasksByMethod,
    "MasksInInfo": _masks("MasksInInfo", [1, 0], [0, 1], np.ones(2, bool)),
    "MasksAllowNothing": _masks("MasksAllowNothing", [1, 0], [1, 0], [0, 0]),
    "MasksTooShort": _masks("MasksTooShort", [1]),
    "MasksMissing": _masks("MasksMissing", [1, 0], None),
    "MasksOdd": _masks("MasksOdd", "no", {}, [0.5, 2], [None, 1]),
    "function_env": function_env,
    "no_env": no_env,
    "InitRaises": _made("InitRaises", __init__=lambda self: _raise(RuntimeError("no\nlicence"))),
    "InitExits": _made("InitExits", __init__=lambda self: _exit(0)),
    "ResetRaises": _made("ResetRaises", reset=_reset_of(lambda given: _raise(OSError(5, "no device")))),
    "ResetExits": _made("ResetExits", reset=_reset_of(lambda given: _exit(3))),
    "ResetGivesObservationOnly": _made("ResetGivesObservationOnly", reset=_reset_of(lambda given: given[0])),
    "ResetGivesNothing": _made("ResetGivesNothing", reset=_reset_of(lambda given: None)),
    "ResetTakesNoSeed": _made("ResetTakesNoSeed", reset=lambda self: Plain.reset(self)),
    "ResetSeesLonger": _made("ResetSeesLonger", reset=_reset_of(lambda given: (np.zeros(5, np.float32), {}))),
    "CloseRaises": _made("CloseRaises", close=lambda self: _raise(RuntimeError("cannot close"))),
    "CloseExits": _made("CloseExits", close=lambda self: _exit(0)),
    "SpacesAreNumbers": _made("SpacesAreNumbers", observation_space=3, action_space=2),
    "SpaceRaises": _made("SpaceRaises", observation_space=property(lambda self: _raise(RuntimeError("no space")))),
    **{name: _made(name, step=_step_of(change)) for name, change in STEPS.items()},
}
ODD |= {
    name: _made(name, __init__=lambda self, make=make: setattr(self, "observation_space", make()))
    for name, make in OBSERVATIONS.items()
}
ODD |= {
    name: _made(name, __init__=lambda self, make=make: setattr(self, "action_space", make()))
    for name, make in ACTIONS.items()
}
globals().update(ODD)  # they are loaded by name
