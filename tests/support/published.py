"""A published artifact, both loopback hubs and keys, for every test that publishes or fetches."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.hubs import huggingface, modelscope

ZOO = "someone/zoo"


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    from rotationzoo.calibration.job import calibrate
    from rotationzoo.calibration.plan import Job
    from rotationzoo.recipe import PRESETS, Data

    recipe = PRESETS["oscar"].model_copy(update={"data": Data(tokens=2048, length=512)})
    return calibrate(
        Job("demo", recipe, tmp_path_factory.mktemp("zoo") / "made", device="cpu")
    ).folder


@pytest.fixture
def zoo(inside, monkeypatch, tmp_path):
    """Both hubs, and the command line in this process pointed at them, with an empty cache."""
    import huggingface_hub

    with huggingface.serve() as hf, modelscope.serve() as ms:
        address = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(
            huggingface_hub.constants.ENDPOINT, hf.endpoint
        )
        changed = {
            "ENDPOINT": hf.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": address,
            "HF_HUB_OFFLINE": False,
        }
        changed |= {"HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_TELEMETRY": True}
        for name, value in changed.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setattr(
            "huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets")
        )
        monkeypatch.setenv("HF_TOKEN", hf.token)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        for name, value in ms_environment(ms, tmp_path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("rotationzoo.zoo.hubs.protocol._PAUSE_SECONDS", 0.0)

        def run(*words) -> SimpleNamespace:
            return inside(*words)

        def forget() -> None:
            shutil.rmtree(tmp_path / "assets", ignore_errors=True)

        yield SimpleNamespace(
            hf=hf,
            ms=ms,
            run=run,
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


def ms_environment(ms, tmp_path) -> dict[str, str]:
    return {
        "MODELSCOPE_ENDPOINT": ms.endpoint,
        "MODELSCOPE_API_TOKEN": ms.token,
        "MODELSCOPE_HOME": str(tmp_path / "ms-home"),
        "MODELSCOPE_CACHE": str(tmp_path / "ms-cache"),
    }


def ok(result) -> dict:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


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
