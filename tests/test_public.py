"""What a user of the package finds: names, tables, figures, agents in one file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.config.wording import in_python

ROOT = Path(__file__).parents[1]
PUBLIC = "Agent Callback Run UserError compare envs evaluate load plot report train"
SMALL: dict[str, Any] = {"env": {"id": "CartPole-v1", "envs_per_worker": 4}, "stop": {"iterations": 2}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> paceline.Run:
    out = str(tmp_path_factory.mktemp("runs"))
    often = {"eval": {"every_steps": 400, "episodes": 2}}
    return paceline.train({**SMALL, **often, "out": out, "name": "x"}, preset="none")


def test_what_tab_shows() -> None:
    assert [name for name in dir(paceline) if not name.startswith("_")] == PUBLIC.split() == paceline.__all__
    for name in PUBLIC.split():
        assert callable(getattr(paceline, name)) and getattr(paceline, name).__doc__
    assert paceline.__version__


def test_names_do_not_depend_on_what_is_imported() -> None:
    """`paceline.evaluate` and `paceline.report` are modules, too, and importing them sets the same names."""
    code = (
        "import paceline.evaluate, paceline.report.page, paceline.envs.check, paceline\n"
        "print(paceline.envs()['Toy text'][0])\n"
        "try: paceline.evaluate('nowhere')\n"
        "except paceline.UserError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="/")
    assert "no run at nowhere" in done.stdout and done.returncode == 0, done.stderr


def test_a_run_shows_its_state_and_its_numbers(run: paceline.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    again = paceline.Run(run.path)
    for one in (run, again):
        steps = run.summary["env_steps"]
        assert repr(one) == f"<Run {run.path}: done, return {run.summary['return_mean']:.2f} after {steps:,} steps>"
        assert one.outcome.reason == "2 of 2 iterations done" and one.config["env"]["id"] == "CartPole-v1"
    pytest.importorskip("pandas")
    assert list(run.metrics["iteration"]) == [1, 2] and run.metrics["env_steps"].iloc[-1] == steps
    assert len(run.evaluations) == 2
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert [row["iteration"] for row in run.metrics] == [1, 2]
    with pytest.raises(paceline.UserError, match="no run at"):
        paceline.Run("nowhere")


def test_evaluating_comparing_drawing_and_reporting(run: paceline.Run, here: Path) -> None:
    [row] = run.evaluate(episodes=3, seed=5)
    [same] = paceline.evaluate(run, episodes=3, seed=5)
    assert row["episodes"] == 3 and row["return_mean"] == same["return_mean"]
    compared = paceline.compare([run, run.path])
    assert "| group |" in repr(compared) and compared.result.results[0].score.value > 0
    pytest.importorskip("matplotlib")
    assert len(run.plot(smooth=2).axes) >= 6 and run.plot("x.svg") == Path("x.svg") and Path("x.svg").is_file()
    assert paceline.plot([run, run.path], "two.png").is_file()
    assert paceline.report(run, "page.md", title="Mine").read_text().startswith("# Mine")


def test_an_environment_is_checked(here: Path) -> None:
    report = paceline.envs.check("CartPole-v1", max_episode_steps=10)
    assert not report.problems and "ready to train on" in repr(report)


# -- agents -----------------------------------------------------------------------------------------------------------


def test_one_observation_or_a_batch(run: paceline.Run) -> None:
    agent = run.load()
    several = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    assert agent.act(several) == [agent.act(one) for one in several] == agent.act(several, batch=True)
    assert {agent.act(several[0], deterministic=False) for _ in range(100)} == {0, 1}
    assert f"<Agent of ppo for CartPole-v1: Box(4,) → Discrete(2); {agent.path}, " in repr(agent)


def test_what_the_policy_thinks(run: paceline.Run) -> None:
    agent = run.load()
    several = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    seen = agent.inspect(several)
    assert seen.probabilities.shape == (5, 2) and np.allclose(seen.probabilities.sum(axis=1), 1)
    assert seen.action == list(seen.probabilities.argmax(axis=1)) == agent.act(several)
    one = agent.inspect(several[2])
    assert one.value == pytest.approx(seen.value[2]) and one.probabilities == pytest.approx(seen.probabilities[2])
    assert "probabilities=" in repr(one) and "mean" not in repr(one)
    sampled = [agent.act(several[2], deterministic=False) for _ in range(2_000)]
    assert np.mean(sampled) == pytest.approx(one.probabilities[1], abs=0.05)


@pytest.mark.parametrize(
    ("algo", "env", "fields"),
    [
        ("dqn", "CartPole-v1", {"action_values": (2,)}),
        ("sac", "Pendulum-v1", {"mean": (1,), "std": (1,)}),
        ("ppo", "Pendulum-v1", {"mean": (1,), "std": (1,)}),
    ],
)
def test_what_other_policies_think(algo: str, env: str, fields: dict[str, Any], here: Path) -> None:
    tree = {"algo": algo, "env": env, "model": {"hidden": [8]}, algo: {"rollout_steps": 8}, "stop": {"iterations": 1}}
    agent = paceline.train(tree, preset="none").load()
    seen = agent.inspect(agent.observation_space.sample())
    known = {name: np.shape(value) for name, value in vars(seen).items() if value is not None}
    assert known.pop("action") == np.shape(agent.action_space.sample())
    assert (known.pop("value", None) is None) != agent.config.algorithm.has_value
    assert known == fields


def test_memory_stays_as_it_was(here: Path) -> None:
    tree = {**SMALL, "model": {"memory": "gru", "hidden": [8]}, "stop": {"iterations": 1}}
    agent, other = (paceline.load(paceline.train(tree, preset="none")) for _ in range(2))
    for observation in np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32):
        agent.inspect(observation)
        assert agent.inspect(observation).value == agent.inspect(observation).value
        assert agent.act(observation) == other.act(observation)
    agent.reset()


def test_an_agent_is_one_file(run: paceline.Run, here: Path) -> None:
    agent = run.load()
    assert agent.save("a.paceline") == Path("a.paceline")
    whole = sum(file.stat().st_size for file in agent.path.iterdir())
    assert Path("a.paceline").stat().st_size < whole  # without optimizer and environments
    code = (
        "import numpy, paceline, json\n"
        "agent = paceline.load('a.paceline')\n"
        "seen = agent.inspect(numpy.full(4, 0.1))\n"
        "print(json.dumps([seen.value, agent.act(numpy.full(4, 0.1)), agent.counters['env_steps']]))\n"
        "print(paceline.evaluate('a.paceline', episodes=2, seed=3)[0]['return_mean'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    here_too = agent.inspect(np.full(4, 0.1))
    assert eval(first) == [pytest.approx(here_too.value), here_too.action, agent.counters["env_steps"]]
    assert float(second) == run.evaluate(episodes=2, seed=3)[0]["return_mean"]


def test_a_file_that_is_no_agent(run: paceline.Run, here: Path) -> None:
    Path("text").write_text("text")
    with pytest.raises(paceline.UserError, match="text is a file, not a run directory"):
        paceline.load("text")
    run.load().save("a.paceline")
    Path("cut").write_bytes(Path("a.paceline").read_bytes()[:500])
    with pytest.raises(paceline.UserError):
        paceline.load("cut")
    with pytest.raises(paceline.UserError, match="cannot be written"):
        run.load().save("nowhere/a.paceline")


# -- words ------------------------------------------------------------------------------------------------------------


COMMAND_LINE = "commands launch schedulers jobs ssh_cluster doctor bench tune"


def messages() -> list[str]:
    """All texts in the package that name a flag, but for docstrings and what only the command line shows."""
    found = []
    for file in sorted((ROOT / "src/paceline").rglob("*.py")):
        if file.relative_to(ROOT / "src/paceline").parts[0] in COMMAND_LINE.split() or file.stem == "train_flags":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("UserError", "ValueError"):
                texts = [ast.unparse(part) for part in node.args if isinstance(part, ast.JoinedStr | ast.Constant)]
                found += [text for text in texts if re.search(r"(?<!\w)--?[a-z]", text)]
    return found


def test_errors_speak_of_keys_and_not_of_flags() -> None:
    assert len(messages()) > 50
    for message in messages():
        said = in_python(message)
        assert not re.search(r"(?<![\w`])--?[a-z]", re.sub(r"`[^`]*`", "", said)), said
    assert in_python("use --engine local or ray, see --device") == "use engine.name=local or ray, see engine.device"
    assert in_python("--episodes 0: at least 1") == "episodes=0: at least 1"
    assert in_python("not for --algo dqn: see `paceline --help`") == "not for algo=dqn: see `paceline --help`"


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: paceline.train({**SMALL, "name": "x"}, keep_schedule=True), "keep_schedule is for a run that"),
        (
            lambda: paceline.train({"algo": "ppo", "dqn": {"gamma": 1}}),
            "dqn.gamma is a setting of algo=dqn, but this run uses",
        ),
        (lambda: paceline.train(SMALL, preset="nope"), "preset 'nope' is not known"),
        (lambda: paceline.train("nowhere.yaml"), "config=nowhere.yaml: there is no such file"),
        (lambda: paceline.train({**SMALL, "name": "a/b"}), "name="),
        (lambda: paceline.evaluate("nowhere"), "no run at nowhere"),
        (lambda: paceline.compare("nowhere"), "nowhere"),
        (lambda: paceline.plot("nowhere", "x.doc"), "output=x.doc: a figure ends in"),
        (lambda: paceline.report("nowhere", "x.doc"), "out=x.doc: a report ends in"),
    ],
)
def test_what_errors_say_in_python(call: Any, named: str, here: Path) -> None:
    with pytest.raises(paceline.UserError) as caught:
        call()
    assert named in str(caught.value) and "--" not in str(caught.value)


def test_quiet_is_quiet(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paceline.train({**SMALL, "name": "x"}, preset="none")
    assert capfd.readouterr() == ("", "")
    paceline.train({**SMALL, "name": "y"}, preset="none", quiet="run")
    assert capfd.readouterr().out.split() == ["run", "runs/y"] * 2
