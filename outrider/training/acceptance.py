"""How much of a network's drafts a greedy target would accept, counted on texts it wrote.

Drafts are chains. As long as a draft is right its tokens are those of the text, so one unrolled
pass over the text (`DraftNetwork.unroll`) shows what every draft from every place would have
said, as far as it matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.training.batches import stack
from outrider.training.corpus import Example
from outrider.training.network import DraftNetwork

_MOST_PROMPT = 1024
_TEXTS_A_BATCH = 8


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of the drafts of a greedy run: rounds, accepted tokens, and by position.

    `tried[i]` drafts had the tokens before position i accepted, `accepted[i]` that one too.
    """

    rounds: int
    tried: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        """1 + accepted / rounds."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0

    @property
    def by_position(self) -> tuple[float, ...]:
        """The share accepted at each position, those before it being accepted."""
        return tuple(
            accepted / tried if tried else 0.0
            for accepted, tried in zip(self.accepted, self.tried, strict=True)
        )


@torch.inference_mode()
def acceptance(
    network: DraftNetwork, examples: Sequence[Example], draft_ids: torch.Tensor, draft_len: int
) -> Acceptance:
    """What comes of drafts of `draft_len` tokens; for `draft_ids` see `positions_of`."""
    rounds, tried, accepted = 0, [0] * draft_len, [0] * draft_len
    steps = draft_len if network.shape.reads_hidden else 1
    ordered = sorted(examples, key=lambda example: len(example.token_ids))
    for begin in range(0, len(ordered), _TEXTS_A_BATCH):
        some = ordered[begin : begin + _TEXTS_A_BATCH]
        texts = stack(some, _MOST_PROMPT)
        guesses = [(h @ network.head.T).argmax(-1) for h in network.unroll(texts, steps)]
        right = [
            (guess[:, :-1] == draft_ids[texts.answer_ids[:, 1:]]).tolist() for guess in guesses
        ]
        for row, example in enumerate(some):
            last, last_slot = 0, len(example.answer) - 1
            while last < last_slot:
                rounds += 1
                count = 0
                for ahead in range(min(draft_len, last_slot - last)):
                    tried[ahead] += 1
                    if not right[min(ahead, steps - 1)][row][last + ahead]:
                        break
                    accepted[ahead] += 1
                    count += 1
                last += count + 1
    return Acceptance(rounds, tuple(tried), tuple(accepted))
