"""Scripts are checked by bash and shellcheck, and run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from paceline.launch import SCHEDULERS
from paceline.launch.job import Job
from paceline.launch.profile import Profile, read_profile
from paceline.launch.script import Place, render

ODD = Profile(
    modules=["purge", "load conda/3"],
    venv="/venv of $USER",
    unset=["LD_PRELOAD", "http_proxy"],
    set={"A": 'say "hi" to $USER', "B": "1"},
    scratch="/scratch/$USER",
    interface="hsn0",
    lines=["ulimit -c 0"],
)


@pytest.mark.parametrize("name", list(SCHEDULERS))
@pytest.mark.parametrize(
    "profile", [Profile(), ODD, Profile(conda="rl"), Profile(conda="/p/$USER/rl", launcher="aprun -n 2")]
)
@pytest.mark.parametrize("attempts", [1, 20])
def test_shellcheck(name: str, profile: Profile, attempts: int, tmp_path: Path) -> None:
    place = Place(tmp_path / "it's here", Path("/work of/mine"), "/venv/bin/python")
    text = render(SCHEDULERS[name], Job(nodes=2, attempts=attempts), profile, place, ["echo", "it's", "a b", "$HOME"])
    script = tmp_path / "job.sh"
    script.write_text(text)
    assert text.startswith("#!/bin/bash") and SCHEDULERS[name].prefix in text
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    assert shutil.which("shellcheck"), "apt-get install shellcheck"
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("site", ["grid5000", "eagle", "polaris", "theta"])
def test_examples_of_sites(site: str, tmp_path: Path) -> None:
    profile = read_profile(site)
    assert profile.scheduler is not None
    job = Job.model_validate({"nodes": 2, **profile.defaults})
    text = render(SCHEDULERS[profile.scheduler], job, profile, Place(tmp_path, tmp_path), ["true"])
    done = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_values_of_a_profile(tmp_path: Path) -> None:
    """Variables and the home folder are put in; nothing else is touched, or run."""
    values = {"A": "$WHO's", "B": "~/x y", "C": r'a\$b \n `id` "q"', "D": "plain:1", "E": "b~"}
    place = Place(tmp_path, tmp_path, "/bin/python3")
    lines = render(SCHEDULERS["slurm"], Job(), Profile(set=values, venv="~/v"), place, ["true"]).splitlines()
    given = "\n".join(line for line in lines if line.startswith("export ") and "DEADLINE" not in line)
    show = f'{given}\nprintf "%s\\n" "$A" "$B" "$C" "$D" "$E" "$VIRTUAL_ENV"'
    done = subprocess.run(
        ["/bin/bash", "-c", show], env={"HOME": "/h", "WHO": "me"}, capture_output=True, text=True, timeout=20
    )
    assert done.stdout.splitlines() == ["me's", "/h/x y", r'a$b \n `id` "q"', "plain:1", "b~", "/h/v"], done


# A `paceline` that does not launch: it runs what follows the `--`.
FAKE_PYTHON = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


class Started:
    """A script that runs, as a scheduler would start it."""

    def __init__(self, tmp_path: Path, command: list[str], name: str = "slurm", **job: object) -> None:
        self.folder = tmp_path / "folder"
        self.folder.mkdir()
        tools = tmp_path / "bin"
        tools.mkdir()
        for tool, text in {
            "python3": FAKE_PYTHON,
            "scontrol": f"#!/bin/sh\necho scontrol $* >>{self.folder}/called\n",
            "qsub": f"#!/bin/sh\necho qsub $* >>{self.folder}/called\necho 8.pbs1\n",
        }.items():
            (tools / tool).write_text(text)
            (tools / tool).chmod(0o755)
        place = Place(self.folder, tmp_path, str(tools / "python"))
        scheduler = SCHEDULERS[name]
        script = self.folder / "job.sh"
        script.write_text(render(scheduler, Job.model_validate(job), Profile(), place, command))
        environ = {**os.environ, scheduler.id_variable: "7"}
        self.process = subprocess.Popen(["bash", str(script)], env=environ)

    def wait_for(self, word: str) -> None:
        limit = time.monotonic() + 20
        while word not in self.output:
            assert time.monotonic() < limit, self.output
            time.sleep(0.02)

    @property
    def output(self) -> str:
        path = self.folder / "output.log"
        return path.read_text() if path.exists() else ""

    @property
    def called(self) -> str:
        path = self.folder / "called"
        return path.read_text() if path.exists() else ""

    def end(self) -> int:
        return self.process.wait(timeout=20)


def test_exit_code_and_files(tmp_path: Path) -> None:
    job = Started(tmp_path, ["sh", "-c", "echo in $PWD until $PACELINE_DEADLINE; exit 3"], walltime=600, save=60)
    assert job.end() == 3
    assert f"in {tmp_path} until " in job.output and (job.folder / "exit_code").read_text() == "3\n"
    number, at = (job.folder / "starts").read_text().split()
    assert number == "7" and abs(int(at) - time.time()) < 60
    deadline = int(job.output.split("until ")[1].split()[0])
    assert abs(deadline - time.time() - 600) < 60 and job.called == ""


# Ready a little late: `timeout` above it, if its fork has not returned yet, ends itself at a signal.
SAVES = """
trap "echo saved; exit 99" USR1
trap "echo ended; exit 99" TERM
sleep 0.3
echo ready
while :; do sleep 0.1; done"""


@pytest.mark.parametrize(
    ("name", "number", "called"),
    [
        ("slurm", signal.SIGUSR1, "scontrol requeue 7"),
        ("oar", signal.SIGUSR2, ""),
        ("pbs", signal.SIGUSR1, "qsub"),
        ("cobalt", signal.SIGUSR2, "qsub"),
    ],
)
def test_signal_arrives_and_the_job_starts_again(name: str, number: int, called: str, tmp_path: Path) -> None:
    job = Started(tmp_path, ["bash", "-c", SAVES], name)
    job.wait_for("ready")
    job.process.send_signal(number)
    assert job.end() == 99 and "saved" in job.output
    assert job.called.startswith(called) and bool(job.called) == bool(called)
    if called == "qsub":
        assert (job.folder / "ids").read_text() == "8.pbs1\n"


@pytest.mark.parametrize(("words", "code"), [(["paceline", "train"], 99), (["some", "thing"], 138)])
def test_told_to_stop_before_it_listens(words: list[str], code: int, tmp_path: Path) -> None:
    """A training has lost nothing then; of another command one cannot know."""
    job = Started(tmp_path, ["bash", "-c", "echo ready; sleep 20; :", *words])
    job.wait_for("ready")
    job.process.send_signal(signal.SIGUSR1)
    assert job.end() == code and bool(job.called) == (code == 99)


def test_two_signals_do_not_end_the_wait(tmp_path: Path) -> None:
    job = Started(
        tmp_path,
        ["bash", "-c", 'trap "echo one more" USR1; echo ready; for i in 1 2 3 4 5 6 7 8; do sleep 0.2; done; exit 5'],
    )
    job.wait_for("ready")
    for count in (1, 2):
        job.process.send_signal(signal.SIGUSR1)
        limit = time.monotonic() + 10
        while job.output.count("one more") < count and time.monotonic() < limit:
            time.sleep(0.02)
    assert job.end() == 5 and job.output.count("one more") == 2


def test_cancelled_jobs_stay_ended(tmp_path: Path) -> None:
    job = Started(tmp_path, ["bash", "-c", SAVES])
    job.wait_for("ready")
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 99 and "ended" in job.output and job.called == ""


def test_cancelled_by_paceline(tmp_path: Path) -> None:
    job = Started(tmp_path, ["bash", "-c", SAVES], "pbs")
    job.wait_for("ready")
    (job.folder / "cancelled").touch()
    job.process.send_signal(signal.SIGUSR1)
    assert job.end() == 99 and job.called == ""


def test_the_last_attempt(tmp_path: Path) -> None:
    assert Started(tmp_path, ["sh", "-c", "exit 99"], attempts=1).end() == 99
    again = tmp_path / "oar"
    again.mkdir()
    job = Started(again, ["sh", "-c", "sleep 0.5; exit 99"], "oar", attempts=2)
    (job.folder / "starts").write_text("5 1\n")  # it has started before
    assert job.end() == 1 and job.called == ""  # 99 would make OAR submit it again


def test_where_the_scheduler_gives_no_signal_the_clock_does(tmp_path: Path) -> None:
    job = Started(tmp_path, ["bash", "-c", SAVES], "pbs", walltime=3, save=2)
    assert job.end() == 99 and "saved" in job.output and job.called.startswith("qsub")
