"""The record of what a server with an artifact's rotations answers, with which `checks.server`
compares a running one."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.artifact.measured import Probe
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation.compatibility import other_weights_note
from rotationzoo.model.loading import forward_errors, input_device
from rotationzoo.model.rope import position_count
from rotationzoo.model.source import Source
from rotationzoo.recipe import Data
from rotationzoo.runtime.cache import RotatedCache
from rotationzoo.runtime.settings import CacheSettings
from rotationzoo.runtime.vllm.settings import Options, make_settings
from rotationzoo.text.documents import HELD_OUT
from rotationzoo.text.rows import read_corpus

PROMPTS, PROMPT, ANSWER = 4, 1024, 16
"""How many prompts are recorded, and the tokens of each and of its answer."""
CANDIDATES = 5
"""As many as every server with OpenAI's API gives log probabilities of."""


def record_probes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, artifact: Artifact, source: Source
) -> list[Probe]:
    """Let a model continue bundled text through the cache that `serve` makes of an artifact.

    Raises `RotationZooError` where no server can read the artifact with these weights, and where
    the model has too few positions for an answer that reads codes.
    """
    if note := other_weights_note(artifact, source):
        raise RotationZooError(note)
    settings = make_settings(Options(artifact=str(artifact.folder)), source)
    positions = position_count(model.config) or PROMPT + ANSWER
    length = min(PROMPT, positions - ANSWER)
    if length <= settings.layout.sink + settings.layout.recent:
        raise RotationZooError(f"no token of a prompt of {length} would be read from codes")
    data = Data(source=str(HELD_OUT), tokens=PROMPTS * length, length=length)
    prompts = read_corpus(data, tokenizer).rows
    with forward_errors(source.name, 1, length):
        return [_record(model, prompt, settings) for prompt in prompts]


@torch.no_grad()
def _record(model: PreTrainedModel, prompt: torch.Tensor, settings: CacheSettings) -> Probe:
    """The answer to a prompt `[T]`."""
    device, cache = input_device(model), RotatedCache(settings, model)
    row, logits, start = prompt, torch.tensor([]), 0
    # The prompt is one chunk, as in a server: it reads itself exact, and the tokens after it codes.
    for _ in range(ANSWER):
        ids, start = row[None, start:].to(device), len(row)
        output = model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        logits = torch.cat([logits, output.logits[0].float().cpu()])
        row = torch.cat([row, logits[-1:].argmax(-1)])
    ids = row[None, :-1].to(device)
    exact = model(input_ids=ids, use_cache=False, logits_to_keep=ANSWER).logits[0].float().cpu()
    read, candidates = logits.log_softmax(-1).topk(CANDIDATES)
    return Probe(
        prompt=prompt.tolist(),
        tokens=row[len(prompt) :].tolist(),
        candidates=candidates.tolist(),
        log_probabilities=read.tolist(),
        exact=exact.log_softmax(-1).gather(1, candidates).tolist(),
    )
