"""`paceline submit`, with stand-ins for the schedulers' commands, whose answers are written by hand."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.schedulers import job_record
from paceline.schedulers.job_record import JobRecord

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    tool(tmp_path, "squeue", "")
    tool(tmp_path, "sacct", "exit 1")
    tool(tmp_path, "sbatch", "echo 17")
    tool(tmp_path, "scancel", "")
    return tmp_path


def tool(home: Path, name: str, lines: str) -> None:
    path = home / "bin" / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >>{home}/called\n{lines}\n')
    path.chmod(0o755)


def called(home: Path, name: str) -> list[str]:
    path = home / "called"
    return [line for line in path.read_text().splitlines() if line.startswith(f"{name} ")] if path.exists() else []


def folders(home: Path) -> list[Path]:
    return list((home / "data").glob("paceline/jobs/*"))


@pytest.mark.parametrize(
    "reason", ["PartitionTimeLimit", "PartitionNodeLimit", "BadConstraints", "QOSMaxCpuPerJobLimit"]
)
def test_what_can_never_run_is_refused(reason: str, home: Path, cli: Cli) -> None:
    tool(home, "squeue", f"echo '17|PENDING|{reason}||N/A|paceline'")
    result = cli("submit", "--on", "slurm", "--walltime", "2h", "--", "true")
    assert result.code == 2 and f"slurm accepted job 17, but can never start it ({reason})" in result.err
    assert called(home, "scancel") == ["scancel 17"] and not folders(home)


@pytest.mark.parametrize("seeds", [[], ["--seeds", "0-3"]])
def test_what_the_scheduler_refuses_leaves_no_folder(seeds: list[str], home: Path, cli: Cli) -> None:
    tool(home, "sbatch", "exit 1")
    assert cli("submit", "--on", "slurm", *seeds, "--", "true").code == 2 and not (home / "data").exists()
    (home / "data").mkdir()
    assert cli("submit", "--on", "slurm", *seeds, "--", "true").code == 2
    assert (home / "data").exists() and not [*(home / "data").iterdir()]


def test_what_only_waits_is_submitted(home: Path, cli: Cli) -> None:
    """SLURM knows the reason a moment later."""
    answers = "17|PENDING|None||N/A|x 17|PENDING|Priority||N/A|x"
    tool(home, "squeue", f"set -- {shlex.quote(answers)}; [ -e asked ] && echo '17|PENDING|Priority||N/A|x' || "
         "echo '17|PENDING|None||N/A|x'; touch asked")  # fmt: skip
    result = cli("submit", "--on", "slurm", "--", "true")
    assert result.code == 0 and "starts     20 at most, of 1:00:00 each" in result.out and not called(home, "scancel")
    assert len(called(home, "squeue")) == 2


def test_pbs_says_so_in_a_comment(home: Path, cli: Cli) -> None:
    for name in ("pbsnodes", "qdel"):
        tool(home, name, "")
    tool(home, "qsub", "echo 7.pbs0")
    comment = "Can Never Run: Insufficient amount of resource: ncpus"
    tool(home, "qstat", f"""echo '{{"Jobs": {{"7.pbs0": {{"job_state": "Q", "comment": "{comment}"}}}}}}'""")
    result = cli("submit", "--on", "pbs", "--cores", "99", "--", "true")
    assert result.code == 2 and comment in result.err and called(home, "qdel") == ["qdel 7.pbs0"] and not folders(home)


def recorded(number: str, **changes: Any) -> JobRecord:
    folder = job_record.new_folder("first")
    job_record.create_folder(folder)
    common: dict[str, Any] = {"command": ("true",), "cwd": "/", "nodes": 1, "walltime": 60, "submitted": 1e9}
    each = JobRecord(folder.name, "pbs", ids=(number,), folder=folder, **{"name": "first", **common, **changes})
    job_record.save(each)
    return each


@pytest.mark.parametrize(
    ("queue", "message"),
    [
        ("", "--after 99999: slurm knows no such job"),
        ("99999|FAILED|NonZeroExitCode|s1|N/A|x", "--after 99999: that job is failed (NonZeroExitCode), so this one"),
        ("99999|CANCELLED|None|s1|N/A|x", "would never start"),
    ],
)
def test_after_a_job_that_cannot_succeed(queue: str, message: str, home: Path, cli: Cli) -> None:
    tool(home, "squeue", f"echo '{queue}'")
    result = cli("submit", "--on", "slurm", "--after", "99999", "--", "true")
    assert result.code == 2 and message in result.err and not called(home, "sbatch") and not folders(home)


def test_after_takes_names_and_the_newest_id(home: Path, cli: Cli) -> None:
    """A job that continues itself has another id now; one that is done need not be waited for."""
    tool(home, "pbsnodes", "")
    tool(home, "qsub", "echo 9.pbs0")
    tool(home, "qstat", """echo '{"Jobs": {"8.pbs0": {"job_state": "R"}, "9.pbs0": {"job_state": "H"}}}'""")
    first, done = recorded("7.pbs0"), recorded("5.pbs0", name="done", state="done")
    (first.folder / "ids").write_text("8.pbs0\n")
    result = cli("submit", "--on", "pbs", "--after", "first", "--after", "done", "--", "true")
    assert result.code == 0, result.err
    assert called(home, "qsub")[0].startswith("qsub -W depend=afterok:8.pbs0 ")
    last = job_record.find("9")
    assert (last.folder / "after").read_text() == "8.pbs0\n" and not (done.folder / "dependents").exists()
    assert (first.folder / "dependents").read_text() == f"9.pbs0 {last.folder}\n"


def test_seeds_are_one_array(home: Path, cli: Cli) -> None:
    result = cli(
        *("submit", "--on", "slurm", "--name", "cart", "--cores", "1", "--seeds", "3,5,9", "--at-once", "2", "--"),
        *("paceline", "train", "--env", "X"),
    )
    assert result.code == 0 and len(called(home, "sbatch")) == 1, result.err
    assert "array      17 (slurm), 3 jobs of 1 host" in result.out and "cancel     paceline cancel 17" in result.out
    records = job_record.records()
    assert [each.ids for each in records] == [("17_0",), ("17_1",), ("17_2",)]
    assert [each.name for each in records] == ["cart-3", "cart-5", "cart-9"] and {each.array for each in records} == {
        "17"
    }
    assert all(
        f"--seed {seed} --name cart-{seed}-" in shlex.join(each.command)
        for each, seed in zip(records, (3, 5, 9), strict=True)
    )
    script = (records[0].folder / "array.sh").read_text()
    assert "#SBATCH --array=0-2%2\n" in script and "#SBATCH --job-name=cart\n" in script
    # The array's script runs the script of an element, which knows its id.
    (records[1].folder / "job.sh").write_text('#!/bin/sh\necho "$0"\n')
    environ = {**os.environ, "SLURM_ARRAY_TASK_ID": "1"}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=20)
    assert done.stdout == f"{records[1].folder}/job.sh\n"
    assert (
        "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
        in (records[2].folder / "job.sh").read_text()
    )


def test_where_there_are_no_arrays_seeds_are_jobs(home: Path, cli: Cli) -> None:
    tool(home, "qsub", "wc -l <called")
    assert cli("submit", "--on", "cobalt", "--seeds", "0-2", "--", "true").code == 0 and len(called(home, "qsub")) == 3
    assert cli("submit", "--on", "slurm", "--seeds", "0-2", "--learner-gpus", "1", "--", "true").code == 0
    assert len(called(home, "sbatch")) == 3
    result = cli("submit", "--on", "cobalt", "--seeds", "0-2", "--at-once", "1", "--", "true")
    assert result.code == 2 and "--at-once 1: needs --seeds" in result.err


@pytest.mark.parametrize(
    ("seeds", "message"),
    [("0-999", "--seeds 0-999: 1000 jobs are many; give --yes"), ("0-999999999", "at most 1,000 at once")],
)
def test_a_thousand_jobs_need_a_word(seeds: str, message: str, home: Path, cli: Cli) -> None:
    result = cli("submit", "--on", "slurm", "--seeds", seeds, "--", "true")
    assert result.code == 2 and message in result.err and not called(home, "sbatch") and not folders(home)
    if seeds == "0-999":
        assert cli("submit", "--on", "slurm", "--seeds", "0-100", "--yes", "--", "true").code == 0
        assert len(job_record.records()) == 101


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("venv: /nowhere/$USER/venv", "venv: /nowhere/$USER/venv in the profile has no bin/python3 here"),
        ("conda: /nowhere/env", "conda: /nowhere/env in the profile has no bin/python3"),
        ("conda: rl2", "conda: rl2 in the profile is unknown to conda, which has base, rl"),
        ("container: apptainer exec /nowhere/rl.sif", "container: /nowhere/rl.sif in the profile does not exist here"),
        ("ports: 80-90", "ports=80-90: give a range from 1024 to 65535 of at least 100 ports"),
    ],
)
def test_the_environment_of_a_profile_must_exist(
    profile: str, message: str, home: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "me")
    tool(home, "conda", """echo '{"envs": ["/opt/conda", "/opt/conda/envs/rl"]}'""")
    monkeypatch.delenv("CONDA_EXE", raising=False)
    (home / "site.yaml").write_text(f"scheduler: slurm\n{profile}\n")
    result = cli("submit", "--profile", "./site.yaml", "--", "true")
    assert result.code == 2 and message in result.err and not called(home, "sbatch")
    if "ports" not in profile:  # a script can be looked at before
        assert cli("submit", "--profile", "./site.yaml", "--dry-run", "--", "true").code == 0


@pytest.mark.parametrize("profile", ["venv: {prefix}", "conda: {prefix}", "conda: rl", "venv: /scratch/$ONLY_IN_JOBS"])
def test_an_environment_that_exists(profile: str, home: Path, cli: Cli) -> None:
    tool(home, "conda", """echo '{"envs": ["/opt/conda", "/opt/conda/envs/rl"]}'""")
    (home / "site.yaml").write_text(f"scheduler: slurm\n{profile.format(prefix=sys.prefix)}\n")
    assert cli("submit", "--profile", "./site.yaml", "--", "true").code == 0


def test_an_interactive_shell_follows_the_profile(home: Path, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    """`salloc` here runs the shell at once, which reads commands from its input as a terminal's would."""
    (home / "site.yaml").write_text(
        "scheduler: slurm\nset: {LICENSE: 1@host}\nlines: [ulimit -c 0]\nmodules: [load sim]\n"
    )
    shell = 'while [ "$1" != --pty ]; do shift; done; shift; echo \'echo got $LICENSE $LOADED $(ulimit -c)\' | "$@" -i'
    tool(home, "salloc", f"export HOME={home}; {shell}")
    (home / ".bashrc").write_text("module() { export LOADED=$2; }\n")
    result = cli("submit", "--profile", "./site.yaml", "--interactive")
    assert result.code == 0 and "on the host: paceline launch -- COMMAND" in result.err
    assert "got 1@host sim 0" in capfd.readouterr().out + result.out and not folders(home)
    tool(home, "qsub", "")
    result = cli("submit", "--profile", "./site.yaml", "--on", "pbs", "--interactive", "--", "true")
    assert (
        f"on the host: . {home}/data/paceline/jobs/shell-" in result.err and "setup.sh; paceline launch" in result.err
    )
