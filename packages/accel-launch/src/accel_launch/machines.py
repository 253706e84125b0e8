"""Which launcher starts a run, on how many machines, which of them this is, and where they meet."""

from __future__ import annotations

from collections.abc import Mapping

from accel_launch.checks import Settings, show
from accel_state.errors import LaunchError
from accel_state.settings import Resolved
from accel_state.slurm import expand_hosts
from accel_state.topology import Topology

DEFAULT_PORT = 29500
"""Where several machines meet unless told otherwise, as everywhere."""


_ELSEWHERE = ("srun", "mpi", "ray", "deepspeed")
"""Launchers that put ranks on machines whose GPUs are not seen from here."""


def settle_launcher(settings: Settings, environ: Mapping[str, str]) -> None:
    """Replace `auto` by who starts the processes, and say why.

    Raises:
        LaunchError: a launcher that cannot do what else was asked for.
    """
    asked = settings["launcher"]
    if asked.value != "auto":
        return
    if settings["mpirun_hostfile"].value:
        found = Resolved("mpi", f"default: {show(settings, 'mpirun_hostfile')}")
    elif settings["num_machines"].value > 1 and settings["use_deepspeed"].value and _deepspeed_keys(settings):
        found = Resolved("deepspeed", f"default: {show(settings, _deepspeed_keys(settings)[0])}")
    elif settings["num_machines"].origin == "default" and _is_wide_batch_script(environ):
        found = Resolved("srun", f"default: a batch script on {_num_slurm_machines(environ)} machines of Slurm")
    elif settings["max_restarts"].value > 0:
        found = Resolved("elastic", f"default: {show(settings, 'max_restarts')}")
    elif settings["num_machines"].value > 1 or _slurm_task(environ) is not None:
        found = Resolved("elastic", "default: several machines")
    else:
        found = Resolved("spawn", "default")
    settings["launcher"] = found


def settle_machines(settings: Settings, environ: Mapping[str, str]) -> None:
    """Fill in what Slurm knows, how machines find each other, and where.

    Raises:
        LaunchError: the host that they meet at is missing, or settings contradict each other.
    """
    task = _slurm_task(environ)
    if task is not None and settings["launcher"].value in ("elastic", "spawn"):
        _ask_slurm(settings, task)
    if settings["launcher"].value == "srun":
        _ask_allocation(settings, environ)
    num_machines, rank = settings["num_machines"].value, settings["machine_rank"].value
    fewest = settings["min_machines"].value
    if fewest is not None and fewest > num_machines:
        raise LaunchError(f"{show(settings, 'min_machines')} contradicts {show(settings, 'num_machines')}: it is more")
    if rank >= num_machines:
        raise LaunchError(
            f"{show(settings, 'machine_rank')} contradicts {show(settings, 'num_machines')}: the last machine is "
            f"{num_machines - 1}"
            if num_machines > 1
            else f"{show(settings, 'machine_rank')} contradicts {show(settings, 'num_machines')}: the only machine is 0"
        )
    if settings["launcher"].value == "elastic":
        _settle_rendezvous(settings)


def num_processes(settings: Settings, num_gpus: int, platform: str) -> Resolved:
    """How many processes the whole job has: one per GPU of each machine, or as many as were asked for.

    Raises:
        LaunchError: they cannot be spread evenly, there are fewer GPUs, or Ray is not told.
    """
    asked, num_machines = settings["num_processes"], settings["num_machines"].value
    if asked.value is None and settings["launcher"].value == "ray":
        raise LaunchError(f"{show(settings, 'launcher')}: --num-processes is missing: say how many Ray shall start")
    if asked.value is None:
        why = "--cpu" if settings["cpu"].value else f"{num_gpus or 'no'} GPU{'s' * (num_gpus != 1)} visible"
        each = f" on each of {num_machines} machines" if num_machines > 1 else ""
        return Resolved(max(1, num_gpus) * num_machines, f"default: {why}{each}")
    if asked.value > 1 and platform in ("darwin", "win32"):
        raise LaunchError(f"{show(settings, 'num_processes')}: on macOS and Windows accel runs one process")
    if asked.value % num_machines:
        raise LaunchError(
            f"{show(settings, 'num_processes')} cannot be spread evenly over {num_machines} machines: it is the number "
            "of processes on all of them together"
        )
    if 0 < num_gpus < asked.value // num_machines and settings["launcher"].value not in _ELSEWHERE:
        raise LaunchError(
            f"{show(settings, 'num_processes')}: {num_gpus} GPU{'s are' if num_gpus > 1 else ' is'} visible, and each "
            "process needs its own; ask for fewer, or add --cpu"
        )
    return asked


def check_launcher(settings: Settings, platform: str) -> None:
    """What the launcher cannot do is refused.

    Raises:
        LaunchError: names the setting and the launcher that can.
    """
    launcher = settings["launcher"].value
    if launcher == "spawn":
        for key, least in (("num_machines", 1), ("max_restarts", 0)):
            if settings[key].value > least:
                raise LaunchError(
                    f"{show(settings, key)} needs --launcher elastic: spawn starts one machine's ranks once"
                )
    if launcher != "elastic":
        for key in ("min_machines", "rdzv_conf", "rdzv_id"):
            if settings[key].value:
                raise LaunchError(f"{show(settings, key)} is for --launcher elastic, and the launcher is {launcher}")
    if launcher == "ray":
        for key in ("main_process_ip", "machine_rank", "max_restarts", "gpu_ids"):
            if settings[key].value not in (None, 0, "all"):
                raise LaunchError(f"{show(settings, key)}: Ray starts the ranks, once, where it chooses; leave it out")
    if launcher == "mpi" and settings["max_restarts"].value:
        raise LaunchError(f"{show(settings, 'max_restarts')}: mpirun starts processes once; leave it out")
    if launcher == "deepspeed":
        _check_deepspeed(settings)
    else:
        for key in _deepspeed_keys(settings):
            raise LaunchError(
                f"{show(settings, key)} is for DeepSpeed's own launcher, with --use-deepspeed on several machines, and "
                f"the launcher is {launcher}"
            )
    if launcher != "spawn" and platform == "win32":
        raise LaunchError(f"{show(settings, 'launcher')} does not exist on Windows")


