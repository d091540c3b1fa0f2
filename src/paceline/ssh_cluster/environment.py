"""The Python environment on a host: this paceline and the versions installed here, in a folder of its own."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from paceline.doctor.checks import EXTRAS
from paceline.ssh_cluster.hosts_file import ClusterConfig
from paceline.ssh_cluster.remote import RemoteHost

BUILD_SECONDS = 3600.0
CONSTRAINTS = "constraints.txt"
_READY = ".ready"
_LOCAL_INSTALL = "direct_url.json"  # marks a distribution from a folder or URL, whose version is on no index

_BUILD = """
set -e
python=
for each in {candidates}; do
  if "$each" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$each
    break
  fi
done
if [ -z "$python" ]; then
  echo "no Python 3.11 or newer with venv: install python3-venv there, or set python: to one that has paceline" >&2
  exit 3
fi
{{
  "$python" -m venv --clear {env} &&
  {env}/bin/python -m pip install --disable-pip-version-check --progress-bar off {pip} &&
  {setup}
}} >{env}.log 2>&1 || {{
  signs='(error|failed|denied|not found|no such file|no space left|cannot|killed)([: ]|$)'
  why=$(grep -iE "$signs" {env}.log | grep -v ResolutionImpossible | tail -n 1)
  [ -n "$why" ] || why=$(grep . {env}.log | tail -n 1)
  conflict=$(grep -A 2 'The conflict is caused by' {env}.log | tail -n +2 | tr -s '[:space:]' ' ')
  echo "building the environment failed: $why$conflict (full log: $(uname -n):"{env}.log")" >&2
  exit 4
}}
touch {env}/{ready}
"""

_VERSIONS = """
import json, platform, sys
from importlib import metadata
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
found = {name: version(name) for name in ("ray", "torch", "paceline")}
print(json.dumps({"python": ".".join(platform.python_version_tuple()[:2]), **found}))
"""


@dataclass(frozen=True)
class PythonEnvironment:
    wheel: tuple[str, bytes]
    constraints: str
    requirements: tuple[str, ...]
    digest: str

    def archive(self, path: Path) -> None:
        """Write what a host needs to build it."""
        with tempfile.TemporaryDirectory() as folder, tarfile.open(path, "w:gz", compresslevel=1) as tar:
            name, data = self.wheel
            (Path(folder) / name).write_bytes(data)
            (Path(folder) / CONSTRAINTS).write_text(self.constraints)
            for each in (name, CONSTRAINTS):
                tar.add(Path(folder) / each, each)


def describe(config: ClusterConfig) -> PythonEnvironment:
    """The environment the hosts need; its digest changes with its content, so that it is built once per change."""
    name, data = make_wheel()
    extras = sorted({"ray", *_installed_extras()} if config.extras is None else config.extras)
    requirements = (f"paceline[{','.join(extras)}]" if extras else "paceline", *config.install)
    constraints = "".join(f"{each}\n" for each in sorted(pins()))
    content = json.dumps([constraints, requirements, config.pip, config.setup, config.container])
    digest = hashlib.sha256(data + content.encode()).hexdigest()[:12]
    return PythonEnvironment((name, data), constraints, requirements, digest)


def make_wheel() -> tuple[str, bytes]:
    """A wheel of this paceline as installed; needs neither its sources nor a build tool."""
    version = metadata.version("paceline")
    installed = metadata.distribution("paceline")
    dist_info = f"paceline-{version}.dist-info"
    package = Path(__file__).parents[1]
    files = {
        f"paceline/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    for each in ("METADATA", "entry_points.txt"):
        files[f"{dist_info}/{each}"] = (installed.read_text(each) or "").encode()
    files[f"{dist_info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: paceline\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{path},sha256={_hash(data)},{len(data)}\n" for path, data in files.items())
    files[f"{dist_info}/RECORD"] = f"{record}{dist_info}/RECORD,,\n".encode()
    with tempfile.TemporaryFile() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as wheel:
            for path, data in files.items():
                wheel.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED)  # undated: always the same bytes
        file.seek(0)
        return f"paceline-{version}-py3-none-any.whl", file.read()


def pins() -> Iterator[str]:
    """The versions installed here, as constraints for pip."""
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name not in (None, "paceline") and distribution.read_text(_LOCAL_INSTALL) is None:
            yield f"{name}=={distribution.version.partition('+')[0]}"  # 2.13.0+cpu is on no index


def _installed_extras() -> set[str]:
    known = {re.sub(r"[-_.]+", "-", str(each.metadata["Name"])).lower() for each in metadata.distributions()}
    return {extra for name, (extra, _) in EXTRAS.items() if name.lower() in known}


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def folder(workdir: str, digest: str) -> str:
    return f"{workdir}/env/{digest}"


def command_prefix(config: ClusterConfig, workdir: str, python: str, variables: Sequence[str] = ()) -> str:
    """Shell text to put before a command, so that it runs in the environment and its container."""
    exports = [f'PATH={shlex.quote(str(Path(python).parent))}:"$PATH"', *variables]
    script = "; ".join([*(f"export {each}" for each in exports), 'exec "$@"'])
    return f"{_container(config, workdir)}sh -c {shlex.quote(script)} sh "


def _container(config: ClusterConfig, workdir: str) -> str:
    return f"{config.container.replace('{workdir}', workdir)} " if config.container else ""


def is_built(host: RemoteHost, workdir: str, digest: str) -> bool:
    ready = f"{folder(workdir, digest)}/{_READY}"
    return host.run(f"[ -e {shlex.quote(ready)} ] && echo yes || true").strip() == "yes"


def build(host: RemoteHost, config: ClusterConfig, workdir: str, environment: PythonEnvironment, archive: Path) -> None:
    env = folder(workdir, environment.digest)
    place = shlex.quote(env)
    host.run(f"rm -rf {place}.in && mkdir -p {place}")
    host.send(archive, f"{env}.in")
    wheel = f"{environment.requirements[0]} @ file://{env}.in/{environment.wheel[0]}"
    pip = ["--constraint", f"{env}.in/{CONSTRAINTS}", *config.pip, wheel, *environment.requirements[1:]]
    same = f"python3.{sys.version_info.minor}"
    script = _BUILD.format(
        candidates=" ".join(dict.fromkeys([same, "python3", "python3.13", "python3.12", "python3.11"])),
        env=place,
        pip=shlex.join(pip),
        setup=" &&\n  ".join([f'export PATH={place}/bin:"$PATH"', *(f"( {each}\n  )" for each in config.setup)]),
        ready=_READY,
    )
    host.run(f"{_container(config, workdir)}sh -c {shlex.quote(script)}", seconds=BUILD_SECONDS)


def installed_versions(host: RemoteHost, config: ClusterConfig, workdir: str, python: str) -> dict[str, str | None]:
    output = host.run(command_prefix(config, workdir, python) + shlex.join([python, "-c", _VERSIONS]))
    versions: dict[str, str | None] = json.loads(output.splitlines()[-1])
    return versions


def differences(found: dict[str, dict[str, str | None]]) -> list[str]:
    """A line for each version that is missing or differs between hosts, with what to do."""
    lines, first = [], next(iter(found))
    for host, versions in found.items():
        for name in ("ray", "paceline"):
            if versions[name] is None:
                lines.append(f"{host}: {name} is not installed there: pip install 'paceline[ray]'")
        for name, version in versions.items():
            theirs = found[first][name]
            if version != theirs and version is not None:
                advice = "; set python: to one that all have" if name == "python" else ""
                lines.append(f"{host}: {name} {version}, on {first} {theirs}: all hosts need the same version{advice}")
    here = metadata.version("paceline")
    if (there := found[first]["paceline"]) not in (None, here):
        lines.append(f"{first}: paceline {there}, here {here}: install the same version")
    return lines
