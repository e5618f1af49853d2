"""Cases of exactness through the whole system: what a client gets, on tiny real models.

The drafter has other padding than the target, and a token of its own that the target's model
has no row for; the padding of both is far likelier than any token.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from outrider.client import AsyncClient, Completion
from outrider.draft_length import format_draft_length
from outrider.errors import UnavailableError
from outrider.local.commands import StackSettings
from outrider.local.stack import LocalStack
from outrider.messages import FinishReason, TokenOrigin
from tests.support.drafters import with_loud_padding, with_other_padding
from tests.support.forked_worker import ForkedCommands
from tests.support.models import EOS, TOKENS, VOCABULARY, save_model

# Ranks that the target is split over.
SIZES, RANKS = (1, 2), "ranks={}"
DRAFT_LEN = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
# Ids whose text is one lower-case letter each.
LETTERS = [token for token in range(TOKENS - 1) if token + 33 in range(ord("a"), ord("z") + 1)]

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_loud_padding(save_model(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("drafter")
    return with_other_padding(target, where, rows=VOCABULARY + 32, noise=0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SIZES, ids=RANKS.format)
async def client(
    target: Path, drafter: Path, request: pytest.FixtureRequest
) -> AsyncIterator[AsyncClient]:
    ranks = ("--tensor-parallel-size", str(request.param)) if request.param > 1 else ()
    settings = StackSettings(
        model=str(target),
        drafter="model",
        draft_model=str(drafter),
        threads=1,
        k=format_draft_length(DRAFT_LEN),
        trust_drafts=True,
        verify_flags=("--draft-wait-s", "60", *ranks),
    )
    stack = LocalStack(settings, commands=ForkedCommands(settings))
    async with stack, AsyncClient(stack.address) as connected:
        yield connected


async def ask(client: AsyncClient, **options: Any) -> Completion:
    """A completion; the end-of-sequence token does not end it, unless that is asked for."""
    wanted = {
        "token_ids": PROMPT,
        "max_tokens": 32,
        "temperature": 0.8,
        "seed": 42,
        "ignore_eos": True,
    }
    return await client.complete(**{**wanted, **options})


def rounds_of(completion: Completion) -> Iterator[tuple[int, int]]:
    """The first and the last index of each round's tokens."""
    first = 0
    for index, piece in enumerate(completion.pieces):
        if piece.origin is not TokenOrigin.ACCEPTED:
            yield first, index
            first = index + 1


async def test_case_10_the_same_text_under_another_load_and_draft_length(
    client: AsyncClient,
) -> None:
    expected = await ask(client, temperature=2.0, speculation=False)
    assert len(set(expected.token_ids)) > 10
    for draft_len in (1, 3, 8):
        alone = await ask(client, temperature=2.0, speculation=draft_len)
        assert alone.token_ids == expected.token_ids
    others = [ask(client, temperature=1.5, seed=n, token_ids=[n] * (n + 1)) for n in range(12)]
    together = await asyncio.gather(*(ask(client, temperature=2.0) for _ in range(3)), *others)
    for completion in together[:3]:
        assert completion.token_ids == expected.token_ids
        assert completion.text == expected.text


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
async def test_case_11_unseeded_and_several_samples_vary(client: AsyncClient, rule: str) -> None:
    unseeded = [await ask(client, seed=None, max_tokens=8, rule=rule) for _ in range(20)]
    assert len({completion.token_ids for completion in unseeded}) == 20
    assert len({completion.seed for completion in unseeded}) == 20
    stream = client.generate(
        token_ids=PROMPT, max_tokens=8, temperature=0.8, seed=42, n=4, rule=rule
    )
    samples = await stream.complete_all()
    assert len({sample.token_ids for sample in samples}) == 4
    # Each can be had again, alone.
    again = await ask(client, seed=samples[3].seed, max_tokens=8, rule="coupled")
    if rule == "coupled":
        assert again.token_ids == samples[3].token_ids


async def test_case_13_the_first_stop_id_ends_everything(client: AsyncClient) -> None:
    options: dict[str, Any] = {
        "token_ids": PROMPT,
        "max_tokens": 32,
        "temperature": 0.0,
        # Greedy, and yet not the same token again and again.
        "frequency_penalty": 2.0,
        "ignore_eos": True,
        "logprobs": 2,
    }
    whole = await client.complete(**options, speculation=8)
    tokens = whole.token_ids
    index = next(i for i in range(3, 12) if tokens.index(tokens[i]) == i)
    options["stop_token_ids"] = [tokens[index]]
    plain = await client.complete(**options, speculation=False)
    stream = client.generate(**options, speculation=8)
    streamed = [chunk async for chunk in stream]
    completion = await stream.complete()
    for ended in (plain, completion):
        assert ended.finish_reason is FinishReason.STOP
        assert ended.token_ids == tokens[: index + 1]
        assert len(ended.logprobs) == index + 1
        assert ended.usage.completion_tokens == index + 1
        # The stop id itself has no text.
        assert whole.text.startswith(ended.text)
        assert ended.text == plain.text
    assert "".join(chunk.text for chunk in streamed) == completion.text
    assert [token for chunk in streamed for token in chunk.token_ids] == list(tokens[: index + 1])
    assert completion.speculation.accepted_tokens <= index


async def letters(client: AsyncClient, seed: int, **options: Any) -> Completion:
    """A completion of lower-case letters, one a token."""
    wanted = {"allowed_token_ids": LETTERS, "seed": seed, "logprobs": 0, "temperature": 0.5}
    return await ask(client, **{**wanted, **options})


