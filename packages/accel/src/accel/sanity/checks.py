"""`python -m accel.sanity.checks`, in every process of a launch: does training work with these devices and ranks?

Each check does something real and compares with what one process would get by itself. A check that fails on one rank
fails on all of them; the others are still made.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, set_seed
from accel.utils import broadcast, broadcast_object_list

UPDATES = 5
BATCH_SIZE = 8  # per rank


def check_collectives(accelerator: Accelerator) -> str:
    """Gather, reduce, broadcast and objects, on this device."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    mine = torch.full((rank + 1,), float(rank), device=accelerator.device)
    everyone = accelerator.gather(mine).tolist()
    _expect("gather", everyone, [float(other) for other in range(world_size) for _ in range(other + 1)])
    _expect("reduce", accelerator.reduce(mine[:1]).item(), float(sum(range(world_size))))
    _expect("broadcast", broadcast(mine[:1].clone(), world_size - 1).item(), float(world_size - 1))
    _expect("gather_object", accelerator.gather_object([f"rank {rank}"]), [f"rank {i}" for i in range(world_size)])
    return f"gather, reduce, broadcast and objects over {world_size} process(es)"


def check_data(accelerator: Accelerator) -> str:
    """Each sample once, over all ranks, in an order that repeats itself."""
    length = BATCH_SIZE * accelerator.num_processes * 2 + 3  # a last batch that is not full
    orders = []
    for _ in range(2):
        set_seed(11)
        data = TensorDataset(torch.arange(length))
        loader = accelerator.prepare_data_loader(DataLoader(data, batch_size=BATCH_SIZE, shuffle=True))
        seen = torch.cat([accelerator.gather_for_metrics(batch[0]) for batch in loader]).tolist()
        _expect("the samples of an epoch", sorted(seen), list(range(length)))
        orders.append(seen)
    _expect("the order with the same seed", orders[1], orders[0])
    return f"{length} samples, each once, twice in the same order"


def check_precision(accelerator: Accelerator) -> str:
    """A model computes in the numbers that were asked for, and learns in them."""
    set_seed(12)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    images, labels = (part.to(accelerator.device) for part in _samples(BATCH_SIZE))
    with accelerator.autocast():
        dtype = F.linear(images, images).dtype
    wanted = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision)
    if wanted is not None:
        _expect("the dtype under autocast", dtype, wanted)
    losses = []
    for _ in range(UPDATES):
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if not losses[-1] < losses[0]:
        raise AssertionError(f"the loss of a batch seen {UPDATES} times did not fall: {losses}")
    return f"mixed precision {accelerator.mixed_precision!r}: loss {losses[0]:.3f} -> {losses[-1]:.3f}"


def check_checkpoint(accelerator: Accelerator) -> str:
    """Weights and optimizer state come back from a checkpoint."""
    set_seed(13)
    model = nn.Linear(16, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    images, labels = (part.to(accelerator.device) for part in _samples(BATCH_SIZE))

    def update() -> dict[str, Tensor]:
        accelerator.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()
        return {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}

    update()
    with tempfile.TemporaryDirectory(prefix="accel-test-") as mine:
        folder = broadcast_object_list([mine])[0] + "/checkpoint"  # on several machines it has to be shared
        accelerator.save_state(folder)
        first = update()
        accelerator.load_state(folder)
        again = update()
        accelerator.wait_for_everyone()  # before rank 0 removes it
    different = [name for name, tensor in first.items() if not torch.equal(tensor, again[name])]
    if different:
        raise AssertionError(f"the update after load_state differs in {', '.join(different)}")
    return "saved, changed, loaded: the next update is the same, to the bit"


def check_parity(accelerator: Accelerator) -> str:
    """Training on all ranks ends where one process ends that sees all samples, in float32."""
    world_size = accelerator.num_processes
    images, labels = _samples(UPDATES * BATCH_SIZE * world_size)
    set_seed(14)
    alone = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    together = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    together.load_state_dict(alone.state_dict())
    by_hand = torch.optim.SGD(alone.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH_SIZE)
    model, optimizer, prepared = accelerator.prepare(together, torch.optim.SGD(together.parameters(), lr=0.1), loader)
    whole = zip(images.split(BATCH_SIZE * world_size), labels.split(BATCH_SIZE * world_size), strict=True)
    for (some_images, some_labels), (all_images, all_labels) in zip(prepared, whole, strict=True):
        accelerator.backward(F.cross_entropy(model(some_images), some_labels))
        optimizer.step()
        optimizer.zero_grad()
        F.cross_entropy(alone(all_images), all_labels).backward()
        by_hand.step()
        by_hand.zero_grad()
    ours = accelerator.get_state_dict(model)  # where it is sharded, on rank 0 alone
    distance = max(
        ((ours[name].cpu() - tensor).abs().max().item() for name, tensor in alone.state_dict().items() if ours),
        default=0.0,
    )
    if not distance < 1e-5:
        raise AssertionError(f"after {UPDATES} updates a weight differs by {distance:g} from a run on one process")
    return f"{UPDATES} updates on {world_size} process(es) and on one: weights differ by at most {distance:.1e}"


CHECKS: dict[str, Callable[[Accelerator], str]] = {
    "collectives": check_collectives,
    "data": check_data,
    "precision": check_precision,
    "checkpoint": check_checkpoint,
    "parity": check_parity,
}


def _samples(num_items: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(15)
    images = torch.randn(num_items, 16, generator=generator)
    return images, images[:, :4].argmax(dim=1)


def _expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: got {found}, wanted {wanted}")


def main() -> int:
    """Make all checks; returns 1 where one failed."""
    accelerator = Accelerator()
    accelerator.print(f"{accelerator.num_processes} process(es) on {accelerator.device.type}")
    plain = Accelerator(mixed_precision="no") if accelerator.mixed_precision != "no" else accelerator
    failed = 0
    for name, check in CHECKS.items():
        try:
            said, trace = check(plain if name == "parity" else accelerator), ""
        except Exception as error:  # noqa: BLE001  told, on all ranks, and the next check is made
            said, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        traces = accelerator.gather_object([trace])
        broken = {rank: text for rank, text in enumerate(traces) if text}
        failed += bool(broken)
        accelerator.print(f"{'FAILED' if broken else 'ok':6} {name}: {said}", flush=True)
        for rank, text in list(broken.items())[:1]:
            accelerator.print(f"rank {rank} of {', '.join(map(str, broken))}:\n{text}", flush=True)
        accelerator.free_memory()
    accelerator.print(f"{failed} of {len(CHECKS)} checks failed" if failed else f"all {len(CHECKS)} checks hold")
    accelerator.end_training()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
