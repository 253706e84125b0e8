"""What the parity table is made of: nets, strategies, settings, and where they do not go together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accel_testkit.nets import TP_PLAN, TP_SEQUENCE_PLAN, chain_net
from accel_testkit.training import tied_net

GLOBAL_BATCH, LENGTH, UPDATES = 8, 16, 5
IGNORED = -100

Data = dict[str, Tensor]
"""The input and its labels, some of which are `IGNORED`, by name; the first dimension counts examples."""


@dataclass(frozen=True, kw_only=True)
class Net:
    """A net and its data.

    Args:
        build: makes it, with the same values on every rank.
        data: makes so many examples.
        inputs: the input's name.
        wrap: of `FullyShardedDataParallelPlugin`, which modules are sharded by themselves.
        tp_plans: how its matrices are shared, by the name of the plan.
        clip: a norm that most of its gradients exceed.
        text: for the page.
    """

    build: Callable[[], nn.Module]
    data: Callable[[int], Data]
    inputs: str
    wrap: Mapping[str, Any]
    tp_plans: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    clip: float
    text: str

    @property
    def has_sequences(self) -> bool:
        """Whether labels run along a sequence, and are shifted by one."""
        return self.inputs == "input_ids"


def digits_net() -> nn.Module:
    """A convolution and two linear layers for images of 8 x 8 pixels.

    Smooth: where a maximum or a ReLU changes sides, one rounding decides which way a whole gradient goes.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.GELU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def sentences(count: int) -> Data:
    """Sequences of tokens whose labels end early here and there."""
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (count, LENGTH))
    ends = torch.randint(2, LENGTH + 1, (count, 1))
    labels = ids.masked_fill(torch.arange(LENGTH) >= ends, IGNORED)
    return {"input_ids": ids, "labels": labels}


def digits(count: int) -> Data:
    """Handwritten digits, of which about every fourth has no label."""
    from sklearn.datasets import load_digits  # takes longer to import than a row takes to train

    torch.manual_seed(1)
    images, numbers = load_digits(return_X_y=True)
    pixels = torch.tensor(images[:count] / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(numbers[:count]).masked_fill(torch.rand(count) < 0.25, IGNORED)
    return {"images": pixels, "labels": labels}


_BLOCKS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
NETS = {
    "transformer": Net(
        build=tied_net, data=sentences, inputs="input_ids", wrap=_BLOCKS, clip=0.5,
        tp_plans={"matrices": TP_PLAN, "sequence": TP_SEQUENCE_PLAN},
        text="two blocks, tied embeddings, learned positions, no bias of keys",
    ),
    "chain": Net(
        build=chain_net, data=sentences, inputs="input_ids", wrap=_BLOCKS, clip=0.5,
        text="in the transformer's place where a model is cut: four blocks in a row, no ties, no positions",
    ),
    "digits": Net(
        build=digits_net, data=digits, inputs="images", clip=0.25,
        wrap={"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000},
        tp_plans={"matrices": {"4": "colwise", "6": "rowwise"}},
        text="a convolution and two linear layers on scikit-learn's handwritten digits",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a net is trained on several ranks.

    Args:
        ranks: how many.
        sizes: of the mesh's axes; without any, all ranks lie on one data axis.
        fsdp: the version of FSDP whose plugin is passed.
        tp_plan: the name of the net's plan for tensor parallelism.
        hook: DDP's communication hook.
        is_local: `LocalSGD` with a mean after every update.
    """

    ranks: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    fsdp: int | None = None
    tp_plan: str | None = None
    hook: str | None = None
    is_local: bool = False

    def has(self, axis: str) -> bool:
        """Whether the mesh has this axis."""
        return self.sizes.get(f"{axis}_size", 1) > 1


def _mesh(fsdp: int | None = None, tp_plan: str | None = None, **sizes: int) -> Strategy:
    ranks = 1
    for size in sizes.values():
        ranks *= size
    named = {f"{axis}_size": size for axis, size in sizes.items()}
    return Strategy(ranks=ranks, sizes=named, fsdp=fsdp, tp_plan=tp_plan)


STRATEGIES = {
    "single": Strategy(ranks=1),
    "ddp": Strategy(ranks=2),
    "ddp+hook": Strategy(ranks=2, hook="fp16"),
    "fsdp1": Strategy(ranks=2, fsdp=1),
    "fsdp2": Strategy(ranks=2, fsdp=2),
    "hsdp": _mesh(fsdp=2, dp_replicate=2, dp_shard=2),
    "tp": _mesh(tp_plan="matrices", tp=2),
    "tp+sequence parallel": _mesh(tp_plan="sequence", tp=2),
    "fsdp2+tp": _mesh(fsdp=2, tp_plan="matrices", dp_shard=2, tp=2),
    "cp": _mesh(cp=2),
    "fsdp2+cp": _mesh(fsdp=2, dp_shard=2, cp=2),
    "sp": _mesh(sp=2),
    "fsdp2+sp": _mesh(fsdp=2, dp_shard=2, sp=2),
    "pp": _mesh(pp=2),
    "pp+fsdp2": _mesh(fsdp=2, pp=2, dp_shard=2),
    "local sgd at 1": Strategy(ranks=2, is_local=True),
}


class Setting(NamedTuple):
    """What is the same for every strategy; `accumulation` 3 leaves one micro-batch to the last window."""

    precision: str
    accumulation: int
    clips: bool
    optimizer: str

    @property
    def examples(self) -> int:
        """Of the whole run."""
        micro_batches = UPDATES if self.accumulation == 1 else (UPDATES - 1) * self.accumulation + 1
        return micro_batches * GLOBAL_BATCH


MOST_EXAMPLES = ((UPDATES - 1) * 3 + 1) * GLOBAL_BATCH
SETTINGS = [Setting(*parts) for parts in itertools.product(["fp32", "bf16"], [1, 3], [False, True], ["adamw", "sgd"])]


class Row(NamedTuple):
    """One comparison."""

    strategy: str
    net: str
    setting: Setting


def why_not(strategy: Strategy, net: Net) -> str | None:
    """Why a net is not trained this way at all; None if it is."""
    if (strategy.has("cp") or strategy.has("sp") or strategy.tp_plan == "sequence") and not net.has_sequences:
        return "an image is no sequence that ranks could share"
    if strategy.has("pp") and net is NETS["transformer"]:
        return "a parameter that is shared across stages is refused; the chain has none"
    if not strategy.has("pp") and net is NETS["chain"]:
        return "it stands in for the transformer where a model is cut into stages"
    return None


def why_no_setting(strategy: Strategy, setting: Setting) -> str | None:
    """Why a strategy is not compared in one setting; None if it is."""
    if strategy.is_local and setting.optimizer == "adamw":
        return "each rank's AdamW divides by the size of its own gradients, so the mean of weights is another one"
    if strategy.is_local and setting.clips:
        return "each rank clips by the norm of its own gradients, as there is no other"
    return None


ROWS = [
    Row(strategy, net, setting)
    for strategy, net, setting in itertools.product(STRATEGIES, NETS, SETTINGS)
    if why_not(STRATEGIES[strategy], NETS[net]) is None and why_no_setting(STRATEGIES[strategy], setting) is None
]
SAMPLE = ROWS[::10]
"""What the core tier runs."""


ADAM_EPS = 1e-4


def optimizer_for(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum.

    AdamW divides by the gradient's own size: with its usual eps of 1e-8 an entry that is hardly more than the rounding
    of its sum would take a full step to either side.
    """
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=ADAM_EPS)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
