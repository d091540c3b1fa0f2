"""A batch system in one file, which stands for OpenPBS or for Cobalt: `qsub`, `qstat`, `qdel`, `pbs_tmrsh`, `ssh`, and
`mom`, which runs on every host. It runs scripts for real and refuses directives it does not know. As PBS it follows
what was noted of a real OpenPBS 23.06. As Cobalt it follows general knowledge, not a manual nor a machine: a test with
it shows that our parts fit together, not that a real Cobalt takes them. All it knows is in the folder FAKEBATCH names.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import socketserver
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HOME = Path(os.environ["FAKEBATCH"])
IS_COBALT = (HOME / "cobalt").exists()
SERVER = "pbs0"
PREFIX = "#COBALT" if IS_COBALT else "#PBS"
VALUED = {
    False: ["-N", "-l", "-A", "-q", "-W", "-S", "-j", "-o", "-e", "-r", "-M", "-m"],
    True: ["-n", "-t", "-A", "-q", "-o", "-e", "-M", "--attrs", "--jobname", "--debuglog", "--dependencies"],
}[IS_COBALT]
NOTICE_SECONDS, KILL_SECONDS = 1.0, 5.0
Job = dict[str, Any]


def path_of(number: str) -> Path:
    return HOME / "jobs" / f"{number.partition('.')[0]}.json"


def load(number: str) -> Job:
    job: Job = json.loads(path_of(number).read_text())
    return job


def change(job: Job, **values: Any) -> None:
    job.update(values)
    new = path_of(job["id"]).with_suffix(".new")
    new.write_text(json.dumps(job))
    new.replace(path_of(job["id"]))


def fail(code: int, text: str) -> int:
    print(text, file=sys.stderr)
    return code


# -- mom: starts what it is told, and ends all of a session -----------------------------------------------------------


class Mom(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        order = json.loads(self.rfile.readline())
        if "kill" in order:
            kill_session(order["kill"], order["signal"])
            return
        with Path(order["output"]).open("ab") as out:
            try:
                task = subprocess.Popen(
                    order["argv"], env=order["env"], cwd=order["cwd"], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True,
                )  # fmt: skip
            except OSError:
                self.wfile.write(b'{"code": 254}\n')
                return
        self.wfile.write(json.dumps({"pid": task.pid}).encode() + b"\n")
        code = task.wait()
        kill_session(task.pid, signal.SIGKILL)  # what it left in the background
        with contextlib.suppress(OSError):  # who asked may be gone
            self.wfile.write(json.dumps({"code": code}).encode() + b"\n")


def kill_session(session: int, number: int) -> None:
    """Who made a session of their own stay."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) == session:
                    os.kill(int(entry.name), number)


def mom(name: str) -> int:
    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

    Server(str(HOME / f"{name}.sock"), Mom).serve_forever()
    return 0


def tell(host: str, **order: Any) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(HOME / f"{host}.sock"))
    link.sendall(json.dumps(order).encode() + b"\n")
    return link


# -- qsub -------------------------------------------------------------------------------------------------------------


