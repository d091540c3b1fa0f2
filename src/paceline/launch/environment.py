"""The environment on a host: this very paceline and the versions that are installed here, in a folder of their own."""

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

from paceline.launch.doctor import EXTRAS
from paceline.launch.hosts_file import Hosts
from paceline.launch.remote import Reach

BUILD_SECONDS = 3600.0
CONSTRAINTS = "constraints.txt"
_READY = ".ready"
_LINKED = "direct_url.json"  # of what was installed from a folder or an address: no index has that version

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
  {env}/bin/python -m pip install --quiet --disable-pip-version-check {pip} &&
  {setup}
}} >{env}.log 2>&1 || {{
  grep -iE 'error|not found' {env}.log | tail -n 1 >&2
  echo "building the environment failed; all of it is in $(uname -n):"{env}.log >&2
  exit 4
}}
touch {env}/{ready}
"""

_LOOK = """
import json, platform, sys
from importlib import metadata
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
found = {name: version(name) for name in ("ray", "torch", "paceline")}
print(json.dumps({"python": ".".join(platform.python_version_tuple()[:2]), **found}))
"""


@dataclass(frozen=True)
class Environment:
    wheel: tuple[str, bytes]
    constraints: str
    requirements: tuple[str, ...]
    digest: str

    def archive(self, path: Path) -> None:
        """What a host needs to build it."""
        with tempfile.TemporaryDirectory() as folder, tarfile.open(path, "w:gz", compresslevel=1) as tar:
            name, data = self.wheel
            (Path(folder) / name).write_bytes(data)
            (Path(folder) / CONSTRAINTS).write_text(self.constraints)
            for each in (name, CONSTRAINTS):
                tar.add(Path(folder) / each, each)


def describe(hosts: Hosts) -> Environment:
    """What the hosts are to have: named by a digest, so that it is built once, and again after a change."""
    name, data = make_wheel()
    extras = sorted({"ray", *_installed_extras()} if hosts.extras is None else hosts.extras)
    wanted = f"paceline[{','.join(extras)}]" if extras else "paceline"
    requirements = (wanted, *hosts.install)
    constraints = "".join(f"{each}\n" for each in sorted(pins()))
    said = json.dumps([constraints, requirements, hosts.pip, hosts.setup, hosts.container])
    digest = hashlib.sha256(data + said.encode()).hexdigest()[:12]
    return Environment((name, data), constraints, requirements, digest)


def make_wheel() -> tuple[str, bytes]:
    """This paceline, packed as it stands: neither its sources nor a build tool are needed."""
    version = metadata.version("paceline")
    installed = metadata.distribution("paceline")
    about = f"paceline-{version}.dist-info"
    package = Path(__file__).parents[1]
    files = {
        f"paceline/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    for each in ("METADATA", "entry_points.txt"):
        files[f"{about}/{each}"] = (installed.read_text(each) or "").encode()
    files[f"{about}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: paceline\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{path},sha256={_hash(data)},{len(data)}\n" for path, data in files.items())
    files[f"{about}/RECORD"] = f"{record}{about}/RECORD,,\n".encode()
    with tempfile.TemporaryFile() as made:
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as wheel:
            for path, data in files.items():
                wheel.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED)  # no dates: the same bytes each time
        made.seek(0)
        return f"paceline-{version}-py3-none-any.whl", made.read()


def pins() -> Iterator[str]:
    """The versions installed here. pip looks only at those it needs."""
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name not in (None, "paceline") and distribution.read_text(_LINKED) is None:
            yield f"{name}=={distribution.version.partition('+')[0]}"  # 2.13.0+cpu is on no index


def _installed_extras() -> set[str]:
    known = {re.sub(r"[-_.]+", "-", str(each.metadata["Name"])).lower() for each in metadata.distributions()}
    return {extra for name, (extra, _) in EXTRAS.items() if name.lower() in known}


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def folder(workdir: str, digest: str) -> str:
    return f"{workdir}/env/{digest}"


def inside(hosts: Hosts, workdir: str, python: str, variables: Sequence[str] = ()) -> str:
    """What comes before the words of a command, so that they run in the environment (and in its container)."""
    prefix = f"{hosts.container.replace('{workdir}', workdir)} " if hosts.container else ""
    named = [f'export PATH={shlex.quote(str(Path(python).parent))}:"$PATH"', *(f"export {each}" for each in variables)]
    script = "; ".join([*named, 'exec "$@"'])
    return f"{prefix}sh -c {shlex.quote(script)} sh "


def is_built(reach: Reach, workdir: str, digest: str) -> bool:
    ready = f"{folder(workdir, digest)}/{_READY}"
    return reach.run(f"[ -e {shlex.quote(ready)} ] && echo yes || true").strip() == "yes"


def build(reach: Reach, hosts: Hosts, workdir: str, environment: Environment, archive: Path) -> None:
    env = folder(workdir, environment.digest)
    place = shlex.quote(env)
    reach.run(f"rm -rf {place}.in && mkdir -p {place}")
    reach.send(archive, f"{env}.in")
    wanted = f"{environment.requirements[0]} @ file://{env}.in/{environment.wheel[0]}"
    pip = ["--constraint", f"{env}.in/{CONSTRAINTS}", *hosts.pip, wanted, *environment.requirements[1:]]
    here = f"python3.{sys.version_info.minor}"
    script = _BUILD.format(
        candidates=" ".join(dict.fromkeys([here, "python3", "python3.13", "python3.12", "python3.11"])),
        env=place,
        pip=shlex.join(pip),
        setup=" &&\n  ".join([f'export PATH={place}/bin:"$PATH"', *(f"( {each}\n  )" for each in hosts.setup)]),
        ready=_READY,
    )
    prefix = f"{hosts.container.replace('{workdir}', workdir)} " if hosts.container else ""
    reach.run(f"{prefix}sh -c {shlex.quote(script)}", seconds=BUILD_SECONDS)


def look(reach: Reach, hosts: Hosts, workdir: str, python: str) -> dict[str, str | None]:
    """The versions that a host really has."""
    words = shlex.join([python, "-c", _LOOK])
    found: dict[str, str | None] = json.loads(reach.run(inside(hosts, workdir, python) + words).splitlines()[-1])
    return found


def differences(found: dict[str, dict[str, str | None]]) -> list[str]:
    """One line for each thing that does not fit, with what to do."""
    lines, first = [], next(iter(found))
    for host, versions in found.items():
        for name in ("ray", "paceline"):
            if versions[name] is None:
                lines.append(f"{host}: {name} is not installed there: pip install 'paceline[ray]'")
        for name, version in versions.items():
            if version != found[first][name] and version is not None:
                text = f"{name} {version}, on {first} {found[first][name]}: all hosts need the same"
                lines.append(
                    f"{host}: {text}; set python: to one that all have" if name == "python" else f"{host}: {text}"
                )
    ours = metadata.version("paceline")
    if (there := found[first]["paceline"]) not in (None, ours):
        lines.append(f"{first}: paceline {there}, here {ours}: install the same")
    return lines
