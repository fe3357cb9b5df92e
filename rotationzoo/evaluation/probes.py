"""A record of the answers that a server should give, with which `checks.server` compares it."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.artifact.measured import Probe
from rotationzoo.artifact.store import Artifact
from rotationzoo.cache.rotated import RotatedCache
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import full_attention_layers, shares_blocks
from rotationzoo.model.changing_rope import reading_whole
from rotationzoo.model.compatibility import other_weights_note
from rotationzoo.model.loading import forward_errors, input_device
from rotationzoo.model.prediction import continue_greedily
from rotationzoo.model.source import Source
from rotationzoo.recipe import Data
from rotationzoo.recipe.rope import position_count
from rotationzoo.text.documents import HELD_OUT
from rotationzoo.text.rows import read_corpus
from rotationzoo.vllm.settings import Options, make_settings

PROMPTS, PROMPT, ANSWER = 4, 1024, 16  # the prompts, and the tokens of each and of its answer
TOKENS = PROMPTS * (PROMPT + ANSWER)  # that the exact model and the cache read for a record
CANDIDATES = 5  # every server with OpenAI's API gives log probabilities of as many


def record_probes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, artifact: Artifact, source: Source
) -> list[Probe]:
    """Let a model continue bundled text through the cache that `serve` makes of an artifact. Raises
    `RotationZooError` if no server can use the artifact with these weights, for layers with a
    sliding window, which a server keeps exact, and for too few positions."""
    if note := other_weights_note(artifact, source):
        raise RotationZooError(note)
    options = Options(artifact=str(artifact.folder))
    has_others = shares_blocks(model.config)
    settings = make_settings(options, source.name, source.folder, has_others)
    if full_attention_layers(model.config) is not None:
        raise RotationZooError("a server keeps layers with a sliding window exact")
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
    # The prompt is one chunk, as in a server: it reads itself exact, and later tokens read codes.
    cache, row = RotatedCache(settings, model), prompt[None].to(input_device(model))
    with reading_whole(model, len(prompt) + ANSWER):
        tokens, logits = continue_greedily(model, row, cache, ANSWER)
        ids = torch.cat([row, tokens[:, :-1]], dim=1)
        exact = model(input_ids=ids, use_cache=False, logits_to_keep=ANSWER).logits[0].float().cpu()
    read, candidates = logits[0].float().cpu().log_softmax(-1).topk(CANDIDATES)
    return Probe(
        prompt=prompt.tolist(),
        tokens=tokens[0].tolist(),
        candidates=candidates.tolist(),
        log_probabilities=read.tolist(),
        exact=exact.log_softmax(-1).gather(1, candidates).tolist(),
    )