def qsub(words: list[str]) -> int:
    script = Path(words[-1])
    text = script.read_text()
    options: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith(f"{PREFIX} "):
            parts = shlex.split(line.removeprefix(PREFIX))
            while parts:
                flag = parts.pop(0)
                if flag not in VALUED or not parts:
                    return fail(2, f"qsub: illegal option {flag}")
                options.setdefault(flag, []).append(parts.pop(0))
    count = len(list((HOME / "jobs").iterdir())) + 1
    job = {
        "id": f"{count}" if IS_COBALT else f"{count}.{SERVER}",
        "state": "Q",
        "name": (options.get("-N") or options.get("--jobname") or ["?"])[0],
        "output": options["-o"][0],
        "script": str(HOME / f"{count}.SC"),
        "cwd": str(Path.cwd()),
        **(cobalt_wishes(options) if IS_COBALT else pbs_wishes(options)),
    }
    Path(job["script"]).write_text(text)
    change(job)
    if job.get("comment") is None:
        keep = [sys.executable, __file__, "serve", job["id"]]
        subprocess.Popen(keep, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    print(job["id"])
    return 0


def pbs_wishes(options: dict[str, list[str]]) -> Job:
    wishes = dict(item.split("=", 1) for value in options.get("-l", []) for item in [value])
    hosts, free = (HOME / "hosts").read_text().split(), {}
    cpus = int((HOME / "cpus").read_text())
    nodes: list[str] = []
    for chunk in wishes.get("select", "1").split("+"):
        number, *resources = chunk.split(":")
        ncpus = int(dict(item.split("=") for item in resources).get("ncpus", 1))
        for _ in range(int(number)):
            used = set(nodes) if "scatter" in wishes.get("place", "pack") else set()
            fits = [host for host in hosts if host not in used and free.get(host, cpus) >= ncpus]
            if not fits:
                return {
                    "comment": "Can Never Run: Insufficient amount of resource: ncpus",
                    "nodes": [],
                    "wishes": wishes,
                }
            free[fits[0]] = free.get(fits[0], cpus) - ncpus
            nodes.append(fits[0])
    hours, minutes, seconds = wishes["walltime"].split(":")
    walltime = int(hours) * 3600 + int(minutes) * 60 + int(seconds)
    return {"comment": None, "nodes": nodes, "wishes": wishes, "walltime": walltime}


def cobalt_wishes(options: dict[str, list[str]]) -> Job:
    hosts = (HOME / "hosts").read_text().split()
    return {
        "comment": None,
        "nodes": hosts[: int(options["-n"][0])],
        "walltime": int(options["-t"][0]) * 60,
        "wishes": {},
    }


# -- the job ----------------------------------------------------------------------------------------------------------


def serve(number: str) -> int:
    """Runs the script on the first host, and ends it when its time is over or somebody says so."""
    job = load(number)
    count = number.partition(".")[0]
    nodes, spool = HOME / f"{count}.nodes", HOME / f"{count}.OU"
    nodes.write_text("".join(f"{node}\n" for node in job["nodes"]))
    environment = {"HOME": os.environ["HOME"], "USER": "root", "PATH": "/bin:/usr/bin", "FAKEBATCH": str(HOME)}
    began = time.time()
    if IS_COBALT:
        environment |= {"COBALT_JOBID": number, "COBALT_NODEFILE": str(nodes), "COBALT_JOBSIZE": str(len(job["nodes"]))}
        environment |= {"COBALT_ENDTIME": str(began + job["walltime"])}
    else:
        environment |= {"PBS_JOBID": number, "PBS_NODEFILE": str(nodes), "PBS_O_WORKDIR": job["cwd"]}
    environment["PATH"] = f"{HOME}/bin:{environment['PATH']}"  # where its commands are installed
    environment |= {name: os.environ[name] for name in ("XDG_DATA_HOME",) if name in os.environ}
    first = job["nodes"][0]
    home = job["cwd"] if IS_COBALT else os.environ["HOME"]
    # PBS keeps what is printed until the job has ended.
    output = job["output"] if IS_COBALT else str(spool)
    link = tell(first, argv=["/bin/bash", job["script"]], env=environment, cwd=home, output=output)
    answers = link.makefile()
    session = json.loads(answers.readline())["pid"]
    change(job, state="R", session=session, started=began)
    link.settimeout(0.2)
    code, asked = None, 0.0
    while code is None:
        with contextlib.suppress(TimeoutError):
            answers = link.makefile()
            line = answers.readline()
            if line:
                code = json.loads(line)["code"]
        gone = (HOME / f"{count}.deleted").exists()
        late = time.time() > began + job["walltime"]
        if code is None and (gone or late):
            if not asked:
                asked = time.time()
                time.sleep(NOTICE_SECONDS)
                tell(first, kill=session, signal=int(signal.SIGTERM))
            elif time.time() > asked + KILL_SECONDS:
                tell(first, kill=session, signal=int(signal.SIGKILL))
    job = load(number)
    if spool.exists() and not IS_COBALT:
        Path(job["output"]).write_bytes(spool.read_bytes())
        Path(job["output"]).chmod(0o600)
    ended = -29 if asked and not gone else 271 if gone else 128 - code if code < 0 else code
    change(job, state="F", exit=ended)
    return 0


# -- what one asks ----------------------------------------------------------------------------------------------------


def qstat(words: list[str]) -> int:
    flags, ids = (
        [word for word in words if word.startswith("-")],
        [word for word in words if word.isdigit() or "." in word],
    )
    if IS_COBALT:
        for number in ids:
            if not path_of(number).exists() or load(number)["state"] == "F":
                continue
            job = load(number)
            state = {"Q": "queued", "R": "running"}[job["state"]]
            fields = {"JobName": job["name"], "State": state, "Location": ",".join(job["nodes"]) or "None"}
            print(f"JobID: {number}")
            print("".join(f"    {name:<18}: {value}\n" for name, value in fields.items()))
        return 0
    if "-F" in flags and "-f" not in flags:
        return fail(2, "usage: qstat -f [-F json] job_identifier...")
    jobs, code = {}, 0
    for number in ids:
        if not path_of(number).exists():
            code = fail(153, f"qstat: Unknown Job Id {number}")
            continue
        job = load(number)
        if job["state"] == "F" and "-x" not in flags:
            code = fail(35, f"qstat: {number} Job has finished, use -x or -H to obtain historical job information")
            continue
        jobs[job["id"]] = {
            "Job_Name": job["name"],
            "job_state": job["state"],
            "exec_host": "+".join(f"{node}/0*1" for node in job["nodes"]),
            "Resource_List": {"walltime": job["wishes"].get("walltime"), "place": job["wishes"].get("place")},
            "Variable_List": {"A": 7, "B": True},
            **({"comment": job["comment"]} if job.get("comment") else {}),
            **({"Exit_status": job["exit"]} if "exit" in job else {}),
            **({"stime": time.ctime(job["started"])} if "started" in job else {}),
        }
    print(json.dumps({"timestamp": int(time.time()), "pbs_server": SERVER, **({"Jobs": jobs} if jobs else {})}))
    return code


def qdel(words: list[str]) -> int:
    if not path_of(words[0]).exists():
        return fail(153, f"qdel: Unknown Job Id {words[0]}")
    job = load(words[0])
    if job["state"] == "Q":
        change(job, state="F")
    (HOME / f"{words[0].partition('.')[0]}.deleted").touch()
    return 0


def pbs_tmrsh(words: list[str]) -> int:
    job = load(os.environ["PBS_JOBID"])
    host, *argv = words
    if host not in job["nodes"]:
        return fail(255, f"pbs_tmrsh: {host} is not a host of this job")
    environment = {"HOME": os.environ["HOME"], "PATH": "/bin:/usr/bin", "PBS_JOBID": job["id"], "FAKEBATCH": str(HOME)}
    spool = HOME / f"{job['id'].partition('.')[0]}.OU"
    return task(host, argv, environment, os.environ["HOME"], str(spool))


def ssh(words: list[str]) -> int:
    words = words[2:] if words[0] == "-o" else words
    host, line = words
    out = HOME / f"ssh-{host}.out"
    environment = {"HOME": os.environ["HOME"], "PATH": "/bin:/usr/bin"}
    given = sys.stdin.buffer.readline()
    feed = f"printf %s {shlex.quote(given.decode())} | {{ {line}; }}"
    return task(host, ["/bin/bash", "-c", feed], environment, os.environ["HOME"], str(out))


def task(host: str, argv: list[str], environment: dict[str, str], cwd: str, output: str) -> int:
    answers = tell(host, argv=argv, env=environment, cwd=cwd, output=output).makefile()
    code: int = -1
    for line in answers:
        code = json.loads(line).get("code", code)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    verbs = {"qsub": qsub, "qstat": qstat, "qdel": qdel, "pbs_tmrsh": pbs_tmrsh, "ssh": ssh}
    if name in verbs:
        raise SystemExit(verbs[name](arguments))
    raise SystemExit(mom(arguments[0]) if name == "mom" else serve(arguments[0]))
