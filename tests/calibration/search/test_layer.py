"""The choice in one layer."""

import torch
from support import architectures
from support.searches import ROWS, samples_of, search_recipe

from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.search.layer import LayerSearch
from rotationzoo.model.geometry import cached_layers


def test_layers_that_share_a_cache_are_no_more_texts():
    """A standard error over texts must not shrink because several layers read each of them."""
    model = architectures.build("gemma4")
    geometry, samples = samples_of(model)
    recipe = search_recipe(steps=0)
    statistics = collect(model, geometry, [torch.stack(ROWS)], recipe)
    baseline = fit(statistics, recipe, geometry)
    for layer in cached_layers(geometry):
        search = LayerSearch(
            layer, statistics[layer.index], recipe, baseline[layer.index], samples[layer.index]
        )
        key = search.choose_keys()
        assert len(key.scores) == len(search.choose_values(key).scores) == len(ROWS)
        assert len(samples[layer.index]) > len(ROWS)
