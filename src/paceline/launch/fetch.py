"""`paceline fetch`: a run directory to here, from a private cluster, or from where a batch job left it."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from paceline.config import UserError
from paceline.launch import record
from paceline.launch.cluster_submit import PREFIX, project_of, runs_folder
from paceline.launch.hosts_file import load
from paceline.launch.remote import Reach, reaches
from paceline.launch.script import OUTPUT, SCRIPT

ORIGIN = ".fetched"
"""File that says where a fetched folder comes from: another of the same name is not written over."""
_PASSES = 3
_FILES = "( -type f -o -type l )"  # the last checkpoint is a link


def fetch(what: str, to: Path) -> Path:
    """Where it is now. Again, it brings what is new."""
    if Path(what).is_dir():
        return _copy(Path(what), to)
    cluster, colon, path = what.partition(":")
    if colon:
        up = load(cluster)
        source = path if path.startswith("/") else f"{runs_folder(up, project_of(Path.cwd()))}/{path}"
        return _bring(reaches(up.hosts)[0], source, _FILES, to / Path(source).name, f"{cluster}:{source}")
    found = record.find(what)
    if not found.scheduler.startswith(PREFIX):
        if not found.run:
            raise UserError(f"{what}: its command is none of ours, so nobody knows where it wrote; see {found.cwd}")
        return _copy(Path(found.run), to)
    up = load(found.scheduler.removeprefix(PREFIX))
    head, job = reaches(up.hosts)[0], f"{up.workdir}/jobs/{found.ids[-1]}"
    if found.run:
        return _bring(head, found.run, _FILES, to / Path(found.run).name, f"{up.name}:{found.run}")
    new = f"{_FILES} ( -path ./work/* -newer {SCRIPT} -o -name {OUTPUT} )"  # what the job has made
    return _bring(head, job, new, to / found.ids[-1], f"{up.name}:{job}")


def _bring(head: Reach, source: str, test: str, target: Path, origin: str) -> Path:
    _claim(target, origin)
    words = shlex.join(["find", ".", *test.split(), "-printf", "%s %T@ %P\\n"])
    for _ in range(_PASSES):  # a run that goes on writes meanwhile
        place = shlex.quote(source)
        listed = head.run(f"[ -d {place} ] || {{ echo {place} is not there >&2; exit 1; }}; cd {place} && {words}")
        if not target.exists():
            target.mkdir(parents=True)
            (target / ORIGIN).write_text(f"{origin}\n")
        names = [name for size, at, name in map(_fields, listed.splitlines()) if not _is_here(target / name, size, at)]
        if not names:
            break
        head.fetch(source, names, target)
    return target


def _fields(line: str) -> tuple[int, float, str]:
    size, at, name = line.split(" ", 2)
    return int(size), float(at), name


def _is_here(path: Path, size: int, at: float) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_size == size and int(status.st_mtime) == int(at)


def _claim(target: Path, origin: str) -> None:
    if target.exists():
        mark = target / ORIGIN
        known = mark.read_text().strip() if mark.exists() else "something else"
        if known != origin:
            raise UserError(f"{target} is there already, and is {known}: give another DEST")


def _copy(source: Path, to: Path) -> Path:
    if not source.is_dir():
        raise UserError(f"{source} is not there: nothing has been written yet, or it was on another machine's disk")
    target = to / source.name
    if target.exists() and target.resolve() == source.resolve():
        return target
    _claim(target, str(source.resolve()))
    for link in (path for path in target.rglob("*") if path.is_symlink()):
        link.unlink()  # one that leads elsewhere now would be in the way
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    (target / ORIGIN).write_text(f"{source.resolve()}\n")
    return target
