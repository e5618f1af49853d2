from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.drafting.base import DraftRequest
from outrider.drafting.draft_model import PlainDraftModel
from outrider.drafting.model import SHORT_CATCH_UP, ModelDrafter
from outrider.errors import FencedError, InvalidRequestError, UnknownSessionError
from outrider.messages import Draft, SamplingParams
from outrider.model.loading import LoadedModel, load_model
from outrider.model.paged import PagedModel, Segment
from outrider.model.rows import StepOutput
from outrider.sampling.coupled import target_tokens
from outrider.sampling.rows import Row

VOCAB, CONTEXT = 128, 192
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=7)

Reference = Callable[[Sequence[int], int, SamplingParams], tuple[int, ...]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        # Wide enough that the tokens vary and no two scores are nearly tied.
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> LoadedModel:
    return load_model(str(path))


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    """The continuation by transformers alone, without any cache."""
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path)

    @torch.inference_mode()
    def continued(tokens: Sequence[int], count: int, sampling: SamplingParams) -> tuple[int, ...]:
        tokens = list(tokens)
        begin = len(tokens)
        for _ in range(count):
            logits = plain(torch.tensor([tokens]), use_cache=False).logits[0, -1:]
            tokens += target_tokens(logits.float(), [Row(sampling, tokens)])
        return tuple(tokens[begin:])

    return continued


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i * i + 13 * i + salt) % VOCAB for i in range(length)]


def other(token: int) -> int:
    return (token + 1) % VOCAB


def proposed(drafter: ModelDrafter, session_id: str, draft_len: int) -> tuple[int, ...]:
    """The proposal, asking until it is ready."""
    for _ in range(CONTEXT):
        (draft,) = drafter.propose([DraftRequest(session_id, draft_len)])
        if draft is not None:
            return draft.token_ids
    raise AssertionError("never ready")


