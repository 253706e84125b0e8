"""One training of the tiny transformer, by hand on one device: what every strategy has to equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .nets import TinyTransformer, next_token_loss


def tied_net() -> TinyTransformer:
    """The model, with the same values on every rank."""
    torch.manual_seed(0)
    return TinyTransformer()


def tokens(updates: int = 3) -> Tensor:
    """Batches of 8 sequences of 16 tokens, one per update."""
    torch.manual_seed(1)
    return torch.randint(0, 64, (updates, 8, 16))


def train(model: nn.Module, optimizer: Any, batches: Iterable[Tensor], clip: Callable[..., Any]) -> list[float]:
    """An update per batch; the norms before clipping."""
    norms = []
    for batch in batches:
        next_token_loss(model(batch), batch).backward()
        norms.append(clip(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def single_truth() -> tuple[list[float], dict[str, Tensor]]:
    """The norms and the weights of three updates of SGD with momentum."""
    model = tied_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = train(model, optimizer, tokens(), nn.utils.clip_grad_norm_)
    return norms, {name: value.clone() for name, value in model.state_dict().items()}


def train_sequences(
    model: nn.Module, step_of: Callable[[nn.Module, Tensor, int], None], batches: Iterable[Tensor]
) -> list[float]:
    """An update per batch of SGD with momentum; the norms before clipping.

    Args:
        step_of: runs forward and backward of the model on a batch, whose loss is the sum over this number of labels.
    """
    from accel_parallel import clip_grad_norm_

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for batch in batches:
        step_of(model, batch, batch[:, 1:].numel())
        norms.append(clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms
