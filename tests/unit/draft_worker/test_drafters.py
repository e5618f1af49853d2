from pathlib import Path

import pytest

from draft_worker.config import Settings
from draft_worker.drafters import build
from outrider.sampling import gumbel_max
from tests.support.models import save_model

URL = "redis://127.0.0.1:6379/0"


def test_a_model_has_what_sampled_drafts_need_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[bool] = []
    monkeypatch.setattr(gumbel_max, "prepare", lambda: prepared.append(True))
    build(Settings(redis_url=URL))
    assert not prepared
    build(Settings(redis_url=URL, drafter="model", draft_model=str(save_model(tmp_path, "gpt2"))))
    assert prepared == [True]
