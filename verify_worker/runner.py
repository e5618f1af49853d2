"""Runs a plan: one forward pass of the target and the verdict on every draft in it.

The only part of the worker that touches the model.
"""

import time
from collections.abc import Sequence

import torch

from outrider import logs
from outrider.errors import (
    InternalError,
    InvalidRequestError,
    NumericsError,
    OutriderError,
)
from outrider.messages import AcceptanceRule
from outrider.model.paged import PagedModel, Segment
from outrider.sampling.acceptance import Verdict, verify_chain
from outrider.sampling.coupled import (
    dead_rows,
    processed_scores,
    target_tokens,
    unusable_rows,
)
from outrider.sampling.logprobs import token_logprobs
from outrider.sampling.rejection import KeyedChance, dense, one_hot, verify_rejection
from outrider.sampling.rows import Row
from verify_worker.state import Decided, Outcome, Plan, Work

_LOG = logs.get(__name__)
Result = Decided | OutriderError | None


class Runner:
    """The target model over its pages; ids from `token_count` on are padding, never chosen."""

    def __init__(self, model: PagedModel, token_count: int) -> None:
        self._model = model
        self._token_count = token_count

    def run(self, plan: Plan) -> Outcome:
        """Run the step; a session whose work fails gets the error, the others their verdict."""
        started = time.perf_counter()
        try:
            results = self._run(plan.work)
        except Exception:
            _LOG.exception("step failed; its sessions are tried one by one", rows=plan.rows)
            results = [self._run_alone(work) for work in plan.work]
        return Outcome(tuple(results), time.perf_counter() - started)

    def _run_alone(self, work: Work) -> Result:
        try:
            return self._run([work])[0]
        except Exception as error:
            _LOG.exception("session failed", session_id=work.session.session_id)
            return InternalError(f"the target model failed on this session: {error}")

    @torch.inference_mode()
    def _run(self, work: Sequence[Work]) -> list[Result]:
        rows_of = [_rows(w) if w.decides else [] for w in work]
        segments = [
            Segment(w.token_ids, w.session.table, len(rows))
            for w, rows in zip(work, rows_of, strict=True)
        ]
        logits = self._model.forward(segments)[:, : self._token_count]
        rows = [row for of_one in rows_of for row in of_one]
        targets = target_tokens(logits, rows) if rows else []
        dead = dead_rows(logits, rows) if rows else []
        results: list[Result] = []
        begin = 0
        for w, of_one in zip(work, rows_of, strict=True):
            end = begin + len(of_one)
            if not w.decides:
                results.append(None)
            else:
                first_dead = min((row - begin for row in dead if begin <= row < end), default=None)
                results.append(
                    _decide(w, of_one, logits[begin:end], targets[begin:end], first_dead)
                )
            begin = end
        return results


def _rows(work: Work) -> list[Row]:
    """The rows that decide: after the last committed token and after each draft token."""
    session, draft = work.session, work.draft.token_ids
    return [
        Row(
            session.sampling,
            session.tokens,
            draft[:drafted],
            session.prompt_len,
            session.endings.stop_ids,
        )
        for drafted in range(len(draft) + 1)
    ]


def _decide(
    work: Work,
    rows: list[Row],
    logits: torch.Tensor,
    targets: list[int],
    first_dead: int | None,
) -> Result:
    """The verdict on one session's draft and what goes with it; logits are [k + 1, V].

    A row that decides nothing (the first is `first_dead`) matters only when it is reached: one
    that only a rejected draft leads to is no fault of the session's.
    """
    alive = len(rows) if first_dead is None else first_dead
    if work.session.rule is AcceptanceRule.REJECTION:
        verdict = _verify_rejection(work, rows, logits)
        if verdict.accepted >= alive:
            return _dead_end(work, logits[alive], alive)
    elif alive:
        # Up to there the target's tokens are what they are; the next step starts at its end.
        verdict = verify_chain(work.draft.token_ids[: alive - 1], targets[:alive])
    else:
        return _dead_end(work, logits[0], 0)
    options = work.session.logprobs
    if options is None:
        return Decided(verdict)
    kept = len(verdict.token_ids)
    return Decided(verdict, token_logprobs(logits[:kept], rows[:kept], verdict.token_ids, options))


def _verify_rejection(work: Work, rows: list[Row], logits: torch.Tensor) -> Verdict:
    draft, vocab_size = work.draft, logits.shape[1]
    p = processed_scores(logits, rows).softmax(-1)
    # A draft without q comes from a drafter that proposes one certain token.
    q = [dense(entry, vocab_size) for entry in draft.q] or [
        one_hot(token, vocab_size) for token in draft.token_ids
    ]
    chance = KeyedChance(work.session.sampling.seed)
    return verify_rejection(draft.token_ids, q, p, rows[0].position, chance)


def _dead_end(work: Work, logits: torch.Tensor, drafted: int) -> OutriderError:
    after = f"after {len(work.session.tokens) + drafted} tokens of this session"
    if unusable_rows(logits[None]):
        return NumericsError(f"the target model gave NaN or infinite logits {after}")
    return InvalidRequestError(f"the request's own constraints bar every token {after}")
