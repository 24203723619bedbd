"""Totals of proposed and accepted tokens."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftCounts:
    """Totals of speculation since start."""

    num_drafts: int = 0  # proposals, each of one or several tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)  # by the place in the proposal

    def add_proposal(self, num_proposed: int, num_accepted: int) -> None:
        """Count a verified proposal."""
        self.num_drafts += 1
        self.num_draft_tokens += num_proposed
        self.num_accepted_tokens += num_accepted
        self.accepted_per_pos += [0] * (num_proposed - len(self.accepted_per_pos))
        for place in range(num_accepted):
            self.accepted_per_pos[place] += 1
