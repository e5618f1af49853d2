"""Change one operator of the sampling functions at a time: the tests must notice each change.

    python scripts/check_mutants.py [--only TEXT] [MODULE ...]

`--only` takes the mutants whose line holds the text. Works in a temporary copy; prints what
became of each mutant and fails when one survives that `EQUIVALENT` does not explain. A mutant
is first run against the tests of its own module, then against all tests of the package that
are not slow. Takes a few seconds a mutant on one core.
"""

import argparse
import ast
import os
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("outrider/sampling")
TESTS = Path("tests/unit/sampling")
# Each module with the tests that are most likely to notice.
MODULES = {
    "acceptance": ("test_acceptance.py", "test_trees.py"),
    "rejection": ("test_rejection.py",),
    "best": ("test_best.py",),
    "coupled": ("test_coupled.py", "test_processors.py"),
    "proposal": ("test_proposal.py",),
    "noise": ("test_noise.py",),
    "gumbel_max": ("test_gumbel_max.py",),
    "processors": ("test_processors.py",),
    "rows": ("test_rows.py",),
    "seeds": ("test_seeds.py",),
    "logprobs": ("test_logprobs.py",),
    "endings": ("test_endings.py",),
}
# Quick ones first, since the first failure ends a run.
ALL_TESTS = (
    *dict.fromkeys(test for tests in MODULES.values() for test in tests),
    "test_wrong_rules.py",
    "test_enumeration.py",
    "test_transformers_parity.py",
    "test_cases.py",
    "test_keyed_law.py",
)
# What the tests import, once, before a process is forked for each mutant.
WARM = ("torch", "numpy", "scipy.stats", "hypothesis", "pytest", "transformers.generation.utils")
# Processor time for the tests of a module and for all tests; enough on a slow machine.
TIMEOUTS_S = (40, 400)
# A mutant may ask for as much memory as it likes; it does not get it.
MEMORY_BYTES = 6 << 30

# Mutants that do what the original does: the module, what changes into what, and the reason.
EQUIVALENT = {
    ("best", ".max(-1)", ".max(1)"): "the last of two dimensions",
    ("best", "whole <= _BLOCK", "whole < _BLOCK"): "one block is looked through either way",
    ("coupled", "count == 1", "count == 0"): "the other way gives one token too",
    ("coupled", "zip(ids, values, strict=True)", "zip(ids, values, strict=False)"): "as many",
    ("coupled", "best.values.tolist(), strict=True", "best.values.tolist(), strict=False"): (
        "one of each a row"
    ),
    ("coupled", "choices.token_ids, strict=True", "choices.token_ids, strict=False"): (
        "one of each a row"
    ),
    ("coupled", "zip(*place, strict=True)", "zip(*place, strict=False)"): "all are pairs",
    ("coupled", "len(place) < len(s", "len(place) <= len(s"): "each row's own noise, once more",
    ("coupled", "logits.shape[1])", "logits.shape[0])"): "only how much is done at once",
    ("coupled", "amax(-1)", "amax(1)"): "the last of two dimensions",
    ("coupled", "shape[-1]", "shape[1]"): "the last of two dimensions",
    ("coupled", "special and gumbel", "special or gumbel"): "of no rows all are drawn",
    ("gumbel_max", "nogil=True", "nogil=False"): "only who may run meanwhile",
    ("gumbel_max", "cache=True", "cache=False"): "only when it is compiled",
    ("gumbel_max", "found = 0", "found = 1"): "the flags decide",
    ("gumbel_max", "found += passes", "found -= passes"): "any number but 0",
    ("gumbel_max", "least <= ", "least < "): "a bound that leaves room",
    ("gumbel_max", "total > best", "total >= best"): "of two equals torch decides",
    ("gumbel_max", "total > second", "total >= second"): "it is the same number then",
    ("gumbel_max", "second > _CLOSE", "second >= _CLOSE"): "a limit that leaves room",
    ("logprobs", "log_softmax(-1)", "log_softmax(1)"): "the last of two dimensions",
    ("logprobs", "(ids, values, strict=True)", "(ids, values, strict=False)"): (
        "topk gives as many ids as values"
    ),
    ("processors", "amax(-1,", "amax(1,"): "the last of two dimensions",
    ("processors", "penalty == 1.0", "penalty == 0.0"): "x / 1 and x * 1 are x",
    ("processors", "values < 0,", "values <= 0,"): "0 times and 0 over a penalty are both 0",
    ("processors", "k < scores", "k <= scores"): "nothing is below the lowest score",
    ("processors", "p > 0 for", "p >= 0 for"): "no mass is below 0",
    ("processors", "p = scores.softmax(-1)", "p = scores.softmax(1)"): "the last of two dimensions",
    ("processors", "logsumexp(-1", "logsumexp(1"): "the last of two dimensions",
    ("processors", "cumsum(-1)", "cumsum(1)"): "the last of two dimensions",
    ("processors", ".sum(-1", ".sum(1"): "the last of two dimensions",
    ("processors", ".all(-1)", ".all(1)"): "the last of two dimensions",
    ("processors", "before < limit", "before <= limit"): "where they are equal a sort decides",
    ("processors", "abs() > _CLEAR", "abs() >= _CLEAR"): "a bound that nothing meets exactly",
    ("rejection", "p_token >= q_token", "p_token > q_token"): "p / q is 1 where they are equal",
}


