"""The scripts that make lab models, and get real ones: what they train on, and checksums."""

import lab_rows
import pytest
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
