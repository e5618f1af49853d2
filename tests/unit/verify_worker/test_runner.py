import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import InternalError, NumericsError, RankLostError
from outrider.messages import (
    Draft,
    DraftWorkerRef,
    Endings,
    Progress,
    Proposal,
    SamplingParams,
    SessionFailed,
    StartSession,
)
from outrider.model.loading import LoadedModel, load_model
from outrider.model.paged import PagedModel
from outrider.model.rows import StepOutput
from tests.support.models import EOS, FAMILIES, TOKENS, plain_greedy, save_model
from verify_worker.runner import Runner
from verify_worker.scheduler import Limits, Scheduler
from verify_worker.state import Output, ToCoordinator

DRAFTER = DraftWorkerRef("d", "127.0.0.1:1")


class Target:
    """A real tiny model under the scheduler, without threads or gRPC."""

    def __init__(self, model: LoadedModel, blocks: int = 60, **limits: Any) -> None:
        self.paged = PagedModel(model, blocks)
        values = {"context_len": model.context_len, "vocab_size": TOKENS, **limits}
        self.scheduler = Scheduler(self.paged.pool, Limits(**values))
        self.runner = Runner(self.paged, TOKENS)
        self.tokens: dict[str, list[int]] = {}
        self.failures: dict[str, SessionFailed] = {}

    def start(self, sid: str, prompt: list[int], new: int, sampling: SamplingParams) -> None:
        command = StartSession(
            session_id=sid,
            epoch=1,
            token_ids=tuple(prompt),
            prompt_len=len(prompt),
            sampling=sampling,
            endings=Endings(new, frozenset({EOS})),
            drafter=DRAFTER,
        )
        self.take(self.scheduler.start(command, owner=1))

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            event = output.event if isinstance(output, ToCoordinator) else None
            if isinstance(event, Progress):
                self.tokens.setdefault(event.session_id, []).extend(event.token_ids)
            elif isinstance(event, SessionFailed):
                self.failures[event.session_id] = event

    def run(self, drafts: Iterator[list[int]] | None = None) -> None:
        """Decode everything; each proposal that is waited for comes from `drafts`."""
        while self.scheduler.sessions:
            for session in self.scheduler.sessions.values():
                if session.want is not None and drafts is not None:
                    proposal = Proposal(
                        session_id=session.session_id,
                        epoch=1,
                        base_len=session.want.base_len,
                        draft=Draft(tuple(next(drafts)[: session.want.draft_len])),
                    )
                    self.scheduler.drafts.receive("d", proposal, 0.0)
            plan = self.scheduler.plan(now_s=1e9)
            assert plan is not None
            self.scheduler.reserve(plan)
            self.take(self.scheduler.apply(plan, self.runner.run(plan), now_s=0.0))


