"""Replace GridSearchCV by SweepCV: the same search and the same results, with all candidates and folds trained together.

python examples/replace_grid_search.py          # writes replace_grid_search.png; needs onelaunch[sklearn]
"""

import sys
import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split

from onelaunch.sklearn import MLPClassifier, SweepCV

quick = "--quick" in sys.argv

# 1. Data, an estimator, and the grid of its parameters to try: 20 candidates of 5 folds are 100 networks.
x, y = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
if quick:
    x, y = x[:300], y[:300]
estimator = MLPClassifier(max_iter=3 if quick else 20, random_state=0)
grid = {
    "learning_rate_init": [1e-3, 1e-2] if quick else [3e-4, 1e-3, 3e-3, 1e-2, 3e-2],
    "hidden_layer_sizes": [(16,), (64,)] if quick else [(16,), (64,), (128, 128), (256, 256)],
}
folds = StratifiedKFold(2 if quick else 5)

# 2. Before: GridSearchCV fits one network after the other.
start = time.perf_counter()
before = GridSearchCV(estimator, grid, cv=folds).fit(x, y)
print(f"GridSearchCV: {before.best_params_}, {time.perf_counter() - start:.2f} s")

# 3. After: only the name of the class changes. Folds, scorers and `cv_results_` stay as they are.
start = time.perf_counter()
after = SweepCV(estimator, grid, cv=folds).fit(x, y)
print(f"SweepCV:      {after.best_params_}, {time.perf_counter() - start:.2f} s")

same = np.allclose(before.cv_results_["mean_test_score"], after.cv_results_["mean_test_score"], atol=1e-3)
print("the scores are", "the same" if same else "different")
print(f"accuracy of the best network on the test rows: {after.score(x_test, y_test):.4f}")

# 4. The picture: the mean score of every candidate.
rates, sizes = grid["learning_rate_init"], grid["hidden_layer_sizes"]
scores = np.empty((len(sizes), len(rates)))
for parameters, score in zip(after.cv_results_["params"], after.cv_results_["mean_test_score"], strict=True):
    place = sizes.index(parameters["hidden_layer_sizes"]), rates.index(parameters["learning_rate_init"])
    scores[place] = 100 * score

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
image = axes.imshow(scores, cmap="viridis", vmin=np.percentile(scores, 20), aspect="auto")
for (row, column), score in np.ndenumerate(scores):
    colour = "black" if image.norm(score) > 0.6 else "white"
    axes.text(column, row, f"{score:.1f}", ha="center", va="center", color=colour)
axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
axes.set_yticks(range(len(sizes)), ["-".join(map(str, size)) for size in sizes])
axes.set(xlabel="learning rate", ylabel="hidden layers", title=f"Accuracy (%), mean of {folds.get_n_splits()} folds")
figure.savefig("replace_grid_search.png", dpi=80)
print("wrote replace_grid_search.png")
