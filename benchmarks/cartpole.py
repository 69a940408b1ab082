"""PPO on many carts at once, each of which balances a pole: the equations of Gym's CartPole-v1.

All of it runs on one device: carts, policy and advantages. This module knows nothing of casting.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

CARTS, TICKS = 256, 32  # what a batch is made of
EPOCHS, PARTS = 4, 4  # passes over a batch, and steps of a pass
LONGEST = 500  # ticks of an episode
DISCOUNT, TRACE = 0.99, 0.95
CLIP, VALUE_SHARE, ENTROPY_SHARE = 0.2, 0.5, 0.01


def fresh(count: int, device: str) -> Tensor:
    """Returns carts at the start of an episode: place, speed, angle, turn; [count, 4]."""
    return torch.rand(count, 4, device=device) * 0.1 - 0.05


def moved(carts: Tensor, actions: Tensor) -> Tensor:
    """Returns the carts one tick later; actions are 0 for a push to the left, 1 to the right."""
    place, speed, angle, turn = carts.unbind(1)
    force = actions * 20.0 - 10.0
    cos, sin = angle.cos(), angle.sin()
    push = (force + 0.05 * turn * turn * sin) / 1.1
    turning = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos * cos / 1.1))
    pushed = push - 0.05 * turning * cos / 1.1
    return torch.stack(
        [
            place + 0.02 * speed,
            speed + 0.02 * pushed,
            angle + 0.02 * turn,
            turn + 0.02 * turning,
        ],
        1,
    )


def has_fallen(carts: Tensor) -> Tensor:
    """Returns for each cart whether it left the track or its pole fell."""
    return (carts[:, 0].abs() > 2.4) | (carts[:, 2].abs() > 0.2095)


class Policy(nn.Module):
    """Logits of the two actions, and the value."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(
                *(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()),
                nn.Linear(width, outputs),
            )
            for outputs in (2, 1)
        )

    def forward(self, carts: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(carts), self.critic(carts).squeeze(-1)


@dataclass
class PPO:
    """A policy that learns from its own carts; see `tasks.Training`."""

    model: Policy
    device: str
    carts: Tensor
    ages: Tensor
    rollout: tuple[Tensor, ...] = ()
    order: Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def start(cls, device: str, steps: int) -> PPO:
        """Returns a training with random weights; it goes on for as long as it is asked to."""
        del steps
        ages = torch.zeros(CARTS, device=device)
        return cls(Policy().to(device), device, fresh(CARTS, device), ages)

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Returns a part of the latest rollout, of a new one after each `EPOCHS` passes."""
        part, size = step % PARTS, CARTS * TICKS // PARTS
        if step % (EPOCHS * PARTS) == 0:
            self.rollout = self.played()
        if part == 0:
            self.order = torch.randperm(CARTS * TICKS, device=self.device)
        rows = self.order[part * size : (part + 1) * size]
        return tuple(values[rows] for values in self.rollout)

    def loss(self, *batch: Tensor) -> Tensor:
        carts, actions, old, advantages, returns = batch
        logits, values = self.model(carts)
        policy = Categorical(logits=logits, validate_args=False)
        ratio = (policy.log_prob(actions) - old).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        value_loss = F.mse_loss(values.float(), returns)
        return VALUE_SHARE * value_loss - gain.mean() - ENTROPY_SHARE * policy.entropy().mean()

    def played(self) -> tuple[Tensor, ...]:
        """Plays `TICKS` ticks; returns carts, actions, log probabilities, advantages, returns."""
        kept = []
        for _ in range(TICKS):
            logits, values = self.model(self.carts)
            policy = Categorical(logits=logits, validate_args=False)
            # Not policy.sample(): on CUDA a NaN there would end the process.
            actions = (torch.rand(CARTS, device=self.device) < policy.probs[:, 1]).long()
            after = moved(self.carts, actions)
            self.ages = self.ages + 1
            is_fallen = has_fallen(after)
            is_over = is_fallen | (self.ages >= LONGEST)
            kept.append((self.carts, actions, policy.log_prob(actions), values, is_fallen, is_over))
            self.carts = torch.where(is_over[:, None], fresh(CARTS, self.device), after)
            self.ages = self.ages * ~is_over
        carts, actions, old, values, is_fallen, is_over = map(torch.stack, zip(*kept, strict=True))
        values = torch.cat([values, self.model(self.carts)[1][None]]).float()
        advantages, trace = [], torch.zeros(CARTS, device=self.device)
        for tick in reversed(range(TICKS)):
            # A cart that ran out of time is worth what it was worth before.
            later = torch.where(is_over[tick], values[tick], values[tick + 1]) * ~is_fallen[tick]
            error = 0.1 + DISCOUNT * later - values[tick]
            trace = error + DISCOUNT * TRACE * trace * ~is_over[tick]
            advantages.append(trace)
        found = torch.stack(advantages[::-1])
        scaled = (found - found.mean()) / (found.std() + 1e-8)
        parts = (carts, actions, old, scaled, found + values[:-1])
        return tuple(part.flatten(0, 1) for part in parts)

    def score(self) -> tuple[float, float]:
        """Returns the loss on a rollout, and the mean length of episodes of the likelier actions."""
        kept = self.carts, self.ages
        torch.manual_seed(0)
        carts, ages = fresh(CARTS, self.device), torch.zeros(CARTS, device=self.device)
        self.carts, self.ages = carts, ages
        loss = self.loss(*self.played()).item()
        self.carts, self.ages = kept
        is_up = torch.ones(CARTS, dtype=torch.bool, device=self.device)
        for _ in range(LONGEST):
            carts = moved(carts, self.model(carts)[0].argmax(-1))
            ages = ages + is_up
            is_up = is_up & ~has_fallen(carts)
        return loss, ages.mean().item()
