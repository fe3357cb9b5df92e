"""The statistics of rows with images and audio, held against sums that the test forms itself, in
float64, from the model's own eager attention."""

import copy
import sys
from collections import defaultdict
from functools import cache

import pytest
import torch
from support import architectures, media
from support.cases import quick_first

from rotationzoo.calibration.collect import collect
from rotationzoo.errors import UnsupportedModel
from rotationzoo.model import loading, long_masks
from rotationzoo.model.capture import decoder
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.source import find
from rotationzoo.recipe import Data, Recipe
from rotationzoo.text.rows import MediaRow, read_media_corpus

SINK = 4

pytestmark = media.needs_pillow


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """A function that makes a model by name, and its rows."""

    @cache
    def make(name):
        path = media.write_rows(tmp_path_factory.mktemp(name), rows=3, audio=name == "gemma4")
        columns = {"images": "image", "audio": "sound" if name == "gemma4" else None}
        data = Data(source=str(path), tokens=600, length=160, **columns)
        model, processor = media.build(name)
        return model, read_media_corpus(data, processor, model.config)

    return make


RECIPE = Recipe(sink=SINK)


@torch.no_grad()
def read_whole(model, row):
    """Run a whole model, with its head, on all inputs from its processor."""
    inputs = {}
    for key, tensor in row.inputs.items():
        inputs[key] = tensor.to(model.dtype) if tensor.is_floating_point() else tensor
    model(input_ids=row.ids, **inputs)


class EagerSums:
    """Sums of the inputs and outputs of the eager attention of a model's decoder."""

    def __init__(self, model, geometry, monkeypatch):
        self.moments = defaultdict(dict)
        self.layers = {layer.index: layer for layer in geometry}
        model.set_attn_implementation("eager")
        tower = decoder(model)
        inside = set(map(id, tower.modules()))
        modeling = sys.modules[type(tower).__module__]
        original = modeling.eager_attention_forward

        def attend(module, query, key, value, attention_mask, **options):
            output, weights = original(module, query, key, value, attention_mask, **options)
            if id(module) in inside:
                self.add(self.layers[module.layer_idx], query, key, value, weights)
            return output, weights

        monkeypatch.setattr(modeling, "eager_attention_forward", attend)

    def add(self, layer, query, key, value, weights):
        each = value.double().repeat_interleave(layer.group, dim=1)
        rows = {"query": query, "output": weights.double() @ each}
        if layer.owner == layer.index:
            rows |= {"key": key, "value": value}
        for kind, tensor in rows.items():
            first = SINK if kind in ("key", "value") else 0
            for head in range(layer.kv_heads):
                group = tensor.double()[0].unflatten(0, (layer.kv_heads, -1))[head][:, first:]
                second, count = self.moments[layer.owner].get((kind, head), (0, 0))
                flat = group.flatten(0, 1)
                self.moments[layer.owner][kind, head] = second + flat.T @ flat, count + len(flat)


@pytest.mark.parametrize("name", quick_first(media.FAMILIES, 2))
def test_statistics_are_those_of_the_models_own_eager_attention(name, families, monkeypatch):
    model, corpus = families(name)
    geometry, rows = geometry_of(model), corpus.media
    statistics = collect(model, geometry, rows, RECIPE)
    reference = EagerSums(model := copy.deepcopy(model), geometry, monkeypatch)
    for row in rows:
        assert set(row.is_media.tolist()) == {True, False}
        read_whole(model, row)
    # Eager attention computes its softmax in float32, whatever the model's type.
    tolerance = 100 * torch.finfo(torch.float32).eps
    for owner, sums in reference.moments.items():
        for (kind, head), (second, count) in sums.items():
            moment = statistics[owner][kind]
            assert moment.weight[head] == count, (owner, kind)
            error = (moment.second[head] - second).norm() / second.norm()
            assert error < tolerance, (owner, kind, error)


def test_long_masks_are_bidirectional_among_image_tokens_too(families, monkeypatch):
    model, corpus = families("gemma3")
    geometry = geometry_of(model)
    short = collect(model, geometry, corpus.media, RECIPE)
    monkeypatch.setattr(long_masks, "LARGEST_MASK", 16)
    monkeypatch.setattr(long_masks, "BLOCK_QUERIES", 24)
    long = collect(model, geometry, corpus.media, RECIPE)
    for layer, kinds in short.items():
        for kind, moment in kinds.items():
            torch.testing.assert_close(long[layer][kind].second, moment.second)


def test_inputs_that_a_class_would_drop_are_refused():
    """A class for text accepts pixels without a warning."""
    ids = torch.tensor([[3, 4, 60, 5, 6, 7]])
    row = MediaRow(ids, ids[0] == 60, {"pixel_values": torch.randn(1, 3, 28, 28)})
    model = architectures.build("llama4")
    with pytest.raises(UnsupportedModel, match="Llama4ForCausalLM does not take all of pixel_"):
        collect(model, geometry_of(model), [row], RECIPE)


@pytest.mark.parametrize("name", ["qwen3_5-vlm", "gemma3-vlm"])
def test_the_class_with_a_vision_tower_is_chosen_for_images_alone(name, tmp_path):
    architectures.config(name).save_pretrained(tmp_path)
    config = loading.load_config(source := find(str(tmp_path)))
    names = []
    for marked in (False, True):
        if marked:
            setattr(config, loading.READS_MEDIA, True)
        names.append(type(loading.on_meta(config, source.name)).__name__)
    assert names[1].endswith("ForConditionalGeneration")
    assert (names[0] == names[1]) == (name == "gemma3-vlm"), "Gemma 3 has no class of its own"
