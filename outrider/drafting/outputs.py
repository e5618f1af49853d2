"""What earlier sessions said, kept so that later ones can be drafted from it; bounded.

Sessions are kept apart by their *corpus*, a word that stands for a model and a tenant: nobody is
drafted from the text of another one.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from outrider.drafting.automaton import NOTHING, Continuation, SuffixAutomaton

# What a corpus takes beside its phrases, and an output that waits beside its tokens, measured.
_CORPUS_BYTES, _WAITING_BYTES = 2048, 400
# A list takes 8 bytes a token, and its numbers 32 at most.
_TOKEN_BYTES = 40


class _Corpus:
    """Outputs in two generations; when the young one is full it is the old one from then on."""

    def __init__(self) -> None:
        self._young = SuffixAutomaton()
        self._old = SuffixAutomaton()
        self._outputs = 0

    @property
    def nbytes(self) -> int:
        return self._young.nbytes + self._old.nbytes + _CORPUS_BYTES

    def add(self, token_ids: Sequence[int], generation_bytes: int) -> None:
        """Index tokens of an output."""
        if self._young.nbytes >= generation_bytes:
            self._old, self._young = self._young, SuffixAutomaton()
        self._young.extend(token_ids)

    def end_output(self) -> None:
        """What comes next is another text."""
        self._outputs += 1
        # Numbers below 0 are no tokens; each occurs once, so no phrase reaches over it.
        self._young.extend([-1 - self._outputs])

    def best(self, token_ids: Sequence[int], limit: int) -> Continuation:
        """What followed the end of `token_ids` in an output; the better of both generations."""
        found = [index.best(index.match(token_ids), limit) for index in (self._young, self._old)]
        return max(found, key=lambda continuation: continuation.score)


class EarlierOutputs:
    """The outputs of many sessions, by corpus, in about `max_bytes` of memory.

    `add` only notes an output; `work` indexes it, some tokens at a time, so that a long one does
    not hold up anybody. A corpus that outgrows half of the memory forgets its older half, and
    where several do not fit, the ones that were used least recently go. What waits to be
    indexed is bounded by as many bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._corpora: OrderedDict[str, _Corpus] = OrderedDict()
        self._waiting: deque[tuple[str, Sequence[int]]] = deque()
        self._waiting_tokens = 0
        self._held_bytes = 0

    @property
    def nbytes(self) -> int:
        """About how much memory the indexes take."""
        return self._held_bytes

    @property
    def waiting(self) -> int:
        """Tokens that are not indexed yet."""
        return self._waiting_tokens

    def add(self, corpus: str, token_ids: Sequence[int]) -> None:
        """Keep an output, unless too many are waiting already or it is empty."""
        tokens, outputs = self._waiting_tokens + len(token_ids), len(self._waiting) + 1
        if token_ids and tokens * _TOKEN_BYTES + outputs * _WAITING_BYTES <= self._max_bytes:
            self._waiting.append((corpus, token_ids))
            self._waiting_tokens += len(token_ids)

    def work(self, limit: int) -> None:
        """Index up to `limit` tokens of what is waiting."""
        while limit > 0 and self._waiting:
            name, token_ids = self._waiting.popleft()
            corpus = self._corpora.get(name)
            if corpus is None:
                corpus = self._corpora[name] = _Corpus()
                self._held_bytes += corpus.nbytes
            before = corpus.nbytes
            corpus.add(token_ids[:limit], self._max_bytes // 2)
            self._waiting_tokens -= len(token_ids[:limit])
            if len(token_ids) > limit:
                self._waiting.appendleft((name, token_ids[limit:]))
            else:
                corpus.end_output()
            limit -= len(token_ids)
            self._held_bytes += corpus.nbytes - before
            self._corpora.move_to_end(name)
            while len(self._corpora) > 1 and self._held_bytes > self._max_bytes:
                self._held_bytes -= self._corpora.popitem(last=False)[1].nbytes

    def best(self, corpus: str, token_ids: Sequence[int], limit: int) -> Continuation:
        """What followed the end of `token_ids` in an earlier output of that corpus."""
        held = self._corpora.get(corpus)
        if held is None:
            return NOTHING
        self._corpora.move_to_end(corpus)
        return held.best(token_ids, limit)
