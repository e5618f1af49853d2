"""What verifying a tree of drafts costs, over one row and over a chain of as many rows."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from bench.engine import VerifyEngine
from bench.prompts import prompts_of
from bench.report import Report
from bench.rounds import Spread, alternate, ratios
from outrider.cli.models import resolve_model
from outrider.config import CACHE, setting
from outrider.messages import Draft
from outrider.model.embedded import EMBEDDED_MODEL
from outrider.model.tokenizers import load_tokenizer

NODES = (16, 32, 64)
_ONE_ROW = "one row"


@dataclass(frozen=True, slots=True)
class Settings:
    """What to time."""

    model: str = setting(EMBEDDED_MODEL, help="A path, or this name.")
    nodes: tuple[int, ...] = setting(NODES, many=True, at_least=1, help="Tokens of a tree.")
    children: int = setting(2, at_least=2, help="Children of each node.")
    context: int = setting(256, at_least=1, help="Tokens before the tree.")
    rounds: int = setting(15, at_least=1, help="Rounds; every step has its turn in each.")
    threads: int = setting(2, at_least=1, help="Threads of torch.")
    cache: str = setting(CACHE, help="Directory for the embedded model.")
    bar: bool = setting(False, help="There is no bar for this one.")


def tree(tokens: tuple[int, ...], children: int) -> Draft:
    """A tree of those tokens, filled level by level; the last committed token has children too."""
    return Draft(tokens, tuple(node // children - 1 for node in range(len(tokens))))


def run(settings: Settings) -> None:
    """What verifying 16, 32 and 64 nodes of a tree costs, over one row and over a chain."""
    path = resolve_model(settings.model, settings.cache)
    (context,) = prompts_of(load_tokenizer(path), 1, settings.context)
    engine = VerifyEngine(path, threads=settings.threads)
    (session,) = engine.decoding([context], 2)
    steps = {_ONE_ROW: engine.verification(session, Draft())}
    for nodes in settings.nodes:
        tokens = tuple(context[i % len(context)] for i in range(nodes))
        steps[f"chain {nodes}"] = engine.verification(session, Draft(tokens))
        steps[f"tree {nodes}"] = engine.verification(session, tree(tokens, settings.children))
    taken = alternate({name: _turn(seconds) for name, seconds in steps.items()}, settings.rounds)
    report = report_of(taken, settings)
    report.print()
    report.exit(enforce=settings.bar)


def report_of(taken: dict[str, list[float]], settings: Settings) -> Report:
    """One line for each number of nodes; a step has a row more than nodes."""
    one = taken[_ONE_ROW]
    report = Report(
        f"Trees with {settings.children} children a node, context {settings.context}",
        ["nodes", "tree, ms", "chain, ms", "tree over one row", "tree over chain"],
    )
    report.rows.append([_ONE_ROW, Spread.of(one).times(1e3), "", "", ""])
    report.figures = {"one_row_s": asdict(Spread.of(one))}
    for nodes in settings.nodes:
        of_tree, chain = taken[f"tree {nodes}"], taken[f"chain {nodes}"]
        spreads = {
            "tree_s": Spread.of(of_tree),
            "chain_s": Spread.of(chain),
            "over_one_row": ratios(of_tree, one),
            "over_chain": ratios(of_tree, chain),
        }
        shown = [spreads["tree_s"].times(1e3), spreads["chain_s"].times(1e3)]
        shown += [spreads["over_one_row"], spreads["over_chain"]]
        report.rows.append([nodes, *shown])
        report.figures[str(nodes)] = {name: asdict(spread) for name, spread in spreads.items()}
    return report


def _turn(seconds: Callable[[], float]) -> Callable[[int], float]:
    return lambda _: seconds()
