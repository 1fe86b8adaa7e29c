"""Training steps are tested like the rest of level 2: graphs run as PyTorch operations, without code generation."""

import pytest

from onelaunch.step.candidates import Candidates
from tests.fuse.conftest import few_threads, fresh_dynamo, inductor, no_code
from tests.step.tape import tapes

__all__ = ["few_threads", "fresh_dynamo", "inductor", "no_code", "tapes"]


@pytest.fixture(autouse=True)
def tuned_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a clock decides when a step is recorded in another form as well, and tests count recordings."""
    is_due = Candidates.is_due
    monkeypatch.setattr(Candidates, "is_due", lambda self: self.tune is True and is_due(self))
