"""A model's parameters under the names, and in the pieces, in which they are saved: views, and no copies.

Since version 5 transformers holds some parameters in another form than the files do, which stay as they always were:
the experts of a layer are one parameter in memory, and two or three per expert in a file.

Not covered: writing and reading the files (`model_folder.py`).
Source: transformers 5.17 and 5.19, `core_model_loading.py`, which `save_pretrained` goes through.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from bridge.errors import UnsupportedModelError
from bridge.weights.copy_recorder import ViewsOnly
from bridge.weights.layout import OTHER_MODES


def saved_form(model: PreTrainedModel, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of `parameters`, which are `model`'s by name, as its files hold them.

    Raises:
        UnsupportedModelError: they are saved in a form that is no view of them.
    """
    held = {name: tensor.detach() for name, tensor in parameters.items()}
    with torch.no_grad(), ViewsOnly([*held.values()]):
        saved: dict[str, Tensor] = revert_weight_conversion(model, held)
    ours = {tensor.untyped_storage()._cdata for tensor in held.values()}
    others = [name for name, tensor in saved.items() if tensor.untyped_storage()._cdata not in ours]
    if others or sum(t.numel() for t in saved.values()) != sum(t.numel() for t in held.values()):
        raise UnsupportedModelError(
            f"{', '.join(others[:3]) or type(model).__name__}: saved in another form than it is held in",
            remedy=OTHER_MODES,
        )
    return saved
