"""The model as the harness asks it: with prompts, stop strings and scores of the harness, and a
cache that a simulation can read."""

import sys
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM, stop_sequences_criteria
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.evaluation.forward import CacheReader
from rotationzoo.model.loading import input_device
from rotationzoo.progress import Progress
from rotationzoo.simulation.simulated import cache_of_all_positions
from rotationzoo.text.chats import ChatTemplate


@dataclass(frozen=True)
class Row:
    """The tokens that the model read for one request."""

    task: str
    tokens: int
    """All tokens that it read: the prompt, and the answer but for its last token."""
    answer: int | None = None
    """Tokens that it generated, with the stop string or the end token; None where it only scored an
    answer that was given."""
    truncated: bool = False
    """Whether a generated answer ended only because it reached the task's largest length."""


class HarnessModel(HFLM):  # type: ignore[misc]
    """lm-evaluation-harness' own model class around a model that is already loaded.

    Prompts, truncation of long contexts, stop strings and scores are the harness' own. Differences:

    * Requests run one at a time, without padding, because a simulated cache counts positions from
      the start of the row.
    * While `through` is set, it reads everything in place of a simulation.
    * While `reads_simulation` is set, answers are generated with a KV cache that keeps all
      positions, which the simulation reads through the codec at each step. Models that need a cache
      class of their own read the whole row again for each token.
    * Log likelihoods are computed in one forward pass, as the harness does it. Inside a
      `Simulation`, every position of that pass reads what it would read when decoding.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, progress: Progress
    ):
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1)
        self._device = input_device(model)
        self._progress = progress
        self._template = ChatTemplate(tokenizer)
        # Where progress is shown while the model works; the harness' own output goes nowhere.
        self._stderr = sys.stderr
        self.reads_simulation = False
        self.through: CacheReader | None = None
        """The real cache that is read in place of a simulation, if any."""
        self.reader = ""
        """The arm that answers, by whose name progress is told."""
        self.rows: list[Row] = []
        """The rows that were read since this list was last emptied."""
        self._task, self._stage, self._done, self._total = "", "", 0, 0
        # The tasks of scored requests, in their order; the windows of a rolling text have no task.
        self._scored_tasks: list[str] = []

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a chat, as the harness makes it, within the limits of `ChatTemplate`: without
        the system's turn where the template refuses that."""
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **self.chat_template_args,
        }
        try:
            return self._template.render(chat_history, **options)
        except ValueError:
            turns = [turn for turn in chat_history if turn["role"] != "system"]
            return self._template.render(turns, **options)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """One text per request, in the order given; the harness sorts them by length otherwise."""
        texts: list[str] = []
        self._start_stage("answering", requests)
        with redirect_stderr(self._stderr):
            for request in requests:
                self._task = request.task_name
                texts += super().generate_until([request], disable_tqdm=True)
                self._tell_progress()
        return texts

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any
    ) -> torch.Tensor:
        """Continue `context` `[1, T]` greedily, unless the task's options say otherwise."""
        if not options.get("temperature"):
            options.pop("temperature", None)
            options.setdefault("do_sample", False)
        options["use_cache"] = True
        if self.reads_simulation:
            cache: DynamicCache | None
            if self.through:
                # The last token of the prompt is left for `generate`.
                cache, _ = self.through.read(context[:, :-1])
            else:
                cache = cache_of_all_positions(self.model)
            options |= {"past_key_values": cache, "cache_implementation": None}
            options["use_cache"] = cache is not None
        rows: torch.Tensor = self.model.generate(
            input_ids=context,
            max_length=max_length,
            stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, context.shape[1], 1),
            pad_token_id=self.tokenizer.pad_token_id,
            **options,
        )
        answer = rows[0, context.shape[1] :]
        truncated = rows.shape[1] >= max_length and not self._is_finished(answer, stop)
        self.rows.append(Row(self._task, rows.shape[1] - 1, len(answer), truncated))
        return rows

    def _is_finished(self, answer: torch.Tensor, stop: list[str]) -> bool:
        """Whether an answer's token ids `[N]` hold a stop string or end in an end token."""
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        if any(token in ends for token in answer[-1:].tolist()):
            return True
        text = self.tokenizer.decode(answer)
        return any(word in text for word in stop)

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The log likelihood of each continuation, and whether it is greedy."""
        self._scored_tasks = [request.task_name for request in requests]
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return scores

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        for task, (_, context, continuation) in zip(self._scored_tasks, requests, strict=False):
            self.rows.append(Row(task, len(context) + len(continuation) - 1))
        self._scored_tasks = []
        self._start_stage("scoring", requests)
        with redirect_stderr(self._stderr):
            scores: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, True)
        return scores

    @torch.no_grad()
    def _model_call(self, inps: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        reader = self.through or self.model
        logits: torch.Tensor = reader(input_ids=inps, use_cache=False).logits
        self._tell_progress()
        return logits

    def _start_stage(self, verb: str, requests: list[Any]) -> None:
        # A stage of its own for each kind of request, because each has its own number and speed.
        self._stage = f"{verb}, {self.reader}"
        self._done, self._total = 0, len(requests)

    def _tell_progress(self) -> None:
        self._done += 1
        self._progress(self._stage, self._done, self._total)
