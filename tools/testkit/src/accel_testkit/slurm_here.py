"""A Slurm cluster of two nodes, made up on this machine: its own munge, controller and two slurmd, in one folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")


def missing() -> str:
    """What keeps a cluster from being made here, or nothing."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start it, yield the variables by which Slurm's commands find it, end it."""
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    config = folder / "slurm.conf"
    config.write_text(_config(folder))
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
    options = [word for name, file in {**files, "seed-file": "seed"}.items() for word in (f"--{name}", folder / file)]
    commands = [
        ["munged", "--foreground", "--force", *options],
        ["slurmctld", "-D", "-f", config],
        ["slurmd", "-D", "-N", "n1", "-f", config],
        ["slurmd", "-D", "-N", "n2", "-f", config],
    ]
    environment = {**os.environ, "SLURM_CONF": str(config)}
    daemons = []
    try:
        for command in commands:
            with (folder / "daemons.log").open("ab") as log:
                daemons.append(subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment))
            if command[0] == "munged":
                _until((folder / "munge.socket").exists, folder)
        _until(lambda: _idle_nodes(environment) == 2, folder)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()


def _idle_nodes(environment: dict[str, str]) -> int:
    asked = ["sinfo", "--noheader", "--Node", "--format", "%N %t"]
    found = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False, timeout=30)
    return sum(line.endswith(" idle") for line in found.stdout.splitlines())


def _until(is_so, folder: Path) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s, (folder / "daemons.log").read_text()
        time.sleep(0.1)


def _config(folder: Path) -> str:
    ports = [_free_port() for _ in range(3)]
    lines = [
        "ClusterName=here",
        f"SlurmctldHost={socket.gethostname()}(127.0.0.1)",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge.socket,cred_expire=5",  # else a job that is queued again waits 2 minutes
        "CredType=cred/munge",
        f"SlurmctldPort={ports[0]}",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        "ProctrackType=proctrack/pgid",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerParameters=sched_interval=1",
        "MpiDefault=none",
        "ReturnToService=2",
        "KillWait=10",
        *(
            f"NodeName=n{i} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={ports[i]} CPUs=1 State=UNKNOWN"
            for i in (1, 2)
        ),
        "PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP",
    ]
    return "\n".join(lines) + "\n"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]
