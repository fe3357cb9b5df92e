"""DEV and TEST for real models: choices are made on DEV, and judged once on TEST ("Real models" in
docs/history.md and "Two real models" in docs/results.md).

* Text: documents of the bundled evaluation text. DEV has the first, the third and so on; TEST has
  the others. Calibration reads the other bundled text, which is in neither.
* Questions: DEV asks for words of the pool `choose` and TEST for those of `judge`, so that no key
  is in both; their seeds differ too. Quotes are of each half's own text.
* Tasks and lengths: `TASKS` at `LENGTHS`. A task with more questions begins with the same ones.

This file alone defines the splits: take a `Split` from `SPLITS`.
"""

import json
from dataclasses import dataclass
from itertools import chain

from transformers import PreTrainedTokenizerBase

from rotationzoo.codec.windows import CacheLayout
from rotationzoo.recall import questions as recall
from rotationzoo.recall.prompts import Prompt, PromptSettings, write_prompts
from rotationzoo.recipe import Data
from rotationzoo.text.chats import ChatTemplate
from rotationzoo.text.documents import HELD_OUT, Sample
from rotationzoo.text.rows import start_tokens, tokenize

TASKS = ("needles", "key-value", recall.QUOTE)
LENGTHS = (1024, 2048, 4096, 6144)  # tokens of a prompt
_SEEDS = 100_000  # a half's own: more than the longest prompt, which is added


@dataclass(frozen=True)
class Split:
    """One half of the texts and questions."""

    name: str
    turn: int  # its place among the two halves, which get documents in turn
    pool: str  # the words of its keys: a key of `questions.POOLS`

    @property
    def documents(self) -> list[str]:
        """Its texts."""
        lines = HELD_OUT.read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["text"] for line in lines[self.turn :: len(SPLITS)]]

    def tokens(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The ids of all its texts, without start tokens."""
        template, data = ChatTemplate(tokenizer), Data(source=str(HELD_OUT))
        samples = [Sample(number, text, {}, []) for number, text in enumerate(self.documents, 1)]
        return list(chain.from_iterable(tokenize(each, template, data) for each in samples))

    def rows(self, tokenizer: PreTrainedTokenizerBase, length: int) -> list[list[int]]:
        """Its texts, cut into whole rows of so many tokens, which begin as every request does."""
        start, ids = start_tokens(tokenizer), self.tokens(tokenizer)
        size = length - len(start)
        return [start + ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]

    def prompts(
        self,
        tokenizer: PreTrainedTokenizerBase,
        task: str,
        length: int,
        questions: range,
        cache: CacheLayout,
    ) -> list[Prompt]:
        """The prompts of a task that have these questions, with all questions of these prompts.
        All answers lie outside the cache's exact windows."""
        each = min(recall.TASKS[task], len(questions))
        first, last = questions.start // each, -(-questions.stop // each)
        seed = (1 + self.turn) * _SEEDS + length
        settings = PromptSettings(
            task, last, length, each, cache.sink, cache.reach, seed, self.pool
        )
        return write_prompts(settings, tokenizer, self.tokens(tokenizer))[first:]


DEV = Split("dev", 0, "choose")
TEST = Split("test", 1, "judge")
SPLITS = {split.name: split for split in (DEV, TEST)}
