"""A target model without a model: the next token is a hash of all tokens before it.

It keeps "KV" (which token was written to which slot) and checks on every step that each
session's blocks hold exactly its own tokens.
"""

import struct
from collections.abc import Callable, Sequence

from outrider.errors import NumericsError, OutriderError
from outrider.messages import Tensor
from outrider.model.blocks import BLOCK_TOKENS
from outrider.sampling.acceptance import Verdict, verify_chain, verify_tree
from verify_worker.state import Decided, Outcome, Plan, Work

VOCABULARY = 50


def next_token(tokens: Sequence[int]) -> int:
    """The token that follows `tokens`; a polynomial hash, so that order matters."""
    state = 7
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (2**61 - 1)
    return state % VOCABULARY


def plain_decoding(prompt: Sequence[int], new_tokens: int, stop: int | None = None) -> list[int]:
    """What a session must say, whatever happens to it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + new_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == stop:
            break
    return tokens[len(prompt) :]


def states_of(tokens: Sequence[int], said: Sequence[int]) -> Tensor:
    """What tells after which of the `tokens` and those before it each token was `said`."""
    text = [*tokens, *said]
    places = range(len(tokens), len(text))
    rows = [struct.pack("<HH", place, text[place - 1]) for place in places]
    return Tensor("bfloat16", (len(said), 2), b"".join(rows))


class SyntheticRunner:
    """Runs plans like `verify_worker.runner.Runner`; sessions in `poisoned` fail.

    A step takes `seconds`, which depends on its rows.
    """

    def __init__(self) -> None:
        self.poisoned: set[str] = set()
        self.rows_of_steps: list[int] = []
        self.seconds: Callable[[int], float] = lambda rows: 0.01
        self._kv: dict[int, int] = {}

    def run(self, plan: Plan) -> Outcome:
        """One step."""
        self.rows_of_steps.append(plan.rows)
        for work in plan.work:
            self._write(work)
        results: list[Decided | OutriderError | None] = []
        for work in plan.work:
            tokens = work.session.tokens
            self._check(work)
            if work.session.session_id in self.poisoned:
                results.append(NumericsError("poisoned"))
            elif not work.decides:
                results.append(None)
            else:
                verdict = self._verdict(work, tokens)
                states = states_of(tokens, verdict.token_ids) if work.keeps_hidden else None
                results.append(Decided(verdict, hidden=states))
        return Outcome(tuple(results), self.seconds(plan.rows))

    def _verdict(self, work: Work, tokens: list[int]) -> Verdict:
        draft = work.draft.token_ids
        paths: list[list[int]] = [[]]
        for node, parent in enumerate(work.parents or range(-1, len(draft) - 1)):
            paths.append([*paths[parent + 1], draft[node]])
        targets = [next_token([*tokens, *path]) for path in paths]
        if not work.parents:
            return verify_chain(draft, targets)
        verdict = verify_tree(draft, work.parents, targets)
        first = work.session.table.kv_len + work.committed_rows
        for place, node in enumerate(verdict.path):
            self._kv[self._slot(work, first + place)] = self._kv[self._slot(work, first + node)]
        return verdict

    def _write(self, work: Work) -> None:
        for offset, token in enumerate(work.token_ids):
            self._kv[self._slot(work, work.session.table.kv_len + offset)] = token

    def _check(self, work: Work) -> None:
        tokens = [*work.session.tokens, *work.draft.token_ids]
        for position in range(work.session.table.kv_len + work.rows):
            assert self._kv[self._slot(work, position)] == tokens[position]

    def _slot(self, work: Work, position: int) -> int:
        block = work.session.table.blocks[position // BLOCK_TOKENS]
        return block * BLOCK_TOKENS + position % BLOCK_TOKENS
