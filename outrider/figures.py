"""What came of speculation, counted."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationFigures:
    """Counts of one session or worker; bonus tokens and unverified drafts are not in them.

    Of a tree every node is a draft token, and `accepted_per_position` goes by depth.
    """

    rounds: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified draft tokens; 0 when nothing was verified."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed by a round on average: 1 + accepted / rounds; 0 without rounds."""
        return 1 + self.accepted_tokens / self.rounds if self.rounds else 0.0

    def add_round(self, draft_tokens: int, accepted_tokens: int) -> None:
        """Count one round that verified `draft_tokens` and accepted the first of them."""
        self.rounds += 1
        if not draft_tokens:
            return
        self.drafts += 1
        self.draft_tokens += draft_tokens
        self.accepted_tokens += accepted_tokens
        self._reach(accepted_tokens)
        for position in range(accepted_tokens):
            self.accepted_per_position[position] += 1

    def add(self, other: "SpeculationFigures") -> None:
        """Add the counts of another session."""
        self.rounds += other.rounds
        self.drafts += other.drafts
        self.draft_tokens += other.draft_tokens
        self.accepted_tokens += other.accepted_tokens
        self._reach(len(other.accepted_per_position))
        for position, count in enumerate(other.accepted_per_position):
            self.accepted_per_position[position] += count

    def _reach(self, positions: int) -> None:
        missing = positions - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * max(missing, 0))
