import random

from outrider.drafting.outputs import EarlierOutputs

PLENTY = 1 << 20


def kept(max_bytes: int, *outputs: tuple[str, list[int]]) -> EarlierOutputs:
    earlier = EarlierOutputs(max_bytes)
    for corpus, tokens in outputs:
        earlier.add(corpus, tokens)
        earlier.work(len(tokens))
    return earlier


def numbers(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(count)]


def test_what_followed_in_an_earlier_output_is_found() -> None:
    earlier = kept(PLENTY, ("m", [1, 2, 3, 4]), ("m", [9, 2, 3, 4]), ("m", [7, 2, 5, 5]))
    assert earlier.best("m", [8, 8, 2], 2).token_ids == (3, 4)
    assert earlier.best("m", [7, 2], 2).token_ids[:1] in {(5,), (3,)}


def test_corpora_are_kept_apart() -> None:
    """Nobody is drafted from the text of another tenant."""
    earlier = kept(PLENTY, ("a", [1, 2, 3]), ("b", [1, 2, 4]))
    assert earlier.best("a", [1, 2], 1).token_ids == (3,)
    assert earlier.best("b", [1, 2], 1).token_ids == (4,)
    assert earlier.best("c", [1, 2], 1).token_ids == ()


def test_no_phrase_reaches_from_one_output_into_the_next() -> None:
    earlier = kept(PLENTY, ("m", [1, 2]), ("m", [3, 4]))
    assert earlier.best("m", [1, 2], 4).token_ids == ()
    assert earlier.best("m", [2, 3], 4).token_ids == (4,)


def test_an_output_is_indexed_some_tokens_at_a_time() -> None:
    earlier = EarlierOutputs(PLENTY)
    earlier.add("m", [1, 2, 3, 4, 5])
    assert earlier.best("m", [1, 2], 1).token_ids == ()
    earlier.work(2)
    assert earlier.waiting == 3
    earlier.work(1)
    assert earlier.best("m", [1, 2], 1).token_ids == (3,)
    # An output that comes in pieces is still one text.
    earlier.work(10)
    assert earlier.waiting == 0
    assert earlier.best("m", [1, 2], 4).token_ids == (3, 4, 5)


def test_memory_is_bounded_and_the_oldest_is_forgotten_first() -> None:
    limit = 400_000
    earlier = kept(limit, ("m", numbers(500, 0)))
    first, second = numbers(500, 0)[:2]
    assert earlier.best("m", [first], 1).token_ids == (second,)
    for seed in range(1, 40):
        earlier.add("m", numbers(500, seed))
        earlier.work(500)
        assert earlier.nbytes <= 1.25 * limit
    assert earlier.best("m", numbers(500, 39)[:1], 1).token_ids == tuple(numbers(500, 39)[1:2])
    assert earlier.best("m", numbers(500, 0)[:3], 1).token_ids != tuple(numbers(500, 0)[3:4])


def test_the_corpus_that_was_used_least_recently_goes_first() -> None:
    one = kept(PLENTY, ("a", numbers(600, ord("a")))).nbytes
    earlier = kept(one * 5 // 2, *((name, numbers(600, ord(name))) for name in "ab"))
    begin = {name: numbers(600, ord(name))[:2] for name in "abc"}
    after = {name: tuple(numbers(600, ord(name))[2:3]) for name in "abc"}
    assert earlier.best("a", begin["a"], 1).token_ids == after["a"]
    earlier.add("c", numbers(600, ord("c")))
    earlier.work(600)
    assert earlier.best("a", begin["a"], 1).token_ids == after["a"]
    assert earlier.best("b", begin["b"], 1).token_ids == ()
    assert earlier.best("c", begin["c"], 1).token_ids == after["c"]


def test_what_waits_is_bounded_too() -> None:
    earlier = EarlierOutputs(10_000)
    for seed in range(20):
        earlier.add("m", numbers(100, seed))
    assert 0 < earlier.waiting <= 250


def test_many_tenants_that_say_little_are_bounded_too() -> None:
    """What a corpus takes beside its few tokens counts."""
    limit = 100_000
    earlier = EarlierOutputs(limit)
    for number in range(200):
        earlier.add(f"m/{number}", [1, 2, number])
        earlier.work(3)
        assert earlier.nbytes <= limit
    known = [n for n in range(200) if earlier.best(f"m/{n}", [1, 2], 1).token_ids == (n,)]
    assert known == list(range(200 - len(known), 200))
    assert 20 <= len(known) <= limit // 2048
    waiting = EarlierOutputs(limit)
    for number in range(1_000):
        waiting.add(f"m/{number}", [number])
    assert 100 <= waiting.waiting <= limit // 400


def test_without_memory_nothing_is_kept() -> None:
    earlier = EarlierOutputs(0)
    earlier.add("m", [1, 2, 3])
    earlier.work(10)
    assert earlier.waiting == 0
    assert earlier.best("m", [1, 2], 1).token_ids == ()
