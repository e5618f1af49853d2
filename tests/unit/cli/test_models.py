"""What the flags of a model and a drafter stand for."""

import pytest

from outrider.cli.models import choose_drafter, resolve_model
from outrider.errors import ConfigError
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.shipped import SHIPPED_DRAFT, shipped_draft


@pytest.mark.parametrize(
    ("drafter", "draft_model", "model", "chosen"),
    [
        ("auto", "", EMBEDDED_MODEL, ("hybrid", SHIPPED_DRAFT)),
        ("auto", "", "/models/other", ("suffix", "")),
        ("auto", "/models/draft", "/models/other", ("hybrid", "/models/draft")),
        ("model", "", EMBEDDED_MODEL, ("model", SHIPPED_DRAFT)),
        ("model", "/models/draft", EMBEDDED_MODEL, ("model", "/models/draft")),
        ("ngram", "", EMBEDDED_MODEL, ("ngram", "")),
    ],
)
def test_the_drafter_that_is_meant(
    drafter: str, draft_model: str, model: str, chosen: tuple[str, str]
) -> None:
    assert choose_drafter(drafter, draft_model, model) == chosen


def test_flags_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="needs --draft-model"):
        choose_drafter("hybrid", "", "/models/other")
    with pytest.raises(ConfigError, match="of no use"):
        choose_drafter("ngram", "/models/draft", "/models/other")


def test_the_draft_model_that_comes_with_outrider_has_a_name(tmp_path: object) -> None:
    assert resolve_model(SHIPPED_DRAFT, str(tmp_path)) == str(shipped_draft())
    with pytest.raises(ConfigError, match=SHIPPED_DRAFT):
        resolve_model("no-such-model", str(tmp_path))
