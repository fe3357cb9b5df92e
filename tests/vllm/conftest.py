"""What tests of a real vLLM share: a text, the demo model, and an artifact of it."""

import pytest
import torch
from support.codec import compile_program, programs_on_cpu  # noqa: F401
from support.jobs import calibrate_short
from support.recipes import CODED
from support.vllm import TEXT
from transformers import AutoModelForCausalLM, PreTrainedModel

from rotationzoo.artifact.store import Artifact
from rotationzoo.model.source import DEMO


@pytest.fixture(scope="session")
def ids(tokenizer) -> list[int]:
    """The tokens of the text."""
    return tokenizer(TEXT).input_ids


@pytest.fixture(scope="session")
def demo() -> PreTrainedModel:
    """The demo model in float32, which no test may change."""
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


@pytest.fixture(scope="session")
def coded(tmp_path_factory) -> Artifact:
    """With transform coding: heads and layers take different bytes."""
    return calibrate_short("demo", tmp_path_factory.mktemp("coded") / "coded", CODED)