def spy_on_rows(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of each segment of each forward from now on."""
    seen: list[list[int]] = []
    step = PagedModel.step

    def spy(self: PagedModel, segments: Sequence[Segment]) -> StepOutput:
        seen.append([len(segment.token_ids) for segment in segments])
        return step(self, segments)

    monkeypatch.setattr(PagedModel, "step", spy)
    return seen


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("accepted", range(5))
def test_after_every_acceptance_it_continues_as_plain_decoding(
    model: LoadedModel,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    accepted: int,
    sampling: SamplingParams,
) -> None:
    """Case 2."""
    k = 4
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=8))
    tokens = prompt(21)
    drafter.open("s", tokens, sampling)
    draft = proposed(drafter, "s", k)
    assert draft == reference(tokens, k, sampling)
    last = reference([*tokens, *draft], 1, sampling)[0] if accepted == k else other(draft[accepted])
    committed = [*draft[:accepted], last]
    drafter.commit("s", len(tokens), committed)
    tokens += committed
    rows = spy_on_rows(monkeypatch)
    assert proposed(drafter, "s", k) == reference(tokens, k, sampling)
    # Whatever was accepted has its KV already, except the draft token that was never fed.
    assert rows == [[2 if accepted == k else 1], [1], [1], [1]]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafting_for_itself_is_accepted_throughout(
    model: LoadedModel, reference: Reference, sampling: SamplingParams
) -> None:
    """Case 1: the acceptance rate stays 1.0 over many full acceptances."""
    k, rounds = 4, 15
    tokens = prompt(17)
    text = reference(tokens, (k + 1) * rounds, sampling)
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=12))
    drafter.open("s", tokens, sampling)
    for begin in range(0, len(text), k + 1):
        assert proposed(drafter, "s", k) == text[begin : begin + k]
        drafter.commit("s", len(tokens) + begin, text[begin : begin + k + 1])


def test_a_batch_of_ragged_sessions_equals_each_alone(
    model: LoadedModel, reference: Reference
) -> None:
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=40))
    sessions = {f"s{i}": prompt(length, salt=i) for i, length in enumerate([1, 16, 17, 40, 5, 64])}
    params = {name: SAMPLED if i % 2 else GREEDY for i, name in enumerate(sessions)}
    lengths = {name: (i * 2) % 6 for i, name in enumerate(sessions)}
    for name, tokens in sessions.items():
        drafter.open(name, tokens, params[name])
    for turn in range(3):
        requests = [DraftRequest(name, lengths[name]) for name in sessions]
        drafts = drafter.propose(requests)
        for name, draft in zip(sessions, drafts, strict=True):
            assert draft == Draft(reference(sessions[name], lengths[name], params[name]))
            committed = [*draft.token_ids[:turn], 3 + turn]
            drafter.commit(name, len(sessions[name]), committed)
            sessions[name] += committed


def test_commits_without_proposals_between_them(model: LoadedModel, reference: Reference) -> None:
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=8))
    tokens = prompt(10)
    drafter.open("s", tokens, GREEDY)
    draft = proposed(drafter, "s", 4)
    # Fewer than were drafted, then tokens that differ from the rest of the draft.
    for committed in ([draft[0]], [other(draft[1]), 5], [], [9]):
        drafter.commit("s", len(tokens), committed)
        tokens += committed
    assert proposed(drafter, "s", 4) == reference(tokens, 4, GREEDY)
    assert proposed(drafter, "s", 2) == reference(tokens, 2, GREEDY)
    assert proposed(drafter, "s", 6) == reference(tokens, 6, GREEDY)


def test_preparing_leaves_only_the_last_token_to_feed(
    model: LoadedModel, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=8))
    tokens = prompt(30)
    drafter.open("s", tokens, GREEDY)
    assert proposed(drafter, "s", 0) == ()
    rows = spy_on_rows(monkeypatch)
    assert proposed(drafter, "s", 1) == reference(tokens, 1, GREEDY)
    assert rows == [[1]]


@pytest.mark.parametrize("length", [CONTEXT - 3, CONTEXT - 1, CONTEXT])
def test_it_drafts_up_to_its_context(model: LoadedModel, reference: Reference, length: int) -> None:
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=24))
    tokens = prompt(length)
    drafter.open("s", tokens, GREEDY)
    fits = CONTEXT + 1 - length
    assert proposed(drafter, "s", 6) == reference(tokens, fits, GREEDY)[:6]


def test_past_its_context_it_proposes_nothing_and_holds_nothing(model: LoadedModel) -> None:
    """Case 17."""
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=24))
    drafter.open("s", prompt(CONTEXT), GREEDY)
    assert len(proposed(drafter, "s", 4)) == 1
    length = CONTEXT
    for _ in range(4):
        drafter.commit("s", length, [1, 2])
        length += 2
        assert proposed(drafter, "s", 4) == ()
        assert proposed(drafter, "s", 0) == ()
        assert drafter.free_blocks == 24
    drafter.open("t", prompt(3 * CONTEXT), GREEDY)
    assert proposed(drafter, "t", 4) == ()


def test_the_idlest_session_loses_its_kv_and_is_rebuilt(
    model: LoadedModel, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2 blocks a session; the pool holds two of three.
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=5))
    sessions = {name: prompt(25, salt=i) for i, name in enumerate("abc")}
    for name, tokens in sessions.items():
        drafter.open(name, tokens, SAMPLED)
        assert proposed(drafter, name, 4) == reference(tokens, 4, SAMPLED)
    rows = spy_on_rows(monkeypatch)
    for name in "cba":
        drafter.commit(name, 25, [1])
        assert proposed(drafter, name, 2) == reference([*sessions[name], 1], 2, SAMPLED)
    # c and b were still there; a had been evicted for c and is fed again whole.
    assert [step[0] for step in rows] == [1, 1, 1, 1, 26, 1]
    for name in "abc":
        drafter.close(name)
    assert drafter.free_blocks == drafter.total_blocks


def test_more_sessions_than_blocks_are_served_in_order(
    model: LoadedModel, reference: Reference
) -> None:
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=5))
    sessions = {name: prompt(25, salt=i) for i, name in enumerate("abcd")}
    for name, tokens in sessions.items():
        drafter.open(name, tokens, GREEDY)
    waiting = list(sessions)
    served = []
    while waiting:
        drafts = drafter.propose([DraftRequest(name, 4) for name in waiting])
        assert drafts[0] is not None
        ready = {name: d for name, d in zip(waiting, drafts, strict=True) if d is not None}
        for name, draft in ready.items():
            assert draft.token_ids == reference(sessions[name], 4, GREEDY)
        served.append(list(ready))
        waiting = [name for name in waiting if name not in ready]
    assert served == [["a", "b"], ["c", "d"]]


def test_who_asks_first_takes_blocks_from_who_asks_later(
    model: LoadedModel, reference: Reference
) -> None:
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=3))
    for name in "ab":
        drafter.open(name, prompt(25), GREEDY)
    assert proposed(drafter, "b", 2)
    drafts = drafter.propose([DraftRequest("a", 2), DraftRequest("b", 2)])
    assert drafts == [Draft(reference(prompt(25), 2, GREEDY)), None]


def test_a_session_that_can_never_fit_gets_no_proposal(model: LoadedModel) -> None:
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=2))
    drafter.open("s", prompt(33), GREEDY)
    assert proposed(drafter, "s", 4) == ()
    assert drafter.free_blocks == 2


def test_a_long_prompt_does_not_hold_up_other_sessions(
    model: LoadedModel, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=24), prefill_chunk=48)
    long, short = prompt(130), prompt(9)
    drafter.open("long", long, GREEDY)
    drafter.open("short", short, GREEDY)
    rows = spy_on_rows(monkeypatch)
    requests = [DraftRequest("long", 2), DraftRequest("short", 2)]
    for turn in range(2):
        assert drafter.propose(requests) == [None, Draft(reference(short, 2, GREEDY))]
        assert rows == [[48, 9 if turn == 0 else 1], [1]]
        drafter.commit("short", len(short), [4])
        short.append(4)
        rows.clear()
    # What is left of it counts as long still, and fits into one chunk.
    assert SHORT_CATCH_UP < 130 - 2 * 48 < 48
    drafts = drafter.propose(requests)
    assert drafts[0] == Draft(reference(long, 2, GREEDY))


def test_the_chunk_is_shared_by_long_prompts(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=24), prefill_chunk=64)
    for name in "abc":
        drafter.open(name, prompt(50), GREEDY)
    rows = spy_on_rows(monkeypatch)
    drafts = drafter.propose([DraftRequest(name, 1) for name in "abc"])
    assert [draft is None for draft in drafts] == [False, True, True]
    assert rows == [[50, 14]]


def test_a_fault_leaves_the_sessions_as_they_were(
    model: LoadedModel, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=8))
    tokens = prompt(12)
    drafter.open("s", tokens, GREEDY)
    step = PagedModel.step
    for good_calls in range(3):
        left = [good_calls]

        def failing(
            self: PagedModel, segments: Sequence[Segment], left: list[int] = left
        ) -> StepOutput:
            if not left[0]:
                raise RuntimeError("out of luck")
            left[0] -= 1
            return step(self, segments)

        with monkeypatch.context() as patch:
            patch.setattr(PagedModel, "step", failing)
            with pytest.raises(RuntimeError, match="out of luck"):
                drafter.propose([DraftRequest("s", 4)])
        drafter.commit("s", len(tokens), [good_calls])
        tokens.append(good_calls)
        assert proposed(drafter, "s", 4) == reference(tokens, 4, GREEDY)
    drafter.close("s")
    assert drafter.free_blocks == 8


def test_what_does_not_fit_is_refused_and_changes_nothing(
    model: LoadedModel, reference: Reference
) -> None:
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=8))
    tokens = prompt(12)
    drafter.open("s", tokens, GREEDY)
    with pytest.raises(InvalidRequestError, match=f"{VOCAB}"):
        drafter.open("s", [1, VOCAB], GREEDY)
    with pytest.raises(InvalidRequestError):
        drafter.commit("s", 12, [2**32 - 1])
    for base_len in (11, 13):
        with pytest.raises(FencedError):
            drafter.commit("s", base_len, [1])
    assert proposed(drafter, "s", 3) == reference(tokens, 3, GREEDY)
    with pytest.raises(UnknownSessionError):
        drafter.commit("t", 0, [1])
    with pytest.raises(UnknownSessionError):
        drafter.propose([DraftRequest("s", 1), DraftRequest("t", 1)])
    drafter.open("empty", [], GREEDY)
    assert proposed(drafter, "empty", 3) == ()


def test_a_reused_session_id_and_reused_blocks_carry_nothing_over(
    model: LoadedModel, reference: Reference
) -> None:
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=4))
    for salt in range(4):
        tokens = prompt(30, salt)
        drafter.open("s", tokens, SAMPLED)
        assert proposed(drafter, "s", 3) == reference(tokens, 3, SAMPLED)
    drafter.close("s")
    drafter.close("s")
    assert drafter.free_blocks == 4


def test_padding_of_the_embedding_is_never_proposed(model: LoadedModel) -> None:
    drafter = ModelDrafter(PlainDraftModel(model, total_blocks=8, token_count=5))
    for number in range(8):
        drafter.open(f"s{number}", prompt(9 + number), SamplingParams(1.0, seed=number))
        assert max(proposed(drafter, f"s{number}", 6)) < 5
