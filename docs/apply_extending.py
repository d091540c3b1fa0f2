"""Follows docs/extending.md in a clone: adds everything the page adds to the package, then runs all checks and tests.

    python docs/apply_extending.py                          the tables, `make lint` and the whole suite
    python docs/apply_extending.py --fast                   the same without the slowest tests
    python docs/apply_extending.py --keep tests/algorithms  these tests alone; the clone is not removed

The clone has uncommitted changes too. Its environment borrows the packages of the one that runs this script.
"""

from __future__ import annotations

import argparse
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from code_blocks import apply_sources

ROOT = Path(__file__).parents[1]
PAGE = "docs/extending.md"
SLOW = (
    "algorithms/test_learning.py",
    "bench/test_runner.py",
    "bench/test_scaling.py",
    "bench/test_seeds.py",
    "collective",
    "engines",
    "envs/test_restarts.py",
    "fuzz",
    "launch",
    "report",
    "ssh_cluster",
    "test_docs.py",
    "test_env_objects.py",
    "test_evaluate.py",
    "test_evaluate_levels.py",
    "test_public.py",
    "test_resume.py",
    "training",
    "tune/test_sweep.py",
)
"""Tests that take two thirds of the time, and look at nothing that the page adds. `make lint` compares the docs."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Apply docs/extending.md to a clone, and test that.")
    parser.add_argument("tests", nargs="*", help="what pytest is given; by default the whole suite, three at a time")
    parser.add_argument("--fast", action="store_true", help="leave out the slow tests")
    parser.add_argument("--keep", action="store_true", help="leave the clone where it is")
    options = parser.parse_args()
    clone = Path(tempfile.mkdtemp(prefix="paceline-extended-")) / "paceline"
    try:
        make_clone(clone)
        apply_sources(clone / PAGE, clone)
        make_environment(clone)
        python = clone / ".venv/bin/python"
        run(clone, python, "docs/generate.py")
        run(clone, "make", "lint")
        left_out = [f"--ignore=tests/{name}" for name in SLOW if options.fast]
        run(clone, python, "-m", "pytest", *(options.tests or ["-n", "3", "--dist", "loadfile"]), *left_out)
    except ValueError as error:  # the page does not fit the source
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        return error.returncode
    finally:
        if options.keep:
            print(f"the clone is at {clone}")
        else:
            shutil.rmtree(clone.parent)
    return 0


def make_clone(clone: Path) -> None:
    """The last commit, with the changes of the working tree on top."""
    run(ROOT, "git", "clone", "--quiet", ROOT, clone)
    words = ["git", "ls-files", "-z", "--modified", "--others", "--exclude-standard"]
    changed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, changed.split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
        else:
            (clone / name).unlink()


def make_environment(clone: Path) -> None:
    """`.venv` as `make setup` makes it, but with the packages and programs of this interpreter instead of copies."""
    venv.create(clone / ".venv", symlinks=True)
    own = clone / ".venv/bin"
    packages = sysconfig.get_path("purelib", vars={"base": str(clone / ".venv")})
    borrow = "".join(f"site.addsitedir({folder!r}); " for folder in site.getsitepackages())
    Path(packages, "borrow.pth").write_text(f"import site, sys; {borrow}sys.path.insert(0, {str(clone / 'src')!r})\n")
    theirs = Path(sys.executable).parent
    for program in theirs.iterdir():
        target = own / program.name
        if target.exists() or not program.is_file():
            continue
        content = program.read_bytes()
        if content.startswith(b"#!"):  # a script that names its interpreter
            target.write_bytes(content.replace(bytes(theirs / "python"), bytes(own / "python")))
            shutil.copymode(program, target)
        else:
            target.symlink_to(program)
    (clone / ".venv/.ready").touch()


def run(folder: Path, *words: object) -> None:
    print("+", *words, flush=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "PYTHONPATH")}
    subprocess.run([str(word) for word in words], cwd=folder, env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main())
