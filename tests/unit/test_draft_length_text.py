"""How a draft length is written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft_length import format_draft_length, parse_draft_length
from outrider.errors import ConfigError


@given(st.integers(0, 2**32))
def test_what_is_written_is_read_back(fixed: int) -> None:
    assert parse_draft_length(format_draft_length(fixed)) == fixed


@pytest.mark.parametrize(
    "text", ["", "4", "fixed", "fixed:", "fixed:0", "fixed:-1", "fixed:x", "fixed:²", "Auto"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"auto or fixed:N"):
        parse_draft_length(text)
