import pytest

from draft_worker.config import Settings
from draft_worker.drafters import build
from outrider.errors import ConfigError

URL = "redis://127.0.0.1:6379/0"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"drafter": "model"}, "--draft-model"),
        ({"drafter": "ngram", "draft_model": "/models/x"}, "--draft-model"),
        ({"drafter": "ngram", "tree_width": 2}, "--tree-width"),
        ({"ngram_min": 5, "ngram_max": 4}, "--ngram-min"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    settings: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        Settings(redis_url=URL, **settings)  # type: ignore[arg-type]  # a table of settings


def test_the_lookup_drafter_fits_every_target() -> None:
    chosen = build(Settings(redis_url=URL))
    assert chosen.drafter.name == "ngram"
    assert (chosen.model_fingerprint, chosen.tokenizer_fingerprint, chosen.context_len) == (
        "",
        "",
        0,
    )
