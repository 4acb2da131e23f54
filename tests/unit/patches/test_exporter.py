"""What a server exports is the model that a trainer builds from the same folder."""

from types import SimpleNamespace

import pytest

from bridge.errors import UnsupportedModelError
from bridge_patches.exporter import refuse_other_model

PLAIN: dict[str, object] = {"model": "m", "tokenizer": "m", "hf_overrides": {}, "hf_config_path": None}


def test_a_model_as_its_folder_describes_it_is_exported() -> None:
    refuse_other_model(SimpleNamespace(**PLAIN))
    refuse_other_model(SimpleNamespace(**{**PLAIN, "hf_overrides": {"head_dtype": "float32"}}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hf_overrides", {"sliding_window": 16}),
        ("hf_overrides", lambda config: config),
        ("hf_config_path", "/elsewhere"),
        ("tokenizer", "another"),
    ],
)
def test_a_model_of_the_server_alone_is_not_exported(name: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"--{name.replace('_', '-')} .* applies only to this server"):
        refuse_other_model(SimpleNamespace(**{**PLAIN, name: value}))
