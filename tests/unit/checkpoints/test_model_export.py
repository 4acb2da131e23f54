"""Export to a model folder: merged adapters match hand-computed numbers, full models are copied."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, LlamaConfig

from bridge.checkpoints import checkpoint
from bridge.checkpoints.checkpoint import MARKER_NAME, Progress
from bridge.checkpoints.model_export import export
from bridge.config import TrainConfig
from bridge.core import folder_mark
from bridge.errors import UsageError
from bridge.weights.adapter import Adapter
from bridge_cli.main import answer
from tests.models import tiny
from tests.models.families import FAMILIES, INSIDE

MODULE = "model.layers.0.self_attn.q_proj"
RANK, ALPHA = 2, 4.0
BASE_TEMPLATE = "{{ messages[0].content }}"
PARTS = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.write(tiny.llama(), tmp_path_factory.mktemp("base"))
    (folder / "chat_template.jinja").write_text(BASE_TEMPLATE)
    return folder


def adapter(folder: Path, base: str, *, module: str = MODULE) -> Path:
    """Write an adapter of one module by hand: A counts, B is 0.5 in its first column and 0 elsewhere."""
    folder.mkdir()
    a = torch.arange(RANK * 128, dtype=torch.float32).view(RANK, 128) / 64
    b = torch.zeros(tiny.VOCABULARY if module == "lm_head" else 128, RANK)
    b[:, 0] = 0.5
    name = f"base_model.model.{module}"
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": RANK, "lora_alpha": ALPHA,
        "target_modules": [module.rpartition(".")[2]] if module == "lm_head" else [module],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def full(folder: Path, base: Path) -> Path:
    """Write a checkpoint of a full model with an optimizer state."""

    def write(scratch: Path) -> None:
        for path in base.iterdir():
            (scratch / path.name).write_bytes(path.read_bytes())
        (scratch / "optimizer").mkdir()
        (scratch / "optimizer" / "state.json").write_text("{}")

    progress = Progress(step=3, weight_version=3, problems_drawn=24, run_dir=folder)
    return checkpoint.save(folder, write, progress)


def test_missing_checkpoint_error_suggests_a_similar_name(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "one"
    for step in (9, 30):
        full(run / "checkpoints" / f"step_{step}", base)
    (run / "config.json").write_text("{}")  # the choices of the run
    for given, meant in (
        (run, run / "checkpoints" / "step_30"),
        (run / "checkpoints", run / "checkpoints" / "step_30"),
        (run / "checkpoints" / "step_3", run / "checkpoints" / "step_30"),
        (run.parent / "ones", run),
    ):
        assert answer(["export", str(given), "--out", str(tmp_path / "out")]) == 2
        error, _, hint = capsys.readouterr().err.splitlines()
        assert error.startswith("error: "), "nothing is said to be written"
        assert hint == f"hint: did you mean {meant}?"
    assert not (tmp_path / "out").exists()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_adapter_is_merged_in_the_dtype_of_its_base(base: Path, tmp_path: Path) -> None:
    folder = export(adapter(tmp_path / "adapter_step_1", str(base)), tmp_path / "out").folder
    before, after = (AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict() for path in (base, folder))
    assert before.keys() == after.keys()
    changed = before.pop(f"{MODULE}.weight").float() + ALPHA / RANK * 0.5 * torch.arange(128) / 64
    assert torch.equal(after[f"{MODULE}.weight"], changed.bfloat16())
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert names(folder) == sorted([folder_mark.NAME, "chat_template.jinja", *PARTS])


def test_expert_adapter_is_merged(tmp_path: Path) -> None:
    config = FAMILIES["Qwen3-MoE"]()
    base = tiny.write(config, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    own = TrainConfig.of(model_name=str(base), mode="lora_only", lora_r=8, lora_target_modules="all-linear,experts")
    adapter = Adapter(model, own.lora, seed=0, base_name=str(base))
    with torch.no_grad():
        for matrices in adapter.modules.values():
            matrices.lora_b.normal_(std=0.1)
    source = tmp_path / "adapter_step_1"
    source.mkdir()
    adapter.save(source)
    merged = AutoModelForCausalLM.from_pretrained(export(source, tmp_path / "out").folder, dtype="auto")
    up = adapter.modules["model.layers.1.mlp.experts.lora.up_proj"]
    name, width = "model.layers.1.mlp.experts.gate_up_proj", config.moe_intermediate_size
    change = (merged.get_parameter(name) - before[name])[:, width:].float()
    assert torch.allclose(change, up.lora_b.float() @ up.lora_a.float(), atol=2e-3)
    assert change.abs().max() > 0.02


def test_exported_tokenizer_is_the_checkpoints_or_the_bases(base: Path, tmp_path: Path) -> None:
    source = adapter(tmp_path / "adapter_step_1", str(base))
    tokenizer: Any = AutoTokenizer.from_pretrained(export(source, tmp_path / "one").folder)
    assert tokenizer("2+3=")["input_ids"] == AutoTokenizer.from_pretrained(base)("2+3=")["input_ids"]
    assert tokenizer.chat_template == BASE_TEMPLATE
    tiny.write_tokenizer(source, tiny.VOCABULARY)
    (source / "chat_template.jinja").write_text("changed")
    tokenizer = AutoTokenizer.from_pretrained(export(source, tmp_path / "other").folder)
    assert tokenizer.chat_template == "changed"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("chat_template.jinja", "own", "own"),
        ("tokenizer_config.json", '{"chat_template": "own"}', "own"),
        ("tokenizer_config.json", "{}", BASE_TEMPLATE),
        ("special_tokens_map.json", "{}", BASE_TEMPLATE),
        ("notes.jinja", "own", BASE_TEMPLATE),
    ],
)
def test_part_of_a_tokenizer_is_exported_beside_the_bases(
    base: Path, tmp_path: Path, name: str, content: str, expected: str
) -> None:
    source = adapter(tmp_path / "adapter_step_1", str(base))
    (source / name).write_text(content)
    exported = export(source, tmp_path / "out").folder
    assert {*PARTS, name} <= {path.name for path in exported.iterdir()}
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    assert tokenizer("2+3=")["input_ids"] == AutoTokenizer.from_pretrained(base)("2+3=")["input_ids"]
    assert tokenizer.chat_template == expected


def test_checkpoint_is_exported_without_optimizer_state(base: Path, tmp_path: Path) -> None:
    source = full(tmp_path / "step_3", base)
    folder = export(source, tmp_path / "out").folder
    assert names(folder) == sorted({*names(source), folder_mark.NAME} - {MARKER_NAME, "optimizer"})
    assert (folder / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == tiny.VOCABULARY
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"


def test_export_replaces_only_an_earlier_export(base: Path, tmp_path: Path) -> None:
    source, out = full(tmp_path / "step_3", base), tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("mine")
    with pytest.raises(UsageError, match="out exists, and Bridge did not write it") as refused:
        export(source, out)
    assert "--out" in refused.value.hint
    assert names(out) == ["model.safetensors"]
    (out / "model.safetensors").unlink()
    export(source, out)
    (out / "model.safetensors").write_text("stale")
    export(source, out)
    assert load_file(out / "model.safetensors")
    (out / "README.md").write_text("mine")
    with pytest.raises(UsageError, match="out exists"):
        export(source, out)
    assert (out / "README.md").read_text() == "mine"
    with pytest.raises(UsageError, match="step_3 exists"):
        export(source, source)


def test_refused_export_is_a_one_line_error_without_leftovers(base: Path, tmp_path: Path) -> None:
    damaged = full(tmp_path / "step_3", base)
    (damaged / "config.json").write_text("{}")
    other = tiny.llama()
    other.num_attention_heads = 2
    narrow = tiny.write(other, tmp_path / "narrow")
    whole = adapter(tmp_path / "whole", str(base))
    no_base = adapter(tmp_path / "no_base", "")
    empty = tmp_path / "empty"
    empty.mkdir()
    for source, model, words in (
        (tmp_path / "absent", None, "there is no folder"),
        (empty, None, "holds neither a model nor an adapter"),
        (damaged, None, "is incomplete or damaged: config.json is truncated"),
        (base, str(base), "holds a full model, expected an adapter"),
        (whole, str(narrow), "does not fit"),
        (no_base, None, "does not name a base model"),
        (adapter(tmp_path / "deeper", str(base), module="model.layers.7.self_attn.q_proj"), None, "does not fit"),
        (adapter(tmp_path / "head", str(base), module="lm_head"), None, "which share one tensor"),
    ):
        with pytest.raises(UsageError, match=words) as refused:
            export(source, tmp_path / "out", base=model)
        assert "\n" not in refused.value.message
        assert not (tmp_path / "out").exists()


def test_revision_of_a_base_on_the_hub_is_refused(base: Path, tmp_path: Path) -> None:
    source = adapter(tmp_path / "pinned", "someone/model")
    config = json.loads((source / "adapter_config.json").read_text())

    def name(model: str, revision: str) -> None:
        document = config | {"base_model_name_or_path": model, "revision": revision}
        (source / "adapter_config.json").write_text(json.dumps(document))

    name("someone/model", "v1.0")
    with pytest.raises(UsageError, match=r"names revision v1\.0 of someone/model, but Bridge reads only") as refused:
        export(source, tmp_path / "out")
    assert refused.value.hint.endswith("with --model FOLDER: hf download someone/model --revision v1.0")
    exported = export(source, tmp_path / "out", base=str(base))
    assert "vllm serve someone/model --revision v1.0 --enable-lora" in exported.as_adapter
    name("someone/model", "main")
    with pytest.raises(UsageError, match="no such model on the hub"):
        export(source, tmp_path / "out")
    name(str(base), "v1.0")  # a folder has no revisions
    assert export(source, tmp_path / "out").folder.is_dir()


def test_base_model_can_be_overridden(base: Path, tmp_path: Path) -> None:
    source = adapter(tmp_path / "moved", "no/such/place/any/more")
    assert export(source, tmp_path / "out", base=str(base)).folder.is_dir()


def saved_by_peft(
    folder: Path, settings: peft.PeftConfig, *, size: float = 0.15, change: int = 0, **model: Any
) -> tuple[Path, Path]:
    """Write an untied base model, and an adapter that PEFT saved, with random weights of the given scale.

    `change` is the number of embeddings that the base gets before training.
    """
    base = tiny.write(LlamaConfig(**tiny.llama().to_dict() | {"tie_word_embeddings": False} | model), folder / "base")
    torch.manual_seed(1)
    trained = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    if change:
        trained.resize_token_embeddings(trained.config.vocab_size + change)
    adapted = peft.get_peft_model(trained, settings)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * size)
    adapted.save_pretrained(str(folder / "adapter"))
    return base, folder / "adapter"


def logprobs(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.float().eval()(torch.arange(3, 60)[None]).logits.log_softmax(-1)
    return result


def lora(**settings: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]} | settings)


MERGED: dict[str, peft.PeftConfig] = {
    "plain": lora(),
    "the embedding": lora(target_modules=["q_proj", "embed_tokens"]),
    "the head": lora(target_modules=["q_proj", "lm_head"]),
    "the head, its base saved": lora(modules_to_save=["lm_head"]),
    "DoRA": lora(use_dora=True),
    "IA3": peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=[]),
    "LoHa": peft.LoHaConfig(task_type="CAUSAL_LM", r=4, alpha=8, target_modules=["q_proj"]),
    "OFT": peft.OFTConfig(task_type="CAUSAL_LM", r=0, oft_block_size=8, target_modules=["q_proj"]),
}


@pytest.mark.parametrize("case", MERGED)
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_merged_model_computes_what_peft_computes(case: str, dtype: Any, tmp_path: Path) -> None:
    base, source = saved_by_peft(tmp_path, MERGED[case])
    (base / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')  # refused by save_pretrained
    exported = export(source, tmp_path / "out", dtype=dtype)
    merged = AutoModelForCausalLM.from_pretrained(exported.folder, dtype="auto")
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.float32 if dtype else torch.bfloat16}
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = logprobs(peft.PeftModel.from_pretrained(whole, str(source)))
    assert (logprobs(merged) - expected).abs().max() < (1e-4 if dtype else 0.2)
    if case != "the head, its base saved":
        assert exported.rounding is not None
        assert exported.rounding.relative_error < (1e-6 if dtype else 0.1)
        assert exported.rounding.cosine > 0.99


@pytest.mark.parametrize("family", sorted(INSIDE))
@pytest.mark.parametrize("trained", ["whole", "vision", "text alone"])
def test_adapter_is_merged_into_a_model_with_vision(family: str, trained: str, tmp_path: Path) -> None:
    """The files keep every tensor of the base, and only the adapted ones change."""
    base = tiny.write(FAMILIES[family](), tmp_path / "base")
    model: Any = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.bfloat16)
    targets: Any = r".*language_model.*q_proj"
    if trained == "vision":
        named = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
        targets = [next(name for name in named if "vis" in name)]
    elif trained == "text alone":
        if family == "Qwen3-VL":
            pytest.skip("transformers has no class for its language model alone")
        language, head = model.get_decoder(), model.get_output_embeddings()
        model = AutoModelForCausalLM.from_config(model.config.get_text_config(), dtype=torch.bfloat16)
        model.model, model.lm_head = language, head
        targets = ["q_proj"]
    adapted = peft.get_peft_model(model, lora(target_modules=targets, lora_alpha=4))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.15)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    folder = export(tmp_path / "adapter", tmp_path / "out", base=str(base)).folder
    before, after = (load_file(path / "model.safetensors") for path in (base, folder))
    assert before.keys() == after.keys()
    changes = {name: after[name].float() - before[name].float() for name in before if not equal(before, after, name)}
    matrices = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    products = [
        matrices[name.replace("lora_A", "lora_B")].float() @ a.float()
        for name, a in matrices.items()
        if "lora_A" in name
    ]
    assert len(changes) == len(products) > 0
    assert all(any(close(change, product) for product in products) for change in changes.values())
    architectures = [json.loads((path / "config.json").read_text())["architectures"] for path in (base, folder)]
    assert architectures[0] == architectures[1]


def equal(one: dict[str, Tensor], other: dict[str, Tensor], name: str) -> bool:
    return torch.equal(one[name], other[name])


def close(change: Tensor, product: Tensor) -> bool:
    return change.shape == product.shape and torch.allclose(change, product, atol=0.02)


RESIZED: dict[str, dict[str, Any]] = {
    "saved with the adapter": {},
    "trained": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "embedding trained": {"modules_to_save": ["embed_tokens"]},
    "some tokens trained": {"trainable_token_indices": {"embed_tokens": [5, 270]}},
}


@pytest.mark.parametrize("case", RESIZED)
@pytest.mark.parametrize("change", [8, -20])
@pytest.mark.parametrize("is_tied", [False, True])
def test_adapter_of_a_resized_embedding_is_merged(case: str, change: int, is_tied: bool, tmp_path: Path) -> None:
    base, source = saved_by_peft(tmp_path, lora(**RESIZED[case]), change=change, tie_word_embeddings=is_tied)
    exported = export(source, tmp_path / "out", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(exported.folder, dtype="auto")
    assert merged.config.vocab_size == tiny.VOCABULARY + change
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    whole.resize_token_embeddings(tiny.VOCABULARY + change, mean_resizing=False)
    expected = logprobs(peft.PeftModel.from_pretrained(whole, str(source)))
    assert (logprobs(merged) - expected).abs().max() < 1e-4
    assert bool(exported.tokens_beyond) == (change < 0), "the base's tokenizer has more tokens"


@pytest.mark.parametrize(("module", "lacking"), [("embed_tokens", "head"), ("lm_head", "embedding")])
def test_adapter_that_lacks_resized_rows_is_refused(module: str, lacking: str, tmp_path: Path) -> None:
    _, source = saved_by_peft(tmp_path, lora(target_modules=["q_proj", module]), change=8)
    words = f"was trained with 309 embeddings, but .* has 301, and the adapter lacks the rows of the {lacking}"
    with pytest.raises(UsageError, match=words):
        export(source, tmp_path / "out")


def test_tokens_without_an_embedding_are_reported(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = adapter(tmp_path / "adapter", str(base))
    tiny.write_tokenizer(source, tiny.VOCABULARY + 5)
    assert answer(["export", str(source), "--out", str(tmp_path / "out")]) == 0
    output = " ".join(capsys.readouterr().err.split())
    assert "warning: 5 tokens of the tokenizer are beyond the model's 301 embeddings, the first: " in output


@pytest.mark.parametrize(("value", "is_refused"), [(3.5, True), (True, True), (False, False), (None, False)])
def test_setting_that_peft_does_not_know_is_refused(base: Path, tmp_path: Path, value: Any, is_refused: bool) -> None:
    source = adapter(tmp_path / "adapter", str(base))
    settings = json.loads((source / "adapter_config.json").read_text())
    (source / "adapter_config.json").write_text(json.dumps(settings | {"scaling_of_tomorrow": value}))
    if not is_refused:
        assert export(source, tmp_path / "out").folder.is_dir()
        return
    with pytest.raises(UsageError, match=f"scaling_of_tomorrow={value}, which PEFT .* does not know and would"):
        export(source, tmp_path / "out")


def test_base_may_be_in_the_home_folder(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(base.parent))
    named = adapter(tmp_path / "named", f"~/{base.name}")
    assert export(named, tmp_path / "one").folder.is_dir()
    source = adapter(tmp_path / "other", "elsewhere")
    assert export(source, tmp_path / "two", base=f"~/{base.name}").folder.is_dir()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_diverged_adapter_is_refused(base: Path, tmp_path: Path, value: float) -> None:
    source = adapter(tmp_path / "adapter", str(base))
    tensors = load_file(source / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_B" in name)
    save_file({**tensors, name: torch.full_like(tensors[name], value)}, source / "other.safetensors")
    (source / "other.safetensors").replace(source / "adapter_model.safetensors")
    with pytest.raises(UsageError, match="changes weights by values that are not finite: its training diverged"):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folder_of_several_adapters_is_refused_with_one_of_them(base: Path, tmp_path: Path) -> None:
    (several := tmp_path / "several").mkdir()
    one = adapter(several / "policy", str(base))
    adapter(several / "reference", str(base))
    with pytest.raises(UsageError, match="holds neither a model nor an adapter") as refused:
        export(several, tmp_path / "out")
    assert refused.value.hint == f"did you mean {one}?"


@pytest.mark.parametrize("named", ["", None, 5])
def test_adapter_without_the_name_of_a_base_is_refused(base: Path, tmp_path: Path, named: Any) -> None:
    source = adapter(tmp_path / "adapter", named)
    with pytest.raises(UsageError, match=r"adapter_config\.json does not name a base model"):
        export(source, tmp_path / "out")
    assert export(source, tmp_path / "out", base=str(base)).folder.is_dir()


@pytest.mark.parametrize("named", ["./base", "base", "some/where/else"])
def test_absent_base_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = adapter(tmp_path / "adapter", named)
    with pytest.raises(UsageError, match=f"was trained on {named}, but there is no such folder in ") as refused:
        export(source, tmp_path / "out")
    assert "--model BASE" in refused.value.hint


@pytest.mark.parametrize("settings", [{}, {"lora_alpha": 0}, {"modules_to_save": ["lm_head"]}])
def test_adapter_that_changes_nothing_is_reported(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_untrained = not settings
    _, source = saved_by_peft(tmp_path, lora(**settings), size=0.0 if is_untrained else 0.1)
    if "modules_to_save" in settings:  # only these modules are trained
        path = source / "adapter_model.safetensors"
        save_file({name: tensor * ("lora_B" not in name) for name, tensor in load_file(path).items()}, path)
    assert answer(["export", str(source), "--out", str(tmp_path / "out")]) == 0
    output = " ".join(capsys.readouterr().err.split())
    said = "the adapter changes nothing: the exported model equals its base" in output
    assert said == ("modules_to_save" not in settings)


def test_rounding_loss_is_measured(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference is computed from the files, in float64."""
    small, source = saved_by_peft(tmp_path, lora(target_modules=["q_proj", "down_proj"]), size=2e-3)
    out = tmp_path / "out"
    assert answer(["export", str(source), "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)["rounding"]
    before, after = (load_file(folder / "model.safetensors") for folder in (small, out))
    exact = load_file(export(source, tmp_path / "exact", dtype="float32").folder / "model.safetensors")
    names = [name for name in before if not torch.equal(exact[name], before[name].float())]
    assert len(names) == 4
    wanted, held = (
        torch.cat([(weights[name].double() - before[name].double()).flatten() for name in names])
        for weights in (exact, after)
    )
    assert found["relative_error"] == pytest.approx(float((held - wanted).norm() / wanted.norm()), rel=1e-3)
    assert found["cosine"] == pytest.approx(float(wanted @ held / wanted.norm() / held.norm()), rel=1e-3)
    assert found["relative_error"] > 0.3
    assert f"relative error {found['relative_error']:.2g}, cosine {found['cosine']:.2f}" in printed.err
    assert f"vllm serve {small} --enable-lora --lora-modules mine={source}" in printed.err
    assert "--dtype float32 keeps it" in printed.err
    assert answer(["export", str(source), "--out", str(out), "--dtype", "float32"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert answer(["export", str(base), "--out", str(out), "--dtype", "float32"]) == 2
    assert "expected an adapter" in capsys.readouterr().err


REFUSED: dict[str, tuple[peft.PeftConfig, str]] = {
    "lora_bias": (lora(lora_bias=True), r"has biases \(lora_bias\) for 2 layers without a bias .*self_attn\.q_proj"),
    "prompts": (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "is a PROMPT_TUNING, which"),
    "prefixes": (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "is a PREFIX_TUNING, which"),
    "aLoRA": (lora(alora_invocation_tokens=[5, 6]), "is an activated LoRA"),
    "repeated layers": (lora(layer_replication=[[0, 2], [1, 2]]), "repeats layers of its base"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unmergeable_adapter_is_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, words = REFUSED[case]
    _, source = saved_by_peft(tmp_path, settings)
    with pytest.raises(UsageError, match=words) as refused:
        export(source, tmp_path / "out")
    assert "\n" not in refused.value.message
    assert not (tmp_path / "out").exists()
    assert answer(["export", str(source), "--out", str(tmp_path / "out")]) == 2
    assert "bug in Bridge" not in capsys.readouterr().err


def test_invalid_adapter_folder_is_refused_in_one_line(base: Path, tmp_path: Path) -> None:
    source = adapter(tmp_path / "adapter", str(base))
    settings = json.loads((source / "adapter_config.json").read_text())
    for odd in (
        "[]",
        '{"peft_type": "LORA", "r": "x"}',
        '{"peft_type": "NONE_OF_PEFT"}',
        "{",
        json.dumps(settings | {"r": 0}),
    ):
        (source / "adapter_config.json").write_text(odd)
        with pytest.raises(UsageError) as refused:
            export(source, tmp_path / "out", base=str(base))
        assert "\n" not in refused.value.message
    (source / "adapter_config.json").write_text(json.dumps(settings))
    torch.save(load_file(source / "adapter_model.safetensors"), source / "adapter_model.bin")
    (source / "adapter_model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"as adapter_model\.bin, expected adapter_model\.safetensors"):
        export(source, tmp_path / "out")
    (source / "adapter_model.bin").unlink()
    with pytest.raises(UsageError, match=r"has no adapter_model\.safetensors"):
        export(source, tmp_path / "out")


def test_quantized_base_model_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    quantized = tmp_path / "quantized"
    shutil.copytree(base, quantized)
    document = json.loads((base / "config.json").read_text())
    document["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantized / "config.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"quantized is quantized \(bitsandbytes\)") as refused:
        export(adapter(tmp_path / "adapter", str(quantized)), tmp_path / "out")
    assert "--model" in refused.value.hint


class FakeHub:
    """Records uploads to the hub."""

    def __init__(self, calls: list[Any], fault: Exception | None = None) -> None:
        self.calls, self.fault = calls, fault

    def whoami(self) -> None:
        self.calls.append("whoami")

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> Any:
        self.calls.append(("create", repo, private, exist_ok))
        if self.fault:
            raise self.fault

        class Page(str):
            repo_id = f"me/{repo}"

        return Page(f"hub/{repo}")

    def upload_folder(self, *, repo_id: str, folder_path: Path, ignore_patterns: list[str]) -> None:
        self.calls.append(("upload", repo_id, folder_path, ignore_patterns))


def test_export_is_pushed_without_bridges_marker_file(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("bridge.core.hub.HfApi", lambda: FakeHub(calls))
    source, out = full(tmp_path / "step_3", base), tmp_path / "out"
    assert answer(["export", str(source), "--out", str(out), "--push", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "folder": str(out),
        "page": "hub/mine",
        "rounding": None,
    }
    assert calls == ["whoami", ("create", "mine", True, True), ("upload", "me/mine", out, [folder_mark.NAME])]


def test_failed_push_keeps_the_folder_and_suggests_a_command(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("bridge.core.hub.HfApi", lambda: FakeHub(calls, RuntimeError("403 Forbidden\nfor you")))
    source, out = full(tmp_path / "step_3", base), tmp_path / "out"
    assert answer(["export", str(source), "--out", str(out), "--push", "mine"]) == 2
    err = capsys.readouterr().err
    assert "error: --push mine: 403 Forbidden for you\n" in err
    assert f"hf upload mine {out} --exclude {folder_mark.NAME}" in err
    assert out.is_dir()
    assert answer(["export", str(source), "--out", str(out), "--push", "not a name"]) == 2
    assert "--push not a name: " in capsys.readouterr().err
