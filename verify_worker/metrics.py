"""Metrics of the verify worker, exported from the start, also when idle.

The counters of speculative decoding follow vLLM's set, so that dashboards for it can be
pointed here.
"""

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from outrider import telemetry
from verify_worker.calibration import STATED_ROWS
from verify_worker.cost import StepShape
from verify_worker.scheduler import Scheduler


def export(scheduler: Callable[[], Scheduler], max_draft_len: int) -> None:
    """Register observable instruments that read the counters of the present scheduler.

    A worker that starts its ranks anew has another one from then on, which counts from 0.
    """
    meter = telemetry.meter(__name__)

    def reading(read: Callable[[], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: [Observation(read())]

    def per_position(_: CallbackOptions) -> Iterable[Observation]:
        counts = scheduler().counters.speculation.accepted_per_position
        for position in range(max_draft_len):
            count = counts[position] if position < len(counts) else 0
            yield Observation(count, {"position": position})

    def step_cost(_: CallbackOptions) -> Iterable[Observation]:
        for rows in STATED_ROWS:
            yield Observation(scheduler().cost.seconds(StepShape.of(rows)), {"rows": rows})

    totals: dict[str, Callable[[], float]] = {
        "outrider_spec_decode_num_drafts": lambda: scheduler().counters.speculation.drafts,
        "outrider_spec_decode_num_draft_tokens": lambda: (
            scheduler().counters.speculation.draft_tokens
        ),
        "outrider_spec_decode_num_accepted_tokens": lambda: (
            scheduler().counters.speculation.accepted_tokens
        ),
        "outrider_verify_steps": lambda: scheduler().counters.steps,
        "outrider_verify_rows": lambda: scheduler().counters.rows,
        "outrider_verify_compute_seconds": lambda: scheduler().counters.compute_s,
        "outrider_generation_tokens": lambda: scheduler().counters.committed_tokens,
        "outrider_stale_proposals": lambda: scheduler().counters.stale_proposals,
        "outrider_malformed_proposals": lambda: scheduler().counters.malformed_proposals,
        "outrider_missed_proposals": lambda: scheduler().counters.missed_proposals,
        # What the draft pool is scaled by, with what its lack costs beside it.
        "outrider_draft_demand_seconds": lambda: scheduler().drafts.demand.busy_s,
        "outrider_draft_demand_tokens": lambda: scheduler().drafts.demand.tokens,
        "outrider_draft_wait_seconds": lambda: scheduler().drafts.demand.waited_s,
        "outrider_preemptions": lambda: scheduler().counters.preemptions,
        "outrider_prefix_cache_queries": lambda: scheduler().counters.prefix_queries,
        "outrider_prefix_cache_hits": lambda: scheduler().counters.prefix_hits,
        "outrider_prefix_cache_evictions": lambda: scheduler().pool.evictions,
        "outrider_failed_sessions": lambda: scheduler().counters.failed_sessions,
    }
    for name, read in totals.items():
        meter.create_observable_counter(name, [reading(read)])
    meter.create_observable_counter(
        "outrider_spec_decode_num_accepted_tokens_per_pos", [per_position]
    )
    gauges: dict[str, Callable[[], float]] = {
        "outrider_kv_blocks_free": lambda: scheduler().pool.free,
        "outrider_kv_blocks_cached": lambda: scheduler().pool.cached,
        "outrider_kv_blocks_total": lambda: scheduler().pool.total,
        "outrider_sessions_held": lambda: len(scheduler().sessions),
        "outrider_sessions_running": lambda: scheduler().running,
        "outrider_sessions_waiting": lambda: len(scheduler().sessions) - scheduler().running,
    }
    for name, read in gauges.items():
        meter.create_observable_gauge(name, [reading(read)])
    meter.create_observable_gauge("outrider_step_cost_seconds", [step_cost])
