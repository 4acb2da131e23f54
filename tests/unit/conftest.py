"""One thread: the models are tiny, and threads that wait for one another cost more than they save."""

import torch

torch.set_num_threads(1)
