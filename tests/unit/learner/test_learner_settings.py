import subprocess
import sys

import pytest

from clawhpc.learner.settings import LearnerSettings


def test_settings_import_no_torch() -> None:
    heavy = "{'torch', 'lightning', 'transformers', 'tokenizers'}"
    code = f"import sys, clawhpc.learner.settings; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"normaliser": "words"}, r"learner.normaliser='words': allowed are token, rollout, constant"),
        ({"precision": "16-true"}, "learner.precision"),
        ({"epochs": 0}, "learner.epochs=0: must be at least 1"),
        ({"truncation": 0.0}, "learner.truncation"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_what_is_allowed(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerSettings(**wrong)
