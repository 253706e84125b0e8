"""Train a small language model on a text that Hugging Face `datasets` streams from local files, shard by shard.

    accel launch --cpu --num-processes 2 text_stream.py FOLDER

Each rank and each of its workers reads files of its own. Prints a JSON line: the first and the last loss, and how often
each line of the text was read in the epoch.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

import datasets
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, set_seed

CONTEXT = 8


def collate(rows: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Bytes of the lines as (contexts [N, CONTEXT], next bytes [N]), and which lines they are."""
    texts = [row["text"].partition("\t") for row in rows]
    joined = "\n".join(text for _, _, text in texts).encode().ljust(CONTEXT + 1)
    windows = torch.tensor(list(joined)).unfold(0, CONTEXT + 1, 3)
    return windows[:, :-1], windows[:, -1], [number for number, _, _ in texts]


def main(folder: Path) -> None:
    """One epoch."""
    set_seed(1)
    accelerator = Accelerator(cpu=True)
    files = sorted(map(str, folder.glob("*.txt")))
    lines = datasets.load_dataset("text", data_files=files, split="train", streaming=True)
    model = nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.ReLU(), nn.Linear(128, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(lines, batch_size=16, num_workers=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, mine, begin = [], [], time.perf_counter()
    for contexts, targets, numbers in loader:
        kept = loader.tail.real if loader.tail is not None and loader.tail.is_padded else len(targets)
        loss = nn.functional.cross_entropy(model(contexts), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        mine += numbers if kept else []
    seconds = time.perf_counter() - begin
    counts = Counter(accelerator.gather_object(mine))
    if accelerator.is_main_process:
        tenth = max(len(losses) // 10, 1)
        print(
            json.dumps(
                {
                    "first_loss": sum(losses[:tenth]) / tenth,
                    "last_loss": sum(losses[-tenth:]) / tenth,
                    "lines": len(counts),
                    "times_read": sorted(set(counts.values())),
                    "steps": len(losses),
                    "seconds": seconds,
                }
            )
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