@dataclass(frozen=True)
class Mutant:
    """One change: the statement before and after, and the module's whole new source."""

    module: str
    function: str
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        """How the report and `EQUIVALENT` call it."""
        return f"{self.module}.{self.function}: {self.before}  =>  {self.after}"


# --- what is changed ------------------------------------------------------------------------

_COMPARE: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_BINARY: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
}
_NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "amax": "amin",
    "argmax": "argmin",
    "clamp_min": "clamp_max",
    "clamp_max_": "clamp_min_",
    "union": "intersection",
}
_DROPPED = {"neg_", "log_", "log", "clone", "double", "round", "clamp_min", "clamp_max_", "add_"}
_DROPPED |= {"mul_", "bitwise_and_", "softmax", "cumsum"}
_MEMBERS = {
    "Stream": ("TARGET", "DRAFT", "ACCEPT", "RESAMPLE"),
    "TokenOrigin": ("PLAIN", "ACCEPTED", "RECOVERED", "BONUS"),
}


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""
    match node:
        case ast.Compare(left, ops, comparators):
            for i, op in enumerate(ops):
                for other in _COMPARE[type(op)]:
                    yield ast.Compare(left, [*ops[:i], other(), *ops[i + 1 :]], comparators)
        case ast.BinOp(left, op, right):
            yield ast.BinOp(left, _BINARY[type(op)](), right)
        case ast.AugAssign(target, op, value):
            yield ast.AugAssign(target, _BINARY[type(op)](), value)
            yield ast.Pass()
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield ast.Constant(value + 1)
            if value == 1:
                yield ast.Constant(type(value)(0))
        case ast.Slice(lower, upper, step):
            if lower is not None:
                yield ast.Slice(_next(lower), upper, step)
            if upper is not None:
                yield ast.Slice(lower, _next(upper), step)
        case ast.Subscript(value, ast.Name() as index, ast.Load() as context):
            yield ast.Subscript(value, _next(index), context)
        case ast.Attribute(ast.Name(kind), member, context) if member in _MEMBERS.get(kind, ()):
            members = _MEMBERS[kind]
            neighbour = members[(members.index(member) + 1) % len(members)]
            yield ast.Attribute(ast.Name(kind), neighbour, context)
        case ast.Call(ast.Name(called), arguments, keywords) if called in _NAMES:
            yield ast.Call(ast.Name(_NAMES[called]), arguments, keywords)
        case ast.Call(ast.Attribute(value, called, context), arguments, keywords):
            if called in _NAMES:
                function = ast.Attribute(value, _NAMES[called], context)
                yield ast.Call(function, arguments, keywords)
            if called in _DROPPED:
                yield value
        case ast.If(ast.Name() | ast.Attribute() | ast.Call() as test, body, orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.IfExp(ast.Name() | ast.Attribute() | ast.Call() as test, body, orelse):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Expr(ast.Call()) | ast.Assign([ast.Subscript()]):
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


def _next(index: ast.expr) -> ast.expr:
    return ast.BinOp(index, ast.Add(), ast.Constant(1))


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a module, each made by one change inside one function."""
    tree = ast.parse(source)
    functions = [("", node) for node in tree.body]
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            functions += [(f"{owner.name}.", node) for node in owner.body]
    for prefix, function in functions:
        if isinstance(function, ast.FunctionDef):
            for before, after in _mutated(function):
                yield Mutant(module, prefix + function.name, before, after, ast.unparse(tree))


def _mutated(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Change the function in place, one change at a time; it is whole again afterwards."""
    for default in filter(None, list(function.args.kw_defaults)):
        for other in changes(default):
            _replace(function.args, default, other)
            yield f"{ast.unparse(default)} as default", ast.unparse(other)
            _replace(function.args, other, default)
    for statement in function.body:
        yield from _in_node(function, statement, statement)


def _in_node(parent: ast.AST, node: ast.AST, statement: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.stmt):
        statement = node
    before = _first_line(statement)
    for other in changes(node):
        _replace(parent, node, other)
        yield before, _first_line(other if node is statement else statement)
        _replace(parent, other, node)
    for child in ast.iter_child_nodes(node):
        # Types of variables are no behaviour.
        if not (isinstance(node, ast.AnnAssign) and child is node.annotation):
            yield from _in_node(node, child, statement)


def _first_line(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).splitlines()[0]


def _replace(parent: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Put a node in the place of another, wherever that hangs in its parent."""
    for field, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, field, new)
        elif isinstance(value, list):
            value[:] = [new if item is old else item for item in value]


# --- what becomes of it ---------------------------------------------------------------------


def passes(sandbox: Path, tests: tuple[str, ...], limit_s: int) -> bool | None:
    """Whether the tests pass in a process of their own; None when they take too long."""
    child = os.fork()
    if child == 0:
        _test(sandbox, tests, limit_s)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return None if code == -signal.SIGXCPU else code == 0


def _test(sandbox: Path, tests: tuple[str, ...], limit_s: int) -> None:
    """Run pytest in the sandbox and end the process."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        log = os.open(sandbox / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(sandbox)
        sys.path.insert(0, str(sandbox))
        import pytest

        options = "-x -q -m not\\ slow -p no:cacheprovider --timeout 0"
        # What is imported already for all of them can't be rewritten, and need not be.
        options += " -W ignore::pytest.PytestAssertRewriteWarning"
        code = int(pytest.main([*shlex.split(options), *(str(TESTS / test) for test in tests)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fate(sandbox: Path, mutant: Mutant, whole: str) -> str:
    """Put the mutant in the place of its module, test it, and put the module back."""
    module = sandbox / PACKAGE / f"{mutant.module}.py"
    try:
        module.write_text(mutant.source)
        for tests, limit_s in zip((MODULES[mutant.module], ALL_TESTS), TIMEOUTS_S, strict=True):
            # A compiled copy is trusted by its second and size; two mutants can share both.
            shutil.rmtree(module.parent / "__pycache__", ignore_errors=True)
            passed = passes(sandbox, tests, limit_s)
            if not passed:
                return "killed" if passed is False else "killed (time)"
    finally:
        module.write_text(whole)
    return "SURVIVED"


def equivalent(mutant: Mutant) -> tuple[str, str, str] | None:
    """The entry of `EQUIVALENT` for a mutant, if there is one."""
    for module, before, after in EQUIVALENT:
        changed = mutant.before.replace(before, after) == mutant.after
        if module == mutant.module and before in mutant.before and changed:
            return module, before, after
    return None


def main() -> None:
    """Make, test and count the mutants of the modules that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="in the line of the mutant")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(MODULES))
    asked = parser.parse_args()
    modules = asked.modules or list(MODULES)
    if unknown := set(modules) - set(MODULES):
        parser.error(f"no such module: {', '.join(sorted(unknown))}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in WARM:
        __import__(name)
    counts: Counter[str] = Counter()
    unused = {key for key in EQUIVALENT if key[0] in modules and not asked.only}
    with tempfile.TemporaryDirectory() as directory:
        sandbox = Path(directory)
        ignored = shutil.ignore_patterns("__pycache__")
        for part in ("outrider", TESTS, "tests/support"):
            shutil.copytree(ROOT / part, sandbox / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", sandbox)
        if not passes(sandbox, ALL_TESTS, TIMEOUTS_S[1]):
            sys.exit((sandbox / "log").read_text() + "the tests fail without any change")
        for module in modules:
            whole = (sandbox / PACKAGE / f"{module}.py").read_text()
            for mutant in mutants(module, whole):
                if asked.only not in mutant.name:
                    continue
                key = equivalent(mutant)
                unused -= {key}
                result = "equivalent" if key else fate(sandbox, mutant, whole)
                counts[result] += 1
                print(f"{result:14}{mutant.name}", flush=True)
    for key in sorted(unused):
        print("NO SUCH MUTANT", *key)
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    sys.exit(1 if counts["SURVIVED"] or unused else 0)


if __name__ == "__main__":
    main()
