"""Scripts are checked by bash and shellcheck, and run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.jobs.submit import Submission
from paceline.schedulers import SCHEDULERS, job_record
from paceline.schedulers.job import Job
from paceline.schedulers.profile import Profile, read_profile
from paceline.schedulers.script import JobPaths, render, site_lines

Shellcheck = Callable[[str], None]
ODD = Profile(
    modules=["purge", "load conda/3"],
    venv="/venv of $USER",
    unset=["LD_PRELOAD", "http_proxy"],
    set={"A": 'say "hi" to $USER', "B": "1"},
    scratch="/scratch/$USER",
    interface="hsn0",
    ports="20000-20999",
    container="apptainer exec --nv '/images of $USER/rl.sif'",
    lines=["ulimit -c 0"],
)


@pytest.mark.parametrize("name", list(SCHEDULERS))
@pytest.mark.parametrize(
    "profile", [Profile(), ODD, Profile(conda="rl"), Profile(conda="/p/$USER/rl", launcher="aprun -n 2")]
)
@pytest.mark.parametrize("attempts", [1, 20])
def test_shellcheck(name: str, profile: Profile, attempts: int, tmp_path: Path, shellcheck: Shellcheck) -> None:
    paths = JobPaths(tmp_path / "it's here", Path("/work of/mine"), "/venv/bin/python", record='{"command": ["$HOME"]}')
    text = render(SCHEDULERS[name], Job(nodes=2, attempts=attempts), profile, paths, ["echo", "it's", "a b", "$HOME"])
    script = tmp_path / "job.sh"
    script.write_text(text)
    assert text.startswith("#!/bin/bash") and SCHEDULERS[name].prefix in text
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    shellcheck(text)


@pytest.mark.parametrize("site", ["grid5000", "eagle", "polaris", "theta"])
def test_examples_of_sites(site: str, tmp_path: Path, shellcheck: Shellcheck) -> None:
    profile = read_profile(site)
    assert profile.scheduler is not None
    job = Job.model_validate({"nodes": 2, **profile.defaults})
    shellcheck(render(SCHEDULERS[profile.scheduler], job, profile, JobPaths(tmp_path, tmp_path), ["true"]))


def test_values_of_a_profile(tmp_path: Path) -> None:
    """Variables and the home folder are put in; nothing else is touched, or run."""
    values = {"A": "$WHO's", "B": "~/x y", "C": r'a\$b \n `id` "q"', "D": "plain:1", "E": "b~"}
    paths = JobPaths(tmp_path, tmp_path, "/bin/python3")
    lines = render(SCHEDULERS["slurm"], Job(), Profile(set=values, venv="~/v"), paths, ["true"]).splitlines()
    given = "\n".join(line for line in lines if line.startswith("export ") and "DEADLINE" not in line)
    show = f'{given}\nprintf "%s\\n" "$A" "$B" "$C" "$D" "$E" "$VIRTUAL_ENV"'
    done = subprocess.run(
        ["/bin/bash", "-c", show], env={"HOME": "/h", "WHO": "me"}, capture_output=True, text=True, timeout=20
    )
    assert done.stdout.splitlines() == ["me's", "/h/x y", r'a$b \n `id` "q"', "plain:1", "b~", "/h/v"], done


def test_conda_runs_its_activation_hooks(tmp_path: Path) -> None:
    hooks = tmp_path / "env/etc/conda/activate.d"
    hooks.mkdir(parents=True)
    (hooks / "one.sh").write_text('export GDAL_DATA="$CONDA_PREFIX/share/gdal"\n')
    lines = site_lines(Profile(conda=str(tmp_path / "env")), "/bin/python3")
    script = "\n".join([*lines, 'echo "$GDAL_DATA"'])
    done = subprocess.run(["/bin/bash", "-c", script], capture_output=True, text=True, timeout=20)
    assert done.stdout == f"{tmp_path}/env/share/gdal\n" and done.stderr == ""


def test_containers_and_ports(tmp_path: Path) -> None:
    """Words with variables reach `launch` as one argument; a launcher of the site's starts the container itself."""
    paths = JobPaths(tmp_path, tmp_path, "/bin/python3")
    profile = Profile(container="apptainer exec $WHO.sif", ports="20000-20999")
    text = render(SCHEDULERS["slurm"], Job(), profile, paths, ["true"])
    assert '--ports 20000-20999 --container "apptainer exec $WHO.sif" -- \\\n' in text
    text = render(SCHEDULERS["slurm"], Job(), Profile(container="shifter", launcher="aprun -n 2"), paths, ["true"])
    assert 'aprun -n 2 shifter python3 -m paceline launch --log "$folder/launch" -- \\\n' in text


# A `paceline` that does not launch: it runs what follows the `--`.
FAKE_PYTHON = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


