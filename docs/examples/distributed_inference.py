"""Distributed inference: each rank answers a part of the prompts, and all answers come back in the prompts' order.

    accel launch --cpu --num-processes 2 docs/examples/distributed_inference.py

No gradients, so no wrapper and no loader: `split_between_processes` deals any list, however many ranks there are. The
model is a table of how often a character follows another in Python's own help; a prompt is a page of it, and the answer
is how surprising the page is, in bits per character.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from accel import Accelerator


class Bigrams(nn.Module):
    """The probability of each character after each other one."""

    def __init__(self, text: Tensor) -> None:
        super().__init__()
        counts = torch.bincount(text[:-1] * 128 + text[1:], minlength=128 * 128).view(128, 128) + 0.1
        self.register_buffer("bits", -(counts / counts.sum(1, keepdim=True)).log2())

    def forward(self, text: Tensor) -> Tensor:
        return self.bits[text[:-1], text[1:]].mean()


def characters(text: str) -> Tensor:
    return torch.tensor(list(text.encode("ascii", "replace")))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=11)
    return parser.parse_args(argv)


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator()
    model = Bigrams(characters("".join(topics.values()))).to(accelerator.device)
    names = sorted(topics)[: args.pages]
    with accelerator.split_between_processes(names) as mine:  # 6 for the first of two ranks, 5 for the second
        answers = [(name, model(characters(topics[name]).to(accelerator.device)).item()) for name in mine]
    print(f"rank {accelerator.process_index} answered {len(answers)}", flush=True)
    for name, bits in accelerator.gather_object(answers):
        accelerator.print(f"{name}: {bits:.3f} bits per character")
    accelerator.end_training()


if __name__ == "__main__":
    main()
