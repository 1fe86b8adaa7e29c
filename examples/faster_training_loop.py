"""Speed up your own training loop: replace its body with one call of `ol.train_step`.

python examples/faster_training_loop.py         # writes faster_training_loop.png
"""

import sys
import time

import matplotlib.pyplot as plt
import torch
from torch import nn

import onelaunch as ol

quick = "--quick" in sys.argv
device = "cuda" if torch.cuda.is_available() else "cpu"
steps = 20 if quick else 600


# 1. A model of your own: a small transformer that adds the digits of a sequence, modulo 10.
class Adder(nn.Module):
    def __init__(self, length: int = 4, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.position = nn.Parameter(torch.randn(length, width) / 10)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(digits) + self.position).mean(1))


def batches():
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        digits = torch.randint(10, (256, 4), generator=random)
        yield digits.to(device), (digits[:, :2].sum(1) % 10).to(device)


def parts():
    """The model, loss, optimizer and learning-rate schedule of a run; the same for both loops."""
    torch.manual_seed(0)
    model = Adder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, nn.CrossEntropyLoss(), optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)


def plain_loop() -> list[float]:
    model, loss_function, optimizer, schedule = parts()
    losses = []
    for x, y in batches():
        loss = loss_function(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())  # no .item(): it would wait for the device in every step
    return torch.stack(losses).tolist()


def faster_loop() -> list[float]:
    model, loss_function, optimizer, schedule = parts()
    # On a GPU the third call records the step as one CUDA graph. On a CPU compiling pays for long runs only.
    step = ol.train_step(model, loss_function, optimizer, clip_norm=1.0, compile=device == "cuda")
    losses = []
    for x, y in batches():
        losses.append(step(x, y))  # forward, loss, backward, clipping, optimizer
        schedule.step()
    print("recorded as a CUDA graph:", "yes" if not step.reason else f"no, {step.reason}")
    return torch.stack(losses).tolist()


# 2. Both loops learn the same. Time them on your machine; the first steps include compiling.
curves = {}
for name, loop in {"plain PyTorch": plain_loop, "ol.train_step": faster_loop}.items():
    start = time.perf_counter()
    curves[name] = loop()
    print(f"{name}: last loss {curves[name][-1]:.4f}, {time.perf_counter() - start:.2f} s for {steps} steps")

# 3. The picture: the two losses lie on each other.
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
axes.semilogy(curves["plain PyTorch"], linewidth=4, alpha=0.35, label="plain PyTorch")
axes.semilogy(curves["ol.train_step"], linewidth=1, color="black", label="ol.train_step")
axes.set(xlabel="step", ylabel="loss", title="The same training, step by step")
axes.grid(alpha=0.3)
axes.legend()
figure.savefig("faster_training_loop.png", dpi=80)
print("wrote faster_training_loop.png")
