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


@pytest.fixture
def another(tmp_path):
    """A plugin that vLLM loads after ours, and that runs these lines."""

    def install(*lines: str) -> dict[str, str]:
        about = tmp_path / "zz_other-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: zz-other\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text("[vllm.general_plugins]\nzz = zz_other:run\n")
        code = ["from vllm.platforms import current_platform"]
        code += ["from vllm.v1.attention.backends.registry import *", "def run():"]
        code += [f"    {line}" for line in lines]
        (tmp_path / "zz_other.py").write_text("\n".join(code))
        return {"ALSO": str(tmp_path)}

    return install
