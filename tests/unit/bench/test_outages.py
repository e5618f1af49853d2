"""The schedule of outages."""

from itertools import islice

from bench.cluster import VALKEY, Cluster
from bench.outages import Kind, Outage, schedule
from outrider.local.commands import StackSettings


def dealt(seed: int, count: int) -> list[Outage]:
    cluster = Cluster(StackSettings(model="m"))
    return list(islice(schedule(seed, cluster, longest_s=2.0, longest_gap_s=1.0), count))


def test_the_same_seed_is_the_same_schedule() -> None:
    assert dealt(1, 50) == dealt(1, 50)
    assert dealt(1, 50) != dealt(2, 50)


def test_a_deck_has_every_kind() -> None:
    for seed in range(5):
        first, second = dealt(seed, 26)[:13], dealt(seed, 26)[13:]
        assert {o.kind for o in first} == {o.kind for o in second} == set(Kind)


def test_times_are_within_their_bounds() -> None:
    for outage in dealt(3, 100):
        assert 0.2 <= outage.seconds <= 2.0
        assert 0.0 <= outage.gap_s <= 1.0


def test_processes_are_killed_and_links_cut() -> None:
    names = {"coordinator", "verify", "draft"}
    for outage in dealt(4, 100):
        pool = outage.target.split("-")[0]
        if outage.kind is Kind.KILL:
            assert pool in names
        if outage.kind in (Kind.EMPTIED, Kind.RESTARTED, Kind.ROLLED_BACK):
            assert outage.target == VALKEY
