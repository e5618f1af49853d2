"""Runs a plan: one forward pass of the target and the verdict on every draft in it.

The only part of the worker that touches the model.
"""

import time
from collections.abc import Sequence

import torch

from outrider import logs
from outrider.errors import InternalError, NumericsError, OutriderError
from outrider.model.paged import PagedModel, Segment
from outrider.sampling.acceptance import Verdict, verify_chain
from outrider.sampling.coupled import target_tokens, unusable_rows
from verify_worker.state import Outcome, Plan, Work

_LOG = logs.get(__name__)


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

    def _run_alone(self, work: Work) -> Verdict | OutriderError | None:
        try:
            return self._run([work])[0]
        except Exception as error:
            _LOG.exception("session failed", session_id=work.session.session_id)
            return InternalError(f"the target model failed on this session: {error}")

    @torch.inference_mode()
    def _run(self, work: Sequence[Work]) -> list[Verdict | OutriderError | None]:
        segments = [Segment(w.token_ids, w.session.table, _logit_rows(w)) for w in work]
        logits = self._model.forward(segments)[:, : self._token_count]
        deciding = [w for w in work if w.decides]
        params = [w.session.sampling for w in deciding for _ in range(_logit_rows(w))]
        positions = [len(w.session.tokens) + row for w in deciding for row in range(_logit_rows(w))]
        unusable = set(unusable_rows(logits))
        targets = target_tokens(logits, params, positions) if deciding else []
        results: list[Verdict | OutriderError | None] = []
        row = 0
        for w in work:
            rows = range(row, row + _logit_rows(w))
            row = rows.stop
            if not w.decides:
                results.append(None)
            elif unusable.intersection(rows):
                results.append(_numerics_error(w))
            else:
                results.append(verify_chain(w.draft, targets[rows.start : rows.stop]))
        return results


def _logit_rows(work: Work) -> int:
    """Rows whose logits are needed: after the last committed token and each draft token."""
    return 1 + len(work.draft) if work.decides else 0


def _numerics_error(work: Work) -> NumericsError:
    return NumericsError(
        f"the target model gave NaN or infinite logits after "
        f"{len(work.session.tokens)} tokens of this session"
    )
