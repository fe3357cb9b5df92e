"""The cache for transformers' `generate` that really stores keys and values in 2 bits."""

import logging
from functools import cache
from pathlib import Path
from statistics import mean
from types import MethodType
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, cache_utils

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.reductions import reduced_rotations
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.cache import layer as cached
from rotationzoo.cache.layer import RotatedHybridLayer, RotatedLayer, RotatedSlidingLayer
from rotationzoo.cache.paged_attention import PageReading, watch_attention
from rotationzoo.codec import settings as caches
from rotationzoo.codec.engine_needs import DEFAULT, check_sides, find_engine
from rotationzoo.codec.formats import SIMULATED
from rotationzoo.codec.options import CacheOptions, Layout, Reading
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.errors import RotationZooError, UnsupportedModel, UsageError
from rotationzoo.geometry import check_group_size, shares_blocks, shift_reason, shifted_layers
from rotationzoo.model.capture import cache_argument, decoder
from rotationzoo.model.changing_rope import changing_ropes, check_factors, generate
from rotationzoo.model.compatibility import check_fits, warn_of_other_weights
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.loading import input_device
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.recipe.rope import changing_at
from rotationzoo.rotations import Rotations
from rotationzoo.words import counted

_say_once = cache(logging.getLogger("rotationzoo").warning)
_SLOW = "on a CPU, RotatedCache saves memory and no time: a token takes 2 to 4 times as long"

Given = str | Path | Artifact | Rotations | None


