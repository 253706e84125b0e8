"""The run that the kill tests interrupt: the digits net with dropout, a checkpoint every few updates, on real data.

Prints `done <hash>` with a hash over weights and optimizer state at the end, so that two runs are compared by one line.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import importlib.util
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from accel import STOPPED_EXIT_CODE, Accelerator, ProjectConfiguration, set_seed

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "digits.py"


def example():
    spec = importlib.util.spec_from_file_location("digits_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def digest(*trees) -> str:
    """A hash over every tensor and number of nested dictionaries and lists."""
    found = hashlib.sha256()

    def visit(tree) -> None:
        if isinstance(tree, dict):
            for key in sorted(tree, key=str):
                found.update(str(key).encode())
                visit(tree[key])
        elif isinstance(tree, list | tuple):
            for item in tree:
                visit(item)
        elif isinstance(tree, torch.Tensor):
            found.update(tree.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(tree).encode())

    visit(trees)
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--stoppable", action="store_true", help="save and leave after SIGTERM")
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # workers inherit it: the test asks for stacks where a run does not end
    digits = example()
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            project_dir=str(args.folder), automatic_checkpoint_naming=True, total_limit=3
        ),
        step_scheduler_with_optimizer=False,
    )
    set_seed(7)
    train_set, _ = digits.digits()
    batch_size = 64 // accelerator.num_processes
    loader = DataLoader(train_set, batch_size=batch_size, shuffle=True, num_workers=args.num_workers)
    model = digits.DigitsNet(width=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.updates)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    set_seed(7, device_specific=True)
    progress = digits.Progress()
    accelerator.register_for_checkpointing(progress)
    try:
        accelerator.load_state()
        accelerator.print(f"resumed at {progress.update}", flush=True)
    except FileNotFoundError:
        accelerator.print("from the beginning", flush=True)
    while progress.update < args.updates:
        for images, labels in loader:
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.update += 1
            accelerator.print(f"update {progress.update}", flush=True)
            if progress.update % args.save_every == 0:
                accelerator.save_state()
            if args.stoppable and accelerator.should_stop:
                accelerator.save_state()
                accelerator.print(f"stopped at {progress.update}", flush=True)
                accelerator.close()
                sys.exit(STOPPED_EXIT_CODE)
            if progress.update == args.updates:
                break
    states = accelerator.gather_object([torch.get_rng_state()])
    accelerator.print(
        "done", digest(model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), states), flush=True
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
