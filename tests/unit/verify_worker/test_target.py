from pathlib import Path

import pytest

from outrider.sampling import gumbel_max
from tests.support.models import save_model
from verify_worker.config import Settings
from verify_worker.target import load_target


def test_a_loaded_target_has_what_sampled_steps_need_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[bool] = []
    monkeypatch.setattr(gumbel_max, "prepare", lambda: prepared.append(True))
    settings = Settings(
        model=str(save_model(tmp_path, "gpt2")),
        redis_url="redis://127.0.0.1:6379/0",
        kv_memory="4MiB",
        calibrate=False,
    )
    load_target(settings)
    assert prepared == [True]
