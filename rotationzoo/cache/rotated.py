"""A cache for transformers' `generate` that really stores keys and values in 2 bits."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)

from rotationzoo.cache.decoding_step import reads_pages, update_lazily
from rotationzoo.cache.hybrid_layer import RotatedHybridLayer
from rotationzoo.cache.model_checks import check_means, check_model
from rotationzoo.cache.padding import Padding, watch_padding
from rotationzoo.cache.paged_attention import PageReading, watch_attention
from rotationzoo.cache.rotated_layer import RotatedLayer
from rotationzoo.cache.settings import Storage
from rotationzoo.cache.sliding_layer import RotatedSlidingLayer
from rotationzoo.cache.states import layer_states
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.model.loading import input_device


class RotatedCache(DynamicCache):
    """A cache that holds one arm's codes: `model.generate(..., past_key_values=cache)`.

    Layers with attention store packed codes between two exact windows, as `RotatedLayer` says.
    Layers without keys and values, such as those with linear attention, stay as transformers makes
    them, and so do layers that read another layer's cache.

    `update` returns keys and values in the model's own frame, for one layer at a time. So every
    model and every attention function can read it, and the memory needed is that of the codes and
    of one layer's keys and values.
    """

    storage: Storage

    def __new__(cls, *args: Any, **options: Any) -> "RotatedCache":
        """A cache of the class that the model asks for: a few accept only one of their own."""
        models = [each for each in (*args, *options.values()) if isinstance(each, PreTrainedModel)]
        # Without a model this is a copy, whose class is right already.
        kind = _own_class(models[0]) if models else None
        if kind is None:
            return super().__new__(cls)
        return super().__new__(type(cls.__name__, (cls, kind), {}))

    def __init__(self, storage: Storage, model: PreTrainedModel):
        """An empty cache for this model.

        Raises `RotationZooError` where the rotations are for other layers, or subtract the mean of
        keys although the model's attention does not ignore it, `UnsupportedModel` for kinds of
        layers that this cache does not know, and `UsageError` for what is no transformers model.
        """
        check_model(model)
        super().__init__()
        self.storage = storage
        self.padding = Padding()
        self._planned = self._build_layers(model)
        # A cache class of a model's own takes the number of layers for that of its states, so its
        # layers are added one by one, when they are first updated.
        one_by_one = len(type(self).__bases__) > 1
        self.layers = [] if one_by_one else self._planned
        next_layer: Any = self._next_layer if one_by_one else None
        self.layer_class_to_replicate = next_layer
        check_means(storage, model)
        watch_padding(model)
        self.page_reading = PageReading(storage.reading != "rows")
        watch_attention(model)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values `[B, H, T, D]` of new tokens, and return what a query reads.

        Where the running model's attention can read pages, a decoding step gets `LazyRows`.
        """
        if self.page_reading.is_open and layer_idx < len(self.layers):
            layer = self.layers[layer_idx]
            if isinstance(layer, RotatedLayer) and reads_pages(layer, key_states):
                return update_lazily(layer, key_states, value_states, self.page_reading.masks)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def has_models_class(self) -> bool:
        """Whether the cache is of a class that the model insists on."""
        return self._planned is not self.layers

    @property
    def rotated_layers(self) -> list[RotatedLayer]:
        """The layers that store codes."""
        return [layer for layer in self.layers if isinstance(layer, RotatedLayer)]

    @property
    def bytes_held(self) -> int:
        """The bytes of every tensor that the cache holds: codes, scales and offsets with the unused
        part of the last blocks, exact windows, and the states of layers without attention. The
        rotations, which all caches of a model share, are not counted."""
        storages = {}
        for tensor in self.tensors().values():
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    @property
    def bytes_in_bf16(self) -> int:
        """The bytes that transformers' own cache takes for the same tokens in bfloat16."""
        total = sum(layer.bf16_bytes for layer in self.rotated_layers)
        for name, tensor in self.tensors().items():
            if ".state." in name:
                total += tensor.nbytes
        return total

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that the cache holds, by its name in a file."""
        tensors = {}
        for index, layer in enumerate(self.layers):
            parts = layer.tensors() if isinstance(layer, RotatedLayer) else layer_states(layer)
            for name, tensor in parts:
                tensors[f"layers.{index}.{name}"] = tensor
        return tensors

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, given as a negative number. Raises `RotationZooError` where a
        layer cannot, before any layer changes."""
        for layer in self.rotated_layers:
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        if not self.get_seq_length():
            self.padding.forget()

    def reset(self) -> None:
        """Forget everything, for the next prompt. Raises `RotationZooError` for a model with a
        cache class of its own: what that keeps is not known."""
        if self.has_models_class:
            raise RotationZooError(
                f"a {type(self).__mro__[2].__name__} cannot be emptied", hint="make a new cache"
            )
        for layer in self.layers:
            layer.reset()
        self.padding.forget()

    def _next_layer(self) -> Any:
        return self._planned[len(self.layers)]

    def _build_layers(self, model: PreTrainedModel) -> list[Any]:
        config = model.config.get_text_config(decoder=True)
        layers: list[Any] = [*DynamicCache(config=config).layers]
        rotations = self.storage.arm.rotations
        if unknown := [index for index in rotations if index >= len(layers)]:
            raise RotationZooError(
                f"the rotations are for layer {unknown[0]}, and {type(model).__name__} caches "
                f"{len(layers)} layers",
                hint="give the rotations of this model",
            )
        for index, layer in enumerate(layers):
            if type(layer) is DynamicSlidingWindowLayer:
                window = layer.sliding_window
                layers[index] = RotatedSlidingLayer(self.storage, index, self.padding, window)
            elif type(layer) is DynamicLayer:
                layers[index] = RotatedLayer(self.storage, index, self.padding)
            elif type(layer) is LinearAttentionAndFullAttentionLayer:
                states = layer.number_of_states
                layers[index] = RotatedHybridLayer(self.storage, index, self.padding, states)
            elif hasattr(layer, "get_seq_length"):
                raise UnsupportedModel(
                    f"layer {index} of {type(model).__name__} keeps a {type(layer).__name__}, "
                    "which this cache cannot store in 2 bits",
                    hint="evaluate it in a simulation: rotationzoo evaluate",
                )
            elif index in rotations:
                raise RotationZooError(
                    f"layer {index} of {type(model).__name__} stores no keys and values, and there "
                    "are rotations for it",
                    hint="give the rotations of this model",
                )
        return layers


def _own_class(model: PreTrainedModel) -> type | None:
    """The cache class that a model insists on; None where it takes any."""
    untyped: Any = model
    if untyped._supports_default_dynamic_cache():
        return None
    ids = torch.zeros(1, 1, dtype=torch.long, device=input_device(model))
    with torch.no_grad():
        return type(untyped(input_ids=ids, use_cache=True).past_key_values)
