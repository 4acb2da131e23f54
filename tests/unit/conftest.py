"""Use one thread: the models are tiny, and synchronizing threads would cost more than it saves.

Every test draws the same random numbers, whether it runs by itself or after others.
"""

import random

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
