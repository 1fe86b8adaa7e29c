"""A deep Q-network that balances a pole on a cart, with `ol.train_step` for its many small updates.

python examples/dqn.py            # writes dqn.png
"""

import copy
import sys

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import onelaunch as ol

quick = "--quick" in sys.argv
steps, carts, batch, longest = (300 if quick else 6000), 16, 128, 500
device = "cuda" if torch.cuda.is_available() else "cpu"
random = np.random.default_rng(0)
torch.manual_seed(0)


# 1. The environment: the cart-pole problem of Barto, Sutton and Anderson (1983), for many carts at once.
def pushed(states: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """The states [carts, 4] (position, speed, angle, angular speed) 0.02 s after a push of 10 N to the left or right."""
    x, speed, angle, spin = states.T
    force = np.where(actions == 1, 10.0, -10.0)
    pull = (force + 0.05 * spin**2 * np.sin(angle)) / 1.1
    turn = (9.8 * np.sin(angle) - np.cos(angle) * pull) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
    gain = pull - 0.05 * turn * np.cos(angle) / 1.1
    return np.stack([x + 0.02 * speed, speed + 0.02 * gain, angle + 0.02 * spin, spin + 0.02 * turn], axis=1)


# 2. The network gives one value per action. `ChosenValue` is what is trained: the value of the action that was taken.
class ChosenValue(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return self.network(states).gather(1, actions[:, None])[:, 0]


network = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)).to(device)
target_network = copy.deepcopy(network)
optimizer = torch.optim.Adam(network.parameters(), lr=5e-4)
step = ol.train_step(ChosenValue(network), nn.SmoothL1Loss(), optimizer, clip_norm=10.0, compile=device == "cuda")

# 3. The replay memory: rows of state, action, reward, next state, and whether the pole fell.
memory = torch.zeros(50_000, 11, device=device)
states = random.uniform(-0.05, 0.05, (carts, 4))
ages, filled = np.zeros(carts, int), 0
lengths: list[tuple[int, int]] = []  # (step, length) of every finished episode

for now in range(steps):
    with torch.no_grad():
        values = network(torch.tensor(states, dtype=torch.float32, device=device))
    explores = random.random(carts) < max(0.02, 1 - now / (0.3 * steps))
    actions = np.where(explores, random.integers(2, size=carts), values.argmax(1).cpu().numpy())
    following = pushed(states, actions)
    fell = (np.abs(following[:, 0]) > 2.4) | (np.abs(following[:, 2]) > 0.2095)
    rows = np.column_stack([states, actions, np.ones(carts), following, fell])
    memory[torch.arange(filled, filled + carts) % len(memory)] = torch.tensor(rows, dtype=torch.float32, device=device)
    filled += carts

    ages += 1
    ends = fell | (ages >= longest)
    lengths += [(now, int(age)) for age in ages[ends]]
    following[ends] = random.uniform(-0.05, 0.05, (int(ends.sum()), 4))
    states, ages = following, np.where(ends, 0, ages)

    if filled >= 1000:  # one update per step of the carts
        drawn = memory[torch.randint(min(filled, len(memory)), (batch,), device=device)]
        with torch.no_grad():  # double Q-learning: one network chooses the next action, the other one values it
            best = network(drawn[:, 6:10]).argmax(1, keepdim=True)
            later = target_network(drawn[:, 6:10]).gather(1, best)[:, 0]
        step(drawn[:, :4], drawn[:, 4].long(), drawn[:, 5] + 0.99 * later * (1 - drawn[:, 10]))
        if now % 200 == 0:
            target_network.load_state_dict(network.state_dict())
    if (now + 1) % (steps // 5) == 0:
        print(
            f"step {now + 1}: the last 30 episodes lasted {np.mean([length for _, length in lengths[-30:]]):.0f} steps"
        )

# 4. The picture: how long the pole stands.
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
when, length = np.array(lengths).T
axes.plot(when, length, ".", markersize=3, alpha=0.4, label="episodes")
axes.plot(when[29:], np.convolve(length, np.ones(30) / 30, "valid"), color="black", label="mean of 30")
axes.set(
    xlabel="step",
    ylabel="steps until the pole falls",
    title=f"A DQN learns to balance a pole (at most {longest} steps)",
)
axes.grid(alpha=0.3)
axes.legend()
figure.savefig("dqn.png", dpi=80)
print("wrote dqn.png")
