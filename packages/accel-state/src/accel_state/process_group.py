"""The one process-wide thing: this process's place in the job, and the process group if there are several.

Made once, by the first `PartialState`. A group that the user has already initialised is adopted. Beside torch's
default group there is one of our own, with a CPU half and a device half, so that collectives of accel never mix with
those of DDP or of the user.
"""

from __future__ import annotations

import atexit
import functools
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, though not listed

from accel_state import meeting
from accel_state.callsite import warn_user
from accel_state.collectives.absence import post_whereabouts
from accel_state.collectives.channel import Channel
from accel_state.devices import BY_NAME, DeviceKind, choose_device, detect_kind, find_device
from accel_state.enums import DistributedType
from accel_state.errors import ProcessGroupError, SettingError
from accel_state.kwargs import NCCL_TIMEOUT, OTHER_TIMEOUT
from accel_state.ordering import name_local_main
from accel_state.settings import UNSET, setting, warn_unknown_variables
from accel_state.topology import Topology

CONNECTING_S = 5.0  # how long a rank that leaves waits for others that are still connecting; at once otherwise
GOODBYE_S = 10.0  # how long the rank that hosts the store waits, when it leaves, for ranks that may still read from it


@dataclass(frozen=True, kw_only=True)
class Job:
    """What this process is part of.

    Args:
        topology: its place.
        device: where it computes.
        kind: the row of that device.
        backend: what the device's ranks talk over; None for a process on its own.
        channel: our own group; None for a process on its own.
        timeout: of every collective; None for a process on its own.
        is_owned: whether we made torch's default group, and therefore end it.
        asked: what `init_process_group` was given.
    """

    topology: Topology
    device: torch.device
    kind: DeviceKind
    backend: str | None = None
    channel: Channel | None = None
    timeout: timedelta | None = None
    is_owned: bool = False
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def distributed_type(self) -> DistributedType:
        """`NO` on its own, else by the kind of device."""
        return DistributedType.NO if self.channel is None else self.kind.distributed_type


_job: Job | None = None
_generation = 0
_was_destroyed = False


def current_job() -> Job:
    """The job, made with what the environment says if there is none yet.

    Raises:
        ProcessGroupError: its group was destroyed, and nobody has made a new state since.
    """
    if _job is None and _was_destroyed:
        raise ProcessGroupError(
            "the process group was destroyed, by destroy_process_group() or end_training(). To go on, make a new "
            "PartialState or Accelerator on every rank; what ranks still have to exchange comes before the end"
        )
    return _job if _job is not None and _is_usable(_job) else start_job()


def known_job() -> Job | None:
    """The job if it was started already; never makes one."""
    return _job


def start_job(cpu: bool = False, **init_kwargs: Any) -> Job:
    """Find this process's place, and make or adopt the process group if a launcher started it.

    Args:
        cpu: ignore accelerators; False leaves it to the settings.
        init_kwargs: as of `torch.distributed.init_process_group`: backend, init_method, timeout, …

    Raises:
        ProcessGroupError: the ranks cannot meet, or a setting does not fit a CPU half.
        SettingError: the job runs already, on another device than asked for.
        DeviceError: no device for this rank.
    """
    global _job, _generation, _was_destroyed
    _was_destroyed = False
    if _job is not None and _is_usable(_job):
        _check_same(_job, cpu, init_kwargs)
        return _job
    topology = Topology.from_env()
    if topology.local_rank == 0:
        warn_unknown_variables()
    kind, device = _find_device(cpu, topology)
    if not (has_group() or topology.is_distributed):
        _job = Job(topology=topology, device=device, kind=kind)
        return _job
    _generation += 1
    is_owned = not has_group()
    asked = dict(init_kwargs)
    backend = init_kwargs.pop("backend", None) or kind.backend
    timeout = init_kwargs.pop("timeout", None)
    timeout = _default_timeout(backend) if timeout is None else timeout
    if is_owned:
        _initialise(topology, device, kind, backend, timeout, init_kwargs)
        atexit.register(_leave)
    channel = _open_channel(kind, backend, timeout)
    if not is_owned:
        topology = _adopted_topology(topology, channel)
        device = choose_device(kind, topology.local_rank) if setting("torch_device") is None else device
    if topology.local_rank == 0:
        name_local_main(channel, topology.node_rank)
    _job = Job(
        topology=topology,
        device=device,
        kind=kind,
        backend=backend,
        channel=channel,
        timeout=timeout,
        is_owned=is_owned,
        asked=asked,
    )
    return _job


