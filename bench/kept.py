"""The rounds of a long run in a file, so that it can be ended and goes on where it was."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.turns import Turn
from outrider.errors import ConfigError
from outrider.figures import SpeculationFigures


class Kept:
    """Rounds as JSON lines after one that says of what run they are; without a path in memory."""

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        """Read what is there.

        Raises:
            ConfigError: the rounds in the file are those of another run.
        """
        self.rounds: list[dict[str, Turn]] = []
        self._path = path
        if path is None:
            return
        head = json.dumps(about, sort_keys=True)
        # A line that was cut off when the run ended is written again.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        if lines and lines[0] != head:
            raise ConfigError(f"{path} is of a run with other settings; name another file")
        self.rounds = [
            {side: _turn_of(said) for side, said in json.loads(line).items()} for line in lines[1:]
        ]
        path.write_text("".join(f"{line}\n" for line in lines or [head]))

    def add(self, turns: Mapping[str, Turn]) -> None:
        """One more round, by side."""
        self.rounds.append(dict(turns))
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({side: asdict(turn) for side, turn in turns.items()}) + "\n")


def _turn_of(said: Mapping[str, Any]) -> Turn:
    return Turn(tuple(said["token_ids"]), said["seconds"], SpeculationFigures(**said["figures"]))
