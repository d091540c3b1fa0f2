"""Wrong, odd and sometimes right invocations of every verb. The same number always gives the same one.

`{world}` in a word is a folder with the files below, `{runs}` one with runs of their own for each invocation.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zoo import ODD

from paceline.commands.flags import Option, Verb, options
from paceline.commands.main import VERBS
from paceline.config.algorithms import ALGORITHMS, algorithm_class
from paceline.config.keys import keys

FILES: dict[str, bytes] = {
    "good.yaml": b"seed: 1\nppo: {gamma: 0.9, rollout_steps: 8}\nenv: {envs_per_worker: 2}\nstop: {iterations: 1}\n",
    "empty.yaml": b"",
    "comments.yaml": b"# nothing\nppo:\n  # gamma: 1\n",
    "list.yaml": b"- algo: ppo\n",
    "number.yaml": b"5\n",
    "broken.yaml": b"ppo: {gamma: 0.9\nseed: 3\n",
    "binary.yaml": b"\0\1\2\xff",
    "latin1.yaml": "name: Zürich\n".encode("latin-1"),
    "utf16.yaml": "seed: 1\n".encode("utf-16"),
    "bom.yaml": b"\xef\xbb\xbfseed: 1\n",
    "tabs.yaml": b"ppo:\n\tgamma: 1\n",
    "windows.yaml": b"seed: 1\r\nppo:\r\n  gamma: 0.5\r\n",
    "keys.yaml": b"1: 2\nnull: 3\ntrue: 4\n",
    "nested_keys.yaml": b"ppo: {1: 2}\nenv: {kwargs: {3: 4}}\n",
    "list_key.yaml": b"? [a, b]\n: 1\n",
    "date.yaml": b"seed: 2024-99-99\n",
    "number_with_many_digits.yaml": b"seed: " + b"9" * 5000 + b"\n",
    "tag.yaml": b"seed: !!bool perhaps\n",
    "python.yaml": b"seed: !!python/object/apply:os.getcwd []\n",
    "two_documents.yaml": b"seed: 1\n---\nseed: 2\n",
    "recursive.yaml": b"env:\n  kwargs: &a\n    again: *a\n",
    "recursive_list.yaml": b"model: {hidden: &h [1, *h]}\n",
    "bomb.yaml": b"a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 9)),
    "bomb_in_kwargs.yaml": b"env:\n  kwargs:\n    a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    + b"".join(b"    a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 9)),
    "deep.yaml": b"env: {kwargs: {a: " + b"[" * 2000 + b"]" * 2000 + b"}}\n",
    "deeper.yaml": b"env: " + b"[" * 100_000 + b"]" * 100_000,
    "deep_block.yaml": b"".join(b" " * i + b"a:\n" for i in range(400)),
    "merge.yaml": b"base: &b {gamma: 1}\nppo: {<<: *b}\n",
    "space.yaml": b"ppo.gamma: [0.9, 0.99]\n",
    "space_ranges.yaml": b"ppo.learning_rate: {log: [1e-4, 1e-2]}\n",
    "space_odd.yaml": b"ppo.gamma: {log: [0, .inf]}\nppo.epochs: []\n",
    "suite.yaml": b"games: {pole: CartPole-v1}\ntotal_steps: 64\nepisodes: 1\n",
    "suite_odd.yaml": b"games: {a b: CartPole-v1, c: {env: Nope-v0, range: [1, 0]}}\nseeds: true\n",
    "study.yaml": b"workers: [1]\nseeds: 1\niterations: 1\n",
    "site.yaml": b"scheduler: slurm\nset: {A: b}\n",
    "site_odd.yaml": b"scheduler: 5\nset: [1]\ndefaults: {walltime: inf}\n",
    "hosts": b"127.0.0.1:1\n",
    "hosts_odd": b"a b c\n:::\nx@y@z:99999 cpus=-1\n",
    "hosts_latin1": "höst\n".encode("latin-1"),
    "hosts.yaml": b"hosts: ['127.0.0.1:1']\n",
    "hosts_odd.yaml": b"hosts: 5\npip: true\n",
    "ray.yaml": b"cluster_name: x\nprovider: {type: local, head_ip: 127.0.0.1, worker_ips: 5}\n",
    "syntax.py": b"class Env:\n    def reset(self:\n",
    "raises.py": b"raise OSError('not\\nhere')\n",
    "exits.py": b"import sys\nsys.exit(0)\n",
    "latin1.py": "name = 'Zürich'\n".encode("latin-1"),
    "net.py": b"import torch\nclass Net(torch.nn.Module):\n    def __init__(self, shape, outputs):\n"
    b"        super().__init__()\n        self.policy, self.value = torch.nn.Linear(shape[0], outputs), "
    b"torch.nn.Linear(shape[0], 1)\n    def forward(self, x):\n        return self.policy(x), self.value(x)[:, 0]\n"
    b"class Odd(Net):\n    def forward(self, x):\n        return 5\n",
    "algo.py": b"from paceline.algorithms.ppo import PPO\nclass Mine(PPO):\n    pass\nclass Nothing:\n    pass\n"
    b"class Env(PPO):\n    pass\n",
    "thesis.txt": b"mine\n",
}
RUNS = (
    "cartpole",
    "pendulum",
    "dqn",
    "memory",
    "masks",
    "team",
    "policies",
    "damaged",
    "no_checkpoint",
    "no_rows",
    "odd_config",
    "deep_config",
)

NUMBERS = ["0", "-1", "1", "2", "3", "0.5", "1e30", "-1e30", "1e18", "9" * 5000, "1e400", "nan", "-inf", ".nan", ".inf"]
WORDS = [
    "",
    " ",
    "true",
    "no",
    "none",
    "null",
    "auto",
    "many",
    "ppo",
    "é",
    "\udcff",
    "a\nb",
    "\x1b[31m",
    "x" * 300,
    "%s",
]
TREES = [
    "[]",
    "{}",
    "[1]",
    "[true]",
    "[64,-1]",
    "[1e30]",
    "{a: 1}",
    "{a: &x [*x]}",
    "[" * 300 + "]" * 300,
    "[1",
    "!!x 1",
    "2024-99-99",
    "[CartPole-v1]",
    "[{a: {}, b: {}}]",
    "[100000000,100000000]",
]
TIMES = [
    "90",
    "1s",
    "30m",
    "1h30m",
    "01:30:00",
    "soon",
    "1.2.3s",
    "-5s",
    "inf",
    "nan",
    "0",
    "9" * 400 + "s",
    "99:99:99",
]
PLACES = [
    "",
    ".",
    "/",
    "/proc",
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    "nowhere",
    "nowhere/at/all",
    "~",
    "~nobody-here/x",
    "{world}",
    "{world}/thesis.txt",
    "{world}/thesis.txt/x",
    "{runs}",
    "{runs}/cartpole",
    "{runs}/dqn",
    "{runs}/damaged",
    "{runs}/no_checkpoint",
    "{runs}/no_rows",
    "{runs}/odd_config",
    "{runs}/cartpole/checkpoints/last",
    "{runs}/cartpole/checkpoints/step-7",
    "{runs}/cartpol",
    "new",
    "new/er",
    "x" * 300,
    "\udcff",
    "a\nb",
]
ENVS = [
    "CartPole-v1",
    "Pendulum-v1",
    "paceline/Identity-v0",
    "CartPol-v1",
    "Nope-v0",
    ":Env",
    "a:b:c",
    "os:getcwd",
    "json:x",
    "{world}/syntax.py:Env",
    "{world}/raises.py:Env",
    "{world}/exits.py:Env",
    "{world}/latin1.py:Env",
    "{world}/nowhere.py:E",
    "nowhere.at.all:Env",
    "ALE/Nope-v5",
    "procgen:procgen-nope-v0",
    "paceline/Nope-v0",
]
ENDLESS = {"watch", "follow", "render", "interactive", "keep", "dashboard", "profile_run"}
"""Flags of commands that wait for their user."""
SLOW = {"episodes", "seeds", "trials", "every"}
STARTS_RAY = ("engine.workers", "engine.name", "engine.learners", "engine.address", "--workers", "--engine")


@dataclass(frozen=True)
class Invocation:
    words: tuple[str, ...]
    signal: int = 0
    after_seconds: float = 0.0
    """When to send the signal."""


def invocation(number: int) -> Invocation:
    rng = random.Random(f"invocation {number}")
    if number % 3 == 2:
        return Invocation(tuple(zoo_words(number // 3)))
    kinds = list(KINDS)
    made = KINDS[rng.choices(kinds, [WEIGHTS.get(kind, 1) for kind in kinds])[0]](rng)
    return made if isinstance(made, Invocation) else Invocation(tuple(made))


def zoo_words(number: int) -> list[str]:
    """Every odd environment, in a small run, then in a check, then in a run with memory or with several policies."""
    lap, at = divmod(number, len(ODD))
    name = "{zoo}:" + list(ODD)[at]
    if lap % 3 == 1:
        return ["envs", "check", name]
    more = ["multi_agent.policies=each"] if "Team" in name else ["model.memory=gru", "model.sequence_length=3"]
    return [
        "train",
        "--env",
        name,
        "--iterations",
        "1",
        "--preset",
        "none",
        "--quiet",
        "--set",
        "env.envs_per_worker=2",
        "--set",
        "ppo.rollout_steps=8",
        *(word for setting in (more if lap % 3 == 2 else []) for word in ("--set", setting)),
    ]


def scalar(rng: random.Random) -> str:
    return rng.choice(rng.choice([NUMBERS, WORDS, TIMES]))


def place(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return "{runs}/" + rng.choice(RUNS)
    return rng.choice(PLACES) if rng.random() < 0.5 else "{world}/" + rng.choice(list(FILES))


def env(rng: random.Random) -> str:
    return rng.choice(ENVS) if rng.random() < 0.3 else "{zoo}:" + rng.choice(list(ODD))


def setting(rng: random.Random, algo: str) -> str:
    """`KEY=VALUE`, about half of them with a value that the setting may take."""
    known = [(key, kind, default) for key, kind, default, _ in keys() if _fits(key, algo)]
    key, kind, default = rng.choice(known)
    if rng.random() < 0.05:
        key = rng.choice(["", ".", "ppo", "ppo.", ".gamma", "ppo.gama", "a.b.c", "env.kwargs.x", "seed.x", "é"])
    values = [default, scalar(rng), rng.choice(TREES)]
    if "|" in kind:
        values += 2 * kind.split(" | ")
    if kind.startswith(("int", "float")):
        values += [rng.choice(NUMBERS), *rng.choices(["1", "2", "3", "8", "0.5", "1.0", "0"], k=6)]
    if kind.startswith("bool"):
        values += 3 * ["true", "false"]
    if key == "env.kwargs":
        values += ["{render_mode: human}", "{nope: 1}", "{1: 2}", "{a: 2024-01-01}", "{a: !!binary aGk=}"]
    if key == "env.wrappers":
        values += [
            "[ClipReward]",
            "[Nope]",
            "[TimeLimit]",
            "[{TimeLimit: {max_episode_steps: 0}}]",
            "[RecordVideo]",
            "[5]",
            "[os:getcwd]",
            "[FlattenObservation, {TransformReward: {func: 5}}]",
            "[NormalizeObservation]",
        ]
    if key == "callbacks":
        values += ["{world}/net.py:Net", "[]", "[5]", "[{a: {}, b: {}}]", "os:getcwd", "{world}/raises.py:Net"]
    if key == "model.class":
        values += ["{world}/net.py:Net", "{world}/net.py:Odd", "os:getcwd", "net", "{world}/raises.py:Net"]
    if key == "model.hidden":
        values += ["[]", "[8]", "[8,8,8,8,8,8]", "[0]", "[1e9]", "[100000000,100000000]"]
    value = rng.choice(values)
    return f"{key}={value}"


def _fits(key: str, algo: str) -> bool:
    section = key.partition(".")[0]
    return section not in ALGORITHMS or section == algo


def train_words(rng: random.Random) -> list[str]:
    """A small run, with up to three things that are odd."""
    algo = rng.choice(["ppo", "ppo", *ALGORITHMS])
    words = ["train", "--algo", algo, "--env", env(rng), "--iterations", "1", "--preset", "none", "--quiet"]
    words += ["--set", "env.envs_per_worker=2", "--set", f"{algo}.rollout_steps=8"]
    words += ["--set", f"{algo}.rounds=2"] if "rounds" in algorithm_class(algo).Settings.model_fields else []
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2])):
        words += rng.choice(
            [
                *[lambda: ["--set", setting(rng, algo)]] * 8,
                lambda: ["--config", place(rng)],
                lambda: ["--out", place(rng)],
                lambda: ["--resume", rng.choice(["auto", place(rng)])],
                lambda: ["--init-from", place(rng)],
                lambda: ["--seeds", rng.choice(["0", "1,1", "0-999999", *WORDS])],
                lambda: ["--name", rng.choice(["a", "..", "a/b", ".", *WORDS])],
                lambda: [rng.choice(["--seed", "--threads", "--total-steps", "--stop-return"]), scalar(rng)],
                lambda: ["--max-time", rng.choice(TIMES)],
                lambda: [
                    "--algo",
                    rng.choice(
                        [
                            *WORDS,
                            "sac",
                            "{world}/algo.py:Mine",
                            "{world}/algo.py:Nothing",
                            "{world}/algo.py:Env",
                            "os:getcwd",
                        ]
                    ),
                ],
                lambda: ["--preset", rng.choice([*WORDS, "CartPole-v1", "none"])],
                lambda: ["--device", rng.choice(["cpu", "cuda", "gpu", ""])],
                lambda: ["--workers", rng.choice(NUMBERS)],
                lambda: ["--engine", rng.choice(["local", "ray", "rllib", "slurm", ""])],
            ]
        )()
    return without_ray(words)


def without_ray(words: list[str]) -> list[str]:
    """With a mistake that is found first, if the command may start Ray, which takes too long here."""
    starts = any(word.startswith(STARTS_RAY) for word in words)
    return [*words, "--set", "no.such=1"] if starts else words


def resume_words(rng: random.Random) -> list[str]:
    run = rng.choice(
        [f"{{runs}}/{rng.choice(RUNS)}", "{runs}/cartpole", "{runs}/cartpole/checkpoints/last", place(rng)]
    )
    words = ["train", "--resume", run, "--iterations", "2"]
    for _ in range(rng.choice([0, 1, 2])):
        words += rng.choice(
            [["--set", setting(rng, "ppo")], ["--name", "other"], ["--out", "new"], ["--preset", "CartPole-v1"]]
        )
    return without_ray(words)


def stopped_training(rng: random.Random) -> Invocation:
    words = ["train", "--env", "CartPole-v1", "--max-time", "60", "--name", "long", "--preset", "none"]
    return Invocation(tuple(words), signal.SIGTERM, rng.uniform(0.0, 1.0))


def odd_flags(rng: random.Random, verb: type[Verb], most: int = 3, skip: Sequence[str] = ()) -> list[str]:
    """Some flags of a verb, with values of all kinds."""
    known = [one for one in options(verb) if one.names and one.field not in {*ENDLESS, *skip}]
    words: list[str] = []
    for one in rng.sample(known, min(len(known), rng.randint(0, most))):
        words.append(rng.choice(one.names))
        if one.keywords.get("action") != "store_true":
            words.append(_value(rng, one))
    return words


def _value(rng: random.Random, option: Option) -> str:
    if option.field in SLOW:
        return rng.choice(["0", "1", "-1", "1e30", "nan", "", "many", "9" * 5000, "0-999999", "999999999999"])
    if "choices" in option.keywords and rng.random() < 0.7:
        return str(rng.choice(option.keywords["choices"]))
    metavar = str(option.keywords.get("metavar"))
    if any(word in metavar for word in ("FILE", "DIR", "RUN", "SITE", "CHECKPOINT")):
        return place(rng)
    if metavar == "KEY=VALUE":
        return setting(rng, "ppo")
    if option.setting == "env.id":
        return env(rng)
    if option.keywords.get("type") in (int, float) and rng.random() < 0.6:
        return rng.choice(["0", "1", "2", "3", "8"])
    return rng.choice(TIMES) if metavar == "TIME" else scalar(rng)


def on_places(*names: str, count: int = 1, skip: Sequence[str] = ()) -> Callable[[random.Random], list[str]]:
    """A verb that takes runs or folders."""

    def make(rng: random.Random) -> list[str]:
        given = [place(rng) if rng.random() < 0.4 else "{runs}/cartpole" for _ in range(rng.randint(0, count) or 1)]
        return [*names, *given, *odd_flags(rng, verb_named(*names), most=2, skip=skip)]

    return make


def verb_named(name: str, *more: str) -> Any:
    verb: Any = VERBS[name]
    return verb.verbs[more[0]] if more else verb


def check_words(rng: random.Random) -> list[str]:
    words = ["envs", rng.choice(["check", "check", "check", "check", "chek"]), env(rng)]
    return [*words, *(["--set", setting(rng, "ppo")] if rng.random() < 0.3 else [])]


def plot_words(rng: random.Random) -> list[str]:
    target = rng.choice(["a.png", "a.svg", "a.jpeg", "", "nowhere/a.png", "{world}/thesis.txt/a.png", place(rng)])
    return [*on_places("plot", count=2, skip=["output"])(rng), "-o", target]


def suite_words(rng: random.Random) -> list[str]:
    suite = rng.choice(["classic", "{world}/suite.yaml", "{world}/suite_odd.yaml", place(rng), scalar(rng)])
    algos = rng.choice(["ppo", "ppo,ppo", "ppo,a2c", "", ",", "sac", "{world}/algo.py:Mine"])
    return [
        "bench",
        "suite",
        "--suite",
        suite,
        "--algos",
        algos,
        "--dry-run",
        *odd_flags(rng, verb_named("bench", "suite")),
    ]


def scaling_words(rng: random.Random) -> list[str]:
    study = ["--study", rng.choice(["{world}/study.yaml", place(rng)])] if rng.random() < 0.5 else ["--iterations", "1"]
    return ["bench", "scaling", *study, *odd_flags(rng, verb_named("bench", "scaling")), "--dry-run"]


def forecast_words(rng: random.Random) -> list[str]:
    given = [rng.choice(["{runs}/cartpole", "{runs}", place(rng)]) for _ in range(rng.choice([1, 1, 2]))]
    workers = rng.choice(["64", "1,2,4", "8,64,512", "100000", "0", ",", "1,,2", scalar(rng)])
    words = ["bench", "forecast", *given, "--workers", workers]
    return [*words, *odd_flags(rng, verb_named("bench", "forecast"), most=2, skip=["workers"])]


def throughput_words(rng: random.Random) -> list[str]:
    """Always with a mistake: measuring takes seconds."""
    wrong = rng.choice([["--set", "ppo.gama=1"], ["nowhere"], ["--config", ""], ["--max-time", "inf"], ["--algo", "x"]])
    return ["bench", "throughput", *wrong, *odd_flags(rng, verb_named("bench", "throughput"), skip=["profile"])]


def tune_words(rng: random.Random) -> list[str]:
    spaces = ["{world}/space.yaml", "{world}/space_ranges.yaml", "{world}/space_odd.yaml", place(rng)]
    words = ["tune", "--env", env(rng), "--space", rng.choice(spaces), *odd_flags(rng, verb_named("tune"))]
    return [*words, "--metric", "no_such_metric"]


def submit_words(rng: random.Random) -> list[str]:
    words = ["submit", "--on", rng.choice(["slurm", "slurm", "pbs", "oar", "cobalt", "cluster:nowhere", scalar(rng)])]
    words += odd_flags(rng, verb_named("submit"), most=4, skip=["on", "dry_run"])
    words += rng.choice([[], ["--seeds", "0-3"], ["--seeds", "0-999999"], ["--seeds", "1,1"], ["--walltime", "inf"]])
    command = rng.choice(
        [["paceline", "train"], ["paceline", "train", "--config", place(rng)], ["true"], [], [""], ["a\nb"]]
    )
    return [*words, *(["--dry-run"] if rng.random() < 0.8 else []), "--", *command]


def launch_words(rng: random.Random) -> list[str]:
    wrong = rng.choice(
        [
            ["--port", "99999"],
            ["--port", "-1"],
            ["--rehearse", "0"],
            ["--rehearse", "-5"],
            ["--nodes", "0"],
            ["--timeout", "nan"],
            ["--timeout", "0"],
            ["--hosts", "nowhere"],
            ["--cpus", "0"],
            ["--hosts", "{world}/hosts_odd"],
            ["--interface", "zzz9", "--rehearse", "1"],
        ]
    )
    return ["launch", *odd_flags(rng, verb_named("launch"), skip=["rehearse"]), *wrong, "--", "true"]


def cluster_words(rng: random.Random) -> list[str]:
    action = rng.choice(["up", "status", "attach", "dashboard", "tensorboard", "down", "zzz"])
    hosts = rng.choice(
        ["hosts_odd", "hosts_latin1", "hosts_odd.yaml", "ray.yaml", "bomb.yaml", "deep.yaml", "list.yaml"]
    )
    return ["cluster", action, rng.choice(["{world}/" + hosts, place(rng), scalar(rng)])]


def job_words(rng: random.Random) -> list[str]:
    verb = rng.choice(["jobs", "logs", "cancel", "status", "fetch"])
    given = [rng.choice([scalar(rng), place(rng), "a:b"]) for _ in range(rng.choice([0, 1, 1, 2]))]
    return [verb, *given, *odd_flags(rng, verb_named(verb))]


def dashboard_words(rng: random.Random) -> list[str]:
    where = rng.choice(["nowhere", "{world}/thesis.txt", "/proc", "{runs}/cartpol", ""])
    return ["dashboard", where, *rng.choice([[], ["--port", "99999"], ["--port", "-1"], ["--port", "many"]])]


def helping(rng: random.Random) -> list[str]:
    name = rng.choice(list(VERBS))
    more = list(getattr(VERBS[name], "verbs", {}))
    return [name, *([rng.choice(more)] if more else []), "--help"]


def nonsense(rng: random.Random) -> list[str]:
    waits = ("train", "launch", "dashboard")  # for a user or for Ray, where the rest happens to be right
    words = [rng.choice([*(name for name in VERBS if name not in waits), scalar(rng)])]
    return words + [
        rng.choice([scalar(rng), place(rng), "--", "-", "--set", "-o", "--zzz"]) for _ in range(rng.randint(0, 4))
    ]


KINDS: dict[str, Callable[[random.Random], list[str] | Invocation]] = {
    "train": train_words,
    "resume": resume_words,
    "stopped": stopped_training,
    "evaluate": on_places("evaluate", skip=["episodes"]),
    "check": check_words,
    "plot": plot_words,
    "compare": on_places("compare", count=3),
    "report": on_places("report", count=3),
    "runs": on_places("runs"),
    "export": on_places("export"),
    "suite": suite_words,
    "scaling": scaling_words,
    "forecast": forecast_words,
    "throughput": throughput_words,
    "tune": tune_words,
    "submit": submit_words,
    "launch": launch_words,
    "cluster": cluster_words,
    "jobs": job_words,
    "dashboard": dashboard_words,
    "doctor": lambda rng: ["doctor", *odd_flags(rng, verb_named("doctor"))],
    "envs": lambda rng: ["envs", *odd_flags(rng, verb_named("envs"))],
    "help": helping,
    "nonsense": nonsense,
}
WEIGHTS = {
    "train": 40,
    "resume": 4,
    "evaluate": 8,
    "check": 10,
    "compare": 6,
    "plot": 4,
    "report": 3,
    "export": 3,
    "suite": 4,
    "scaling": 4,
    "forecast": 3,
    "throughput": 3,
    "tune": 4,
    "submit": 6,
    "launch": 3,
    "cluster": 3,
    "jobs": 4,
    "dashboard": 2,
    "help": 2,
    "nonsense": 4,
}
