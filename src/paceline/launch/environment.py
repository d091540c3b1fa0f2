"""Which environment variables of the launcher reach the other hosts."""

from __future__ import annotations

from collections.abc import Mapping

TO_START_PYTHON = ("PYTHONPATH", "LD_LIBRARY_PATH")  # without these Python may not even start on another host
TO_FIND_PROGRAMS = (*TO_START_PYTHON, "PATH", "VIRTUAL_ENV", "CONDA_PREFIX")
PASSED_ON = (*TO_FIND_PROGRAMS, "LANG", "LC_ALL", "TMPDIR")
PASSED_PREFIXES = ("PACELINE_", "RAY_", "OMP_", "MKL_", "OPENBLAS_", "GLOO_", "KMP_")
SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")


def passed_on(environ: Mapping[str, str], names: str, *, into_container: bool = False) -> dict[str, str]:
    """Variables for other hosts, with those of these names; none that look secret, because the connection is not
    encrypted. A container has its own programs and libraries."""
    known = {*PASSED_ON, *names.split()} - ({*TO_FIND_PROGRAMS} if into_container else set())
    return {
        name: value
        for name, value in environ.items()
        if (name in known or name.startswith(PASSED_PREFIXES)) and not looks_secret(name)
    }


def looks_secret(name: str) -> bool:
    return any(word in name.upper() for word in SECRET_WORDS)
