"""Measure: benchmark cases and comparisons of training runs.

A *contender* is anything that is measured. A *peer* is a contender that is not ours. A floor is neither: it does only the work
that no implementation can avoid.

- `onelaunch bench` times cases (`case.py`, `cases/`): one unit of work, say a training step, by us and by each peer. A case is
  timed only after its check has passed. `peers_torch.py` and `peers_jax.py` hold the peers that train; they are only timed.
- `onelaunch compare` gives all contenders of `contenders.py` the same training run. Each trains it to the end and hands back
  losses, times and the trained model, so that loss curves can be compared as well. `step_peers.py` adds peers to
  `compare --sizes`, which looks at times alone.
"""