class RotatedCache(DynamicCache):
    """A KV cache that stores 2 bits: `model.generate(..., **RotatedCache(...).argument)`.

    * `rotations`: an artifact, as `rotationzoo.pull` returns it, its folder, or `Rotations`. None
      is no rotation. An evaluation gives the `CacheSettings` of an arm;
    * `model`: the transformers model that will read the cache;
    * `engine`: store an artifact as this engine does, such as `sglang`, unless other options say
      otherwise. The default, `transformers`, uses all of the artifact;
    * `format`: `segments` (the default for an artifact with transform coding), `sglang` (otherwise
      the default) or `vllm`;
    * `bits`: another budget of bits per element, for an artifact that has one;
    * `sink`, `recent`: how many first and last tokens stay exact, by default as the recipe says;
    * `group_size`: channels that share a scale; by default the recipe's, or the whole head;
    * `prefill_layout`: which earlier tokens a chunk of a prompt reads exact: `server`, the default,
      only the sink; `window`, as in vLLM, also the `recent` tokens before the chunk;
    * `reading`: whether a decoding step reads `rows` that are restored and rotated back, layer by
      layer, or the `pages` of codes. `auto`, the default, reads pages if there is a kernel for it,
      on an NVIDIA GPU. Everything else reads rows;
    * `slack`: how many candidate tokens assisted decoding may take back, 64 by default.

    A cache serves one request or one batch; `cache.reset()` empties it for the next. Layers with
    attention store packed codes between two exact windows (`RotatedLayer`). Layers without keys and
    values, such as linear attention, stay as in transformers, and so do layers that read another
    layer's cache.

    `update` returns keys and values in the model's own frame, for one layer at a time. So every
    model and attention function can read it, and it takes the memory of the codes and of one
    layer's keys and values.

    Raises `RotationZooError` if the rotations do not fit the model, if they center keys and the
    model's attention does not ignore that, or if the cache is read with both kinds of LongRoPE
    factors; `UnsupportedModel` for keys and values that this cache cannot store; and `UsageError`
    for anything but a transformers model.
    """

    def __init__(
        self,
        rotations: Given | CacheSettings,
        model: PreTrainedModel,
        *,
        engine: str | None = None,
        format: str | None = None,
        bits: float | None = None,
        sink: int | None = None,
        recent: int | None = None,
        group_size: int | None = None,
        prefill_layout: Layout | None = None,
        reading: Reading = "auto",
        slack: int = 64,
    ) -> None:
        options = CacheOptions(
            engine=engine,
            format=format,
            bits=bits,
            sink=sink,
            recent=recent,
            group_size=group_size,
            prefill_layout=prefill_layout,
            reading=reading,
            slack=slack,
        )
        check_model(model)
        if isinstance(rotations, str | Path):
            rotations = Artifact.open(Path(rotations).expanduser())
        settings = build_settings(rotations, model, options)
        if rotations is not settings and input_device(model).type == "cpu":
            _say_once(_SLOW)
        super().__init__()
        self.settings = settings
        (self._name,) = cache_argument(model, None)
        self.padding = cached.Padding()
        self.layers = self._build_layers(model)
        self.layer_class_to_replicate = None
        _check_means(settings.codec.rotations, model)
        cached.watch_padding(model)
        self.page_reading = PageReading(settings.reading != "rows")
        watch_attention(model)
        self._boundary, self._is_long = changing_at(model.config), False
        if changing_ropes(decoder(model)):  # which a request has to be read whole with
            untyped: Any = model
            untyped.generate = MethodType(generate, model)
        if isinstance(rotations, Artifact):
            warn_of_other_weights(rotations, model)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values `[B, H, T, D]` of new tokens, and return what a query reads:
        `LazyRows` for a decoding step, if the running model's attention can read pages."""
        if self._boundary:
            tokens = self.get_seq_length(layer_idx), key_states.shape[-2]
            self._is_long = check_factors(self._boundary, *tokens, self._is_long)
        if self.page_reading.readers and layer_idx < len(self.layers):
            layer = self.layers[layer_idx]
            if isinstance(layer, RotatedLayer):
                return layer.update(key_states, value_states, masks=self.page_reading.masks)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def __repr__(self) -> str:
        codec, format = self.settings.codec, self.settings.layout.format
        sides = codec.rotations.each()
        bits = mean(codec.stored_bits(at, side, each.dim, format) for at, side, each in sides)
        name = next(name for name, known in SIMULATED.items() if known == format)
        tokens = counted(max((layer.columns for layer in self.rotated_layers), default=0), "token")
        size = f"{tokens}, {self.bytes_held:,} bytes"
        return f"RotatedCache({bits:.2f} bits an element quantized, format {name}, {size})"

    @property
    def argument(self) -> dict[str, "RotatedCache"]:
        """This cache by its name in the model: `cache`, or `past_key_values` before 5.24."""
        return {self._name: self}

    @property
    def rotated_layers(self) -> list[RotatedLayer]:
        """The layers that store codes."""
        return [layer for layer in self.layers if isinstance(layer, RotatedLayer)]

    @property
    def bytes_held(self) -> int:
        """The bytes of every tensor that the cache holds: codes, scales and offsets with the unused
        part of the last blocks, exact windows, and the states of layers without attention. All
        caches of a model share its rotations, which are not counted."""
        storages = [tensor.untyped_storage() for tensor in self.tensors()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def bytes_in_bf16(self) -> int:
        """The bytes of the same tokens in transformers' own cache in bfloat16."""
        states = sum(state.nbytes for layer in self.layers for state in cached.states_of(layer))
        return states + sum(layer.bf16_bytes for layer in self.rotated_layers)

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that the cache holds."""
        tensors = [tensor for layer in self.rotated_layers for tensor in layer.tensors()]
        return tensors + [state for layer in self.layers for state in cached.states_of(layer)]

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, given as a negative number. Raises as `RotatedLayer.crop`."""
        for layer in self.rotated_layers:
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        if not self.get_seq_length():
            self.padding.forget()

    def reset(self) -> None:
        """Forget everything, for the next prompt."""
        for layer in self.layers:
            layer.reset()
        self.padding.forget()

    def _build_layers(self, model: PreTrainedModel) -> list[Any]:
        untyped: Any = model
        rotations, name = self.settings.codec.rotations, type(model).__name__
        simulate = "evaluate it in a simulation: rotationzoo evaluate"
        hint = "give the rotations of this model"
        if not untyped._supports_default_dynamic_cache():
            raise UnsupportedModel(f"{name} takes only a cache of a class of its own", simulate)
        config = model.config.get_text_config(decoder=True)
        layers: list[Any] = [*DynamicCache(config=config).layers]
        if unknown := [index for index in rotations if index >= len(layers)]:
            problem = f"the rotations are for layer {unknown[0]}"
            raise RotationZooError(f"{problem}, and {name} caches {len(layers)} layers", hint)
        for index, layer in enumerate(layers):
            if type(layer) is cache_utils.DynamicSlidingWindowLayer:
                window = layer.sliding_window
                layers[index] = RotatedSlidingLayer(self.settings, index, self.padding, window)
            elif type(layer) is cache_utils.DynamicLayer:
                layers[index] = RotatedLayer(self.settings, index, self.padding)
            elif type(layer) is cache_utils.LinearAttentionAndFullAttentionLayer:
                states = layer.number_of_states
                layers[index] = RotatedHybridLayer(self.settings, index, self.padding, states)
            elif hasattr(layer, "get_seq_length"):
                problem = f"layer {index} of {name} keeps a {type(layer).__name__}"
                says = f"{problem}, which this cache cannot store in 2 bits"
                raise UnsupportedModel(says, simulate)
            elif index in rotations:
                problem = f"layer {index} of {name} stores no keys and values"
                raise RotationZooError(f"{problem}, and there are rotations for it", hint)
        return layers


def check_model(model: object) -> None:
    """Raise `UsageError` for anything but a transformers model."""
    if not isinstance(model, PreTrainedModel):
        hint = "give what from_pretrained returns; of a PEFT model, model.get_base_model()"
        raise UsageError(f"a {type(model).__name__} is not a transformers model", hint)


def _check_means(rotations: Rotations, model: PreTrainedModel) -> None:
    """Raise `RotationZooError` if keys lose a mean that attention needs, as calibration does."""
    keys = [rotation for _, side, rotation in rotations.each() if side == "key"]
    if all(rotation.mean is None for rotation in keys):
        return
    if layers := shifted_layers(geometry_of(model)):
        problem = f"keys of this model cannot be centered: {shift_reason(layers)}"
        hint = "give rotations of a recipe without center_keys"
        raise RotationZooError(problem, hint)


def build_settings(
    rotations: Given | CacheSettings, model: PreTrainedModel, options: CacheOptions
) -> CacheSettings:
    """The settings of a cache of this model, with the arguments and errors of `RotatedCache`."""
    if isinstance(rotations, CacheSettings):
        if options != CacheOptions():
            raise UsageError("settings of a cache take no options", hint="leave out the options")
        return rotations
    recipe, engine = Recipe(), options.engine or DEFAULT
    if isinstance(rotations, Artifact):
        recipe = rotations.recipe
        check_fits(rotations, model)
        check_sides(engine, rotations.rotations.sides)
        entry = find_engine(engine)
        budget = None if options.bits is None else Budget(options.bits)
        if not entry.sliding:  # the engine keeps layers with a sliding window exact
            others = shares_blocks(model.config)
            budget = caches.budget_beside_others(budget, recipe.budget, others)
        rotations = reduced_rotations(rotations, not entry.heads, entry.uncentered, budget)
    elif rotations is None:
        rotations = fit(None, PRESETS["identity"], geometry_of(model))
    elif not isinstance(rotations, Rotations):
        hint = "give an artifact or its folder, or None"
        raise UsageError(f"an object of type {type(rotations).__name__} holds no rotations", hint)
    elif options.bits is not None:
        raise UsageError("bits is for an artifact, whose recipe it changes", hint="leave it out")
    settings = caches.complete_settings(recipe, rotations, options)
    dims = {rotation.dim for _, _, rotation in rotations.each()}
    check_group_size(settings.layout.group_size, dims)
    return settings
