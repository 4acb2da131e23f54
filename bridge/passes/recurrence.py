"""Layers that carry a state from token to token, such as GatedDeltaNet: each packed sequence starts with an empty one.

transformers' own code treats all tokens of a call as one sequence. Here such a layer gets the sequences as rows that
are padded to one length. This is exact on every device and with every kernel: the layer's convolution and recurrence
are causal, so that no token depends on the padding after it.

Not covered: shared prompts, since a completion would need the state at the end of its prompt.
Shape suffixes: S rows, L tokens of the longest one, T tokens of all sequences, H hidden size.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bridge.errors import UnsupportedModelError
from bridge.passes.attention import Attended, Rows, similar


def is_stateful(module: nn.Module) -> bool:
    """Return whether a module carries a state from token to token: it has a convolution over tokens."""
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def keep_apart(model: PreTrainedModel) -> None:
    """Reset the state of every recurrent layer at the start of each sequence; without boundaries nothing changes."""
    for module in filter(is_stateful, model.get_decoder().modules()):
        module.forward = MethodType(_each_sequence, module)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _each_sequence(
    module: nn.Module,
    hidden_states: Tensor,
    *args: Any,
    cu_seq_lens_q: Tensor | None = None,
    seen: Attended | None = None,
    **others: Any,
) -> Tensor:
    """Run a layer with transformers' signature on each sequence: [1, T, H] -> [1, T, H]."""
    run: Callable[..., Tensor] = partial(type(module).forward, module)
    if cu_seq_lens_q is None:
        return run(hidden_states, *args, **others)
    if seen is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} carries a state from token to token, so completions cannot share a prompt",
            hint="pack each completion with its own prompt",
        )
    lengths = [end - start for start, end in pairwise(cu_seq_lens_q.tolist())]
    blocks = [[length for length, _ in block] for block in similar((length, length) for length in lengths)]
    outputs = []
    for block, part_TH in zip(blocks, hidden_states[0].split([sum(block) for block in blocks]), strict=True):
        rows = Rows(block, part_TH.device)
        rows_SLH = rows.of(part_TH.unsqueeze(1)).squeeze(1)
        outputs.append(rows.back(run(rows_SLH, *args, **others).unsqueeze(1)).squeeze(1))
    return torch.cat(outputs).unsqueeze(0)
