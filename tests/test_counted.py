"""Counted writes as far as they need no GPU: the search of their protocol."""

from __future__ import annotations

import pytest
from counted_model import PLANTED, search


@pytest.mark.parametrize("name", PLANTED)
def test_search_of_the_protocol(name: str) -> None:
    """Every order of two ranks' steps in three rounds; results/counted_model.txt has four rounds, and three ranks."""
    found = [search(2, kinds, PLANTED[name], rows=1)[0] for kinds in ("ddc", "dcd", "cdd")]
    if name == "the protocol":
        assert found == [None, None, None]
    else:
        assert any(found), "the search does not see what was taken out"