def forget_job() -> None:
    """Forget a job without a process group, so that the next one may be set up differently; others stay."""
    global _job
    if _job is not None and _job.channel is None:
        _job = None


def is_forked_copy() -> bool:
    """Whether this process only inherited the job from the one that forked it."""
    return _job is not None and _job.channel is not None and _job.channel.is_copy


def has_group() -> bool:
    """Whether torch's default process group exists."""
    return dist.is_available() and dist.is_initialized()


def end_job(group: Any = None) -> None:
    """Destroy torch's process group, or only the sub-group that is given; the next state makes a new one."""
    global _job, _was_destroyed
    if not has_group():
        _job = None
        return
    if group is not None:
        dist.destroy_process_group(group)
        return
    channel = None if _job is None else _job.channel
    if channel is not None:
        channel.wait_until_connected(CONNECTING_S)
    _was_destroyed = channel is not None and channel.world_size > 1
    _job = None
    dist.destroy_process_group()


def _leave() -> None:
    """At exit: end our group first, so that ranks that still wait in a collective notice, then let the others go."""
    if _job is None or _job.channel is None or _job.channel.is_copy:
        return
    goodbye = _job.channel.goodbye()
    end_job()
    goodbye(GOODBYE_S)


def _is_usable(job: Job) -> bool:
    return job.channel is None or dist.is_initialized()


def _check_same(job: Job, cpu: bool, init_kwargs: dict[str, Any]) -> None:
    if cpu and job.device.type != "cpu":
        raise SettingError(
            f"cpu=True was asked for, but this process already runs on {job.device}. Ask for it where the first state "
            "or Accelerator is made, or call PartialState._reset_state() before"
        )
    running = {**job.asked, "backend": job.backend, "timeout": job.timeout}
    changed = [
        f"{name}={value} (it is {running.get(name)})"
        for name, value in init_kwargs.items()
        if value is not None and job.channel is not None and value != running.get(name)
    ]
    if changed:
        warn_user(
            f"the process group exists already, so that this has no effect: {', '.join(changed)}. Give it where the "
            "first state or Accelerator is made"
        )


def _find_device(cpu: bool, topology: Topology) -> tuple[DeviceKind, torch.device]:
    is_cpu = setting("cpu", True if cpu else UNSET)
    named = setting("torch_device")
    if named is not None and not is_cpu:
        return find_device(named)
    kind = detect_kind(is_cpu)
    if kind.backend is None and topology.world_size > 1:  # ranks on mps have nothing to talk over
        kind = BY_NAME["cpu"]
    device = choose_device(kind, topology.local_rank) if topology.is_distributed else torch.device(kind.name)
    return kind, device


def _default_timeout(backend: str | None) -> timedelta:
    seconds = setting("process_group_timeout_s")
    if seconds is not None:
        return timedelta(seconds=seconds)
    return NCCL_TIMEOUT if backend == "nccl" else OTHER_TIMEOUT


def _mixed_backend(kind: DeviceKind, backend: str | None) -> str:
    """`cpu:gloo,cuda:nccl`: a CPU half beside the device's backend."""
    if backend is None or kind.name == "cpu":
        return "cpu:gloo"
    return backend if ":" in backend else f"cpu:gloo,{kind.name}:{backend}"


