"""The models of every family that the tests of exactness share, each computed by plain transformers once."""

import pytest

from tests.core.exactness import FAMILIES, Subject, subject_of


@pytest.fixture(scope="session", params=list(FAMILIES))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_of(request.param, 250, tmp_path_factory.mktemp("classifier") / request.param)
