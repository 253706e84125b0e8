"""Several models: a generator and a discriminator with an optimizer each, trained in turns (a GAN).

    accel launch --cpu --num-processes 2 docs/examples/gan.py

Each model and each optimizer is prepared like a single one would be. Progress is measured by the energy distance
between drawn digits and real ones that training does not see (Székely & Rizzo, 2013): 0 for equal distributions.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, set_seed

NOISE = 16


def energy_distance(drawn: Tensor, real: Tensor) -> float:
    """Twice the mean distance between the two samples, less those within each."""
    return (2 * torch.cdist(drawn, real).mean() - torch.pdist(drawn).mean() - torch.pdist(real).mean()).item()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator()
    set_seed(0)
    images, _ = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16, dtype=torch.float32)
    generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))
    betas = (0.5, 0.999)
    generator_optimizer = torch.optim.Adam(generator.parameters(), args.lr, betas)
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), args.lr, betas)
    loader = DataLoader(TensorDataset(pixels[:1437]), args.batch_size, shuffle=True)
    generator, discriminator, generator_optimizer, discriminator_optimizer, loader = accelerator.prepare(
        generator, discriminator, generator_optimizer, discriminator_optimizer, loader
    )
    held_out = pixels[1437:].to(accelerator.device)
    set_seed(0, device_specific=True)  # equal weights so far; from here on each rank draws noise of its own
    fixed_noise = torch.randn(len(held_out), NOISE, device=accelerator.device)

    def judged(samples: Tensor, as_real: bool) -> Tensor:
        logits = discriminator(samples)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(as_real)))

    for epoch in range(args.epochs + 1):
        if epoch in (0, args.epochs):
            with torch.no_grad():
                distance = energy_distance(generator(fixed_noise), held_out)
            accelerator.print(f"epoch {epoch}: energy distance {distance:.3f}")
        if epoch == args.epochs:
            break
        for (real,) in loader:
            drawn = generator(torch.randn(len(real), NOISE, device=accelerator.device))
            samples = torch.cat([real, drawn.detach()])
            logits = discriminator(samples)
            wanted = torch.cat([torch.full_like(logits[: len(real)], 0.9), torch.zeros_like(logits[len(real) :])])
            accelerator.backward(F.binary_cross_entropy_with_logits(logits, wanted))
            discriminator_optimizer.step()
            discriminator_optimizer.zero_grad()

            accelerator.backward(judged(drawn, as_real=True))
            generator_optimizer.step()
            generator_optimizer.zero_grad()
            discriminator_optimizer.zero_grad()  # the generator's loss left gradients there too
    accelerator.end_training()


if __name__ == "__main__":
    main()
