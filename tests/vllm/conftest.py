"""What tests of a real vLLM share."""

import pytest
from support.codec import compile_program, programs_on_cpu  # noqa: F401
from support.jobs import calibrate_short
from support.recipes import CODED
from support.vllm import TEXT

from rotationzoo.artifact.store import Artifact


@pytest.fixture(scope="session")
def ids(tokenizer) -> list[int]:
    """The tokens of the text."""
    return tokenizer(TEXT).input_ids


@pytest.fixture(scope="session")
def coded(tmp_path_factory) -> Artifact:
    """With transform coding: heads and layers take different bytes."""
    return calibrate_short("demo", tmp_path_factory.mktemp("coded") / "coded", CODED)
