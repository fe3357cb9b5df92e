"""The public cache: from an artifact, a folder, rotations, or nothing."""

import pytest
import torch
from support import architectures
from support.caches import generate, with_transforms
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from rotationzoo import Artifact, RotatedCache
from rotationzoo.cache import rotated
from rotationzoo.codec.formats import SEGMENTS, SGLANG, VLLM
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError, UsageError

PROMPT = torch.randint(20, 2000, (1, 90), generator=torch.Generator().manual_seed(0))


def test_all_ways_to_name_rotations(demo, made):
    artifact = Artifact.open(made)
    options = {"sink": 4, "recent": 16}
    texts = []
    for rotations in (artifact, str(made), made, artifact.rotations):
        cache = RotatedCache(rotations, demo, **options)
        assert cache.settings.layout.sink == 4
        texts.append(generate(demo, cache, PROMPT, 6))
        assert cache.bytes_held < cache.get_seq_length() * 4 * 2 * 2 * 64 * 4, "less than exact"
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_what_a_cache_says_of_itself(demo, caplog):
    rotated._say_once.cache_clear()
    caches = [RotatedCache(None, demo), RotatedCache(None, demo, format="vllm")]
    assert [message.split(":")[0] for message in caplog.messages] == [
        "on a CPU, RotatedCache saves memory and no time"
    ], "once"
    generate(demo, caches[0], PROMPT, 2)
    held = f"91 tokens, {caches[0].bytes_held:,} bytes"
    assert repr(caches[0]) == f"RotatedCache(3.00 bits an element quantized, format sglang, {held})"
    assert "2.50 bits an element quantized, format vllm, 0 tokens, 0 bytes" in repr(caches[1])


def test_settings_come_from_the_recipe_and_the_options(demo, made):
    settings = RotatedCache(made, demo).settings
    assert settings.layout == CacheLayout(SGLANG, sink=64, recent=256, prefill_layout="server")
    assert (settings.codec.group_size, settings.slack, settings.reading) == (None, 64, "auto")
    options = {"format": "vllm", "group_size": 32, "prefill_layout": "window"}
    settings = RotatedCache(made, demo, **options, slack=7, reading="rows").settings
    assert settings.layout == CacheLayout(VLLM, 64, 256, prefill_layout="window", group_size=32)
    assert (settings.codec.group_size, settings.slack, settings.reading) == (32, 7, "rows")


def test_transform_coding_is_used_where_rotations_have_it(demo, made):
    plain = Artifact.open(made).rotations
    settings = RotatedCache(with_transforms(plain), demo).settings
    assert (settings.codec.rounding, settings.layout.format) == ("transform", SEGMENTS)
    assert RotatedCache(plain, demo).settings.codec.rounding == "nearest"
    other = RotatedCache(with_transforms(plain), demo, format="sglang").settings
    assert (other.codec.rounding, other.layout.format) == ("nearest", SGLANG)
    with pytest.raises(RotationZooError, match="no matrices for transform coding"):
        RotatedCache(plain, demo, format="segments")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "gguf"}, "there is no format 'gguf'"),
        ({"format": "sgland"}, "did you mean 'sglang'"),
        ({"reading": "page"}, "no reading 'page' .did you mean 'pages'"),
        ({"prefill_layout": "windows"}, "no prefill_layout 'windows' .did you mean 'window'"),
        ({"recent": 3.5}, "recent must be a whole number of at least 0, not 3.5"),
        ({"group_size": 0}, "group_size must be a whole number of at least 1, not 0"),
        ({"sink": -1}, "sink must be a whole number of at least 0, not -1"),
        ({"slack": -1}, "slack must be a whole number of at least 0, not -1"),
    ],
)
def test_what_no_cache_can_have_is_refused(demo, options, message):
    with pytest.raises(UsageError, match=message):
        RotatedCache(None, demo, **options)


def test_what_is_no_model_and_no_rotations_is_refused(demo, made):
    with pytest.raises(UsageError, match="a str is not a transformers model"):
        RotatedCache(made, "demo")
    with pytest.raises(UsageError, match="an object of type int holds no rotations"):
        RotatedCache(3, demo)
    with pytest.raises(UsageError, match="bits is for an artifact"):
        RotatedCache(Artifact.open(made).rotations, demo, bits=2.5)


def test_an_artifact_of_another_model_is_refused(made):
    with pytest.raises(RotationZooError, match="made for a model of other layers, heads"):
        RotatedCache(made, architectures.build("qwen3"))


def test_an_artifact_of_other_weights_is_a_warning(demo, made, tmp_path, caplog):
    RotatedCache(made, demo)
    caplog.clear()  # the first cache of a process says that it is slow on a CPU
    RotatedCache(made, demo)
    assert not caplog.records
    other = tmp_path / "other"
    Qwen3ForCausalLM(demo.config).save_pretrained(other)
    RotatedCache(made, AutoModelForCausalLM.from_pretrained(other))
    message = f"{made.name} was made for other weights than {other} has; see: rotationzoo verify"
    assert caplog.messages == [message]
