"""MNIST in a minute: train a network, then look at its curves and at the digits that it gets wrong.

python examples/mnist_in_a_minute.py            # full MNIST; writes mnist_in_a_minute.png
python examples/mnist_in_a_minute.py --quick    # 1,797 digits of 8 × 8 pixels
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import onelaunch as ol
from onelaunch.data import load, split

quick = "--quick" in sys.argv
torch.manual_seed(0)

# 1. Data: arrays of pixels and of class numbers. MNIST comes from the cache or a download.
data = split(load("digits"), 0.2, seed=0) if quick else load("mnist")
pixels = data.x[0].size
print(data.source)

# 2. A network of PyTorch modules. On a machine with a GPU it trains there.
model = nn.Sequential(
    nn.Flatten(),
    nn.Linear(pixels, 512),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(512, 512),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(512, 10),
)
if torch.cuda.is_available():
    model.cuda()

# 3. The whole training run in one call. `reason` says which engine ran, and why not a faster one.
history = ol.fit(
    model, data.x, data.y, epochs=2 if quick else 8, batch_size=128, optimizer="adam", lr=2e-3,
    schedule="one_cycle", validation=(data.test_x, data.test_y),
)  # fmt: skip
print(history)
print(history.reason)

# 4. Predictions: class numbers, or probabilities.
probabilities = ol.predict(model, data.test_x, probabilities=True)
predicted = probabilities.argmax(1)
wrong = np.flatnonzero(predicted != np.asarray(data.test_y))
surest = wrong[np.argsort(-probabilities[wrong].max(1))][:15]  # the mistakes the network was most certain of
print(f"{len(wrong)} of {len(predicted)} test digits are wrong")

# 5. The picture: accuracy over the epochs, and the mistakes.
figure = plt.figure(figsize=(10, 4), layout="constrained")
left, right = figure.subfigures(1, 2)
axes = left.subplots()
epochs = [epoch["epoch"] + 1 for epoch in history.epochs]
axes.plot(epochs, [100 * epoch["accuracy"] for epoch in history.epochs], "o--", label="training batches")
axes.plot(epochs, [100 * epoch["validation"]["accuracy"] for epoch in history.epochs], "o-", label="test digits")
axes.set(xlabel="epoch", ylabel="accuracy (%)", title="Accuracy")
axes.grid(alpha=0.3)
axes.legend()
right.suptitle("The surest mistakes: predicted (true)")
side = int(pixels**0.5)
for place, row in zip(right.subplots(3, 5).flat, surest, strict=False):
    place.imshow(np.asarray(data.test_x[row]).reshape(side, side), cmap="gray_r")
    place.set_title(f"{predicted[row]} ({data.test_y[row]})", fontsize=10)
for place in right.axes:
    place.set_axis_off()
figure.savefig("mnist_in_a_minute.png", dpi=80)
print("wrote mnist_in_a_minute.png")
