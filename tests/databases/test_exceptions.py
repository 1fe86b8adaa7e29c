"""The table of exceptions names cases that there are."""

from __future__ import annotations

import re
from itertools import product

from tests.databases.exceptions import REASONS, UNRECORDED
from tests.databases.module_cases import INFOS, cases
from tests.databases.optimizer_cases import settings


def test_no_entry_is_left_over() -> None:
    tests = product(("fuse", "train", "tape"), cases(every=True), ("cpu", "cuda"))
    modules = {f"{test}:{case}:{device}" for test, case, device in tests}
    optimizers = {f"optimizer:{one}:{one.device}" for one in settings()}
    for pattern in REASONS:
        assert any(re.fullmatch(pattern, name) for name in modules | optimizers), pattern
    assert INFOS.keys() >= UNRECORDED.keys()
