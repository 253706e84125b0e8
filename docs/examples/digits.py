"""Handwritten digits: a small conv net trained on one process or many, with live metrics and exact resume.

    accel launch --cpu --num-processes 2 docs/examples/digits.py
    accel launch --cpu --num-processes 2 docs/examples/digits.py --resume
    accel launch --cpu --num-processes 2 docs/examples/digits.py --fsdp        # parameters shared over the processes
    accel launch --cpu --num-processes 2 docs/examples/digits.py --tp 2        # each linear layer shared by two of them
    python docs/examples/digits.py --mixed-precision bf16

The data is scikit-learn's copy of the UCI handwritten digits: 1,797 images of 8 x 8 pixels, inside the package.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from accel import STOPPED_EXIT_CODE, Accelerator, PartialState, ProjectConfiguration, set_seed
from accel.utils import FullyShardedDataParallelPlugin, ParallelismConfig, broadcast_object_list


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers, with dropout: 8 x 8 pixels in, ten logits out."""

    tp_plan: ClassVar[dict[str, str]] = {"hidden": "colwise", "logits": "rowwise"}  # how processes share them by --tp

    def __init__(self, width: int = 32, dropout: float = 0.25) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(2 * width * 16, 128)
        self.logits = nn.Linear(128, 10)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.hidden(self.dropout(x.flatten(1))))
        return self.logits(self.dropout(x))


class Progress:
    """Where the run stands; part of every checkpoint."""

    def __init__(self) -> None:
        self.epoch = 0
        self.update = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "update": self.update}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.update = state["epoch"], state["update"]


def digits(seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """The training and the test part (1,437 and 360 images), the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, random_state=seed, stratify=labels)
    x_train, x_test = (torch.tensor(x / 16.0, dtype=torch.float32).view(-1, 1, 8, 8) for x in parts[:2])
    y_train, y_test = (torch.tensor(y) for y in parts[2:])
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def learning_rate_factor(update: int) -> float:
    """Warm-up over 30 updates, then half as much every 80: bound to no length, so a finished run can be prolonged."""
    return min(1.0, (update + 1) / 30) * max(0.01, 0.5 ** (update / 80))


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, list[Tensor]]:
    """Accuracy over the whole test set, and the images, labels and predictions, each sample once."""
    model.eval()
    seen = []
    for images, labels in loader:
        guesses = model(images).argmax(dim=1)
        seen.append(accelerator.gather_for_metrics((images, labels, guesses)))
    model.train()
    images, labels, guesses = (torch.cat(parts) for parts in zip(*seen, strict=True))
    return (guesses == labels).float().mean().item(), [images, labels, guesses]


def draw_mistakes(images: Tensor, labels: Tensor, guesses: Tensor, path: Path) -> None:
    """A PNG with every test image that the net got wrong."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wrong = (labels != guesses).nonzero().flatten().tolist()
    columns = 8
    rows = max(1, -(-len(wrong) // columns))
    figure = Figure(figsize=(columns * 1.1, rows * 1.4))
    figure.suptitle(f"{len(wrong)} of {len(labels)} wrong")
    for place, index in enumerate(wrong):
        axis = figure.add_subplot(rows, columns, place + 1)
        axis.imshow(images[index, 0].cpu(), cmap="gray_r")
        axis.set_title(f"{labels[index]} seen as {guesses[index]}", fontsize=7)
        axis.axis("off")
    FigureCanvasAgg(figure).print_png(path)


def run_directory(base: Path, resume: bool) -> Path:
    """The newest run's folder to resume, else the next free one: the main process's choice on every rank."""
    numbers = [int(path.name[4:]) for path in base.glob("run-*") if path.name[4:].isdigit()]
    newest = max(numbers, default=0)
    choice = [f"run-{newest if resume and newest else newest + 1}"]
    return base / broadcast_object_list(choice)[0]


def save_and_leave(accelerator: Accelerator, progress: Progress) -> NoReturn:
    """End here and now, so that whoever started the run knows that it can go on."""
    accelerator.save_state()
    accelerator.print(f"stopped at update {progress.update}; --resume continues")
    accelerator.close()
    sys.exit(STOPPED_EXIT_CODE)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15, help="in all, those before a --resume included")
    parser.add_argument("--global-batch-size", type=int, default=64, help="over all processes")
    parser.add_argument("--lr", type=float, default=4e-3, help="at the schedule's peak")
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--num-workers", type=int, default=0, help="data loading processes per rank")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default=None)
    parser.add_argument("--fsdp", action="store_true", help="share parameters and optimizer state over processes")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="processes that share each linear layer")
    parser.add_argument("--cpu", action="store_true", help="ignore every accelerator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=20, help="updates between checkpoints")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/digits"), help="each run gets a folder in it")
    parser.add_argument("--resume", action="store_true", help="continue the newest run, if there is one")
    return parser.parse_args(argv)


