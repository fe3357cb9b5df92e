"""Orientation and composition of files, recognised from the matrices whatever the files say."""

import pytest
import torch
from support.oscar_files import DIM, LAYERS, MOMENTS, published, query_moment, v1
from support.tensors import stored_rotations, stored_statistics

from rotationzoo.checks.verify import verify
from rotationzoo.engines.recognise import pair_contrast


def test_a_fork_whose_eigenvectors_descend(pair):
    """It claims the published name; the order of its eigenvalues tells."""
    pair.key = v1("key", "qqt_r_h_pbr", descending=True)
    pair.value = v1("value", "sst_r_h_pbr", descending=True)
    artifact = pair.read()
    notes = artifact.content["imported"]["notes"]
    assert artifact.content["recipe"]["composition"] == "rdesc_h_br"
    assert sum("descending order" in note for note in notes) == 2
    assert verify(artifact).ok
    moment = stored_statistics(artifact)["layers.0.query.second_moment"][0]
    assert (moment - MOMENTS["key"][0]).norm() < 1e-6 * moment.norm()


def test_transposed_matrices_are_recognised(pair):
    for side in (pair.key, pair.value):
        for entry in side["layers"].values():
            entry["rotation"] = entry["rotation"].T.contiguous()
    assert "transposed: R is its M^T (add --transposed" in pair.refused()
    artifact = pair.read(transposed=True)
    expected, _ = published(MOMENTS["key"][0])
    assert torch.equal(stored_rotations(artifact)["layers.0.key.rotation"][0], expected)


def slow_directions(dim: int, seed: int, strength: float) -> torch.Tensor:
    """A query moment whose strongest directions turn too slowly for RoPE to balance their pairs, as
    few positions leave it."""
    generator = torch.Generator().manual_seed(seed)
    moment = query_moment(dim, seed)
    basis, _ = torch.linalg.qr(torch.randn(dim, 24, generator=generator, dtype=torch.float64))
    return moment + strength * torch.linalg.eigvalsh(moment)[-1] * basis @ basis.mT


@pytest.mark.parametrize("strength", [0.8, 2.0])
def test_a_stated_composition_is_believed_against_the_mark_of_rope(pair, strength):
    """Four of six published pairs have a contrast of .38 to .54, and less with their eigenvalues in
    reverse."""
    for i, entry in pair.key["layers"].items():
        entry["rotation"], entry["eigenvalues"] = published(slow_directions(DIM, i, strength))
    artifact = pair.read()
    assert artifact.content["recipe"]["name"] == "oscar-v1"
    (note,) = artifact.content["imported"]["notes"]
    assert note.startswith("the files do not say clip ratios")
    statistics = stored_statistics(artifact)
    moments = [statistics[f"layers.{i}.query.second_moment"] for i in range(LAYERS)]
    expected = slow_directions(DIM, 0, strength)
    assert (moments[0][0] - expected).norm() < 1e-6 * expected.norm()
    contrast = pair_contrast(torch.cat(moments))
    assert contrast > 0.35, "where the mark alone would not do"


@pytest.mark.parametrize("said", ["qqt_r_h", "qqt_br", "qqt_plain", "qqt_h_r_pbr"])
def test_a_real_contradiction_is_still_told(pair, said):
    """The matrices are U H P, and the files say that they are something else."""
    pair.key["objective"], pair.value["objective"] = said, said.replace("qqt", "sst")
    artifact = pair.read(f"k_rotation_{said}.pt", f"v_rotation_{said.replace('qqt', 'sst')}.pt")
    composition = said.removeprefix("qqt_")
    note = f"the files say {composition}, and the matrices are of another composition"
    assert note in artifact.content["imported"]["notes"]
    assert artifact.statistics is None, "they would be those of other vectors"


@pytest.mark.parametrize("what", ["swapped", "transposed"])
def test_matrices_tell_where_files_say_nothing(pair, what):
    """Bare tables without a word of their composition."""
    if what == "swapped":
        pair.key, pair.value = pair.value, pair.key
    for side in (pair.key, pair.value):
        for entry in side["layers"].values():
            if what == "transposed":
                entry["rotation"] = entry["rotation"].T.contiguous()
            del entry["eigenvalues"]
        side["objective"] = "unheard of"
    words = "keys and values are" if what == "swapped" else "holds its matrices"
    assert f"{words} {what}" in pair.refused("k_rotation.pt", "v_rotation.pt")
