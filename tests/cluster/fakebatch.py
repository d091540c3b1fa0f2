"""A batch system in one file, which stands for OpenPBS or for Cobalt: `qsub`, `qstat`, `qdel`, `qalter`, `pbsnodes`,
`pbs_tmrsh`, `ssh`, and `mom`, which runs on every host. It runs scripts for real and refuses directives it does not
know. As PBS it follows what a real OpenPBS 23.06 showed (tests/README.md). As Cobalt it follows general knowledge, not
a manual nor a machine: a test with it shows that our parts fit together, not that a real Cobalt takes them. All it
knows is in the folder FAKEBATCH names; a file `history` there turns on PBS's job history, which is off by default.
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
    False: ["-N", "-l", "-A", "-q", "-W", "-S", "-j", "-o", "-e", "-r", "-M", "-m", "-J"],
    True: ["-n", "-t", "-A", "-q", "-o", "-e", "-M", "--attrs", "--jobname", "--debuglog", "--dependencies"],
}[IS_COBALT]
NOTICE_SECONDS, KILL_SECONDS = 1.0, 10.0  # kill_delay is 10 s by default
NO_HISTORY = "PBS is not configured to maintain job history"
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
    given = words[:-1]
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith(f"{PREFIX} "):
            given += shlex.split(line.removeprefix(PREFIX))
    while given:
        flag = given.pop(0)
        if flag not in VALUED or not given:
            return fail(2, f"qsub: illegal option {flag}")
        options.setdefault(flag, []).append(given.pop(0))
    if "-J" in options and options.get("-r") == ["n"]:
        return fail(1, "qsub: cannot submit non-rerunable Array Job")
    after, problem = dependencies((options.get("-W") or options.get("--dependencies") or [""])[0])
    if problem:
        return fail(1, f"qsub: {problem}")
    count = len(list((HOME / "jobs").iterdir())) + 1
    last = int(options["-J"][0].partition("-")[2].partition("%")[0]) if "-J" in options else None
    for index in [None] if last is None else range(last + 1):
        tail = "" if index is None else f"[{index}]"
        job = {
            "id": f"{count}" if IS_COBALT else f"{count}{tail}.{SERVER}",
            "state": "Q",
            "name": (options.get("-N") or options.get("--jobname") or ["?"])[0],
            "output": options["-o"][0].replace("^array_index^", str(index)),
            "script": str(HOME / f"{count}.SC"),
            "cwd": str(Path.cwd()),
            "after": after,
            "index": index,
            **(cobalt_wishes(options) if IS_COBALT else pbs_wishes(options)),
        }
        Path(job["script"]).write_text(text)
        change(job)
        if job.get("comment") is None:
            keep, nothing = [sys.executable, __file__, "serve", job["id"]], subprocess.DEVNULL
            subprocess.Popen(keep, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    print(f"{count}" if IS_COBALT else f"{count}{'' if last is None else '[]'}.{SERVER}")
    return 0


def dependencies(text: str) -> tuple[list[str], str]:
    """The ids of `depend=afterok:7:8`, and what is wrong with them."""
    ids = text.removeprefix("depend=afterok:").split(":") if text else []
    for number in ids:
        known = path_of(number).exists() and (load(number)["state"] != "F" or (HOME / "history").exists())
        if not known and "[]" not in number:
            return [], f"Unknown Job Id {number}"
    return ids, ""


def qalter(words: list[str]) -> int:
    *_, value, number = words
    after, problem = dependencies(value)
    if not problem:  # it accepts an unknown job, too
        change(load(number), after=after)
    return 0


def waits(job: Job) -> bool:
    """Until all jobs before it have ended well. One that did not deletes this job."""
    for number in [each for word in load(job["id"])["after"] for each in elements(word)]:
        other = load(number)
        if other["state"] != "F":
            return True
        if other.get("exit") != 0:
            change(load(job["id"]), state="F")
            raise SystemExit(0)
    return False


def elements(number: str) -> list[str]:
    """The jobs of an array, `7[].pbs0`; else the job itself."""
    name, brackets, _ = number.partition("[]")
    every = [json.loads(path.read_text())["id"] for path in (HOME / "jobs").glob("*.json")]
    return [each for each in every if each.startswith(f"{name}[")] if brackets else [number]


def pbsnodes(words: list[str]) -> int:
    cpus = int((HOME / "cpus").read_text())
    node = {"state": "free", "resources_available": {"ncpus": cpus, "mem": "8388608kb"}}
    print(json.dumps({"nodes": dict.fromkeys((HOME / "hosts").read_text().split(), node)}))
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
    return {"comment": None, "nodes": nodes, "wishes": wishes, "walltime": walltime, "ncpus": ncpus}


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
    while waits(job):
        time.sleep(0.2)
    job = load(number)
    if job["state"] == "F":
        return 0
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
        environment |= {} if job["index"] is None else {"PBS_ARRAY_INDEX": str(job["index"])}
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
                # To every process of the session: the script's trap and `timeout` pass it on, so COMMAND gets several.
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
    has_history = (HOME / "history").exists()
    is_refused = "-x" in flags and not has_history
    jobs, code = {}, fail(0, f"qstat: {NO_HISTORY} {' '.join(ids)}") if is_refused else 0
    for number in (
        [] if is_refused else ids or [json.loads(path.read_text())["id"] for path in (HOME / "jobs").glob("*.json")]
    ):
        job = load(number) if path_of(number).exists() else {"state": "F"}
        if "id" not in job or (job["state"] == "F" and not has_history):
            code = fail(153, f"qstat: Unknown Job Id {number}") if ids else code
            continue
        if job["state"] == "F" and "-x" not in flags:
            code = fail(35, f"qstat: {number} Job has finished, use -x or -H to obtain historical job information")
            continue
        jobs[job["id"]] = {
            "Job_Name": job["name"],
            "job_state": job["state"],
            "exec_host": "+".join(f"{node}/0*{job.get('ncpus', 1)}" for node in job["nodes"]),
            "Resource_List": {"walltime": job["wishes"].get("walltime"), "place": job["wishes"].get("place")},
            "Variable_List": {"A": 7, "B": True},
            **({"comment": job["comment"]} if job.get("comment") else {}),
            **({"Exit_status": job["exit"]} if "exit" in job else {}),
            **({"stime": time.ctime(job["started"])} if "started" in job else {}),
        }
    print(json.dumps({"timestamp": int(time.time()), "pbs_server": SERVER, **({"Jobs": jobs} if jobs else {})}))
    return code


def qdel(words: list[str]) -> int:
    for number in elements(words[0]):
        if not path_of(number).exists():
            return fail(153, f"qdel: Unknown Job Id {number}")
        job = load(number)
        if job["state"] == "Q":
            change(job, state="F")
        (HOME / f"{number.partition('.')[0]}.deleted").touch()
    return 0


def qsig(words: list[str]) -> int:
    """To the whole session of the script. The login shell around it dies of the signal, and the job ends at once."""
    job = load(words[2])
    if job["state"] != "R":
        return fail(158, f"qsig: Request invalid for state of job {words[2]}")
    for number in (signal.Signals[f"SIG{words[1]}"], signal.SIGKILL):
        tell(job["nodes"][0], kill=job["session"], signal=int(number))
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
    verbs = {"qsub": qsub, "qstat": qstat, "qdel": qdel, "qsig": qsig, "qalter": qalter, "pbsnodes": pbsnodes}
    verbs |= {"pbs_tmrsh": pbs_tmrsh, "ssh": ssh}
    if name in verbs:
        raise SystemExit(verbs[name](arguments))
    raise SystemExit(mom(arguments[0]) if name == "mom" else serve(arguments[0]))
