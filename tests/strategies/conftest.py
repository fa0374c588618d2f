"""One start of ranks for all tests of this folder that ask the same of the same number of them."""

from __future__ import annotations

import pytest

from tests.strategies.ranks import Findings, start


@pytest.fixture(scope="session")
def on_two_ranks(tmp_path_factory) -> Findings:
    """All checks of `strategy_ranks.py`."""
    return start("strategy_ranks.py", 2, tmp_path_factory.mktemp("two"), timeout=280)


@pytest.fixture(scope="session")
def on_four_ranks(tmp_path_factory) -> Findings:
    """Those checks whose answer depends on the number of ranks."""
    return start("strategy_ranks.py", 4, tmp_path_factory.mktemp("four"), "memory_shares", timeout=280)
