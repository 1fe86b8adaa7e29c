"""Read `ol.explain`: who runs each operation of a model, how many bytes it moves, and what fusion saves.

python examples/read_explain.py                 # writes explain.html and read_explain.png; no GPU is needed
"""

import sys

import matplotlib.pyplot as plt
import torch
from torch import nn

import onelaunch as ol

quick = "--quick" in sys.argv
torch.manual_seed(0)


# 1. A model with chains that can be fused: a batch norm, ReLU and dropout; a scaled residual addition.
class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.activation, self.dropout = nn.ReLU(), nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.dropout(self.activation(self.norm(self.linear(x))))


width = 64 if quick else 512
first = [nn.Linear(32, width), nn.GELU(), nn.Dropout(0.1)]
model = nn.Sequential(*first, *(Block(width) for _ in range(2 if quick else 4)), nn.Linear(width, 10))

# 2. Explain it as it trains. Without a GPU, kernels and times are predicted, here for an H200.
explanation = ol.explain(model, torch.randn(4096, 32), device="H200")
print(explanation)
explanation.html("explain.html")  # the same as an interactive page

# 3. The totals: every operation by itself, and as it will run.
before, after = explanation.before, explanation.after
print(
    f"{before.bytes / 1e6:,.0f} MB in {before.launches} launches become {after.bytes / 1e6:,.0f} MB in {after.launches}"
)

# 4. The picture: bytes of each group of operations. Equal blocks are one bar, named by how often they occur.
rows = [(count, group) for count, group in explanation.rows()]
names = [f"{count} × {group.name}" if count > 1 else group.name for count, group in rows]
places = range(len(rows))
colours = {"onelaunch": "#0b57d0", "Inductor": "#b3450a", "library": "#7b8794"}
figure, axes = plt.subplots(figsize=(9, 1.2 + 0.45 * len(rows)), layout="constrained")
axes.barh(
    places, [count * group.before.bytes / 1e6 for count, group in rows], 0.75, color="#d0d7de", label="each by itself"
)
for runs, colour in colours.items():
    chosen = [place for place, (_, group) in enumerate(rows) if group.runs == runs]
    if chosen:
        sizes = [rows[place][0] * rows[place][1].after.bytes / 1e6 for place in chosen]
        axes.barh(chosen, sizes, 0.4, color=colour, label=f"together, run by {runs}")
axes.set_yticks(places, [name if len(name) < 48 else name[:45] + "…" for name in names], fontsize=9)
axes.invert_yaxis()
axes.set(xlabel="megabytes read and written", title="Memory traffic of one call, by group of operations")
axes.legend()
figure.savefig("read_explain.png", dpi=80)
print("wrote read_explain.png")