def _initialise(
    topology: Topology,
    device: torch.device,
    kind: DeviceKind,
    backend: str | None,
    timeout: timedelta,
    init_kwargs: dict[str, Any],
) -> None:
    if timeout <= timedelta(0):
        raise ProcessGroupError(f"a time-out of {timeout} lets no collective finish; give one above zero")
    if kind.name == "cpu" and backend == "nccl":
        raise ProcessGroupError("backend='nccl' cannot carry tensors of the CPU; leave it out, or use 'gloo'")
    if kind.name != "cpu":
        kind.set_device(device)
    url = init_kwargs.pop("init_method", None) or "env://"
    if kind.name == "cuda":  # nccl then knows from the start which GPU is whose
        init_kwargs.setdefault("device_id", device)
    where = f"{topology.master_address}:{topology.master_port}" if url == "env://" else url
    try:
        store = PrefixStore(f"accel/init/{_generation}", meeting.meeting_place(url, topology, timeout))
        meeting.agree_on_size(store, topology.rank, topology.world_size, timeout)
        dist.init_process_group(
            backend=backend if kind.name == "cpu" else _mixed_backend(kind, backend),
            timeout=timeout,
            rank=topology.rank,
            world_size=topology.world_size,
            store=store,
            **init_kwargs,
        )
    except (RuntimeError, ValueError) as error:  # torch's network and time-out errors are RuntimeErrors
        who = f"rank {topology.rank} of {topology.world_size} could not join the others at {where}"
        raise ProcessGroupError(f"{who}: {_why_apart(error)}") from error


def _why_apart(error: Exception) -> str:
    """What torch's or our error means, and what to do."""
    if isinstance(error, ProcessGroupError):
        return str(error)
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return (
            "another program uses that port already, perhaps a run that has not ended. End it, or choose another port "
            f"(MASTER_PORT, --main-process-port): {error}"
        )
    return (
        f"{error}. Check that rank 0 runs, that the port is free there and can be reached, and that all ranks were "
        "given one world size"
    )


def _open_channel(kind: DeviceKind, backend: str | None, timeout: timedelta) -> Channel:
    group = dist.new_group(backend=_mixed_backend(kind, backend), timeout=timeout)
    assert group is not None  # every rank is a member
    world = dist.group.WORLD
    assert world is not None
    store = PrefixStore(f"accel/{_generation}", world.get_group_store())
    channel = Channel(group, store, dist.get_rank(), dist.get_world_size(), timeout)
    channel.note_connected()
    post_whereabouts(store, channel.rank)
    _tell_others_before_dying()
    return channel


@functools.cache
def _tell_others_before_dying() -> None:
    """Let a rank that ends by an exception say so to those that wait for it, in our collectives or in torch's."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        report_failure(error)
        before(kind, error, trace)

    sys.excepthook = hook


def report_failure(error: BaseException) -> None:
    """Tell the other ranks, through the store, why this one is about to end. Called when an exception ends it.

    Args:
        error: what ends it.
    """
    if _job is not None and _job.channel is not None and not _job.channel.is_copy:
        _job.channel.post_failure(error)


def _adopted_topology(topology: Topology, channel: Channel) -> Topology:
    """The place in a group that somebody else made; without a launcher's variables, machines are told by host name."""
    if topology.is_distributed and topology.world_size == channel.world_size:
        return topology
    hosts = channel.exchange_objects("adopt process group", socket.gethostname())
    nodes = list(dict.fromkeys(hosts))
    here = [rank for rank, host in enumerate(hosts) if host == hosts[channel.rank]]
    return Topology(
        rank=channel.rank,
        world_size=channel.world_size,
        local_rank=here.index(channel.rank),
        local_world_size=len(here),
        node_rank=nodes.index(hosts[channel.rank]),
        num_nodes=len(nodes),
        master_address=nodes[0],
        master_port=0,
    )
