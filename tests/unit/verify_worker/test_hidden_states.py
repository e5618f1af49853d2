"""The hidden states of what is committed go to the draft workers that read them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.messages import AssignDrafter, CommitDraft, Draft, Endings, SamplingParams
from outrider.model.loading import load_model
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.tensors import unpacked
from tests.support.models import TOKENS, save_model
from tests.support.scheduling import DRAFTER, OTHER, Worker
from tests.support.stepping import Reference, Stepper
from tests.support.synthetic import plain_decoding, states_of
from verify_worker.state import Output, ToDrafter

LAYERS = 7


def worker_of(**limits: Any) -> Worker:
    return Worker(**{"draft_len": 4, "draft_wait_s": 100.0, "layers": LAYERS, **limits})


def answer(worker: Worker, right: int, layers: tuple[int, ...] = (LAYERS,), sid: str = "s") -> None:
    """A proposal with so many right tokens, the next one wrong, that says what it reads."""
    draft = worker.right_draft(sid, right)
    worker.propose(sid, [*draft, 49, 49][:4], feature_layers=layers)


def last_commit(worker: Worker) -> CommitDraft:
    commit = worker.commands(CommitDraft)[-1]
    assert isinstance(commit, CommitDraft)
    return commit


def test_from_the_first_proposal_on_each_token_has_its_state() -> None:
    worker = worker_of()
    worker.start(prompt=20, new=30)
    worker.step()
    assert last_commit(worker).features == ()
    for right in (2, 0, 4, 1):
        text = list(worker.scheduler.sessions["s"].tokens)
        answer(worker, right)
        worker.step()
        commit = last_commit(worker)
        assert len(commit.token_ids) == right + 1
        assert commit.features == ((LAYERS, states_of(text, commit.token_ids)),)
    # A session that comes later has them from its first token on, after its prompt.
    worker.start("later", tokens=(5, 6, 7))
    answer(worker, 0)
    worker.step()
    commits = [c for c in worker.commands(CommitDraft) if c.session_id == "later"]
    assert commits[0].features == ((LAYERS, states_of([5, 6, 7], commits[0].token_ids)),)


def test_plain_steps_send_them_too() -> None:
    worker = worker_of(draft_wait_s=0.01)
    worker.start(new=30)
    worker.step()
    answer(worker, 1)
    worker.step()
    text = list(worker.scheduler.sessions["s"].tokens)
    told = len(worker.commands(CommitDraft))
    while len(worker.commands(CommitDraft)) == told:
        worker.now += 1
        worker.step()
    # With the next question, for all tokens since the last.
    commit = last_commit(worker)
    assert list(commit.token_ids) == worker.scheduler.sessions["s"].tokens[len(text) :]
    assert commit.features == ((LAYERS, states_of(text, commit.token_ids)),)


@pytest.mark.parametrize("layers", [(), (0,), (LAYERS - 1, LAYERS + 1)])
def test_layers_that_are_not_known_are_ignored(layers: tuple[int, ...]) -> None:
    worker = worker_of()
    worker.start(new=30)
    worker.step()
    for _ in range(2):
        answer(worker, 2, layers)
        worker.step()
    assert {commit.features for commit in worker.commands(CommitDraft)} == {()}


def test_a_worker_that_does_not_know_its_layers_sends_nothing() -> None:
    worker = worker_of(layers=0)
    worker.start(new=30)
    worker.step()
    answer(worker, 2, (0,))
    worker.step()
    assert last_commit(worker).features == ()


def test_it_is_remembered_by_draft_worker_until_that_is_lost() -> None:
    worker = worker_of()
    worker.start("a", new=60)
    worker.start("b", new=60, drafter=OTHER)
    worker.step()
    answer(worker, 1, sid="a")
    worker.propose("b", worker.right_draft("b", 2), worker_id="d2")
    worker.step()
    sent = {c.session_id: bool(c.features) for c in worker.commands(CommitDraft)}
    assert sent == {"a": True, "b": False}
    # It says otherwise, and is believed.
    answer(worker, 1, (), sid="a")
    worker.propose("b", worker.right_draft("b", 2), worker_id="d2", feature_layers=(LAYERS,))
    worker.step()
    # What was wanted when the step was planned is what came of it.
    answer(worker, 1, (), sid="a")
    worker.propose("b", worker.right_draft("b", 2), worker_id="d2", feature_layers=(LAYERS,))
    worker.step()
    sent = {c.session_id: bool(c.features) for c in worker.commands(CommitDraft)}
    assert sent == {"a": False, "b": True}
    worker.take(worker.scheduler.drafts.lose("d2"))
    assign = AssignDrafter(session_id="b", epoch=1, drafter=OTHER)
    worker.take(worker.scheduler.drafts.assign(assign))
    worker.step()
    assert not last_commit(worker).features


def test_at_its_end_a_session_says_nothing_more() -> None:
    worker = worker_of()
    said = plain_decoding(range(1, 6), 5)
    worker.start(endings=Endings(30, frozenset({said[2]})))
    worker.step()
    answer(worker, 4)
    worker.step()
    # Two of five tokens were committed, and nothing was sent of the others.
    assert worker.tokens["s"] == said[:3]
    assert [len(c.token_ids) for c in worker.commands(CommitDraft)] == [1]
    assert worker.scheduler.drafts.workers[DRAFTER.worker_id].reads_hidden


# --- with a model -----------------------------------------------------------------------------


class Sending(Stepper):
    """What it says to draft workers, too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.commits: dict[str, list[CommitDraft]] = {}
        super().__init__(*arguments, **options)

    def take(self, outputs: Any) -> None:
        outputs: list[Output] = list(outputs)
        for output in outputs:
            if isinstance(output, ToDrafter) and isinstance(output.command, CommitDraft):
                self.commits.setdefault(output.command.session_id, []).append(output.command)
        super().take(outputs)


