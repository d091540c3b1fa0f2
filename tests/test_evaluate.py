from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import pytest

import paceline
from paceline.envs import catalog
from paceline.evaluate import evaluate, use_offscreen_mujoco
from paceline.results.run_files import is_own_evaluation
from paceline.run import checkpoint
from paceline.run.directory import RunDirectory

ODD = Path(__file__).with_name("odd_envs.py")

STATISTICS = (
    "return_mean return_std return_median return_iqm return_min return_max return_ci_low return_ci_high length_mean"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    tree = {
        "env": {"id": "CartPole-v1", "max_episode_steps": 60},
        "name": "x",
        "out": str(out),
        "seed": 2,
        "stop": {"total_steps": 20_000},
        "eval": {"every_steps": 8000, "episodes": 5},
    }
    return paceline.train(tree).path


@pytest.fixture
def run(trained: Path, here: Path) -> Path:
    """A copy: an evaluation adds to the run."""
    shutil.copytree(trained, here / "x", symlinks=True)
    return Path("x")


def rows(run: Path) -> list[dict[str, Any]]:
    return RunDirectory(run).read_eval()


@pytest.mark.parametrize("episodes", [1, 7, 32, 45])
def test_exactly_so_many_episodes(episodes: int, run: Path, cli: Callable[..., Any]) -> None:
    before = rows(run)
    result = cli("evaluate", run, "--episodes", episodes)
    assert result.code == 0 and result.err == "" and f"{episodes} episodes" in result.out
    *same, row = rows(run)
    assert same == before and row["episodes"] == episodes and row["kind"] == "deterministic"
    with (run / "eval_episodes.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [int(line["episode"]) for line in table] == list(range(episodes))
    returns = [float(line["return"]) for line in table]
    assert row["return_mean"] == pytest.approx(sum(returns) / episodes) and row["return_max"] == max(returns)
    assert row["length_mean"] == pytest.approx(sum(float(line["length"]) for line in table) / episodes)
    assert set(STATISTICS.split()) <= row.keys()
    assert str(run / "eval.jsonl") in result.out and str(run / "eval_episodes.csv") in result.out


def test_an_environment_that_differs_from_training(run: Path, cli: Callable[..., Any]) -> None:
    result = cli(
        "evaluate", run, "--episodes", 5, "--set", "env.max_episode_steps=7", "--set", "env.kwargs.render_mode="
    )
    assert result.code == 0 and "with env.max_episode_steps=7" in result.out
    row = rows(run)[-1]
    assert row["env_settings"] == {"max_episode_steps": 7, "kwargs": {"render_mode": None}} and row["length_max"] == 7
    assert not is_own_evaluation(row) and is_own_evaluation(rows(run)[0])
    for words, named in {
        ("--set", "ppo.gamma=0.5"): "settings of the environment only",
        ("--set", "env.max_steps=3"): "unknown key 'env.max_steps'",
        ("--set", "env.id=Acrobot-v1"): "but the agent was trained on",
        ("--set", "env.id=Pendulum-v1"): "but the agent was trained on",
    }.items():
        refused = cli("evaluate", run, "--episodes", 2, *words)
        assert refused.code == 2 and named in refused.err and refused.err.count("\n") == 1
    assert rows(run)[-1] == row


def test_baselines_and_whether_the_task_is_solved(run: Path, cli: Callable[..., Any]) -> None:
    result = cli("evaluate", run, "--episodes", 5, "--constant", 1)
    row = rows(run)[-1]
    assert result.code == 0 and (row["kind"], row["action"], row["solved"]) == ("constant", "1", False)
    assert 7 < row["return_mean"] < 12  # the pole falls as fast as it can
    assert "solved   no: a mean of 475 is needed" in result.out
    for words in (["--constant", 2], ["--constant", 1, "--random"], ["--constant", 1, "--video", "a.gif"]):
        assert cli("evaluate", run, "--episodes", 2, *words).code == 2
    own = paceline.train({"env": "CartPole-v1", "name": "goal", "stop": {"iterations": 1, "return_mean": 5}})
    assert "solved   yes: the mean reaches 5" in cli("evaluate", own.path, "--episodes", 5).out


def test_metrics_of_the_environment(here: Path, cli: Callable[..., Any]) -> None:
    tree = {"env": f"{ODD}:Script", "name": "m", "stop": {"iterations": 1}, "eval": {"every_steps": 1, "episodes": 3}}
    made = paceline.train(tree)
    assert rows(made.path)[0]["env/mark"] > 0
    result = cli("evaluate", made.path, "--episodes", 4)
    assert result.code == 0 and f"env/mark {rows(made.path)[-1]['env/mark']:.4g}" in result.out


def test_a_hundred_by_default(run: Path, cli: Callable[..., Any]) -> None:
    assert cli("evaluate", run).code == 0 and rows(run)[-1]["episodes"] == 100


def test_the_same_seed_gives_the_same_result(here: Path) -> None:
    run = paceline.train({"env": "CartPole-v1", "stop": {"iterations": 1}}).path  # one that does not always win

    def result(**options: Any) -> dict[str, Any]:
        [row] = evaluate(run, episodes=20, **options)
        return {key: row[key] for key in STATISTICS.split()}

    kinds: list[dict[str, Any]] = [{}, {"stochastic": True}, {"random": True}]
    for options in kinds:
        assert result(**options) == result(**options)
        assert result(**options) != result(seed=1, **options)
    assert [row["kind"] for row in rows(run)] == ["deterministic"] * 4 + ["stochastic"] * 4 + ["random"] * 4
    with (run / "eval_episodes.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 12 * 20


def test_an_agent_beats_chance(run: Path, cli: Callable[..., Any]) -> None:
    for words in ([], ["--stochastic"], ["--random"]):
        assert cli("evaluate", run, "--episodes", 30, *words).code == 0
    best, sampled, chance = rows(run)[-3:]
    assert [row["kind"] for row in (best, sampled, chance)] == ["deterministic", "stochastic", "random"]
    assert best["return_mean"] > 50 and sampled["return_mean"] > 35 and 10 < chance["return_mean"] < 30


def test_which_checkpoint(run: Path, cli: Callable[..., Any]) -> None:
    last = checkpoint.find(run, "last")
    for words, expected in (
        ([run], checkpoint.find(run, "best")),
        ([run, "--checkpoint", "last"], last),
        ([run, "--checkpoint", last.name.removeprefix("step-")], last),
        ([run / "checkpoints" / "last"], last),
        ([last], last),
    ):
        assert cli("evaluate", *words, "--episodes", 1).code == 0
        row = rows(run)[-1]
        assert Path(row["checkpoint"]).resolve() == expected.resolve()
        assert f"step-{row['env_steps']}" == expected.name


def test_evaluating_leaves_the_weights_alone(run: Path) -> None:
    before = {str(p): p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()}
    evaluate(run, episodes=3, stochastic=True)
    assert before == {str(p): p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()}


def test_a_checkpoint_without_its_run(run: Path, cli: Callable[..., Any]) -> None:
    """It can be sent to somebody: nothing else is needed, and nothing is written beside it."""
    shutil.copytree(checkpoint.find(run, "last"), "alone")
    shutil.rmtree(run)
    result = cli("evaluate", "alone", "--episodes", 2)
    assert result.code == 0 and "written" not in result.out
    assert sorted(p.name for p in Path.cwd().rglob("*")) == ["alone", "arrays.safetensors", "state.json"]


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_a_video(suffix: str, run: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
        monkeypatch.delenv(variable, raising=False)
    before = rows(run)
    result = cli("evaluate", run, "--video", f"out.{suffix}")
    assert result.code == 0 and result.err == "", result
    assert f"video in out.{suffix}" in result.out
    frames = imageio.imread(f"out.{suffix}", plugin="FFMPEG" if suffix == "mp4" else "pillow")
    total = float(result.out.split()[1].rstrip(","))
    assert 10 < len(frames) <= total + 1
    if suffix == "mp4":  # a frame for each step of the one episode; a GIF shows equal ones as one, for longer
        assert len(frames) >= total - 1
    assert frames.shape[1:] == (400, 600, 3) and frames.std() > 5
    assert (frames[0] != frames[-1]).any()
    assert rows(run) == before and not [name for name in os.listdir() if "partial" in name]  # noqa: PTH208


def test_a_longer_video(run: Path, cli: Callable[..., Any]) -> None:
    result = cli("evaluate", run, "--video", "out.mp4", "--episodes", 2, "--stochastic", "--seed", 3)
    assert result.code == 0
    mean = float(result.out.split()[1].rstrip(","))
    assert abs(len(imageio.imread("out.mp4", plugin="FFMPEG")) - 2 * mean) <= 2


def test_an_env_that_cannot_be_filmed(here: Path, cli: Callable[..., Any]) -> None:
    paceline.train({"env": "paceline/KnownReturn-v0", "stop": {"iterations": 1}, "name": "y"})
    result = cli("evaluate", "runs/y", "--video", "out.mp4")
    assert result.code == 2 and len(result.err.splitlines()) == 1 and not Path("out.mp4").exists()


@pytest.mark.parametrize(
    ("installed", "variables", "expected"),
    [
        ({"EGL", "OSMesa"}, {}, "egl"),
        ({"OSMesa"}, {}, "osmesa"),
        (set(), {}, None),
        ({"EGL"}, {"DISPLAY": ":0"}, None),
        ({"EGL"}, {"MUJOCO_GL": "glfw"}, "glfw"),
    ],
)
def test_mujoco_renders_off_screen_where_there_is_none(
    installed: set[str], variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("paceline.evaluate.find_library", lambda name: name if name in installed else None)
    use_offscreen_mujoco()
    assert os.environ.get("MUJOCO_GL") == expected


def test_a_video_of_mujoco_that_fails_says_what_it_needs(
    here: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)  # a video recorded in this process has set it
    if not catalog.is_installed("mujoco"):
        pytest.skip("no mujoco")
    paceline.train({"env": "InvertedPendulum-v5", "stop": {"iterations": 1}, "name": "m"}, preset="none")
    hidden = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    result = command("evaluate", "runs/m", "--video", "out.gif", env=hidden | {"MUJOCO_GL": "glfw"})
    assert result.code == 2 and "Traceback" not in result.err and not Path("out.gif").exists()
    last = result.err.splitlines()[-1]
    assert last.startswith("paceline: --video") and "MUJOCO_GL=egl" in last and "MUJOCO_GL=osmesa" in last


def test_rows_are_strict_json(run: Path) -> None:
    evaluate(run, episodes=1)  # of one episode there is no spread

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    for line in (run / "eval.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
