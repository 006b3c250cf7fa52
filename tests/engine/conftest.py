"""Drafts whose length does not depend on measured times."""

import pytest

from infinigen_jax.engine.draft_length import MOST, DraftLength


@pytest.fixture
def longest_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft as many tokens as a test's limit allows; without a limit, times choose."""
    chosen = DraftLength.choose

    def choose(self: DraftLength, most: int) -> int:
        return min(most, self.most) if self.most < MOST else chosen(self, most)

    monkeypatch.setattr(DraftLength, "choose", choose)
