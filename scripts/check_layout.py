"""Fail when a source file has grown beyond what one file should hold."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("outrider", "coordinator", "draft_worker", "verify_worker", "bench", "scripts", "tests")
MOST_LINES = 400
GENERATED = ROOT / "outrider" / "pb"


def main() -> None:
    """Count the lines of every Python file outside generated code."""
    long = [
        (path.relative_to(ROOT), lines)
        for source in SOURCES
        for path in sorted((ROOT / source).rglob("*.py"))
        if GENERATED not in path.parents
        and (lines := len(path.read_text().splitlines())) > MOST_LINES
    ]
    for path, lines in long:
        print(f"{path}: {lines} lines, at most {MOST_LINES}; split it")
    sys.exit(1 if long else 0)


if __name__ == "__main__":
    main()
