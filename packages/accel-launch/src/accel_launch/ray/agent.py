"""The process that talks to Ray: `python -m accel_launch.ray.agent REQUEST COMMAND...`.

It is a process of its own so that `accel launch` needs no Ray, and so that whoever kills either of them takes the ranks
along. `REQUEST` is what `ray.plan.agent_command` made, as JSON. It reserves a place for each rank, starts them there,
writes what they write to the files that `_ACCEL_OUT_<rank>` and `_ACCEL_ERR_<rank>` name, hands on signals, and ends
with the exit code of the rank that failed first, after it said who that was on the file that `_ACCEL_RESULT` names.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from accel_launch.ray.host import Host
from accel_launch.ray.places import Place, by_machine, rank_variables
from accel_launch.signals import STOP_SIGNALS
from accel_launch.spawn.report import shell_code
from accel_state import STOPPED_EXIT_CODE
from accel_state.errors import LaunchError

PLACEMENT_S = 900.0
"""How long the job waits in a cluster that others use too."""

_TURN_S = 0.2  # a signal is seen within it


def main(argv: list[str]) -> int:
    """Run the ranks until all ended well, were stopped, or one failed."""
    job = Job(json.loads(argv[0]), argv[1:])
    try:
        is_ours = connect()
        for signum in STOP_SIGNALS:
            signal.signal(signum, job.ask)  # Ray has some of its own
        job.place(is_ours)
        return job.run()
    except LaunchError as error:
        print(f"accel launch: error: {error}", file=sys.stderr)
        return 2
    finally:
        ray.shutdown()


def connect() -> bool:
    """Join the cluster that `RAY_ADDRESS` names or that runs here; where none does, start one here, which is told."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    try:
        ray.init(os.environ.get("RAY_ADDRESS") or "auto", **options)
    except ConnectionError as error:
        if os.environ.get("RAY_ADDRESS"):
            raise LaunchError(f"RAY_ADDRESS={os.environ['RAY_ADDRESS']} cannot be reached: {error}") from None
        ray.init("local", include_dashboard=False, **options)
        return True
    return False


