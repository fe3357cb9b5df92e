"""The choice in one layer."""

import torch
from support import architectures
from support.searches import ROWS, read_projections, search_recipe, stored_samples

from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.search.frame import LayerData
from rotationzoo.calibration.search.layer import LayerSearch
from rotationzoo.model.geometry import cached_layers


def test_layers_that_share_a_cache_are_no_more_texts():
    """A standard error over texts must not shrink because several layers read each of them."""
    model = architectures.build("gemma4")
    geometry, samples = stored_samples(model)
    projections = read_projections(model, geometry)
    recipe = search_recipe(steps=0)
    statistics = collect(model, geometry, [torch.stack(ROWS)], recipe)
    baseline = fit(statistics, recipe, geometry)
    for layer in cached_layers(geometry):
        data = LayerData(statistics[layer.index], samples[layer.index], projections)
        search = LayerSearch(layer, data, recipe, baseline[layer.index])
        key = search.rank("key", search.make_forms("key")).chosen
        value = search.rank("value", search.make_forms("value"), key).chosen
        assert len(key.scores) == len(value.scores) == len(ROWS)
        assert len(samples[layer.index].queries) > len(ROWS)
