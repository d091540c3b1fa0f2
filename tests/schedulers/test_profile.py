"""Profiles of sites, and the options of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import UserError
from paceline.schedulers.job import Job
from paceline.schedulers.profile import read_profile, validated


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "paceline/sites"
    folder.mkdir(parents=True)
    return folder


def test_by_name_and_by_path(sites: Path, tmp_path: Path) -> None:
    assert read_profile(None).modules == []
    assert read_profile("eagle").scheduler == "slurm"
    (sites / "eagle.yaml").write_text("scheduler: pbs\nset: {A: 1, B: true, C: x}\n")
    own = read_profile("eagle")
    assert own.scheduler == "pbs" and own.set == {"A": "1", "B": "true", "C": "x"}
    (tmp_path / "here.yaml").write_text("modules: [purge]\n")
    assert read_profile(str(tmp_path / "here.yaml")).modules == ["purge"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("module: [x]", "--profile x: module: unknown; did you mean modules?"),
        ("defaults: {node: 2}", "--profile x: defaults.node: unknown; did you mean nodes"),
        ("defaults: {walltime: soon}", "--profile x: defaults.walltime=soon: expected a duration such as"),
        ("defaults: {nodes: 0}", "--profile x: defaults.nodes=0: "),
        ("set: {A B: 1}", "'A B' is not a valid name of a variable"),
        ("modules: purge", "--profile x: modules=purge: "),
        ("[1]", "--profile x: expected a mapping"),
        ("a: [", "--profile x, line 1, column 5: not YAML"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str, sites: Path) -> None:
    (sites / "x.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        read_profile("x")
    assert message in str(error.value)


def test_unknown_site_lists_the_known(sites: Path) -> None:
    (sites / "mine.yaml").write_text("")
    with pytest.raises(UserError, match="eagle, grid5000, mine, polaris, theta"):
        read_profile("elsewhere")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"name": "my job"}, "--name=my job: use a letter, then"),
        ({"memory": "16"}, "--memory=16: give a number with M, G or T"),
        ({"queue": "a\nb"}, "one line"),
        ({"extra": ("a\nb",)}, "one line"),
        ({"walltime": "1m"}, "save=120 s must be less than walltime=60 s"),
        ({"learner_queue": "gpu"}, "learner_queue=gpu needs learner_gpus"),
    ],
)
def test_options_of_a_job(tree: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as error:
        validated(Job, tree, "--")
    assert message in str(error.value)
