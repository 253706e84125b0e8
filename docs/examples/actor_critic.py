"""Two Accelerators in one process: an actor that updates in every step, and a critic that accumulates four.

    accel launch --cpu --num-processes 2 docs/examples/actor_critic.py

A reinforcement-learning loop in small: the state is the image of a digit, the action a guess, the reward 1 where it is
right. The actor learns by REINFORCE (Williams, 1992) with the critic's expected reward as the baseline; nobody shows it
the labels. Settings, counters and precision belong to each Accelerator; the process group is shared.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, set_seed


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--critic-steps", type=int, default=4, help="micro-batches per update of the critic")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    for_actor = Accelerator()
    for_critic = Accelerator(gradient_accumulation_steps=args.critic_steps, mixed_precision="bf16")
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    actor = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    critic = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    actor_optimizer = torch.optim.AdamW(actor.parameters(), 5e-3)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), 1e-2)
    actor, actor_optimizer, loader = for_actor.prepare(
        actor, actor_optimizer, DataLoader(digits, args.batch_size, shuffle=True, drop_last=True)
    )
    critic, critic_optimizer = for_critic.prepare(critic, critic_optimizer)
    set_seed(0, device_specific=True)  # each rank tries other actions

    actor_updates = critic_updates = 0
    for epoch in range(args.epochs):
        rewards = []
        for state, answer in loader:
            policy = torch.distributions.Categorical(logits=actor(state))
            action = policy.sample()
            reward = (action == answer).float()
            rewards.append(reward.mean())

            with for_critic.accumulate(critic):
                expected = critic(state).squeeze(1)
                for_critic.backward(F.mse_loss(expected, reward))
                critic_optimizer.step()
                critic_optimizer.zero_grad()
            critic_updates += for_critic.sync_gradients

            advantage = reward - expected.detach()
            for_actor.backward(-(policy.log_prob(action) * advantage).mean())
            actor_optimizer.step()
            actor_optimizer.zero_grad()
            actor_updates += 1
        mean = for_actor.reduce(torch.stack(rewards).mean(), "mean").item()
        for_actor.print(f"epoch {epoch + 1}: reward {mean:.3f}")
    for_actor.print(f"{actor_updates} updates of the actor, {critic_updates} of the critic")
    for_actor.end_training()


if __name__ == "__main__":
    main()
