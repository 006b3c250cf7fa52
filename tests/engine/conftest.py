"""Drafts whose length does not depend on measured times."""

import pytest

from infinigen_jax.engine.draft_length import DraftLength


@pytest.fixture
def longest_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft as many tokens as the settings allow."""
    monkeypatch.setattr(DraftLength, "choose", lambda self, most: min(most, self.most))
