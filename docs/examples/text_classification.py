"""Text classification: to which topic of Python's own help does a passage belong?

    accel launch --cpu --num-processes 2 docs/examples/text_classification.py

The text is what `help("TOPIC")` shows; Python ships it as `pydoc_data.topics`. The net averages the embeddings of a
passage's words and of its pairs of words. Every fifth passage is kept for testing.
"""

from __future__ import annotations

import argparse
import itertools
import re
import zlib
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, set_seed

BUCKETS = 1 << 14


def passages(names: list[str], length: int) -> tuple[TensorDataset, TensorDataset]:
    """For training and for testing: hashed words and pairs of words of each passage, and the number of its topic."""
    parts: tuple[list, list] = ([], [])
    for label, name in enumerate(names):
        words = re.findall(r"\w+", topics[name].lower())
        for number, start in enumerate(range(0, len(words) - length, length)):
            passage = words[start : start + length]
            pairs = [f"{left} {right}" for left, right in itertools.pairwise(passage)]
            terms = [zlib.crc32(term.encode()) % BUCKETS for term in passage + pairs]
            parts[number % 5 == 0].append((label, terms))
    train, test = (
        TensorDataset(torch.tensor([terms for _, terms in part]), torch.tensor([label for label, _ in part]))
        for part in parts
    )
    return train, test


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--topics", type=int, default=8, help="how many, the longest first")
    parser.add_argument("--length", type=int, default=40, help="words in a passage")
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=0.02)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator()
    set_seed(0)
    names = sorted(topics, key=lambda name: (-len(topics[name]), name))[: args.topics]
    train_set, test_set = passages(names, args.length)
    model = nn.Sequential(nn.EmbeddingBag(BUCKETS, 32), nn.Dropout(0.2), nn.Linear(32, len(names)))
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, args.batch_size, shuffle=True), DataLoader(test_set, 128)
    )
    for epoch in range(args.epochs):
        model.train()
        for terms, label in train_loader:
            loss = F.cross_entropy(model(terms), label)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        with torch.no_grad():
            right = [accelerator.gather_for_metrics(model(terms).argmax(1) == label) for terms, label in test_loader]
        accuracy = torch.cat(right).float().mean()
        accelerator.print(f"epoch {epoch + 1}: accuracy {accuracy:.2%} on {', '.join(names)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
