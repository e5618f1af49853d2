"""Runs a plan: one forward pass of the target and the verdict on every draft in it.

The only part of the worker that touches the model.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from outrider import logs
from outrider.errors import (
    InternalError,
    InvalidRequestError,
    NumericsError,
    OutriderError,
    RankLostError,
)
from outrider.messages import AcceptanceRule
from outrider.model.paged import Segment, StepModel
from outrider.model.tensors import packed
from outrider.sampling.acceptance import Verdict, verify_tree
from outrider.sampling.coupled import TargetsFrom, processed_scores, unusable_rows
from outrider.sampling.logprobs import token_logprobs
from outrider.sampling.rejection import KeyedChance, dense, one_hot, verify_rejection
from outrider.sampling.rows import Row
from outrider.sampling.scores import Choosing, Scores
from verify_worker.state import Decided, Outcome, Plan, Work

_LOG = logs.get(__name__)
Result = Decided | OutriderError | None


class Runner:
    """The target model over its pages; ids from `token_count` on are padding, never chosen."""

    def __init__(self, model: StepModel, token_count: int) -> None:
        self._model = model
        self._token_count = token_count

    def run(self, plan: Plan) -> Outcome:
        """Run the step; a session whose work fails gets the error, the others their verdict."""
        started = time.perf_counter()
        try:
            results = self._run(plan.work)
        except RankLostError:
            raise  # no session's fault, and none can go on
        except Exception:
            _LOG.exception("step failed; its sessions are tried one by one", rows=plan.rows)
            results = [self._run_alone(work) for work in plan.work]
        return Outcome(tuple(results), time.perf_counter() - started)

    def _run_alone(self, work: Work) -> Result:
        try:
            return self._run([work])[0]
        except RankLostError:
            raise  # after a step that failed on rank 0 the others are told to end
        except Exception as error:
            _LOG.exception("session failed", session_id=work.session.session_id)
            return InternalError(f"the target model failed on this session: {error}")

    @torch.inference_mode()
    def _run(self, work: Sequence[Work]) -> list[Result]:
        rows_of = [_rows(w) if w.decides else [] for w in work]
        segments = [
            Segment(w.token_ids, w.session.table, len(rows), w.parents)
            for w, rows in zip(work, rows_of, strict=True)
        ]
        rows = [row for of_one in rows_of for row in of_one]
        begins = [0, *accumulate(len(of_one) for of_one in rows_of)]
        whole = [
            row
            for w, (begin, end) in zip(work, pairwise(begins), strict=True)
            if _needs_logits(w)
            for row in range(begin, end)
        ]
        scores = self._model.score(segments, Choosing(rows, whole, self._token_count))
        results: list[Result] = []
        for w, of_one, begin in zip(work, rows_of, begins, strict=False):
            result = _decide(w, of_one, scores, begin) if w.decides else None
            if w.keeps_hidden and isinstance(result, Decided):
                # Now: the next step writes where they are.
                hidden = scores.hidden([begin + row for row in _deciding(result)])
                result = replace(result, hidden=packed(hidden))
            results.append(result)
        # In a tree what was accepted lies apart; in a chain it is in its place already.
        self._model.keep_paths(
            [
                (w.session.table, _kept_rows(w, result.verdict))
                for w, result in zip(work, results, strict=True)
                if isinstance(result, Decided) and w.parents
            ]
        )
        return results


def _rows(work: Work) -> list[Row]:
    """The rows that decide: after the last committed token and after each draft token.

    Each sees the tokens that lead to it, in a tree those of its own path.
    """
    session, draft = work.session, work.draft.token_ids
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(work.parents or range(-1, len(draft) - 1)):
        paths.append((*paths[parent + 1], draft[node]))
    return [
        Row(
            session.sampling,
            session.tokens,
            path,
            session.prompt_len,
            session.endings.stop_ids,
        )
        for path in paths
    ]


def _kept_rows(work: Work, verdict: Verdict) -> list[int]:
    """The rows of a segment whose tokens are committed, in the order of the text."""
    first = work.committed_rows
    return [*range(first), *(first + node for node in verdict.path)]


def _needs_logits(work: Work) -> bool:
    """Whether the logits of its rows are looked at, not only the tokens they lead to."""
    return work.session.rule is AcceptanceRule.REJECTION or work.session.logprobs is not None


def _decide(work: Work, rows: list[Row], scores: Scores, begin: int) -> Result:
    """The verdict on one session's draft and what goes with it; its rows are from `begin` on.

    A row that decides nothing matters only when it is reached: one that only a rejected draft
    leads to is no fault of the session's.
    """
    draft, targets = work.draft.token_ids, TargetsFrom(scores.targets, begin)
    if work.session.rule is AcceptanceRule.REJECTION:
        logits = scores.logits(begin, begin + len(rows))
        verdict, dead = _verify_rejection(work, rows, logits)
        first_dead = min(dead, default=len(rows))
        if verdict.accepted >= first_dead:
            return _dead_end(work, scores.broken(begin + first_dead), first_dead)
    elif targets[0] is None:
        return _dead_end(work, scores.broken(begin), 0)
    else:
        parents = work.parents or range(-1, len(draft) - 1)
        verdict = verify_tree(draft, parents, targets)
    options = work.session.logprobs
    if options is None:
        return Decided(verdict)
    decided = Decided(verdict)
    deciding = _deciding(decided)
    logits = scores.logits(begin, begin + len(rows))
    logprobs = token_logprobs(
        logits[deciding], [rows[row] for row in deciding], verdict.token_ids, options
    )
    return replace(decided, logprobs=logprobs)


def _deciding(decided: Decided) -> list[int]:
    """The row that each of the committed tokens was chosen on."""
    return [0, *(node + 1 for node in decided.verdict.path)]


def _verify_rejection(
    work: Work, rows: list[Row], logits: torch.Tensor
) -> tuple[Verdict, set[int]]:
    """The verdict, and the rows that decide nothing."""
    draft, vocab_size = work.draft, logits.shape[1]
    scores = processed_scores(logits, rows)
    dead = {*unusable_rows(logits), *unusable_rows(scores)}
    p = scores.softmax(-1)
    # A draft without q comes from a drafter that proposes one certain token.
    q = [dense(entry, vocab_size) for entry in draft.q] or [
        one_hot(token, vocab_size) for token in draft.token_ids
    ]
    chance = KeyedChance(work.session.sampling.seed)
    return verify_rejection(draft.token_ids, q, p, rows[0].position, chance), dead


def _dead_end(work: Work, broken: bool, drafted: int) -> OutriderError:
    after = f"after {len(work.session.tokens) + drafted} tokens of this session"
    if broken:
        return NumericsError(f"the target model gave NaN or infinite logits {after}")
    return InvalidRequestError(f"the request's own constraints bar every token {after}")
