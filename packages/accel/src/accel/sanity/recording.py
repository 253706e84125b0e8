"""`python -m accel.sanity.recording OUT STEPS SCRIPT ...`: a user's script, ended after its first updates.

Writes to OUT, as JSON, the mean loss over all ranks and the gradients' norm of each update. The script has to use
`accelerator.backward` and a torch optimizer.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from accel import Accelerator
from accel_parallel import total_norm
from accel_state import PartialState, reduce


class Recorder:
    """What the first updates of a run were; ends the run after the last of them.

    Args:
        out: the file.
        num_updates: how many.
    """

    def __init__(self, out: Path, num_updates: int) -> None:
        self.out = out
        self.num_updates = num_updates
        self.losses: list[Tensor] = []  # of the micro-batches since the last update
        self.updates: list[dict[str, float]] = []

    def watch(self) -> None:
        """Take part in every backward and every optimizer step of this process."""
        backward = Accelerator.backward

        def recorded(accelerator: Accelerator, loss: Tensor, **kwargs: Any) -> None:
            self.losses.append(loss.detach().float())
            backward(accelerator, loss, **kwargs)

        Accelerator.backward = recorded  # type: ignore[assignment,method-assign]  # the script's own lines stay as they are
        register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self.losses:
            return  # a second optimizer of the same update
        loss = reduce(torch.stack(self.losses).mean(), "mean")
        norm = total_norm([one for group in optimizer.param_groups for one in group["params"]])
        self.losses = []
        self.updates.append({"loss": loss.item(), "norm": norm.item()})
        if len(self.updates) == self.num_updates:
            self._leave()

    def _leave(self) -> None:
        state = PartialState()
        if state.is_main_process:
            self.out.write_text(json.dumps(self.updates), encoding="utf-8")
        state.wait_for_everyone()
        state.destroy_process_group()
        raise SystemExit(0)


def main(argv: list[str]) -> None:
    """Run the script with its own arguments."""
    out, num_updates, script, *arguments = argv
    recorder = Recorder(Path(out), int(num_updates))
    recorder.watch()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
    raise SystemExit(
        f"{script} ended after {len(recorder.updates)} updates: {num_updates} were to be compared (--steps)"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
