"""What a list of published rotations shows of each without opening it: answers, cost and bits."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rotationzoo.artifact.results import Count

BITS_FORMAT = "sglang"
"""The format whose bits are stated, so that rotations in one list can be compared."""


class Summary(BaseModel):
    """The figures of one artifact, taken from its manifest when it is published; None where nothing
    was measured.

    An entry's `evaluation` does not tell them: an index sorts its keys, so nobody knows any more
    which of the arms is the artifact's.
    """

    # Later versions may have more figures.
    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    answered: Count | None = None
    """How many questions of the recall tasks it answered: of all tasks that the exact model could
    do, together."""
    questions: Count | None = None
    perplexity_increase: float | None = None
    """Relative: 0.01 is 1 %."""
    bits_per_element: Annotated[float, Field(gt=0)] | None = None
    """Bits per cached element at 131,072 tokens, at the recipe's windows, in `BITS_FORMAT`."""

    @property
    def share_answered(self) -> float | None:
        """The share of the questions that were answered, from 0 to 1; None if none was asked."""
        if self.answered is None or not self.questions:
            return None
        return self.answered / self.questions
