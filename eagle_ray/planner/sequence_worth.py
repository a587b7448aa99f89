"""SequenceWorths: the value of each sequence's drafts, as a ratio to the average draft.

    worths.observe_draft(sequences, first_values)      # how likely the drafter finds its first tokens
    worths.observe_result(sequences, accepted, expected)     # how many of its drafts were accepted
    worths.of(sequence)      # 0.4: two fifths of an average draft's accepted tokens

If easy and hard texts run together, or one after the other, an average over the batch fits none of
them. The first drafts of a sequence show which kind it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eagle_ray.planner.acceptance_model import MEMORY, PRIOR_COUNT
from eagle_ray.planner.plan_search import Members

LESSONS = 3  # drafts of a sequence before its own record may leave it out
PROMISE_DEPTH = 4  # levels of the path that the first token's probability stands for


@dataclass(slots=True)
class _Record:
    """Decaying sums over the drafts of one sequence.

    Attributes:
        sequence: kept, so that its id belongs to no other one.
        num_drafts: drafts so far, without decay.
        promised, average: what its drafts promised, and what those of the average did.
        accepted, expected: its accepted drafts, and as many as the planner expected.
        retry_at: step at which it drafts again although it is left out; None while it is not.
        wait: steps until the next such step.
    """

    sequence: object
    num_drafts: int = 0
    promised: float = 0.0
    average: float = 0.0
    accepted: float = 0.0
    expected: float = 0.0
    retry_at: int | None = None
    wait: int = MEMORY

    @property
    def ease(self) -> float:
        return (self.promised + 1) / (self.average + 1)

    @property
    def accuracy(self) -> float:
        return (self.accepted + PRIOR_COUNT) / (self.expected + PRIOR_COUNT)

    @property
    def worth(self) -> float:
        return self.ease * self.accuracy

    def decay(self, factor: float) -> None:
        """Let the next drafts count for more than the earlier ones."""
        self.promised *= factor
        self.average *= factor
        self.accepted *= factor
        self.expected *= factor


class SequenceWorths:
    """Values of the drafts of running sequences, from a record for each sequence that has drafted.

    Records are shrunk towards the average: promised values with the weight of one draft, acceptance
    with the weight of PRIOR_COUNT expected tokens.
    """

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._average = 0.0  # what a draft promises
        self._num_observed = 0

    def of(self, sequence: object) -> float:
        """Return the value of a sequence's next draft: its expected accepted tokens as a ratio to
        the average draft's."""
        record = self._records.get(id(sequence))
        return 1.0 if record is None else record.worth

    def accuracy(self, sequence: object) -> float:
        """Return the accepted tokens of a sequence's drafts as a ratio to those that the drafts' values promised."""
        record = self._records.get(id(sequence))
        return 1.0 if record is None else record.accuracy

    def is_new(self, sequence: object) -> bool:
        """Return whether the sequence has drafted too seldom to be left out."""
        record = self._records.get(id(sequence))
        return record is None or record.num_drafts < LESSONS

    def observe_draft(self, sequences: Sequence[object], first_values: Sequence[float]) -> None:
        """Observe one draft of some sequences.

        Args:
            first_values: the probability of each sequence's likeliest first token.
        """
        for sequence, probability in zip(sequences, first_values, strict=True):
            promise = _promise(probability)
            self._num_observed += 1
            rate = max(1 / self._num_observed, 1 / MEMORY)
            self._average += rate * (promise - self._average)
            record = self._records.setdefault(id(sequence), _Record(sequence))
            record.decay(1 - 1 / MEMORY)
            record.num_drafts += 1
            record.promised += promise
            record.average += self._average

    def observe_result(
        self, sequences: Sequence[object], accepted: Sequence[int], expected: Sequence[float]
    ) -> None:
        """Observe how many drafts of a step were accepted, and how many were expected."""
        for sequence, number, hoped in zip(sequences, accepted, expected, strict=True):
            record = self._records.get(id(sequence))
            if record is not None:
                record.accepted += number
                record.expected += hoped

    def groups(self, sequences: Sequence[object]) -> list[Members]:
        """Return the groups that a step may draft for: all sequences, the easiest half, the easiest quarter.

        The list is empty while more than half of the sequences are new.
        """
        num_new = sum(map(self.is_new, sequences))
        if 2 * num_new > len(sequences):
            return []
        worths = sorted(map(self.of, sequences), reverse=True)
        size = len(worths)
        groups = []
        for number in sorted({size, -(-size // 2), -(-size // 4)}, reverse=True):
            best = worths[:number]
            min_worth = 0.0 if number == size else best[-1]
            groups.append(Members(number, sum(best) / number, min_worth))
        return groups

    def members(self, sequences: Sequence[object], min_worth: float, step: int) -> tuple[int, ...]:
        """Return the indices of the sequences to draft for.

        They are the new ones, those whose drafts have at least the value `min_worth`, and now and
        then another one, whose text may have become easier. Its wait doubles after each such draft.
        """
        return tuple(i for i, one in enumerate(sequences) if self._is_member(one, min_worth, step))

    def _is_member(self, sequence: object, min_worth: float, step: int) -> bool:
        record = self._records.get(id(sequence))
        if record is None or record.num_drafts < LESSONS or record.worth >= min_worth:
            if record is not None:
                record.retry_at = None
            return True
        if record.retry_at is None:
            record.retry_at = step + record.wait
            return False
        if step < record.retry_at:
            return False
        record.decay(0.5)
        record.wait *= 2
        record.retry_at = step + record.wait
        return True

    def keep_only(self, sequences: Iterable[object]) -> None:
        """Drop the records of all other sequences, which are no longer in the batch."""
        running = {id(sequence) for sequence in sequences}
        for key in [key for key in self._records if key not in running]:
            del self._records[key]


def _promise(probability: float) -> float:
    """Return the accepted drafts of a path whose tokens are as likely as its first one."""
    return sum(probability**depth for depth in range(1, PROMISE_DEPTH + 1))
