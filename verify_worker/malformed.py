"""What is wrong with a draft, if anything: it comes from an untrusted peer. Pure."""

from dataclasses import dataclass

from outrider.messages import AcceptanceRule, Draft, SparseDistribution
from outrider.model.rows import NO_PARENT


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What a draft may look like on this worker; a tree has at most `max_nodes`, 0 is none."""

    vocab_size: int
    max_nodes: int


def fault_of(draft: Draft, draft_len: int, rule: AcceptanceRule, shape: DraftShape) -> str:
    """What is wrong with an answer to a want of `draft_len` tokens; empty when nothing is.

    A chain has at most `draft_len` tokens, a tree as many levels, since what leads from its
    root to a node is what a chain would be. The rejection rule is one for chains.
    """
    strange = [token for token in draft.token_ids if not 0 <= token < shape.vocab_size]
    if strange:
        return f"token id {strange[0]} outside the vocabulary of {shape.vocab_size}"
    if not draft.is_chain:
        fault = _fault_of_tree(draft, draft_len, rule, shape)
    elif len(draft.token_ids) > draft_len:
        fault = f"{len(draft.token_ids)} tokens where {draft_len} were asked for"
    else:
        fault = ""
    if fault:
        return fault
    # Empty where nothing was sampled.
    sampled = zip(draft.token_ids[: len(draft.q)], draft.q, strict=True)
    return next(filter(None, (_fault_of_q(token, q, shape) for token, q in sampled)), "")


def _fault_of_tree(draft: Draft, draft_len: int, rule: AcceptanceRule, shape: DraftShape) -> str:
    tokens, parents = draft.token_ids, draft.parents
    if len(parents) != len(tokens):
        return f"{len(parents)} parents of {len(tokens)} tokens"
    if any(not NO_PARENT <= parent < node for node, parent in enumerate(parents)):
        return "a parent that does not come before its child"
    if rule is AcceptanceRule.REJECTION:
        return "a tree, where the rejection rule needs a chain"
    if len(tokens) > shape.max_nodes:
        return f"a tree of {len(tokens)} tokens, which may have {shape.max_nodes}"
    if max(draft.depths) > draft_len:
        return f"a tree of {max(draft.depths)} levels where {draft_len} were asked for"
    if len(set(zip(parents, tokens, strict=True))) < len(tokens):
        return "a tree with the same token twice in one place"
    return ""


def _fault_of_q(token: int, q: SparseDistribution, shape: DraftShape) -> str:
    """What is wrong with the distribution that a token was sampled from."""
    if len(set(q.token_ids)) != len(q.token_ids):
        return "a distribution that names a token twice"
    if any(not 0 <= other < shape.vocab_size for other in q.token_ids):
        return f"a distribution with an id outside the vocabulary of {shape.vocab_size}"
    if dict(zip(q.token_ids, q.weights, strict=True)).get(token, 0) <= 0:
        return f"token {token}, which its own distribution can't give"
    return ""
