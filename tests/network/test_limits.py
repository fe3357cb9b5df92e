"""The size of a download whose answer states its length."""

import pytest

from rotationzoo.errors import HubError
from rotationzoo.network.limits import save_chunks


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("stated", ["", "4", "99", "9" * 5000, "-1", "4, 4"])
def test_a_stated_length_lowers_the_limit_if_it_is_a_number(tmp_path, stated):
    save_chunks([b"ab", b"cd"], tmp_path / "file", 9, "it", {"content-length": stated})
    assert (tmp_path / "file").read_bytes() == b"abcd"
    with pytest.raises(HubError, match="it sent more than 3 bytes"):
        save_chunks([b"ab", b"cd"], tmp_path / "file", 9, "it", {"content-length": "3"})
