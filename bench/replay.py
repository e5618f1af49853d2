"""What drafters would have got accepted of texts that are known already: the target is not asked.

Under the coupled rule and without temperature the text does not depend on the drafts, so a
drafter can be judged on what the target said without any.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bench.answers import Said
from outrider.drafting.base import Drafter, DraftLaw, DraftRequest
from outrider.drafting.hits import compared
from outrider.figures import SpeculationFigures
from outrider.messages import FREE, Draft, Price, SamplingParams, Tensor

CORPUS = "replay"
# Of a tree, as verify workers take them.
MOST_NODES = 64


def replay(
    drafter: Drafter, texts: Sequence[Said], draft_len: int, price: Price = FREE
) -> list[SpeculationFigures]:
    """The figures of each text, one after the other, as one session each of one corpus.

    With a price a drafter may make trees.
    """
    return [
        _session(drafter, str(number), said, draft_len, price) for number, said in enumerate(texts)
    ]


def total(figures: Sequence[SpeculationFigures]) -> SpeculationFigures:
    """Their sum."""
    found = SpeculationFigures()
    for of in figures:
        found.add(of)
    return found


def ask(drafter: Drafter, session_id: str, draft_len: int, price: Price = FREE) -> Draft:
    """A draft, asked for until the drafter has caught up with the session."""
    while (draft := drafter.propose([DraftRequest(session_id, draft_len, price)])[0]) is None:
        pass
    return draft


def commit(
    drafter: Drafter,
    session_id: str,
    base_len: int,
    token_ids: Sequence[int],
    hidden: npt.NDArray[np.float16] | None,
) -> None:
    """Commit tokens, with their hidden states [tokens, hidden] where the drafter reads them."""
    states = None
    if hidden is not None and drafter.reads is not None:
        states = Tensor("float16", hidden.shape, hidden.tobytes())
    drafter.commit(session_id, base_len, token_ids, states)


def _session(
    drafter: Drafter, name: str, said: Said, draft_len: int, price: Price
) -> SpeculationFigures:
    figures = SpeculationFigures()
    base, tokens = len(said.prompt), said.tokens
    law = DraftLaw(prompt_len=base, corpus=CORPUS, max_nodes=MOST_NODES if price.row else 0)
    drafter.open(name, said.prompt, SamplingParams(), law)
    ask(drafter, name, 0)
    begin = 0
    while begin < len(tokens):
        # The first token is a plain step: a draft is asked for with what follows it.
        wanted = min(draft_len, len(tokens) - begin - 1) if begin else 0
        draft = ask(drafter, name, wanted, price) if wanted else Draft()
        accepted, _ = compared(draft, tokens[begin:])
        figures.add_round(len(draft.token_ids), accepted)
        end = begin + accepted + 1
        hidden = None if said.hidden is None else said.hidden[begin:end]
        commit(drafter, name, base + begin, tokens[begin:end], hidden)
        begin = end
    drafter.close(name)
    return figures
