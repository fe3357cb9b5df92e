"""The recall tasks: what each hides in a text, and what it asks for at the end.

To add a task, add a function, a row to `EXERCISES` and a row to `TASKS`. Statements look
like source code and its comments, because code models and chat models read both.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Short, common and unrelated. The first half is for choosing rotations and the second for judging
# them, so that a choice is never judged on words that it was made on.
_TEXT = (
    "amber anchor apple arrow basin beacon birch blade bridge bronze cabin candle canyon cedar "
    "cloud copper coral cotton crane crystal dagger desert dragon eagle ember falcon feather "
    "flint forest garden ginger glacier "
    "hammer harbor hazel helmet island ivory jasper jungle kettle ladder lantern lemon maple "
    "marble meadow mirror needle ocean olive orchid paper pepper pillar planet ribbon river "
    "saddle silver summit timber velvet willow winter"
)
_WORDS = _TEXT.split()
POOLS = {"choose": _WORDS[: len(_WORDS) // 2], "judge": _WORDS[len(_WORDS) // 2 :]}
"""Words of the prompts that rotations are chosen on, and of those that they are judged on."""

_UNASKED = 1.5  # statements per question: some are never asked for
_HOPS = 2  # assignments between a number and the name that is asked for
_PASSAGE, _CUE = 8, 2  # words of a passage, and of its beginning that is given

Block = tuple[str, ...]  # lines that are hidden together, one after another


@dataclass(frozen=True)
class Asked:
    """A question: the model continues `prefix` and should write `answer`, which `line` holds."""

    prefix: str
    answer: str
    line: str


@dataclass(frozen=True)
class Exercise:
    """The statements that one prompt hides, and its questions. Each group is a list of blocks that
    keep their order in the text. All lines differ."""

    groups: list[list[Block]]
    questions: list[Asked]


def _needles(draw: random.Random, words: Sequence[str], count: int) -> Exercise:
    """Facts at places of their own, as in the needle-in-a-haystack test."""
    facts = []
    for name in _draw_names(draw, words, round(count * _UNASKED)):
        prefix, answer = f"# the code of {name} is", f" {_draw_number(draw)}"
        facts.append(Asked(prefix, answer, prefix + answer))
    return Exercise([[(fact.line,)] for fact in facts], draw.sample(facts, count))


def _key_value(draw: random.Random, words: Sequence[str], count: int) -> Exercise:
    """A table of keys and values at one place."""
    pairs = []
    for name in _draw_names(draw, words, round(count * _UNASKED)):
        number = _draw_number(draw)
        line = f'    "{name}": {number},'
        pairs.append(Asked(f'assert CODES["{name}"] ==', f" {number}", line))
    table = "CODES = {", *(pair.line for pair in pairs), "}"
    return Exercise([[table]], draw.sample(pairs, count))


def _copy(draw: random.Random, words: Sequence[str], count: int) -> Exercise:
    """Passages of random words, continued from their first words. Any model with induction heads
    can do it."""
    # No word occurs twice before all have occurred, so each word of a passage tells the next one.
    order = itertools.chain.from_iterable(draw.sample(words, len(words)) for _ in range(count))
    passages = []
    for _ in range(count):
        passage = list(itertools.islice(order, _PASSAGE))
        cue = f"# {' '.join(passage[:_CUE])}"
        answer = "".join(f" {word}" for word in passage[_CUE:])
        passages.append(Asked(cue, answer, cue + answer))
    return Exercise([[(each.line,)] for each in passages], draw.sample(passages, count))


def _assignments(draw: random.Random, words: Sequence[str], count: int) -> Exercise:
    """Chains of variables, each assigned from the one before; the number is in the first line."""
    names = iter(_draw_names(draw, words, count * (1 + _HOPS)))
    groups: list[list[Block]] = []
    questions = []
    for _ in range(count):
        chain = [next(names) for _ in range(1 + _HOPS)]
        answer = f" {_draw_number(draw)}"
        first = f"{chain[0]} ={answer}"
        copies = [f"{name} = {before}" for before, name in itertools.pairwise(chain)]
        groups.append([(line,) for line in (first, *copies)])
        questions.append(Asked(f"assert {chain[-1]} ==", answer, first))
    return Exercise(groups, draw.sample(questions, count))


def _draw_names(draw: random.Random, words: Sequence[str], count: int) -> list[str]:
    """Distinct names of two words each."""
    pairs = [f"{first}_{second}" for first in words for second in words if first != second]
    return draw.sample(pairs, count)


def _draw_number(draw: random.Random) -> str:
    return f"{draw.randrange(10**6):06d}"


EXERCISES: dict[str, Callable[[random.Random, Sequence[str], int], Exercise]] = {
    "needles": _needles,
    "key-value": _key_value,
    "copy": _copy,
    "assignments": _assignments,
}
"""Task -> what writes its exercise, with words and questions in random order."""

QUOTE = "quote"
"""The task that hides nothing: it asks for passages of the text itself, word for word."""
TASKS = {"needles": 8, "key-value": 8, QUOTE: 4, "copy": 4, "assignments": 4}
"""Task -> questions per prompt. The tasks with fewer have longer answers or more statements."""
