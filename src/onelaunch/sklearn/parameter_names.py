"""Messages of `fit` in the words of an estimator's user, who wrote `max_iter`, not `epochs`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from onelaunch.errors import OnelaunchError

PARAMETERS = {  # by what a message of `fit` says: the estimator's parameter
    "epochs=": "max_iter=",  # with its sign: epochs are also a unit
    "lr": "learning_rate_init",
    "weight_decay": "alpha",
    "betas[0]": "beta_1",
    "betas[1]": "beta_2",
    "eps": "epsilon",
    "nesterov": "nesterovs_momentum",
    "early_stopping.patience": "n_iter_no_change",
    "early_stopping.min_delta": "tol",
    "drop_last=True or another batch_size": "another batch_size",
}
# A name begins and ends where a word does, and is not a value in quotation marks.
_NAMES = re.compile("|".join(rf"(?<![\w'.]){re.escape(name)}" + r"(?!\w)" * name[-1].isalnum() for name in PARAMETERS))


def in_parameters(message: str) -> str:
    """The message with the estimator's parameters in place of the arguments of `fit`."""
    return _NAMES.sub(lambda found: PARAMETERS[found[0]], message)


@contextmanager
def named_by_parameters() -> Iterator[None]:
    """Let an OnelaunchError out of the block with the estimator's parameters in its message."""
    try:
        yield
    except OnelaunchError as error:
        error.args = (in_parameters(str(error)),)
        raise