SAMPLINGS = [SamplingParams(), SamplingParams(0.8, seed=5)]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_the_rows_are_those_that_the_tokens_were_chosen_on(
    tmp_path: Path, sampling: SamplingParams, family: str
) -> None:
    path = save_model(tmp_path, family)
    model = load_model(str(path))
    layers = model.module.config.num_hidden_layers
    worker = Sending(
        model,
        draft_len=4,
        draft_wait_s=100.0,
        max_tree_nodes=16,
        layers=layers,
        # Compiled, where it can be: its states lie in a buffer that the next step writes.
        numerics=choose_numerics(FAST, model) if family == "qwen3" else None,
    )
    reference = Reference(path)
    prompts = {"a": [1, 2, 3], "b": [4] * 20, "c": [9]}
    for sid, prompt in prompts.items():
        worker.start(sid, prompt, 30, sampling)
    worker.scheduler.drafts.workers["d"].reads_hidden = True
    assert worker.step()
    for _ in range(3):
        for session in worker.wanting:
            right = reference.continuation(session.tokens, 4, sampling)
            wrong = [(token + 1) % TOKENS for token in right]
            draft = {
                # A tree whose right path is 1, 3; a chain that is right in two places; whole.
                "a": Draft((wrong[0], right[0], wrong[1], right[1]), (-1, -1, 1, 1)),
                "b": Draft((right[0], right[1], wrong[2])),
                "c": Draft(tuple(right)),
            }[session.session_id]
            worker.propose(session, draft)
        worker.scheduler.drafts.workers["d"].reads_hidden = True
        assert worker.step()
    plain = AutoModelForCausalLM.from_pretrained(path).eval()
    for sid, prompt in prompts.items():
        text = [*prompt, *worker.said[sid].tokens]
        with torch.inference_mode():
            output = plain(torch.tensor([text]), output_hidden_states=True, use_cache=False)
        states = output.hidden_states[-1][0]
        lengths = [len(commit.token_ids) for commit in worker.commits[sid]]
        assert lengths == [1, *{"a": [3] * 3, "b": [3] * 3, "c": [5] * 3}[sid]]
        for commit in worker.commits[sid]:
            ((layer, tensor),) = commit.features
            assert (layer, tensor.dtype) == (layers, "bfloat16")
            end = commit.base_len + len(commit.token_ids)
            expected = states[commit.base_len - 1 : end - 1]
            torch.testing.assert_close(unpacked(tensor), expected, rtol=1e-2, atol=1e-2)
