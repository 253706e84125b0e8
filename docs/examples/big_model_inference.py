"""A model that is larger than the memory it may use: planned, loaded without a copy, and run from disk.

    python docs/examples/big_model_inference.py
    python docs/examples/big_model_inference.py --memory 400KB

A small net learns handwritten digits (scikit-learn's 1,797 images) and is saved; then it is loaded into a model that
was made without memory, with so many bytes of it on each device and the rest on disk, and recognises the test images.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from accel import Accelerator, infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch, set_seed


class Block(nn.Module):
    """A residual block, which has to stay on one device."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.inner(self.norm(x)))


def build(width: int = 128, depth: int = 8) -> nn.Sequential:
    """64 pixels in, ten logits out."""
    return nn.Sequential(nn.Linear(64, width), *(Block(width) for _ in range(depth)), nn.Linear(width, 10))


def train(folder: Path, images: Tensor, labels: Tensor) -> None:
    """Learn the digits, and leave the weights in a folder of safetensors files."""
    accelerator = Accelerator(cpu=True)
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    for _ in range(60):
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_model(model, folder, max_shard_size="200KB")


def main() -> None:
    """Train, save, plan, load, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="300KB", help="what may lie in the CPU's memory; the rest stays on disk")
    options = parser.parse_args()
    set_seed(7)
    pixels, digits = load_digits(return_X_y=True)
    parts = train_test_split(torch.tensor(pixels).float() / 16, torch.tensor(digits), test_size=0.25, random_state=7)
    images, test_images, labels, test_labels = parts
    with tempfile.TemporaryDirectory() as scratch:
        weights = Path(scratch, "weights")
        train(weights, images, labels)
        with init_empty_weights():
            model = build()
        memory = {"cpu": options.memory}  # {0: "20GB", "cpu": "60GB"} on a machine with a GPU
        device_map = infer_auto_device_map(model, memory, no_split_module_classes=["Block"])
        print("places:", dict(device_map))
        model = load_checkpoint_and_dispatch(
            model, weights, device_map=device_map, offload_folder=Path(scratch, "offload")
        ).eval()
        on_disk = sum(parameter.nbytes for parameter in model.parameters() if parameter.is_meta)
        print(f"{on_disk / 1000:.0f} of {sum(p.nbytes for p in model.parameters()) / 1000:.0f} kB stay on disk")
        with torch.inference_mode():
            found = model(test_images).argmax(1)
        print(f"test accuracy {100 * (found == test_labels).float().mean():.1f}%")


if __name__ == "__main__":
    main()