class Job:
    """The ranks of one launch and how far they are.

    Args:
        request: as `ray.plan.request` makes it, and the ranks' `environment`.
        command: what each rank runs.
    """

    def __init__(self, request: dict[str, Any], command: Sequence[str]) -> None:
        self._request = request
        self._command = tuple(command)
        self._hosts: list[Any] = []  # by rank
        self._environments: list[dict[str, str]] = []
        self._codes: dict[int, int] = {}
        self._first_failure: int | None = None
        self._asked: int | None = None
        self._is_stopping = False
        self._deadline_s: float | None = None  # on the monotonic clock, for those that were asked to end

    def ask(self, signum: int, _frame: FrameType | None) -> None:
        """Note a signal, to be handed on once."""
        self._asked = self._asked or signum

    # ------------------------------------------------------------------ places

    def place(self, is_ours: bool) -> None:
        """Wait for the resources, and settle which rank is where.

        Raises:
            LaunchError: there are not enough, at all or within `PLACEMENT_S`.
        """
        wanted = self._request
        cpus, gpus = wanted["cpus_per_rank"], wanted["gpus_per_rank"]
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        if wanted["needs_gpus"] and not has_gpus:
            raise LaunchError("--multi-gpu: Ray's cluster has no GPU; use --cpu for CPU ranks")
        each = {"CPU": cpus} | ({"GPU": gpus} if gpus and has_gpus else {})
        num_ranks = wanted["ranks_per_bundle"]
        bundle = {name: count * num_ranks for name, count in each.items()}
        group = placement_group([bundle] * wanted["num_bundles"], strategy=wanted["strategy"])
        self._wait_for(group, bundle, is_ours)
        actor = ray.remote(num_cpus=cpus, num_gpus=each.get("GPU", 0), max_concurrency=3)(Host)
        hosts = [
            actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
            for index in range(wanted["num_bundles"])
            for _ in range(num_ranks)
        ]
        places: list[Place] = ray.get([host.where.remote() for host in hosts])
        order = by_machine(places)
        self._hosts = [hosts[index] for index in order]
        places = [places[index] for index in order]
        address = places[0].address
        port = ray.get(self._hosts[0].find_port.remote(address, wanted["port"]))
        self._environments = [{**wanted["environment"], **one} for one in rank_variables(places, port)]

    def _wait_for(self, group: PlacementGroup, bundle: dict[str, int], is_ours: bool) -> None:
        began_s, is_told = time.monotonic(), False
        while not group.wait(_TURN_S):
            waited_s = time.monotonic() - began_s
            if self._asked is not None:
                raise SystemExit(128 + self._asked)
            total = {name: ray.cluster_resources().get(name, 0) for name in bundle}
            num_bundles = self._request["num_bundles"]
            needed = f"{num_bundles} times {bundle}, and Ray's cluster has {total} in all"
            is_hopeless = is_ours and any(num_bundles * count > total[name] for name, count in bundle.items())
            if is_hopeless or waited_s > PLACEMENT_S:
                raise LaunchError(f"the ranks cannot be placed: they need {needed}. Ask for fewer processes")
            if not is_told and waited_s > 5:
                is_told = True
                print(f"accel launch: waiting for Ray: the ranks need {needed}", file=sys.stderr)

    # ------------------------------------------------------------------ ranks

    def run(self) -> int:
        """Start the ranks and see them to their end; the exit code.

        Raises:
            LaunchError: one cannot be started.
        """
        folder = str(Path.cwd())
        starting = [
            host.start.remote(self._command, environment, folder)
            for host, environment in zip(self._hosts, self._environments, strict=True)
        ]
        wrong = [text for text in ray.get(starting) if text]
        if wrong:
            raise LaunchError(wrong[0])
        self._watch()
        if self._first_failure is None:
            return 0
        returncode = self._codes[self._first_failure]
        _tell({"rank": self._first_failure, "stream": self._first_failure, "returncode": returncode})
        return shell_code(returncode)

    def _watch(self) -> None:
        with ExitStack() as files:
            names = [[f"_ACCEL_{name}_{rank}" for name in ("OUT", "ERR")] for rank in range(len(self._hosts))]
            self._pass_on([[files.enter_context(Path(os.environ[name]).open("wb")) for name in pair] for pair in names])

    def _pass_on(self, outlets: list[list[BinaryIO]]) -> None:
        reads = {host.read.remote(): rank for rank, host in enumerate(self._hosts)}
        while reads:
            done, _ = ray.wait(list(reads), timeout=_TURN_S)
            for reference in done:
                rank = reads.pop(reference)
                out, err, code = _result_of(reference)
                for outlet, text in zip(outlets[rank], (out, err), strict=True):
                    outlet.write(text)
                    outlet.flush()
                if code is None:
                    reads[self._hosts[rank].read.remote()] = rank
                else:
                    self._settle(rank, code)
            self._act()

    def _settle(self, rank: int, code: int) -> None:
        self._codes[rank] = code
        if code != 0 and self._first_failure is None:
            self._first_failure = rank
        if code != 0 and not self._is_stopping:  # one that stopped was asked to, and so are the others
            self._stop(None if code == STOPPED_EXIT_CODE else signal.SIGTERM)
        if self._is_stopping:
            self._hosts[rank].kill.remote()  # what it left behind; after a good end that may be meant to stay

    def _act(self) -> None:
        if self._asked is not None and not self._is_stopping:
            self._stop(self._asked)
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            self._deadline_s = None
            for host in self._living():
                host.kill.remote()

    def _stop(self, signum: int | None) -> None:
        self._is_stopping = True
        self._deadline_s = time.monotonic() + self._request["grace_s"]
        for host in self._living() if signum is not None else ():
            host.signal.remote(signum)

    def _living(self) -> list[Any]:
        return [host for rank, host in enumerate(self._hosts) if rank not in self._codes]


def _result_of(reference: Any) -> tuple[bytes, bytes, int | None]:
    try:
        result: tuple[bytes, bytes, int | None] = ray.get(reference)
    except ray.exceptions.RayActorError as error:  # its machine is gone, or Ray's worker there was killed
        return b"", f"{error}\n".encode(), -signal.SIGKILL
    return result


def _tell(result: dict[str, Any]) -> None:
    Path(os.environ["_ACCEL_RESULT"]).write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
