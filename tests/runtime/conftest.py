import pytest
from support.float64 import all_in_float64


@pytest.fixture(autouse=True)
def float64():
    """Models of float64 weights compute nothing in float32."""
    with all_in_float64():
        yield
