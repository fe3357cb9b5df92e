"""The first answers to the harness' tasks, in words: what a score of 0 or 1 was given for."""

from typing import Any, TypedDict


class KeptAnswer(TypedDict):
    """One answer beside the right one."""

    question: int
    """Its number in the task's data."""
    right: str
    answer: str


def keep_answers(samples: list[dict[str, Any]], count: int) -> list[KeptAnswer]:
    """The first `count` answers among a task's samples, as the harness logs them.

    A task that only scores a given text has no answers.
    """
    kept: dict[int, KeptAnswer] = {}
    for sample in samples:
        question, answer = sample["doc_id"], _answer(sample)
        # A task with several filters has a sample for each, with the same answer.
        if answer is not None and question not in kept and len(kept) < count:
            kept[question] = {"question": question, "right": _right(sample), "answer": answer}
    return list(kept.values())


def _answer(sample: dict[str, Any]) -> str | None:
    """What the model wrote, or which of several choices it finds most likely."""
    responses = [repeats[0] for repeats in sample["resps"]]
    if isinstance(responses[0], str):
        return responses[0]
    context, _ = sample["arguments"][0]
    scores = {}
    for (asked, choice), (log_likelihood, _) in zip(sample["arguments"], responses, strict=True):
        if asked == context:  # others, where there are any, score the choices alone
            scores[choice] = log_likelihood
    return None if len(scores) < 2 else str(max(scores, key=lambda choice: scores[choice])).strip()


def _right(sample: dict[str, Any]) -> str:
    """The right answer in words; the harness gives that of a choice as its number."""
    target = sample["target"]
    if isinstance(target, int) and not isinstance(sample["resps"][0][0], str):
        _, target = sample["arguments"][target]
    if isinstance(target, list):
        target = ", ".join(map(str, target))
    return str(target).strip()
