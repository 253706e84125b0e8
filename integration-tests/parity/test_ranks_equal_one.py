"""A 2-rank run with the same seed and global batch equals the 1-rank run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_state.testing import run_ranks
from accel_testkit.nets import TinyTransformer, next_token_loss

GLOBAL_BATCH = 64
UPDATES = 20


def digits_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def digits_data() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images / 16.0, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels))


def train(model: nn.Module, loss_of, data, accumulation: int = 1) -> dict[str, torch.Tensor]:
    """The weights after UPDATES updates of SGD with momentum, the same script on any number of ranks."""
    from accel import Accelerator, set_seed

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    set_seed(3)
    batch_size = GLOBAL_BATCH // accelerator.num_processes // accumulation
    loader = DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    while True:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            if done == UPDATES:
                return {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}


def train_digits(accumulation: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return train(
        digits_net(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), digits_data(), accumulation
    )


def train_transformer(accumulation: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (512, 16))
    return train(TinyTransformer(), lambda model, batch: next_token_loss(model(batch), batch), tokens, accumulation)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("training", [train_digits, train_transformer])
def test_two_ranks_end_with_the_weights_of_one(training, accumulation):
    (alone,) = run_ranks(training, 1, accumulation)
    first, second = run_ranks(training, 2, accumulation)
    for name, value in alone.items():
        assert torch.equal(first[name], second[name]), f"{name} differs between the ranks"
        assert (first[name] - value).abs().max() <= 1e-6, f"{name} differs from the one-rank run"
