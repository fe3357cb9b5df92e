"""A calibration that the tests of this package look at."""

import pytest
from support.jobs import job

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.job import calibrate


@pytest.fixture(scope="session")
def calibrated(tiny, tmp_path_factory) -> Artifact:
    """The artifact of the tiny model, which no test may change."""
    return calibrate(job(tiny, tmp_path_factory.mktemp("calibrated")))