def sharing(args: argparse.Namespace, num_processes: int) -> dict[str, Any]:
    """What `Accelerator` is told about who shares what; nothing where each process has a model of its own."""
    told: dict[str, Any] = {}
    if args.fsdp:
        told["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    if args.tp > 1:
        axis = "dp_shard_size" if args.fsdp else "dp_replicate_size"
        told["parallelism_config"] = ParallelismConfig(tp_size=args.tp, **{axis: num_processes // args.tp})
    return told


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    state = PartialState(cpu=args.cpu)  # who is who, before the processes agree on a folder
    folder = run_directory(args.output_dir, args.resume)
    accelerator = Accelerator(
        cpu=args.cpu,
        **sharing(args, state.num_processes),
        mixed_precision=args.mixed_precision,
        log_with=["tensorboard", "jsonl"],
        project_config=ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=3),
        step_scheduler_with_optimizer=False,  # the schedule below is counted in updates, on any number of processes
    )
    set_seed(args.seed)
    train_set, test_set = digits()
    parts = state.num_processes // args.tp  # of each batch
    batch_size = args.global_batch_size // parts
    workers = {"num_workers": args.num_workers, "persistent_workers": args.num_workers > 0}
    train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True, drop_last=True, **workers)
    test_loader = DataLoader(test_set, batch_size=256 // parts)
    model = DigitsNet(dropout=args.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    updates = args.epochs * (len(train_set) // args.global_batch_size)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)

    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )
    set_seed(
        args.seed + accelerator.data_parallel_rank
    )  # equal weights so far; who has other samples drops other units
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        try:
            accelerator.load_state()
            accelerator.print(f"resumed {folder} at epoch {progress.epoch}, update {progress.update} of {updates}")
            if progress.epoch >= args.epochs:
                accelerator.print(f"all {args.epochs} epochs are done: --epochs {args.epochs + 5} trains on")
        except FileNotFoundError:
            accelerator.print(f"{folder} holds no checkpoint yet: starting from the beginning")
    accelerator.init_trackers("digits", config={key: str(value) for key, value in vars(args).items()})

    bar = tqdm(total=updates, initial=progress.update, unit="update", disable=not accelerator.is_main_process)
    accuracy, seen = evaluate(accelerator, model, test_loader)
    for epoch in range(progress.epoch, args.epochs):
        started, samples, losses = time.perf_counter(), 0, []
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.update += 1
            samples += len(labels) * parts
            losses.append(loss.detach())
            bar.update()
            if accelerator.should_stop:  # the machine is needed elsewhere, or the time is over: --resume goes on
                save_and_leave(accelerator, progress)
            if progress.update % args.save_every == 0:
                accelerator.save_state()
        progress.epoch = epoch + 1
        mean_loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item() if losses else float("nan")
        speed = samples / (time.perf_counter() - started)
        accuracy, seen = evaluate(accelerator, model, test_loader)
        accelerator.log(
            {"loss": mean_loss, "accuracy": accuracy, "samples_per_second": speed, "epoch": epoch + 1},
            step=progress.update,
        )
        bar.set_postfix(loss=f"{mean_loss:.4f}", accuracy=f"{accuracy:.2%}", per_second=f"{speed:,.0f}")
        accelerator.save_state()
    bar.close()

    if accelerator.is_main_process:
        draw_mistakes(*seen, folder / "mistakes.png")
    accelerator.print(f"test accuracy {accuracy:.2%} on {accelerator.num_processes} process(es)")
    accelerator.print(f"checkpoints   {folder / 'checkpoints'}")
    accelerator.print(f"logs          {accelerator.logging_dir}  (tensorboard --logdir {accelerator.logging_dir})")
    accelerator.print(f"mistakes      {folder / 'mistakes.png'}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