def random_drafts(seed: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        length = int(torch.randint(0, 5, (1,), generator=generator))
        yield torch.randint(0, TOKENS, (length,), generator=generator).tolist()


PROMPTS = {f"s{n}": [(n * 37 + t * t) % 250 for t in range(n * 11 + 1)] for n in range(5)}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_what_transformers_generates(family: str, tmp_path: Path) -> None:
    path = save_model(tmp_path, family)
    target = Target(load_model(str(path)), step_tokens=40)
    for sid, prompt in PROMPTS.items():
        target.start(sid, prompt, 40, SamplingParams())
    target.run(random_drafts(1))
    for sid, prompt in PROMPTS.items():
        assert target.tokens[sid] == plain_greedy(path, prompt, 40)
    assert target.paged.pool.free == target.paged.pool.total


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_batches_and_preemption_do_not_change_tokens(
    temperature: float, tmp_path: Path
) -> None:
    model = load_model(str(save_model(tmp_path)))
    sampling = {
        sid: SamplingParams(temperature, top_k=50, top_p=0.95, seed=n)
        for n, sid in enumerate(PROMPTS)
    }
    solo = {}
    for sid, prompt in PROMPTS.items():
        target = Target(model)
        target.start(sid, prompt, 30, sampling[sid])
        target.run()
        solo[sid] = target.tokens[sid]
    for blocks in (60, 8):
        target = Target(model, blocks, draft_len=4)
        for sid, prompt in PROMPTS.items():
            target.start(sid, prompt, 30, sampling[sid])
        target.run(random_drafts(2))
        assert target.tokens == solo
    assert target.scheduler.counters.preemptions > 0


def test_the_own_continuation_as_draft_is_accepted_whole(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    model = load_model(str(path))
    prompt = PROMPTS["s2"]
    expected = plain_greedy(path, prompt, 41)
    target = Target(model, draft_len=4)
    target.start("s", prompt, 41, SamplingParams())

    def drafts() -> Iterator[list[int]]:
        while True:
            said = len(target.tokens["s"])
            yield expected[said : said + 4]

    target.run(drafts())
    assert target.tokens["s"] == expected
    assert target.scheduler.counters.speculation.acceptance_rate == 1.0
    assert target.scheduler.counters.speculation.draft_tokens == 32


def test_case_9_nan_fails_the_session_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(load_model(str(save_model(tmp_path))))
    for sid in ("s1", "s2"):
        target.start(sid, PROMPTS[sid], 8, SamplingParams(0.7, seed=1))
    step = target.paged.step

    def damaged(segments: Any) -> StepOutput:
        output = step(segments)
        if len(target.tokens.get("s2", [])) == 3 and output.logits.shape[0] > 1:
            output.logits[-1, 5] = torch.nan
        return output

    monkeypatch.setattr(target.paged, "step", damaged)
    target.run()
    assert isinstance(target.failures["s2"].error, NumericsError)
    assert "NaN" in target.failures["s2"].error.message
    assert len(target.tokens["s1"]) == 8
    assert target.paged.pool.free == target.paged.pool.total


def test_one_session_that_breaks_the_forward_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(load_model(str(save_model(tmp_path))))
    for sid in ("s1", "s2", "s3"):
        target.start(sid, PROMPTS[sid], 8, SamplingParams())
    step = target.paged.step

    def damaged(segments: Any) -> StepOutput:
        if any(segment.token_ids[0] == PROMPTS["s2"][0] for segment in segments):
            raise RuntimeError("no kernel for this one")
        return step(segments)

    monkeypatch.setattr(target.paged, "step", damaged)
    target.run()
    assert isinstance(target.failures["s2"].error, InternalError)
    assert len(target.tokens["s1"]) == len(target.tokens["s3"]) == 8


def test_no_session_is_blamed_when_rank_0_fails_and_the_others_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(load_model(str(save_model(tmp_path))))
    for sid in ("s1", "s2"):
        target.start(sid, PROMPTS[sid], 8, SamplingParams())
    ends: list[Exception] = [MemoryError("no room"), RankLostError("rank 0 ended the group")]

    def failing(segments: Any) -> StepOutput:
        raise ends.pop(0)

    monkeypatch.setattr(target.paged, "step", failing)
    with pytest.raises(RankLostError, match="ended the group"):
        target.run()
    assert not target.failures


def test_case_22_padding_ids_never_come_out(tmp_path: Path) -> None:
    model = load_model(str(save_model(tmp_path)))
    with torch.no_grad():
        # The padding rows of the head are the loudest of all.
        model.module.get_output_embeddings().weight[TOKENS:] *= 50
    target = Target(model)
    target.start("s", PROMPTS["s1"], 60, SamplingParams(1.0, seed=3))
    target.run()
    assert max(target.tokens["s"]) < TOKENS


def test_case_10_and_11_seeds(tmp_path: Path) -> None:
    model = load_model(str(save_model(tmp_path)))
    said = []
    for seed in (42, 42, *range(20)):
        target = Target(model)
        target.start("s", PROMPTS["s1"], 12, SamplingParams(2.0, seed=seed))
        target.run()
        said.append(tuple(target.tokens["s"]))
    assert said[0] == said[1]
    assert len(set(said[2:])) == 20


def test_a_dead_row_that_is_not_reached_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path)
    target = Target(load_model(str(path)), draft_len=4)
    target.start("s", PROMPTS["s1"], 12, SamplingParams())
    step = target.paged.step

    def damaged(segments: Any) -> StepOutput:
        output = step(segments)
        # Whatever a draft leads to is NaN; the row after the committed tokens is not.
        output.logits[1:] = torch.nan
        return output

    monkeypatch.setattr(target.paged, "step", damaged)
    expected = plain_greedy(path, PROMPTS["s1"], 12)
    target.run(itertools.repeat([(token + 1) % TOKENS for token in expected[1:5]]))
    assert target.tokens["s"] == expected
    assert not target.failures


def test_constraints_that_bar_everything_end_the_session_with_the_reason(tmp_path: Path) -> None:
    target = Target(load_model(str(save_model(tmp_path))))
    sampling = SamplingParams(0.5, allowed_ids=(5,), bad_words=((5, 5, 5),), seed=1)
    target.start("s", PROMPTS["s1"], 12, sampling)
    target.run(itertools.repeat([5, 5]))
    assert target.tokens["s"] == [5, 5]
    assert "bar every token" in target.failures["s"].error.message
