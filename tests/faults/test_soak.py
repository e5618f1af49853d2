"""The short version of `make soak`: real processes, a real Valkey, everything breaks in turn."""

import pytest

from bench.outages import Kind
from bench.soak import Settings, measure, report_of

# One deck of outages, and requests that are long and slow enough to meet several each.
SHORT = Settings(
    generations=16,
    at_once=8,
    new_tokens=96,
    pace_s=0.05,
    longest_s=1.0,
    longest_gap_s=0.4,
    least_outages=13,
)


@pytest.mark.timeout(300)
async def test_every_completion_survives_whatever_happens() -> None:
    outcome = await measure(SHORT)
    report = report_of(outcome)
    assert all(bar.met for bar in report.bars), report.bars
    assert len(outcome.expected.said) == SHORT.generations
    assert {outage.kind for outage in outcome.outages} == set(Kind)
    # Otherwise nobody was hit.
    assert outcome.load.reconnects >= 1