@pytest.mark.parametrize("where", ["over two rounds", "inside an accepted block"])
async def test_case_14_a_stop_string(client: AsyncClient, where: str) -> None:
    for seed in range(40):
        whole = await letters(client, seed)
        assert len(whole.text) == len(whole.token_ids) == 32
        ends = [
            last + 1 if where == "over two rounds" else first + 1
            for first, last in rounds_of(whole)
            if last + 2 < 32 and (where == "over two rounds" or last - first >= 3)
        ]
        found = [e for e in ends if e >= 2 and whole.text.index(whole.text[e - 1 : e + 1]) == e - 1]
        if found:
            break
    end = found[0]
    stop = whole.text[end - 1 : end + 1]
    for options in ({"speculation": DRAFT_LEN}, {"speculation": False}):
        cut = await letters(client, seed, stop=[stop, "never"], **options)
        assert cut.text == whole.text[: end - 1]
        assert cut.token_ids == whole.token_ids[: end + 1]
        assert len(cut.logprobs) == cut.usage.completion_tokens == end + 1
        assert cut.finish_reason is FinishReason.STOP
    kept = await letters(client, seed, stop=stop, include_stop=True)
    assert kept.text == whole.text[: end + 1]


async def test_case_15_exactly_max_tokens_are_delivered_and_billed(client: AsyncClient) -> None:
    whole = await ask(client)
    for max_tokens in range(1, 2 * DRAFT_LEN + 2):
        completion = await ask(client, max_tokens=max_tokens, logprobs=1)
        assert completion.token_ids == whole.token_ids[:max_tokens]
        assert completion.usage.completion_tokens == max_tokens
        assert len(completion.logprobs) == max_tokens
        assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_case_18_the_end_is_barred_for_exactly_min_tokens(
    client: AsyncClient, rule: str, temperature: float
) -> None:
    completion = await ask(
        client,
        logit_bias={EOS: 80.0},
        min_tokens=20,
        max_tokens=40,
        temperature=temperature,
        rule=rule,
        ignore_eos=False,
    )
    assert EOS not in completion.token_ids[:20]
    assert completion.token_ids[20:] == (EOS,)
    assert completion.finish_reason is FinishReason.STOP
    biased: dict[str, Any] = {"logit_bias": {EOS: 80.0}, "temperature": temperature, "rule": rule}
    assert (await ask(client, **biased, ignore_eos=False)).token_ids == (EOS,)
    ignoring = await ask(client, **biased, max_tokens=9)
    assert ignoring.token_ids == (EOS,) * 9
    assert ignoring.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
async def test_case_20_bias_and_min_p_on_every_row(client: AsyncClient, rule: str) -> None:
    plain = await ask(client, temperature=0.5, max_tokens=60)
    favourite = max(set(plain.token_ids), key=plain.token_ids.count)
    assert plain.token_ids.count(favourite) > 1
    for seed in range(4):
        barred = await ask(
            client, logit_bias={favourite: -100.0}, temperature=0.5, seed=seed, rule=rule
        )
        assert favourite not in barred.token_ids
        assert barred.speculation.draft_tokens > 0
        narrow = await ask(client, min_p=0.9, logprobs=1, seed=seed, temperature=1.0, rule=rule)
        assert narrow.speculation.draft_tokens > 0
        for entry in narrow.logprobs:
            (_, best), *_ = entry.top
            assert entry.logprob >= best + math.log(0.9)


async def test_case_21_logprobs_with_and_without_speculation(client: AsyncClient) -> None:
    for kind in ("raw", "processed"):
        options = {"logprobs": 3, "logprobs_kind": kind, "top_k": 20, "presence_penalty": 0.3}
        plain = await ask(client, speculation=False, **options)
        drafted = await ask(client, speculation=6, **options)
        assert drafted.speculation.accepted_tokens > 0
        assert drafted.token_ids == plain.token_ids
        assert len(drafted.logprobs) == len(plain.logprobs) == len(plain.token_ids)
        for ours, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert ours.logprob < 0.0
            assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
            assert [v for _, v in ours.top] == pytest.approx([v for _, v in theirs.top], abs=1e-4)
    none_of_the_best = await ask(client, logprobs=0)
    assert len(none_of_the_best.logprobs) == len(none_of_the_best.token_ids)
    assert all(entry.top == () and entry.logprob < 0 for entry in none_of_the_best.logprobs)
    assert (await ask(client)).logprobs == ()


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
async def test_case_22_padding_and_added_tokens_never_come_out(
    client: AsyncClient, rule: str
) -> None:
    accepted = 0
    for seed in range(6):
        completion = await ask(client, seed=seed, temperature=1.5, rule=rule, max_tokens=60)
        assert max(completion.token_ids) < TOKENS
        accepted += completion.speculation.accepted_tokens
        # The drafter stayed to the end: nothing that it sent was malformed.
        assert completion.speculation.drafts >= completion.speculation.rounds - 2
    assert accepted > 0


async def test_case_23_a_drafter_with_another_tokenizer_is_refused_at_start(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    other = with_other_padding(target, tmp_path / "drafter", rows=VOCABULARY, noise=0.1)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"<eos>"', '"<end>"'))
    settings = StackSettings(model=str(target), drafter="model", draft_model=str(other), threads=1)
    with pytest.raises(UnavailableError) as refused:
        await LocalStack(settings).start()
    assert "draft-1 ended with exit code 1" in refused.value.message
    # The first id that differs and can come out; 257 differs too, and can not.
    assert "id 256 is '<eos>'" in refused.value.message
    assert "'<end>'" in refused.value.message
