"""The trainer's model without its weights: what comes from the server, and what is trained."""

import ast
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from bridge.checks import model as model_checks
from bridge.checks import probe
from bridge.config import ComputeConfig
from bridge.errors import BridgeError, UnsupportedModelError
from bridge.passes import preparation
from bridge.processes import start_checks
from bridge.weights import loaded, skeleton
from bridge.weights.model_folder import stored_buffers
from tests.models import tiny
from tests.models.families import FAMILIES, ON_GPUS, WITH_BUFFERS

ROOT = Path(__file__).parents[3]
ALL_FAMILIES = {**FAMILIES, **ON_GPUS}


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_skeleton_has_transformers_parameters_and_buffers(family: str, tmp_path: Path) -> None:
    """For example, the bias of GLM-4.5's router, which vLLM also uses to choose experts, stays a buffer."""
    config = ALL_FAMILIES[family]()
    config.save_pretrained(tmp_path)
    model = skeleton.build(str(tmp_path), torch.bfloat16)
    with init_empty_weights():
        expected = skeleton.auto_class(config).from_config(config, dtype=torch.bfloat16)
    expected.tie_weights()
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = ([(name, x.shape, x.dtype) for name, x in getattr(made, kind)()] for made in (model, expected))
        assert ours == theirs
    stored = stored_buffers(expected)
    assert bool(stored) == (family in WITH_BUFFERS)
    assert {name for name, buffer in model.named_buffers() if buffer.is_meta} == stored.keys()
    assert stored.keys() <= skeleton.shapes(model).keys()


def with_code(folder: Path, *, family: str) -> str:
    """Write a model with its own code, which fails like code written for transformers 4."""
    model = AutoModelForCausalLM.from_config(tiny.llama())
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": family}))
    (folder / "own.py").write_text("from transformers.utils import is_torch_fx_available\n")
    tokenizer = {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return str(folder)


@pytest.fixture
def _nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("transformers asks whether to run the code that comes with a model")

    monkeypatch.setattr("builtins.input", asked)


@pytest.mark.usefixtures("_nobody_answers")
def test_known_family_is_built_without_its_remote_code(tmp_path: Path) -> None:
    model = with_code(tmp_path, family="llama")
    assert type(skeleton.build(model, torch.bfloat16)) is LlamaForCausalLM
    assert type(loaded.load(model, device="cpu").model) is LlamaForCausalLM
    start_checks.check_model(model)


@pytest.mark.parametrize(
    "settings",
    [
        {"_attn_implementation": "flash_attention_2"},
        {"attn_implementation": "flash_attention_3"},
        {"experts_implementation": "deepgemm"},
        {"return_dict": False},
        {"output_attentions": True, "output_hidden_states": True, "use_cache": False},
    ],
)
def test_settings_of_previous_runs_are_ignored(settings: dict[str, Any], tmp_path: Path) -> None:
    plain, odd = (tiny.write(FAMILIES["Qwen3-MoE"](), tmp_path / name) for name in ("plain", "odd"))
    config = odd / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    assert skeleton.shapes(skeleton.build(str(odd), torch.bfloat16))
    start_checks.check_model(str(odd))
    models = [loaded.load(str(folder), device="cpu").model for folder in (plain, odd)]
    expected, found = (model(torch.arange(3, 60)[None]).logits for model in models)
    assert torch.equal(found, expected)
    preparation.prepare(models[1], ComputeConfig())


@pytest.mark.usefixtures("_nobody_answers")
def test_remote_code_family_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ask", cache(probe.ask))  # three checks ask the same child process
    model = with_code(tmp_path, family="own_llama")
    words = "belongs to family own_llama, which transformers .* does not support: only code that ships with"
    refusals: list[Callable[[], object]] = [
        lambda: skeleton.build(model, torch.bfloat16),
        lambda: loaded.load(model, device="cpu"),
        lambda: start_checks.check_model(model, shares_weights=True),
        lambda: start_checks.check_model(model, shares_weights=False),
    ]
    for refused in refusals:
        with pytest.raises(UnsupportedModelError, match=words):
            refused()
    checks = list(model_checks.modes(model, model_checks.read(model)))
    assert [check.status for check in checks] == ["FAIL"] * 3
    with pytest.raises(BridgeError):
        skeleton.tokenizer(model)


def test_loading_never_prompts_for_remote_code() -> None:
    """Without the argument, transformers prompts on a terminal, and waits."""
    packages = ("bridge", "cli", "environments", "patches")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    calls = [
        (path.name, node)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("Auto")
        if ast.unparse(node.func).endswith(".from_pretrained")
    ]
    assert len(calls) > 5
    assert not [name for name, call in calls if "trust_remote_code=False" not in ast.unparse(call)]


def test_template_of_a_processor_is_the_tokenizers(tmp_path: Path) -> None:
    folder = tiny.write(FAMILIES["Qwen3-VL"](), tmp_path / "seeing")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert skeleton.tokenizer(str(folder)).chat_template == "{{ messages }}"
    (folder / "chat_template.jinja").write_text("own")
    assert skeleton.tokenizer(str(folder)).chat_template == "own"
    text = tiny.write(tiny.llama(), tmp_path / "text")
    shutil.copy(folder / "chat_template.json", text)
    assert skeleton.tokenizer(str(text)).chat_template is None, "no processor reads it"
