"""Scripts of texts to learn from: prompts that are given, or that the target writes itself."""

import random
from collections.abc import Sequence

from outrider.messages import SamplingParams
from outrider.model.tokenizers import Tokenizer
from outrider.training.corpus import Example
from outrider.training.openings import KINDS, Kind
from outrider.training.writing import Passage, Script

# Stands for a message where a chat template is rendered to find what is around it.
_MARK = "\x07"
# Prompts are invented with some chance; colder ones are alike, hotter ones make no sense.
_TEMPERATURE = 0.8
# Of all conversations, those with a second turn.
_SECOND_TURN = 0.12


def answered(
    index: int, prompt: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int]
) -> Script:
    """The target's greedy answer to a prompt of token ids."""
    written = yield Passage(tuple(prompt), SamplingParams(), max_tokens, stop_ids)
    return Example(index, (*prompt, *written.token_ids), len(prompt), written.hidden.numpy())


def invented(
    index: int, tokenizer: Tokenizer, *, seed: int, max_tokens: int, stop_ids: frozenset[int]
) -> Script:
    """A conversation whose user is the target, too; what it answers is greedy."""
    chance = random.Random(f"{seed}/{index}")
    kind = chance.choices(KINDS, [kind.share for kind in KINDS])[0]
    opening = chance.choice(kind.openings)
    messages: list[dict[str, str]] = []
    turns = 2 if chance.random() < _SECOND_TURN else 1
    for turn in range(turns):
        opening = chance.choice(kind.openings) if turn == 0 else ""
        asked = yield Passage(
            tuple(_up_to_message(tokenizer, messages, opening)),
            _sampling(seed, index, turn),
            _length(kind, turn, chance),
            stop_ids,
        )
        closing = kind.closing if turn == 0 else ""
        message = opening + _text(tokenizer, asked.token_ids) + closing
        messages.append({"role": "user", "content": message})
        prompt = tokenizer.apply_chat_template(messages)
        answer = yield Passage(tuple(prompt), SamplingParams(), max_tokens, stop_ids)
        messages.append({"role": "assistant", "content": _text(tokenizer, answer.token_ids)})
    return Example(index, (*prompt, *answer.token_ids), len(prompt), answer.hidden.numpy())


def _sampling(seed: int, index: int, turn: int) -> SamplingParams:
    return SamplingParams(temperature=_TEMPERATURE, seed=(seed << 32) + 2 * index + turn)


def _length(kind: Kind, turn: int, chance: random.Random) -> int:
    if turn:
        return 40
    return chance.randint(max(kind.most_tokens // 3, 8), kind.most_tokens)


def _up_to_message(tokenizer: Tokenizer, messages: list[dict[str, str]], opening: str) -> list[int]:
    """The conversation, and the beginning of the message that the user goes on with."""
    rendered = tokenizer.render([*messages, {"role": "user", "content": _MARK}])
    return tokenizer.encode_rendered(rendered[: rendered.index(_MARK)] + opening)


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Without the marks of the template; a first space stays, as it joins what is before."""
    return tokenizer.decode(ids).rstrip()
