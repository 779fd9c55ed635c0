from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clawhpc.learner.policy import create_policy
from clawhpc.learner.tokenizer import train_tokenizer
from tests.fakes.learner_campaign import SMALL


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors are slower on many threads, most of all where other tests run beside."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    train_tokenizer(["write kiwi to apple.txt"] * 3, folder / "tokenizer", vocab_size=280)
    return Path(create_policy(folder / "start", folder / "tokenizer", SMALL, seed=0).path)
