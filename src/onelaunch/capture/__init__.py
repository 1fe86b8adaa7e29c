"""Recordings as CUDA graphs: how a call is captured, what its recording depends on, and how a replay gets its arguments.

`graph` captures, `dependencies` says whether a recording may be replayed, `recorded` holds a recorded step, `recorded_call` a
recorded function of tensors. `dynamo` and `substitutes` are how this package uses Dynamo, which knows what code depends on.
"""
