"""Pages that a KV connector of vLLM's loads, from another server or from main memory, are read from
codes alone. `make vllm` also installs NIXL."""

import copy
import random
import socket
import subprocess
from pathlib import Path

import pytest
from support.codec import on_gpu
from support.vllm import NEEDS_VLLM, NGRAMS, PYTHON, TOKENS, drive, engine_job, environment, hold
from support.vllm_answers import (
    FLIPPED_EARLY,
    assert_same,
    differences,
    read_in_transformers,
    read_loaded,
)

from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.recipe.loading import PRESETS

pytestmark = NEEDS_VLLM
FIND_NIXL = [PYTHON, "-c", "import nixl._api"]
HAS_NIXL = PYTHON.exists() and subprocess.run(FIND_NIXL, capture_output=True).returncode == 0
LENGTH, BLOCK = 700, 64
FEW = {"block_size": BLOCK, "max_model_len": 768, "num_gpu_blocks_override": 1 + 768 // BLOCK}
"""Blocks for one request, and one more that vLLM takes for itself: another request takes them."""


@pytest.fixture(scope="module")
def prompts(ids) -> tuple[list[int], list[int]]:
    """One, and another."""
    return ids[:LENGTH], ids[LENGTH : 2 * LENGTH]


def assert_loaded(artifact, model, answer: dict, held: int) -> None:
    """That the `held` first tokens were read from codes alone, where others are read exact."""
    expected = read_loaded(artifact, model, answer["ids"], held)[-TOKENS:]
    exact = read_in_transformers(artifact, model, answer["ids"])[-TOKENS:]
    assert differences(exact, expected).mean() > 0.01
    assert_same(answer["answer"], expected, FLIPPED_EARLY)


def nixl(role: str) -> dict:
    """The options of a server that gives pages or takes them."""
    asked = {"kv_connector": "NixlConnector", "kv_role": f"kv_{role}"}
    return {"kv_transfer_config": asked | {"kv_load_failure_policy": "recompute"}}


def is_free(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


def variables() -> dict[str, str]:
    """Of a server on this machine, whose cores two of them share. The system does not hand out its
    port: until it is bound, another socket could get it, and NIXL would wait forever."""
    port = next(filter(is_free, random.sample(range(20_000, 30_000), 99)))
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed with vLLM")


def hand_over(folder: Path, artifact: Path, prompts, others=(), **more) -> list[dict]:
    """The answer of a server that loads the pages of a prompt from another server, after another
    prompt; then the answer of one with each of the `others`. They have `more` options."""
    prompt, another = prompts
    asked = [{"do_remote_decode": True, "do_remote_prefill": False}]
    first = engine_job(artifact, [[prompt]], 1, handed=asked, block_size=BLOCK, **nixl("producer"))
    options, answers = FEW | nixl("consumer") | more, []
    # Of two processes, each has a folder.
    (folder / "first").mkdir()
    with hold(folder / "first", first, **variables()) as prefilled:
        handed = [None, prefilled["rounds"][0][0]["handed"]]
        for each in (artifact, *others):
            job = engine_job(each, [[another], [prompt]], handed=handed, **options)
            answers.append(drive(folder, job, **variables())["rounds"][1][0])
    return answers


ABORTED = """
import pickle
from types import SimpleNamespace
from rotationzoo.vllm.connectors import SaysWhatItLoads

class Own:  # what vLLM's scheduler calls of its connectors
    def __init__(self, *_):
        pass
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 128, True
    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass
    def build_connector_meta(self, scheduler_output):
        return SimpleNamespace()

groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=64))]
connector = type("Ours", (SaysWhatItLoads, Own), {})(
    None, None, SimpleNamespace(kv_cache_groups=groups)
)
before = pickle.dumps(vars(connector))
for number in range(100):  # aborted before they get blocks
    request = SimpleNamespace(request_id=str(number))
    connector.get_num_new_matched_tokens(request, 64)
assert pickle.dumps(vars(connector)) == before
blocks = SimpleNamespace(get_block_ids=lambda: ([7, 8, 9],))
connector.update_state_after_alloc(request, blocks, 128)
assert connector.build_connector_meta(None).loaded_blocks == [8, 9]
assert connector.build_connector_meta(None).loaded_blocks == []
"""


def test_nothing_is_kept_of_requests_that_end_before_they_get_blocks():
    subprocess.run([PYTHON, "-c", ABORTED], env=environment(), check=True, timeout=300)


@needs_nixl
def test_a_server_on_the_loopback_address_hands_its_pages_over(made, demo, prompts, tmp_path):
    """The blocks that a server loads into had exact copies of another request: 0.53 was measured of
    random tokens without forgetting them. From another artifact, it loads nothing and reads the
    prompt itself: 1.5 if that was not compared."""
    other = calibrate(Job("demo", PRESETS["hadamard"], tmp_path / "other", device="cpu")).folder
    answer, refused = hand_over(tmp_path, made, prompts, [other])
    # The last token of a prompt is always computed.
    assert_loaded(made, demo, answer, LENGTH - 1)
    assert_same(refused["answer"], read_in_transformers(other, demo, refused["ids"])[-TOKENS:])


@needs_nixl
def test_pages_of_layers_that_take_different_bytes_are_handed_over(coded, demo, prompts, tmp_path):
    """To a server that drafts n-grams."""
    drafts = NGRAMS | {"num_speculative_tokens": 3}
    (answer,) = hand_over(tmp_path, coded.folder, prompts, speculative_config=drafts)
    assert_loaded(coded.folder, demo, answer, LENGTH - 1)


@on_gpu
@pytest.mark.parametrize("simple", ["0", "1"])
def test_pages_come_back_from_main_memory(simple, coded, demo, prompts, tmp_path, device):
    """Of vLLM's two connectors for it. The second request takes all blocks of the first."""
    prompt, another = prompts
    rounds = [[prompt], [another], [prompt]]
    job = engine_job(coded.folder, rounds, kv_offloading_size=1, **FEW)
    answers = drive(tmp_path, job, VLLM_USE_SIMPLE_KV_OFFLOAD=simple)["rounds"]
    model = copy.deepcopy(demo).to(device)
    assert_loaded(coded.folder, model, answers[2][0], LENGTH // BLOCK * BLOCK)
