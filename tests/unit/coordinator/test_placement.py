from dataclasses import replace

import pytest

from coordinator.placement import Trust, choose_draft_worker, choose_verify_worker
from outrider.errors import OverloadedError
from outrider.session.identity import ModelIdentity
from outrider.session.registry import Pool, WorkerRecord

TARGET = ModelIdentity("f", "float32", "fast")


def worker(worker_id: str, **fields: object) -> WorkerRecord:
    record = WorkerRecord(
        pool=Pool.VERIFY,
        worker_id=worker_id,
        address="h:1",
        incarnation="i1",
        model="m",
        model_fingerprint="f",
        tokenizer_fingerprint="",
        capacity=4,
        sessions=0,
        draining=False,
        context_len=64,
        dtype="float32",
        numerics="fast",
    )
    return replace(record, **fields)  # type: ignore[arg-type]  # the test names real fields


def chosen(record: WorkerRecord | None) -> str | None:
    return record and record.worker_id


def test_least_own_sessions_then_least_reported() -> None:
    workers = [worker("a", sessions=0), worker("b", sessions=3), worker("c", sessions=1)]
    assert chosen(choose_verify_worker(workers, {"a": 2, "b": 1, "c": 1}, target=TARGET)) == "c"
    assert chosen(choose_verify_worker(reversed(workers), {}, target=TARGET)) == "a"


def test_sessions_are_shared_out_by_weight() -> None:
    workers = [worker("big", capacity=64, weight=8), worker("small", capacity=64, weight=2)]
    load: dict[str, int] = {}
    for _ in range(20):
        taken = chosen(choose_verify_worker(workers, load, target=TARGET))
        assert taken is not None
        load[taken] = load.get(taken, 0) + 1
    assert load == {"big": 16, "small": 4}
    # Without one it is the capacity, and nobody gets more than that.
    workers = [worker("a", capacity=3), worker("b", capacity=1)]
    assert chosen(choose_verify_worker(workers, {"a": 1, "b": 0}, target=TARGET)) == "b"
    assert chosen(choose_verify_worker(workers, {"a": 2, "b": 1}, target=TARGET)) == "a"


def test_the_longest_held_prefix_wins() -> None:
    workers = [worker("a", capacity=64), worker("b", capacity=64), worker("c", capacity=64)]

    def choose(load: dict[str, int], **held: int) -> str | None:
        return chosen(choose_verify_worker(workers, load, target=TARGET, held=held))

    assert choose({}, c=64) == "c"
    assert choose({}, b=64, c=128) == "c"
    assert choose({"a": 1}, a=0, b=0) == "b"
    # Between equal holders the less loaded one.
    assert choose({"b": 1}, b=128, c=128) == "c"


def test_a_holder_that_is_too_busy_for_what_it_holds_is_not_taken() -> None:
    workers = [worker("a", capacity=64), worker("b", capacity=64), worker("c", capacity=64)]

    def choose(load: dict[str, int], **held: int) -> str | None:
        return chosen(choose_verify_worker(workers, load, target=TARGET, held=held))

    # One session more for each 64 tokens, compared with the least busy one.
    assert choose({"a": 3, "b": 5, "c": 4}, b=128) == "b"
    assert choose({"a": 3, "b": 6, "c": 4}, b=128) == "a"
    # Another holds less, and is not too busy for that.
    assert choose({"a": 3, "b": 6, "c": 4}, b=128, c=64) == "c"
    # Never more than a quarter of its capacity.
    assert choose({"b": 16}, b=4096) == "b"
    assert choose({"b": 17}, b=4096) == "a"
    # What a worker says itself counts too: another coordinator may have placed sessions there.
    busy = [workers[0], replace(workers[1], sessions=3)]
    assert chosen(choose_verify_worker(busy, {}, target=TARGET, held={"b": 128})) == "a"
    assert chosen(choose_verify_worker(busy, {}, target=TARGET, held={"b": 192})) == "b"


def test_a_small_holder_may_have_one_session_more() -> None:
    workers = [worker("a", capacity=2), worker("b", capacity=2)]
    assert chosen(choose_verify_worker(workers, {"b": 1}, target=TARGET, held={"b": 256})) == "b"


def test_a_holder_that_takes_nothing_is_not_chosen() -> None:
    workers = [worker("a"), worker("b"), worker("c", capacity=1), worker("d", draining=True)]
    held = {"b": 512, "c": 512, "d": 512}
    assert (
        chosen(choose_verify_worker(workers, {"c": 1}, target=TARGET, exclude={"b"}, held=held))
        == "a"
    )


def test_draining_and_full_workers_take_nothing() -> None:
    workers = [worker("a", draining=True), worker("b", capacity=1), worker("c")]
    assert chosen(choose_verify_worker(workers, {"b": 1, "c": 3}, target=TARGET)) == "c"
    assert choose_verify_worker([workers[0]], {}, target=TARGET) is None
    assert choose_verify_worker([], {}, target=TARGET) is None


def test_all_full_or_refusing_is_an_overload() -> None:
    workers = [worker("a", capacity=1), worker("b")]
    with pytest.raises(OverloadedError, match="all 2 verify workers"):
        choose_verify_worker(workers, {"a": 1}, target=TARGET, exclude={"b"})


def test_only_workers_that_compute_alike_are_the_same_model() -> None:
    workers = [
        worker("a", model_fingerprint="g"),
        worker("b", dtype="bfloat16"),
        worker("c", numerics="invariant"),
    ]
    assert choose_verify_worker(workers, {}, target=TARGET) is None
    assert choose_verify_worker(workers, {}, target=None) is None
    busy = worker("d", capacity=1)
    with pytest.raises(OverloadedError, match="all 1 verify workers"):
        choose_verify_worker([*workers, busy], {"d": 1}, target=TARGET)
    for other in workers:
        assert choose_verify_worker([*workers, busy], {}, target=other.identity) is other


def test_draft_worker_fits_the_tokenizer() -> None:
    workers = [
        worker("any", tokenizer_fingerprint=""),
        worker("ours", tokenizer_fingerprint="t1"),
        worker("theirs", tokenizer_fingerprint="t2"),
    ]

    def choose(load: dict[str, int], **options: set[tuple[str, str]]) -> str | None:
        return chosen(choose_draft_worker(workers, load, tokenizer_fingerprint="t1", **options))

    assert choose({}) == "any"
    assert choose({"any": 1}) == "ours"
    assert choose({"any": 1, "ours": 2}) == "any"
    assert choose({"any": 4, "ours": 4}) is None
    assert choose({}, exclude={("any", "i1")}) == "ours"
    assert choose({}, exclude={("any", "i0")}) == "any"


def test_only_trusted_draft_workers_where_that_is_needed() -> None:
    workers = [worker("a"), worker("b"), worker("c", draining=True)]

    def choose(trust: Trust | None, load: dict[str, int] | None = None) -> str | None:
        found = choose_draft_worker(workers, load or {}, tokenizer_fingerprint="t", trusted=trust)
        return chosen(found)

    assert choose(None) == "a"
    assert choose(Trust()) is None
    assert choose(Trust(frozenset({"b", "c"}))) == "b"
    assert choose(Trust(frozenset({"b", "c"})), {"b": 4}) is None
    assert choose(Trust(frozenset({"all"}))) == "a"
