"""The verdict on a run's speed: its bottleneck, and what would and would not help.

A time split holds the seconds of one process in `start, env, act, learn, sync, eval, save, idle`. Shares are of the
training time, which excludes `start`, `eval` and `save`. On a GPU, `act` and `learn` are the time spent waiting for it.
With `overlap` the next rollout is collected during learning, and `learn` is the rest of learning after that.

The module stands at the bottom of the layers because the training loop prints the verdict and `results` computes it
again for the training time alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.config import UserError, algorithm_class, algorithm_name
from paceline.machine import Usage

TimeSplit = dict[str, float]

TRAINING = ("env", "act", "learn", "sync", "idle")
OVERHEAD = {"start": "set-up", "eval": "evaluation", "save": "saving"}
WASTE = ("sync", "stragglers", "idle")

OVERHEAD_SHARE = 0.5
"""If more than this share of all time is not training, that is the bottleneck."""
WORK_SHARE = 0.4
"""If no part of the work (env, act, learn) reaches this share, the run is balanced."""
WASTE_SHARE = 0.25
"""Exchange and waiting achieve nothing by themselves, so a smaller share of them is worth a verdict or a mention."""
FULL_CPU = 0.8
"""From this CPU use on, all cores count as taken: the system and uneven workers use the rest."""
COMPUTING_SHARE = 0.5
"""An environment that uses a core for a smaller share of its time mostly waits for something else."""
BUSY_SHARE = 0.1
"""If other programs use this share of the cores, and the run waits for a core this share of its time, it is told."""
MAX_GROWTH = 32
"""The advice never goes beyond this many times the measured workers."""


@dataclass(frozen=True)
class Verdict:
    bound: str
    """`env, env-waiting, act, learner, sync, stragglers, idle, balanced`; `set-up, evaluation, saving` if training is
    less than half of the time; `unknown` if nothing was measured."""
    share: float
    """Share of the bottleneck; of the largest part if balanced."""
    text: str
    """One line."""


_UNKNOWN = Verdict("unknown", 0.0, "unknown: no time has been measured yet")


@dataclass(frozen=True)
class _Run:
    algo: str
    faster_learning: str
    one_learner: bool
    can_overlap: bool
    workers: int
    nodes: int
    cpu_share: float | None
    stepping: Usage | None
    cores: int
    gpu: bool
    overlap: bool
    share: bool

    @property
    def full(self) -> bool:
        return self.cpu_share is not None and self.cpu_share >= FULL_CPU

    @property
    def fewer_steps(self) -> str:
        return self.faster_learning or "larger batches"

    @property
    def longer_rollouts(self) -> str:
        return f"a larger {self.algo}.rollout_steps"

    @property
    def no_core(self) -> str:
        return f"no core is free (of {self.cores})"

    @property
    def by_network(self) -> str:
        return " over the network" if self.nodes > 1 else ""

    @property
    def more_workers(self) -> str:
        """Whether more workers would have a core to run on."""
        if self.full:
            return f"{self.no_core}, so more workers need more cores"
        free = 0 if self.cpu_share is None else int(self.cores * (1.0 - self.cpu_share))
        if free:
            return f"more workers help (about {free} of {_count(self.cores, 'core')} free)"
        return "more workers help while there are free cores"

    def times(self, growth: float) -> tuple[int, str]:
        """`growth` times the workers, at least one more: the number, and the same as text."""
        number = max(self.workers + 1, round(self.workers * min(growth, MAX_GROWTH)))
        return number, f"{'about' if growth <= MAX_GROWTH else 'at least'} {number}"


def _declared(algo: str) -> tuple[str, bool, bool]:
    """What speeds up its learning, whether one learner learns for all workers, whether it can overlap."""
    try:
        algorithm = algorithm_class(algo)
    except UserError:  # a user's own, whose file is not on this machine
        return "", False, False
    return algorithm.faster_learning, algorithm.sharing in ("rollouts", "replay"), algorithm.can_overlap


def verdict(
    main: TimeSplit,
    actors: TimeSplit | None,
    *,
    algo: str,
    workers: int,
    nodes: int,
    cpu_share: float | None,
    cores: int,
    straggling: float | None,
    stepping: Usage | None = None,
    other_share: float | None = None,
    device: str = "cpu",
    overlap: bool = False,
    share: bool = True,
) -> Verdict:
    """`main`: mean time split of the processes that collect and learn; with `actors`, that of the learner.
    `actors`: mean time split of the processes that collect for the learner; None if there are none.
    `cpu_share`: CPU seconds of all processes of the run over (cores × wall seconds), if known.
    `straggling`: share of the training time in which the average worker has collected its rollout and waits for slower
    workers; part of `idle`.
    `stepping`: use of the processes that step environments, if known. `other_share`: share of the cores of this machine
    that other programs use, if known.
    `device`: where the network learns, `cpu` or the name of a GPU. `overlap`: the next rollout is collected meanwhile.
    `share`: whether additional workers learn too; those of RLlib only collect.
    """
    known_cpu = None if cpu_share is None or not math.isfinite(cpu_share) else min(1.0, max(0.0, cpu_share))
    gpu = device != "cpu" or overlap
    name, declared = algorithm_name(algo), _declared(algo)
    run = _Run(name, *declared, max(1, workers), max(1, nodes), known_cpu, stepping, max(1, cores), gpu, overlap, share)
    main = _tidy(main)
    if not any(main.values()):
        return _UNKNOWN
    overhead = {name: main[part] / sum(main.values()) for part, name in OVERHEAD.items()}
    training = _of_training(run, main, actors, straggling)
    found = _overhead(overhead, training) if sum(overhead.values()) > OVERHEAD_SHARE else training
    busy = _busy(run, main if actors is None else _tidy(actors), other_share)
    return replace(found, text=f"{found.text}; {busy}") if busy else found


def _of_training(run: _Run, main: TimeSplit, actors: TimeSplit | None, straggling: float | None) -> Verdict:
    if actors is not None:
        return _learner(run, main, _tidy(actors))
    if not any(main[part] for part in TRAINING):
        return _UNKNOWN
    shares = _shares(main)
    if run.gpu:
        return _gpu(run, shares)
    waiting = straggling if straggling is not None and math.isfinite(straggling) else 0.0
    shares["stragglers"] = min(max(0.0, waiting), shares["idle"])
    shares["idle"] -= shares["stragglers"]
    return _replicas(run, main, shares)


def _busy(run: _Run, collecting: TimeSplit, other_share: float | None) -> str:
    seconds = run.workers * sum(collecting[part] for part in TRAINING)
    waited = run.stepping.waited_seconds / seconds if run.stepping is not None and seconds else 0.0
    if waited < BUSY_SHARE or other_share is None or other_share < BUSY_SHARE:
        return ""
    return f"this machine is busy with other work: this run waited for a core {_percent(min(1.0, waited))} of the time"


def _overhead(shares: dict[str, float], training: Verdict) -> Verdict:
    bound = _largest(shares)
    helps = {
        "set-up": "it matters less in a longer run; more workers will not help",
        "evaluation": "a larger eval.every_steps or fewer eval.episodes helps; more workers will not help",
        "saving": "a larger checkpoint.every_seconds or a faster disk helps; more workers will not help",
    }[bound]
    much = f"{_percent(sum(shares.values()))} of all time is not training ({_listed(shares)})"
    rest = f"; the training itself is {training.text}" if training is not _UNKNOWN else ""
    return _bound(bound, shares[bound], f"{much}; {helps}{rest}")


def _replicas(run: _Run, main: TimeSplit, shares: dict[str, float]) -> Verdict:
    """One or several processes that collect and learn."""
    part = _largest(shares)
    share = shares[part]
    rest = _mention(shares, part)
    time = f"{_percent(share)} of the time"
    if not _stands_out(part, share):
        much = f"no part of the work takes {_percent(WORK_SHARE)} of the time ({_listed(shares)})"
        helps = f"{run.more_workers}; a change to one part alone gains little"
        return Verdict("balanced", share, f"balanced: {much}; {helps}")
    if part == "env":
        return _env(run, share, time, _computing(run, main, main, 0.0), None, rest)
    if part == "act":
        helps = "a larger env.envs_per_worker (larger batches) or a smaller network helps"
        return _bound("act", share, f"{time} is choosing actions; {helps}; {run.more_workers}{rest}")
    if part == "learn":
        rows = run.more_workers if run.full else "more workers share the rows"
        if run.one_learner:  # with actors, this process would only learn
            rows = f"actors would collect meanwhile, for at most {1.0 / share:.1f} times the speed"
        rows = rows if run.share else "more workers will not help, as they only collect; --engine ray will"
        helps = f"{run.fewer_steps} or a smaller network helps; {rows}; a faster environment will not help"
        return _bound("learner", share, f"{time} is gradient steps; {helps}{rest}")
    if part == "sync":
        between = f"{_count(run.workers, 'worker')} on {_count(run.nodes, 'node')}"
        much = f"{time} is the exchange{run.by_network} between {between}"
        fewer = "fewer nodes, or a faster link" if run.nodes > 1 else "fewer workers"
        return _bound(
            "sync",
            share,
            f"{much}; {run.fewer_steps} (fewer exchanges), or {fewer} helps; more workers will not help{rest}",
        )
    if part == "stragglers":
        helps = "engine.straggler_share=0.6 or steps of more even length helps; more workers will not help"
        return _bound("stragglers", share, f"{time} is waiting for slower workers to finish collecting; {helps}{rest}")
    return _idle(run, share, "more workers will not help", rest)


def _idle(run: _Run, share: float, no_help: str, rest: str) -> Verdict:
    much = f"{_percent(share)} of the time passes between iterations, outside the measured parts"
    return _bound("idle", share, f"{much}; {run.longer_rollouts} (fewer iterations) helps; {no_help}{rest}")


def _gpu(run: _Run, shares: dict[str, float]) -> Verdict:
    """One process with its environments on the CPU and its network on a GPU. More workers are no option."""
    # With `overlap`, waiting for learning means that learning takes longer than collecting.
    waits = run.overlap and shares["learn"] >= WASTE_SHARE
    part = "learn" if waits else _largest(shares)
    share = shares[part]
    time, rest = f"{_percent(share)} of the time", _mention(shares, part)
    hide = "" if run.overlap or not run.can_overlap else "engine.overlap=true (collect while learning) helps; "
    if not waits and not _stands_out(part, share):
        much = f"no part of the work takes {_percent(WORK_SHARE)} of the time ({_listed(shares)})"
        return Verdict("balanced", share, f"balanced: {much}; {hide}a change to one part alone gains little")
    if part == "learn":
        much = f"{time} is gradient steps on the GPU"
        if run.overlap:
            much = f"learning on the GPU takes longer than collecting, which waits for it {time}"
        helps = f"{run.fewer_steps}, a smaller network or a faster GPU helps; {hide}"
        return _bound("learner", share, f"{much}; {helps}more cores or environments will not help{rest}")
    if part == "env":
        idle = "learns and then waits" if run.overlap else "waits"
        much = f"{time} is the environments on the CPU, while the GPU {idle}"
        cores = "more cores help" if run.full else "more cores help, or env.processes to use the free ones"
        more = f"{run.no_core}, so {cores}" if run.full else cores
        return _bound("env", share, f"{much}; {more}; {hide}a smaller network or a faster GPU will not help{rest}")
    if part == "act":
        fewer = f"a larger env.envs_per_worker with a smaller {run.algo}.rollout_steps (fewer round trips) helps"
        shared = f"; {run.fewer_steps} helps too, as learning shares the GPU" if run.overlap else ""
        much = f"{time} is waiting for actions from the GPU, a round trip at every step"
        return _bound("act", share, f"{much}; {fewer}{shared}; {hide}more cores will not help{rest}")
    return _idle(run, share, "a faster GPU will not help", rest)


def _learner(run: _Run, learner: TimeSplit, actors: TimeSplit) -> Verdict:
    """One process that learns from what the actors collect."""
    shares = _shares(learner, ("learn", "sync", "idle"))
    part = _largest(shares)
    share = shares[part]
    if not share:
        return _UNKNOWN
    if part == "idle":
        return _actors(run, learner, actors, share)
    time = f"{_percent(share)} of the learner's time"
    if not _stands_out(part, share):
        much = f"the learner and its {_count(run.workers, 'actor')} keep pace ({_listed(shares)} of the learner's time)"
        return Verdict("balanced", share, f"balanced: {much}; only a faster learner together with more actors helps")
    rest = _mention(shares, part)
    if part == "sync":
        link = "a faster link or " if run.nodes > 1 else ""
        helps = f"{run.longer_rollouts} (fewer messages), {link}a smaller network helps; more actors will not help"
        return _bound("sync", share, f"{time} is the exchange{run.by_network} with its actors; {helps}{rest}")
    other = "a faster GPU" if run.gpu else "data-parallel ppo"
    where = " on the GPU" if run.gpu else ""
    helps = f"more actors will not help, {run.fewer_steps}, a smaller network or {other} will"
    return _bound("learner", share, f"{time} is gradient steps{where}; {helps}{rest}")


def _actors(run: _Run, learner: TimeSplit, actors: TimeSplit, waits: float) -> Verdict:
    """The learner mostly waits for data, so its actors are the bottleneck."""
    shares = _shares(actors)
    waiting = f"the learner waits for data {_percent(waits)} of the time"
    if not any(shares.values()):
        return _bound("idle", waits, f"{waiting}, and no actor has reported its time yet; more actors may help")
    # If each new actor brings as much as the present ones, this many keep the learner busy.
    number, said = run.times(1.0 / (1.0 - waits) if waits < 1.0 else math.inf)
    enough = f"{said} keep the learner busy"
    more = f"{run.no_core}, so more actors need more cores: {enough}" if run.full else f"more actors help: {enough}"
    part = _largest(shares)
    share = shares[part]
    rest = _mention(shares, part)
    time = f"{waiting} and {_percent(share)} of the actors' time"
    if not _stands_out(part, share):
        much = f"{waiting}, and no part takes {_percent(WORK_SHARE)} of the actors' ({_listed(shares)})"
        return Verdict("balanced", share, f"balanced: {much}; {more}; a faster learner will not help")
    if part == "env":
        return _env(run, share, time, _computing(run, learner, actors, learner["learn"]), (number, enough, more), rest)
    if part == "act":
        helps = "a larger env.envs_per_worker (larger batches) or a smaller network helps"
        return _bound(
            "act", share, f"{time} is choosing actions; {helps}; {more}; a faster learner will not help{rest}"
        )
    if part == "learn":  # the actors of A3C compute the gradients
        helps = f"a smaller network helps; {more}; a faster environment will not help"
        return _bound("learner", share, f"{time} is computing gradients; {helps}{rest}")
    if part == "sync":
        link = "fewer nodes, a faster link or " if run.nodes > 1 else ""
        helps = f"{run.longer_rollouts} (fewer messages), {link}a smaller network helps; a faster learner will not help"
        return _bound("sync", share, f"{time} is the exchange{run.by_network} with it; {helps}{rest}")
    helps = f"the hand-over is slow: {run.longer_rollouts} (fewer messages) helps; more actors will not help"
    return _bound("idle", share, f"{time} is also waiting; {helps}{rest}")


def _env(
    run: _Run, share: float, time: str, computing: float | None, enough: tuple[int, str, str] | None, rest: str
) -> Verdict:
    """`computing`: share of the environments' time that used a core. `enough`: how many actors keep the learner busy,
    as a number, as words and as advice; None without actors."""
    who = "workers" if enough is None else "actors"
    more = run.more_workers if enough is None else enough[2]
    no_help = f"a smaller network will not help{rest}"
    if run.full:
        return _bound("env", share, f"{time} is the environment; {more}; {no_help}")
    if run.cpu_share is None or computing is None:
        beyond = f"more {who} than cores help only if it waits for something else"
        return _bound("env", share, f"{time} is the environment; {more}; {beyond}; {no_help}")
    if computing >= COMPUTING_SHARE:
        return _bound("env", share, f"{time} is the environment, which computes; {more}; {no_help}")
    number, said = run.times(1.0 / run.cpu_share if run.cpu_share else math.inf)
    goal = enough[1] if enough is not None and enough[0] <= number else f"{said} until the CPU is full"
    used = f"CPU use {_percent(run.cpu_share)} of {_count(run.cores, 'core')}"
    much = f"{time} is the environment, which mostly waits ({used})"
    return _bound("env-waiting", share, f"{much}; more {who} than cores help: {goal}; more cores or {no_help}")


def _computing(run: _Run, main: TimeSplit, collecting: TimeSplit, learner_seconds: float) -> float | None:
    """Share of the environments' time that used a core: the CPU time minus acting and learning, which always compute.
    Waiting for a core that other programs use is no part of that time."""
    if run.cpu_share is None or not collecting["env"]:
        return None
    if run.stepping is not None:
        used, waited = run.stepping.cpu_seconds, run.stepping.waited_seconds
    else:  # with the CPU time of all processes, so a short run rather counts as computing
        used, waited = run.cpu_share * run.cores * sum(main.values()) - learner_seconds, 0.0
    used = max(0.0, used - run.workers * (collecting["act"] + collecting["learn"]))
    seconds = max(used, run.workers * collecting["env"] - waited)
    return used / seconds if seconds else None


def _tidy(lane: TimeSplit) -> TimeSplit:
    parts = {part: lane.get(part, 0.0) for part in (*OVERHEAD, *TRAINING)}
    return {part: seconds if math.isfinite(seconds) and seconds > 0.0 else 0.0 for part, seconds in parts.items()}


def _shares(lane: TimeSplit, parts: tuple[str, ...] = TRAINING) -> dict[str, float]:
    total = sum(lane[part] for part in parts)
    return {part: lane[part] / total if total else 0.0 for part in parts}


def _largest(shares: dict[str, float]) -> str:
    return max(shares, key=lambda part: shares[part])


def _stands_out(part: str, share: float) -> bool:
    return share >= (WASTE_SHARE if part in WASTE else WORK_SHARE)


def _mention(shares: dict[str, float], bound: str) -> str:
    """Large shares of waste besides the bottleneck."""
    more = {part: shares[part] for part in WASTE if part != bound and shares.get(part, 0.0) >= WASTE_SHARE}
    return f"; also {_listed(more)}" if more else ""


def _bound(bound: str, share: float, text: str) -> Verdict:
    return Verdict(bound, share, f"{bound}-bound: {text}")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _listed(shares: dict[str, float]) -> str:
    """`env 38 %, act 35 %`: the largest first, without those below 1 %."""
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {_percent(share)}" for part, share in ranked if share >= 0.01)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
