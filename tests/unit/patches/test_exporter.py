"""A server exports only a model that a trainer can build from the same folder."""

from types import SimpleNamespace

import pytest

from bridge.errors import UnsupportedModelError
from bridge_patches.exporter import refuse_other_model

PLAIN: dict[str, object] = {"model": "m", "tokenizer": "m", "hf_overrides": {}, "hf_config_path": None}


def test_model_that_matches_its_folder_is_exported() -> None:
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
def test_model_with_server_only_settings_is_refused(name: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"--{name.replace('_', '-')} .* applies only to this server"):
        refuse_other_model(SimpleNamespace(**{**PLAIN, name: value}))
