"""`bench end-to-end` and `bench sweep`, as small as they get, over one stack with random drafts."""

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench import end_to_end, sweep
from bench.drafters import RANDOM, Choice, stack
from outrider.draft_length import AUTO
from tests.support.models import save_model

pytestmark = pytest.mark.timeout(240)


async def test_both_over_one_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(save_model(tmp_path))

    async def said(run: Callable[[Any], None], settings: Any) -> dict[str, Any]:
        await asyncio.to_thread(run, settings)
        printed: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return printed

    async with stack(Choice(RANDOM), target, threads=1) as running:
        for benchmark in (end_to_end, sweep):
            monkeypatch.setattr(benchmark, "stack", lambda *_, **__: nullcontext(running))
        asked = end_to_end.Settings(
            model=target,
            drafter=RANDOM,
            count=2,
            categories=("code",),
            context=64,
            new_tokens=12,
            temperature=0.8,
            keep=str(tmp_path / "kept"),
        )
        printed = await said(end_to_end.run, asked)
        # All of it is there now.
        monkeypatch.delattr(end_to_end, "measure")
        assert await said(end_to_end.run, asked) == printed
        swept = await said(
            sweep.run,
            sweep.Settings(
                model=target,
                sessions=(1, 3),
                lengths=(2,),
                rounds=1,
                prompt_tokens=24,
                new_tokens=6,
                plot=str(tmp_path / "sweep.png"),
            ),
        )
    figures = printed["figures"]
    assert (figures["code"]["prompts"], figures["all"]["same_texts"]) == (2, 2)
    assert set(figures["peers"]["code"]) == {"tokens_per_s", "off", AUTO}
    assert "at least 0.97x over all" in printed["bars"]
    assert printed["bars"]["every text is the same without drafts"]

    assert list(swept["figures"]) == ["1", "3"]
    for of in swept["figures"].values():
        assert list(of["tokens_per_s"]) == ["off", "k = 2", AUTO]
        assert of["auto_over_best"]["count"] == 1
    assert swept["bars"]["every text is the same without drafts"]
    assert (tmp_path / "sweep.png").stat().st_size
