"""The recall tasks: the statements that each hides in a text, and its questions at the end.

To add a task, add a function, a row to `EXERCISES` and a row to `TASKS`. Statements look like
source code and its comments, which both code models and chat models read.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Short, common and unrelated words. The first half is for choosing rotations and the second for
# judging them, so that no choice is judged on the words that it was made on.
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

_UNASKED = 1.5  # statements per question: some are never asked for
_HOPS = 2  # assignments between a number and the name that is asked for
_PASSAGE, _CUE = 8, 2  # words of a passage, and of the beginning that is given

Block = tuple[str, ...]  # consecutive lines


@dataclass(frozen=True)
class Asked:
    """A question: the model continues `prefix` and should write `answer`, which is in `line`."""

    prefix: str
    answer: str
    line: str


@dataclass(frozen=True)
class Exercise:
    """The statements that a prompt hides, and its questions. The blocks of a group keep their order
    in the text. All lines differ."""

    groups: list[list[Block]]
    questions: list[Asked]


def _needles(draw: random.Random, words: Sequence[str], count: int) -> Exercise:
    """Facts at separate places, as in the needle-in-a-haystack test."""
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
    """Passages of random words, to continue from their first words: needs induction heads only."""
    # All words occur before one occurs again, so each word of a passage determines the next.
    order = itertools.chain.from_iterable(draw.sample(words, len(words)) for _ in range(count))
    passages = []
    for _ in range(count):
        passage = list(itertools.islice(order, _PASSAGE))
        cue = f"# {' '.join(passage[:_CUE])}"
        answer = "".join(f" {word}" for word in passage[_CUE:])
        passages.append(Asked(cue, answer, cue + answer))
    return Exercise([[(each.line,)] for each in passages], draw.sample(passages, count))


def _assignments(draw: random.Random, words: Sequence[str], count: int) -> Exercise:
    """Chains of variables, each assigned from the one before, the first from a number."""
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
    """Different names of two words each."""
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
QUOTE = "quote"  # the task that hides nothing: it asks for passages of the text, word for word
TASKS = {"needles": 8, "key-value": 8, QUOTE: 4, "copy": 4, "assignments": 4}
"""Task -> questions per prompt: fewer where answers are longer or statements are more."""
