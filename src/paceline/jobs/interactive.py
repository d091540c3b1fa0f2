"""`paceline submit --interactive`: a shell on the first host of an allocation."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from paceline.config import UserError
from paceline.jobs.dependencies import resolved
from paceline.jobs.scheduler_call import not_started
from paceline.jobs.site_environment import check_environment
from paceline.schedulers import job_record
from paceline.schedulers.job import Job
from paceline.schedulers.profile import Profile
from paceline.schedulers.scheduler import Scheduler
from paceline.schedulers.script import launch_options, needs_login_shell, site_lines

SETUP = "setup.sh"


def open_shell(scheduler: Scheduler, profile: Profile, job: Job, command: Sequence[str], *, dry_run: bool) -> int:
    """An interactive job; returns when the user leaves its shell. The shell has what the profile sets up."""
    job = resolved(scheduler, job)
    check_environment(profile, only_warn=dry_run)
    if not dry_run:
        scheduler.check_limits(job)
    folder = job_record.new_folder("shell")
    lines = _setup_lines(profile)
    argv = scheduler.interactive_argv(job, folder / SETUP if lines else None)
    if dry_run:
        print(shlex.join(argv))
        print("".join(f"# {SETUP}: {line}\n" for line in lines), end="")
        return 0
    by_hand = [f". {shlex.quote(str(folder / SETUP))};"] if lines and not scheduler.reads_setup else []
    words = [*by_hand, "paceline launch", *launch_options(profile), "--", shlex.join(command) or "COMMAND"]
    print(f"on the host: {' '.join(words)}", file=sys.stderr)
    try:
        if lines:
            job_record.create_folder(folder)
            (folder / SETUP).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return subprocess.run(argv).returncode
    except OSError as error:
        raise UserError(not_started(argv, error)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _setup_lines(profile: Profile) -> list[str]:
    """What the shell reads first; nothing where the profile sets nothing up."""
    if profile.model_copy(update={"scheduler": None, "defaults": {}}) == Profile():
        return []
    files = [*(["/etc/profile"] if needs_login_shell(profile) else []), "~/.bashrc"]
    return [*(f"if [ -r {file} ]; then . {file}; fi" for file in files), *site_lines(profile, sys.executable)]
