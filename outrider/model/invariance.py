"""At start: do a row's logits depend on its own tokens alone, bit for bit?

The same tokens go in one by one, in chunks, as a chain, as a tree and at many places of a
batch among strangers, with one, two and the present number of threads.
"""

from collections.abc import Sequence

import torch

from outrider.model.blocks import BLOCK_TOKENS, BlockTable
from outrider.model.linears.tiled import torch_threads
from outrider.model.loading import LoadedModel
from outrider.model.paged import NO_PARENT, Numerics, PagedModel, Segment

# The first block is shared by all sequences of a batch; what follows it is compared.
_COMPARED = 5
_TOKENS = BLOCK_TOKENS + _COMPARED
_SINGLES = 32
_BLOCKS = _SINGLES + 16


def first_dependence(model: LoadedModel, numerics: Numerics) -> str:
    """What a row's logits were seen to depend on, as a sentence; empty when on nothing."""
    if model.context_len < _TOKENS:
        return f"its context of {model.context_len} tokens is too short to check it"
    probe = _Probe(model, PagedModel(model, _BLOCKS, numerics))
    expected = probe.one_by_one()
    present = torch.get_num_threads()
    for threads in sorted({1, 2, present}, key=lambda count: count != present):
        with torch_threads(threads):
            for name, rows, indices in [*probe.in_chunks(), *probe.in_one_step()]:
                if not torch.equal(rows, expected[indices]):
                    difference = float((rows - expected[indices]).abs().max())
                    return (
                        f"its logits depend on {name}, by {difference:.2g} with {threads} threads"
                    )
    return ""


# What rows were computed in, their logits [R, V], and which of the compared tokens they are.
_Found = tuple[str, torch.Tensor, list[int]]


class _Probe:
    """Ways to compute the logits of the tokens after the first block."""

    def __init__(self, model: LoadedModel, paged: PagedModel) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, model.vocab_size, (_TOKENS,), generator=generator).tolist()
        self._paged = paged
        self._head, self._tail = tokens[:BLOCK_TOKENS], tokens[BLOCK_TOKENS:]
        self._strangers = self._tail[::-1] + self._head

    def one_by_one(self) -> torch.Tensor:
        """A prompt of one block, then each token in a step of its own: [_COMPARED, V]."""
        table = self._table()
        self._keep(table, self._head)
        rows = [self._keep(table, [token]) for token in self._tail]
        self._paged.pool.release(table)
        return torch.cat(rows)

    def in_chunks(self) -> list[_Found]:
        """Everything again, in other chunks."""
        table = self._table()
        self._keep(table, self._head[:7])
        rows = self._keep(table, [*self._head[7:], *self._tail])[-_COMPARED:]
        self._paged.pool.release(table)
        return [("the chunks of its prompt", rows, list(range(_COMPARED)))]

    def in_one_step(self) -> list[_Found]:
        """A chain, a tree and single rows, strangers between them, all in one step."""
        prompt = self._table()
        self._keep(prompt, self._head)
        tables = [self._table(prompt.blocks[:1]) for _ in range(_SINGLES + 2)]
        tree, parents = self._tree()
        segments = [
            Segment(tree, tables[0], len(tree), parents),
            Segment(self._tail, tables[1], _COMPARED),
        ]
        # Two strangers after each pair of the same rows.
        for number, table in enumerate(tables[2:]):
            same = number % 4 < 2
            token = self._tail[0] if same else self._strangers[number % len(self._strangers)]
            segments.append(Segment([token], table, 1))
        logits = self._paged.forward(segments)
        for table in tables:
            table.blocks = table.blocks[1:]
            self._paged.pool.release(table)
        self._paged.pool.release(prompt)
        on_path, chain, singles = torch.split(logits, [len(tree), _COMPARED, _SINGLES])
        same_rows = [number for number in range(_SINGLES) if number % 4 < 2]
        return [
            ("the tree around it", on_path[::2], list(range(_COMPARED))),
            ("the draft around it", chain, list(range(_COMPARED))),
            ("its place in the batch", singles[same_rows], [0] * len(same_rows)),
        ]

    def _tree(self) -> tuple[list[int], list[int]]:
        """Tokens and parents; every second row is on the path, the others are its siblings."""
        tokens, parents = list(self._tail[:1]), []
        for depth, token in enumerate(self._tail[1:]):
            parent = 2 * depth - 1 if depth else NO_PARENT
            tokens += [self._strangers[depth], token]
            parents += [parent, parent]
        return tokens, parents

    def _table(self, shared: Sequence[int] = ()) -> BlockTable:
        table = BlockTable(list(shared), BLOCK_TOKENS * len(shared))
        # Room for the tree, which has two rows for each token.
        self._paged.pool.grow(table, BLOCK_TOKENS + 2 * _COMPARED)
        return table

    def _keep(self, table: BlockTable, tokens: Sequence[int]) -> torch.Tensor:
        """Run and keep the tokens: logits of all of them."""
        logits = self._paged.forward([Segment(tokens, table, len(tokens))])
        table.kv_len += len(tokens)
        return logits
