"""What several ranks say to seeded requests with drafts, beside what one rank says to them.

Each request has its own sampling: greedy, drawn, or of processed rows. One rank says them without
drafts first; drafts are then made of that, most of them right for a while, some wrong at once, and
are the same for both sides. Up to `SESSIONS` requests run at once.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from outrider.errors import InternalError
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
from outrider.model.blocks import BlockTable
from outrider.model.paged import Segment
from outrider.sampling.coupled import is_sampled, processed_scores
from outrider.sampling.noise import gumbels
from outrider.sampling.rows import Row
from verify_worker.runner import Runner
from verify_worker.scheduler import Limits, Scheduler
from verify_worker.state import Output, ToCoordinator
from verify_worker.target import Target

SESSIONS = 8
_DRAFT_LEN = 4
_DRAFTER = DraftWorkerRef("bench", "127.0.0.1:1")
# The clock of the scheduler, so that what shares a step does not depend on the machine.
_STEP_S = 0.01


@dataclass(frozen=True, slots=True)
class Request:
    """One completion."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Said:
    """Texts by request, and how many tokens of drafts were accepted in them."""

    texts: list[list[int]]
    accepted: int


def requests_of(number: int, vocab_size: int) -> list[Request]:
    """So many seeded requests, the same each time."""
    chance = random.Random(5)
    return [
        Request(
            tuple(chance.randrange(vocab_size) for _ in range(chance.randint(1, 24))),
            SamplingParams(
                temperature=chance.choice((0.0, 0.6, 1.0, 1.4)),
                seed=chance.getrandbits(64),
                top_p=chance.choice((1.0, 1.0, 0.9)),
                top_k=chance.choice((0, 0, 20)),
                repetition_penalty=chance.choice((1.0, 1.0, 1.2)),
            ),
        )
        for _ in range(number)
    ]


def say(
    target: Target,
    requests: Sequence[Request],
    new_tokens: int,
    known: Sequence[Sequence[int]] | None = None,
) -> Said:
    """What a target says, with drafts from `known` texts if they are given.

    Raises:
        InternalError: a session failed, or none goes on.
    """
    return _Run(target, requests, new_tokens, known).said()


class _Run:
    def __init__(
        self,
        target: Target,
        requests: Sequence[Request],
        new_tokens: int,
        known: Sequence[Sequence[int]] | None,
    ) -> None:
        model: Any = target.model
        limits = Limits(
            context_len=target.context_len,
            vocab_size=target.token_count,
            max_sessions=SESSIONS,
            draft_len=_DRAFT_LEN,
            draft_wait_s=60.0,
        )
        self._tokens = target.token_count
        self._scheduler = Scheduler(model.pool, limits)
        self._runner = Runner(model, target.token_count)
        self._known = known
        self._texts: dict[str, list[int]] = {str(n): [] for n in range(len(requests))}
        self._now_s = 0.0
        for sid, request in zip(self._texts, requests, strict=True):
            command = StartSession(
                session_id=sid,
                epoch=1,
                token_ids=request.prompt,
                prompt_len=len(request.prompt),
                sampling=request.sampling,
                endings=Endings(new_tokens),
                drafter=_DRAFTER,
            )
            self._take(self._scheduler.start(command, owner=1))

    def said(self) -> Said:
        """Run all to their ends."""
        while self._step():
            pass
        return Said(
            list(self._texts.values()), self._scheduler.counters.speculation.accepted_tokens
        )

    def _step(self) -> bool:
        for session in list(self._scheduler.sessions.values()):
            if session.want is not None:
                proposal = Proposal(
                    session_id=session.session_id,
                    epoch=session.epoch,
                    base_len=session.want.base_len,
                    draft=self._draft(session.session_id, session.want.draft_len),
                )
                received = self._scheduler.drafts.receive(_DRAFTER.worker_id, proposal, self._now_s)
                self._take(received)
        while (plan := self._scheduler.plan(self._now_s)) is None:
            wake_s = self._scheduler.wake_at_s(self._now_s)
            if wake_s is None:
                return False
            self._now_s = max(self._now_s, wake_s) + 1e-6
        self._scheduler.reserve(plan)
        outcome = replace(self._runner.run(plan), compute_s=_STEP_S)
        self._now_s += _STEP_S
        self._take(self._scheduler.apply(plan, outcome, self._now_s))
        return True

    def _draft(self, sid: str, most: int) -> Draft:
        if self._known is None:
            return Draft(())
        said = len(self._texts[sid])
        chance = random.Random(f"{sid} {said}")
        right = self._known[int(sid)][said : said + most]
        wrong = [(token + 1) % self._tokens for token in right]
        pairs = zip(right, wrong, strict=True)
        return Draft(tuple(r if chance.random() < 0.8 else w for r, w in pairs))

    def _take(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            match output.event if isinstance(output, ToCoordinator) else None:
                case Progress(session_id=sid, token_ids=token_ids):
                    self._texts[sid] += token_ids
                case SessionFailed(error=error):
                    raise InternalError(f"a session of the benchmark failed: {error}")


def margins(
    target: Target,
    requests: Sequence[Request],
    texts: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
) -> Iterator[float]:
    """By how much a target prefers its token where `texts`, its own, and `others` first part.

    In scores, of which the best is chosen: logits by temperature, with the noise of the seed.
    Texts that are the same give nothing.
    """
    for request, text, other in zip(requests, texts, others, strict=True):
        pairs = zip(count(), text, other, strict=False)
        place = next((i for i, a, b in pairs if a != b), None)
        if place is None:
            if len(text) != len(other):
                yield float("inf")
            continue
        tokens = [*request.prompt, *text[:place]]
        row = Row(request.sampling, tokens, prompt_len=len(request.prompt))
        table = BlockTable()
        target.model.pool.grow(table, len(tokens))
        logits = target.model.forward([Segment(tokens, table, 1)])[:, : target.token_count]
        target.model.pool.release(table)
        scores = processed_scores(logits, [row])
        if is_sampled(row):
            noise = gumbels([request.sampling.seed], [row.position], target.token_count)
            scores = scores + noise
        yield float(scores[0, text[place]] - scores[0, other[place]])
