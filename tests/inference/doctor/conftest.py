"""A target and heads for it that are fitted once."""

import pytest

from outrider.draft_models.targets.open_target import open_target
from tests.inference.doctor.fitted import Clinic, fitted, recordings, save_plain_target


@pytest.fixture(scope="session")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Clinic:
    folder = tmp_path_factory.mktemp("clinic")
    stack = save_plain_target(folder / "target")
    target = open_target(str(folder / "target"))
    texts = recordings(stack)
    return Clinic(folder, target, stack, texts, fitted(stack, texts), fitted(stack, texts, still=True))