class Started:
    """A script that runs, as a scheduler would start it."""

    def __init__(
        self,
        tmp_path: Path,
        command: list[str],
        name: str = "slurm",
        profile: Profile | None = None,
        tools_made: dict[str, str] | None = None,
        **job: object,
    ) -> None:
        self.folder = tmp_path / "folder"
        self.folder.mkdir()
        tools = tmp_path / "bin"
        tools.mkdir()
        for tool, text in {
            "python3": FAKE_PYTHON,
            "scontrol": f"#!/bin/sh\necho scontrol $* >>{self.folder}/called\n",
            "qsub": f"#!/bin/sh\necho qsub $* >>{self.folder}/called\necho 8.pbs1\n",
            "qalter": f"#!/bin/sh\necho qalter $* >>{self.folder}/called\n",
            **(tools_made or {}),
        }.items():
            (tools / tool).write_text(text)
            (tools / tool).chmod(0o755)
        paths = JobPaths(self.folder, tmp_path, str(tools / "python"))
        scheduler = SCHEDULERS[name]
        script = self.folder / "job.sh"
        script.write_text(render(scheduler, Job.model_validate(job), profile or Profile(), paths, command))
        environ = {**os.environ, scheduler.id_variables[0]: "7"}
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
    trap = "n=0; trap 'echo one more; n=$((n + 1))' USR1; echo ready"
    job = Started(tmp_path, ["bash", "-c", f"{trap}; until ((n == 2)); do sleep 0.1; done; exit 5"])
    job.wait_for("ready")
    for count in (1, 2):
        job.process.send_signal(signal.SIGUSR1)
        limit = time.monotonic() + 10
        while job.output.count("one more") < count and time.monotonic() < limit:
            time.sleep(0.02)
    assert job.end() == 5 and job.output.count("one more") == 2


@pytest.mark.parametrize("name", ["slurm", "pbs"])
def test_a_burst_of_signals_is_one_request_to_end(name: str, tmp_path: Path) -> None:
    """As scancel and qdel send them, to the script and, on PBS, to `timeout` below it."""
    trap = "n=0; trap 'echo told; n=1' TERM; sleep 0.3; echo ready; until ((n)); do sleep 0.05; done; sleep 1; exit 99"
    job = Started(tmp_path, ["bash", "-c", trap], name)
    job.wait_for("ready")
    for _ in range(3):
        job.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert job.end() == 99 and job.output.count("told\n") == 1 and job.called == ""


def test_variables_that_the_profile_sets_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEFORE", "1")
    monkeypatch.setenv("CHANGED", "1")
    profile = Profile(set={"LM_LICENSE_FILE": "27@h", "CHANGED": "2"}, lines=["export B='a\n b'"], kill_delay="90s")
    job = Started(tmp_path, ["sh", "-c", "echo passed $PACELINE_PASS_ON, $PACELINE_KILL_DELAY"], profile=profile)
    assert job.end() == 0
    names = job.output.split("passed ")[1].partition(", 90\n")[0].split()
    assert {"LM_LICENSE_FILE", "CHANGED", "B"} <= {*names} and not {"BEFORE", "HOME"} & {*names}


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


def test_a_site_that_forbids_resubmission_is_named(tmp_path: Path) -> None:
    """Some sites forbid qsub on the hosts: the log says how to continue."""
    refused = {"qsub": "#!/bin/sh\necho 'qsub: not allowed on this host' >&2\nexit 1\n"}
    job = Started(tmp_path, ["sh", "-c", "exit 99"], "pbs", tools_made=refused, attempts=5)
    assert job.end() == 99 and not (job.folder / "ids").exists()
    assert "to be continued (start 1 of 5 at most)" in job.output and "not allowed on this host" in job.output
    assert f"does not let a job continue; to continue it, run on a login node: qsub {job.folder}/job.sh" in job.output


def test_the_limit_of_starts_is_named(tmp_path: Path) -> None:
    job = Started(tmp_path, ["sh", "-c", "sleep 0.5; exit 99"], "pbs", attempts=2)
    (job.folder / "starts").write_text("5 1\n")  # it has started before
    assert job.end() == 99 and job.called == ""
    assert "stopped early at its last start (--attempts 2); to continue it, run on a login node: qsub" in job.output


def test_jobs_that_wait_for_this_one_wait_for_its_successor(tmp_path: Path) -> None:
    """PBS deletes a job that waits for one that ended with 99."""
    job = Started(tmp_path, ["sh", "-c", "sleep 0.5; exit 99"], "pbs")
    place = tmp_path / "later job"
    place.mkdir()
    (place / "after").write_text("5.pbs1\n7\n")
    (job.folder / "dependents").write_text(f"9.pbs1 {place}\n")
    assert job.end() == 99 and (job.folder / "ids").read_text() == "8.pbs1\n"
    assert (place / "after").read_text() == "5.pbs1\n8.pbs1\n"
    assert job.called.splitlines()[-1] == "qalter -W depend=afterok:5.pbs1:8.pbs1 9.pbs1"


def test_a_script_submitted_by_hand_makes_its_folder_and_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `submit --dry-run` prints it, saved anywhere: no folder exists before the job starts."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text(FAKE_PYTHON)
    (tmp_path / "bin/python3").chmod(0o755)
    paths = JobPaths(job_record.new_folder("cart"), tmp_path, str(tmp_path / "bin/python"))
    words = ["sh", "-c", "echo $HOME 'it is'"]
    script = tmp_path / "mine.sh"
    script.write_text(Submission(SCHEDULERS["pbs"], Profile(), Job(name="cart"), paths, words).text_by_hand())
    assert f"#PBS -o {tmp_path}/{paths.folder.name}.log\n" in script.read_text()
    subprocess.run(["bash", str(script)], env={**os.environ, "PBS_JOBID": "7.pbs1"}, check=True, timeout=20)
    (each,) = job_record.records()
    assert each.ids == ("7.pbs1",) and each.command == tuple(words) and abs(each.submitted - time.time()) < 60
    assert f"{os.environ['HOME']} it is\n" in each.output.read_text() and each.folder.stat().st_mode & 0o777 == 0o700
    assert (each.folder / "job.sh").read_text() == script.read_text() and os.access(each.folder / "job.sh", os.X_OK)
