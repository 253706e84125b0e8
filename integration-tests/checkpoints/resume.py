"""A run that stops at an update and goes on in other processes: what it trains, and what it tells.

Every sample carries its index, so that a run can tell which ones it has used.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_testkit.nets import TinyTransformer, next_token_loss

GLOBAL_BATCH = 24  # of which one, two and three ranks have equal parts
NUM_SAMPLES = 96
UPDATES = 14


class DigitsNet(nn.Module):
    """A convolution, dropout and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)
        self.logits = nn.Linear(216, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.conv(images))).flatten(1)
        return self.logits(F.dropout(hidden, 0.1, self.training))


def digits() -> tuple[nn.Module, TensorDataset]:
    images, labels = (torch.tensor(part[:NUM_SAMPLES]) for part in load_digits(return_X_y=True))
    return DigitsNet(), TensorDataset((images / 16).float().view(-1, 1, 8, 8), labels, torch.arange(NUM_SAMPLES))


def transformer() -> tuple[nn.Module, TensorDataset]:
    tokens_bt = torch.randint(0, 31, (NUM_SAMPLES, 12), generator=torch.Generator().manual_seed(5))
    net = TinyTransformer(vocabulary=31, width=16, heads=2, layers=2, length=12, dropout=0.1)
    return net, TensorDataset(tokens_bt, tokens_bt, torch.arange(NUM_SAMPLES))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    outputs = model(inputs).float()
    return next_token_loss(outputs, targets) if outputs.dim() == 3 else F.cross_entropy(outputs, targets)


def without_randomness(model: nn.Module) -> None:
    """What makes another world size another run: dropout per rank, statistics of a rank's own batches."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.BatchNorm2d):
            part.eval()


def shard_by_hand(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for part in getattr(model, "blocks", [model.logits]):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(
    folder: Path,
    net: str,
    strategy: str,
    precision: str,
    accumulation: int,
    *,
    seed: int = 3,
    resume: bool = False,
    stop_after: int | None = None,
    deterministic: bool = False,
) -> tuple[dict[str, list], list[list[int]]]:
    """The weights after the run's last update, and of each update made here the samples used on all ranks.

    Args:
        strategy: single, ddp or fully_shard.
        resume: go on from the checkpoint in the folder.
        stop_after: save to the folder at this update, make two more that are lost, and return.
        deterministic: without what depends on the number of ranks.
    """
    from accel import Accelerator, set_seed

    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        step_scheduler_with_optimizer=False,  # else a rate per update would depend on the number of ranks
    )
    set_seed(seed)
    model, data = {"digits": digits, "transformer": transformer}[net]()
    if deterministic:
        without_randomness(model)
    if strategy == "fully_shard":
        model = accelerator.prepare_model(shard_by_hand(model), evaluation_mode=True)
    else:
        model = accelerator.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * UPDATES)
    batch_size = GLOBAL_BATCH // accelerator.num_processes // accumulation
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    optimizer, schedule, loader = accelerator.prepare(optimizer, schedule, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    set_seed(seed, device_specific=True)
    if resume:
        accelerator.load_state(folder / "state")
    last = UPDATES if stop_after is None else stop_after + 2
    used: list[list[int]] = [[]]
    while progress.update < last:
        for inputs, targets, indices in loader:
            used[-1] += accelerator.gather(indices).tolist()
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, inputs, targets))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            progress.update += 1
            used.append([])
            if progress.update == stop_after:
                accelerator.save_state(folder / "state")
            if progress.update == last:
                break
    inner = accelerator.unwrap_model(model)
    return {name: whole(value).tolist() for name, value in inner.state_dict().items()}, used[:-1]


class Progress:
    """Updates so far."""

    update = 0

    def state_dict(self) -> dict[str, int]:
        return {"update": self.update}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.update = state["update"]