def _deepspeed_keys(settings: Settings) -> list[str]:
    """The settings of DeepSpeed's own launcher that somebody gave; none where it is to stay away."""
    keys = ("multinode_launcher", "hostfile", "exclusion_filter", "inclusion_filter")
    return [key for key in (f"deepspeed_{key}" for key in keys) if settings[key].value not in (None, "", "standard")]


def _check_deepspeed(settings: Settings) -> None:
    if settings["deepspeed_multinode_launcher"].value == "standard":
        raise LaunchError(f"{show(settings, 'deepspeed_multinode_launcher')} contradicts {show(settings, 'launcher')}")
    if settings["num_machines"].value < 2 or not settings["use_deepspeed"].value:
        raise LaunchError(f"{show(settings, 'launcher')}: needs --use-deepspeed and several machines, --num-machines")
    filters = [f"deepspeed_{kind}_filter" for kind in ("exclusion", "inclusion")]
    if all(settings[key].value for key in filters):
        raise LaunchError(f"{' and '.join(show(settings, key) for key in filters)} contradict each other: give one")
    for key in ("machine_rank", "max_restarts"):
        if settings[key].value:
            raise LaunchError(f"{show(settings, key)}: DeepSpeed's launcher starts all machines from the first, once")


def _settle_rendezvous(settings: Settings) -> None:
    num_machines, elastic = settings["num_machines"].value, settings["min_machines"].value is not None
    if settings["rdzv_backend"].value is None:
        restarts = settings["max_restarts"].value > 0 or elastic
        why = "default: machines may come back" if restarts else "default"
        settings["rdzv_backend"] = Resolved("c10d" if restarts else "static", why)
    elif settings["rdzv_backend"].value == "static" and elastic:
        raise LaunchError(
            f"{show(settings, 'min_machines')} needs --rdzv-backend c10d: static knows one set of machines"
        )
    if num_machines == 1:
        return
    if settings["main_process_ip"].value is None:
        raise LaunchError(
            f"{show(settings, 'num_machines')}: --main-process-ip is missing: give all machines the host of machine 0"
        )
    if not settings["main_process_port"].value:
        settings["main_process_port"] = Resolved(DEFAULT_PORT, "default: the same on all machines")
    if settings["rdzv_backend"].value == "static" and settings["machine_rank"].origin == "default":
        raise LaunchError(
            f"{show(settings, 'num_machines')}: --machine-rank is missing: give each machine its own, from 0, and 0 to "
            f"{settings['main_process_ip'].value}"
        )


# ---------------------------------------------------------------- Slurm


def _slurm_task(environ: Mapping[str, str]) -> Topology | None:
    """This launcher's place where srun started one on each of several machines."""
    if not environ.get("SLURM_PROCID"):
        return None
    place = Topology.from_env({name: text for name, text in environ.items() if name.startswith("SLURM_")})
    if not place.is_distributed or place.world_size == 1:
        return None
    if place.world_size != place.num_nodes:
        raise LaunchError(
            f"srun started {place.world_size} launchers on {place.num_nodes} machines: start one on each, with srun "
            "--ntasks-per-node 1, and let accel launch start the processes; or run the script by srun without it"
        )
    return place


def _ask_slurm(settings: Settings, task: Topology) -> None:
    known = {
        "num_machines": task.num_nodes,
        "machine_rank": task.node_rank,
        "main_process_ip": task.master_address,
        "main_process_port": task.master_port,
    }
    for key, value in known.items():
        if settings[key].origin == "default":
            settings[key] = Resolved(value, "environment SLURM_*")


def _is_wide_batch_script(environ: Mapping[str, str]) -> bool:
    """Whether this is the script of a batch job, or a shell in an allocation, that has several machines."""
    in_step = any(environ.get(name) for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))
    first = environ.get("SLURM_PROCID", "0") == "0"
    return bool(environ.get("SLURM_JOB_ID")) and not in_step and first and _num_slurm_machines(environ) > 1


def _num_slurm_machines(environ: Mapping[str, str]) -> int:
    text = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or ""
    return int(text) if text.isdigit() else len(expand_hosts(environ.get("SLURM_JOB_NODELIST", "")))


def _ask_allocation(settings: Settings, environ: Mapping[str, str]) -> None:
    if not environ.get("SLURM_JOB_ID"):
        raise LaunchError(
            f"{show(settings, 'launcher')}: this is not inside an allocation of Slurm; `accel slurm` writes a batch "
            "script that asks for one"
        )
    if settings["num_machines"].origin == "default":
        settings["num_machines"] = Resolved(max(1, _num_slurm_machines(environ)), "environment SLURM_JOB_NUM_NODES")
