"""A published artifact, both loopback hubs and keys, for every test that publishes or fetches."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.command_line import succeeded
from support.hubs import huggingface, modelscope
from support.recipes import QUICK

ZOO = "someone/zoo"


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    from rotationzoo.calibration.calibrate import calibrate
    from rotationzoo.calibration.plan import Job
    from rotationzoo.recipe import Data

    recipe = QUICK.model_copy(update={"data": Data(tokens=2048, length=512)})
    folder = tmp_path_factory.mktemp("zoo") / "made"
    return calibrate(Job("demo", recipe, folder, device="cpu")).folder


@pytest.fixture
def zoo(inside, monkeypatch, tmp_path):
    """Both hubs, and the command line in this process pointed at them, with an empty cache."""
    import huggingface_hub

    with huggingface.serve() as hf, modelscope.serve() as ms:
        point_clients(monkeypatch, hf.endpoint)
        for name, value in (
            ("OFFLINE", False),
            ("DISABLE_XET", True),
            ("DISABLE_TELEMETRY", True),
            ("CACHE", str(tmp_path / "hub-cache")),
        ):
            monkeypatch.setattr(huggingface_hub.constants, f"HF_HUB_{name}", value)
        monkeypatch.setattr(
            "huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets")
        )
        monkeypatch.setenv("HF_TOKEN", hf.token)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        for name, value in ms_environment(ms, tmp_path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("rotationzoo.zoo.hubs.protocol._PAUSE_SECONDS", 0.0)

        def forget() -> None:
            shutil.rmtree(tmp_path / "assets", ignore_errors=True)

        yield SimpleNamespace(
            hf=hf,
            ms=ms,
            run=inside,
            forget=forget,
            assets=tmp_path / "assets",
            state=tmp_path / "state" / "rotationzoo",
            folder=inside.folder,
        )
        assert not hf.leaks, "a token reached another host"
        assert not ms.leaks


@pytest.fixture
def keys(tmp_path) -> SimpleNamespace:
    """Two private keys, and the public key of each."""
    pytest.importorskip("model_signing", reason="the extra `sign` is not installed")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def write(name: str) -> Path:
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (tmp_path / f"{name}.pem").write_bytes(private)
        (tmp_path / f"{name}.pub.pem").write_bytes(public)
        return tmp_path / f"{name}.pem"

    ours, other = write("ours"), write("other")
    return SimpleNamespace(
        ours=ours,
        other=other,
        public=ours.with_suffix(".pub.pem"),
        other_public=other.with_suffix(".pub.pem"),
    )


@pytest.fixture
def listed(zoo, made, tmp_path) -> Path:
    """An index of an artifact that is published on one hub."""
    place = tmp_path / "zoo_index.json"
    ok(zoo.run("push", made, ZOO, "--index", place, "--json"))
    return place


@pytest.fixture
def signed(zoo, made, keys) -> None:
    """An artifact is published, signed with our key."""
    ok(zoo.run("push", made, ZOO, "--sign", keys.ours, "--json"))


def point_clients(monkeypatch, endpoint: str) -> None:
    """Let the clients of both hubs ask this server."""
    from huggingface_hub import constants

    address = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", endpoint)


def hub_environment(hf, ms, tmp_path) -> dict[str, str]:
    """The variables of a process whose clients ask these hubs."""
    variables = {"HF_ENDPOINT": hf.endpoint, "HF_TOKEN": hf.token, "HF_HUB_DISABLE_XET": "1"}
    return variables | ms_environment(ms, tmp_path)


def ms_environment(ms, tmp_path) -> dict[str, str]:
    return {
        "MODELSCOPE_ENDPOINT": ms.endpoint,
        "MODELSCOPE_API_TOKEN": ms.token,
        "MODELSCOPE_HOME": str(tmp_path / "ms-home"),
        "MODELSCOPE_CACHE": str(tmp_path / "ms-cache"),
    }


def ok(result) -> dict:
    return json.loads(succeeded(result).stdout)


def refused(result, code: int = 1) -> str:
    """It failed with this code, in one `Error:` line and at most one `Hint:` line after any
    notes."""
    assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
    notes = ("Read ", "Took ", "Note: ", "Waiting for ", "[")
    lines = [line for line in result.stderr.splitlines() if not line.startswith(notes)]
    assert lines[0].startswith("Error: "), result.stderr
    assert len(lines) <= 2, result.stderr
    assert all(line.startswith("Hint: ") for line in lines[1:])
    assert "hf_test" not in result.stderr + result.stdout
    assert "ms_test" not in result.stderr + result.stdout
    return result.stderr


def nothing_left(zoo) -> bool:
    """No half artifact, and no temporary folder, is in the cache."""
    return not [path for path in zoo.assets.rglob("*") if path.is_file()]


def foreign(objective: str = "qqt_r_h_pbr", layers: int = 2, dim: int = 16, seed: int = 0) -> dict:
    from support.oscar_files import v1_file

    generator = torch.Generator().manual_seed(seed)
    table = {}
    for i in range(layers):
        matrix = torch.linalg.qr(torch.randn(dim, dim, generator=generator))[0]
        table[i] = {"layer_id": i, "rotation": matrix, "eigenvalues": torch.ones(dim)}
    return v1_file(table, objective=objective)


def publish_folder(hub, name: str, folder: Path) -> str:
    """A new repository with the files of a folder. Returns the commit."""
    hub.create(name)
    return hub.commit(name, {path.name: path.read_bytes() for path in folder.iterdir()})


def publish_oscar_pair(zoo, tmp_path, **contents) -> None:
    files = {}
    for name in ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"):
        torch.save(contents.get(name[0], foreign(name[11:-3], seed=ord(name[0]))), tmp_path / name)
        files[f"Qwen3-8B/seq20000_prompt83_group128/{name}"] = (tmp_path / name).read_bytes()
    if "Zhongzhu/OSCAR-RotationZoo" not in zoo.hf.repositories:
        zoo.hf.create("Zhongzhu/OSCAR-RotationZoo")
    zoo.hf.commit("Zhongzhu/OSCAR-RotationZoo", files)


CONFIG = """model: someone/model
extends: oscar
sink: 8
recent: 24
data:
  source: bundled
  tokens: 2048
  length: 256
"""


EVALUATED = ["--tokens", "1024", "--length", "256", "--tasks", "none"]


@pytest.fixture
def model(zoo):
    """The demo model on the hub, a recipe for it, and its rotations published from its first
    revision."""
    from rotationzoo.model.source import DEMO

    publish_folder(zoo.hf, "someone/model", DEMO)
    (zoo.folder / "configs").mkdir()
    (zoo.folder / "configs" / "model.yaml").write_text(CONFIG)
    return "someone/model"


def planned(zoo) -> list[dict]:
    return ok(zoo.run("regenerate", "--plan", "--repo", ZOO, "--json"))["models"]
