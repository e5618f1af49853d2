"""What drafters would have got accepted of texts that are known already: the target is not asked.

Under the coupled rule and without temperature the text does not depend on the drafts, so a
drafter can be judged on what the target said without any.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.inprocess import InProcess
from outrider.drafting.base import Drafter, DraftLaw, DraftRequest
from outrider.drafting.ngram import NgramDrafter
from outrider.figures import SpeculationFigures
from outrider.messages import (
    Draft,
    Endings,
    SamplingParams,
    SpeculationOptions,
    StartSession,
)
from outrider.model.blocks import BLOCK_TOKENS
from outrider.model.loading import LoadedModel
from outrider.model.numerics import FAST, choose_numerics
from outrider.model.paged import PagedModel
from verify_worker.scheduler import Limits

CORPUS = "replay"


@dataclass(frozen=True, slots=True)
class Said:
    """A prompt and what the target said, greedily."""

    category: str
    prompt: list[int]
    tokens: list[int]


def plain_greedy(
    model: LoadedModel,
    prompts: Sequence[tuple[str, list[int]]],
    *,
    new_tokens: int,
    token_count: int,
    at_once: int = 8,
) -> list[Said]:
    """What the target says after each (category, prompt), some prompts at a time."""
    longest = max(len(prompt) for _, prompt in prompts) + new_tokens
    blocks = at_once * (-(-longest // BLOCK_TOKENS) + 1)
    limits = Limits(context_len=model.context_len, vocab_size=token_count)
    paged = PagedModel(model, blocks, choose_numerics(FAST, model))
    workers = InProcess(paged, NgramDrafter(), token_count, limits)
    said: list[Said] = []
    for begin in range(0, len(prompts), at_once):
        batch = prompts[begin : begin + at_once]
        starts = [
            StartSession(
                session_id=str(begin + number),
                epoch=1,
                token_ids=tuple(prompt),
                prompt_len=len(prompt),
                sampling=SamplingParams(),
                endings=Endings(new_tokens, model.stop_ids),
                speculation=SpeculationOptions(enabled=False),
            )
            for number, (_, prompt) in enumerate(batch)
        ]
        answers = workers.run(starts)
        said += [
            Said(category, prompt, answer.token_ids)
            for (category, prompt), answer in zip(batch, answers, strict=True)
        ]
    return said


def replay(drafter: Drafter, texts: Sequence[Said], draft_len: int) -> list[SpeculationFigures]:
    """The figures of each text, one after the other, as one session each of one corpus."""
    return [_session(drafter, str(number), said, draft_len) for number, said in enumerate(texts)]


def _session(drafter: Drafter, name: str, said: Said, draft_len: int) -> SpeculationFigures:
    figures = SpeculationFigures()
    base, tokens = len(said.prompt), said.tokens
    law = DraftLaw(prompt_len=base, corpus=CORPUS)
    drafter.open(name, said.prompt, SamplingParams(), law)
    _ask(drafter, name, 0)
    begin = 0
    while begin < len(tokens):
        # The first token is a plain step: a draft is asked for with what follows it.
        wanted = min(draft_len, len(tokens) - begin - 1) if begin else 0
        draft = _ask(drafter, name, wanted) if wanted else Draft()
        accepted = 0
        for token, right in zip(draft.token_ids, tokens[begin:], strict=False):
            if token != right:
                break
            accepted += 1
        figures.add_round(len(draft.token_ids), accepted)
        drafter.commit(name, base + begin, tokens[begin : begin + accepted + 1])
        begin += accepted + 1
    drafter.close(name)
    return figures


def _ask(drafter: Drafter, name: str, draft_len: int) -> Draft:
    while (draft := drafter.propose([DraftRequest(name, draft_len)])[0]) is None:
        pass
    return draft
