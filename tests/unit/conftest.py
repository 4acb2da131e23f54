"""Use one thread: the models are tiny, and synchronizing threads would cost more than it saves."""

import torch

torch.set_num_threads(1)
