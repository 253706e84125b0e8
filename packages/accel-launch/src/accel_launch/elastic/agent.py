"""The process that runs torch elastic for one machine: `python -m accel_launch.elastic.agent REQUEST COMMAND...`.

It is a process of its own so that `accel launch` needs no torch, and so that whoever kills either of them takes the
ranks along. `REQUEST` is what `elastic.plan.request` made, as JSON. It ends with the exit code of the rank that failed
first, and says who that was on the file that `_ACCEL_RESULT` names.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(argv: list[str]) -> int:
    """Run the ranks of this machine until all ended well, were stopped, or failed more often than allowed."""
    request: dict[str, Any] = json.loads(argv[0])
    # with torch's default, a restarted rank meets the store of the dead attempt, and a machine that joins hangs
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher import api

    from accel_launch.elastic.stopping import stoppable_agent

    agent = stoppable_agent()
    vars(api)["LocalElasticAgent"] = agent  # torch's launcher cannot be given an agent
    try:
        command = [word.replace("$", "$$") for word in argv[1:]]  # torch substitutes in them
        api.elastic_launch(api.LaunchConfig(**request), command[0])(*command[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = 128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode
        _tell({"rank": rank, "stream": failure.local_rank, "returncode": failure.exitcode})
        return code
    except SignalException as error:
        return 128 + int(error.sigval)
    except RendezvousError as error:
        print(f"accel launch: error: the machines did not meet: {error}", file=sys.stderr)
        return 1
    return int(agent.exit_code)


def _tell(result: dict[str, Any]) -> None:
    place = os.environ.get("_ACCEL_RESULT")
    if place:
        Path(place).write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
