"""The demo's model loads offline from its folder, is cached, and is never left half-written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bridge.errors import UsageError
from bridge_cli import demo_model
from bridge_environments.registry import Arithmetic

SHORT = {
    "clean": {"num_steps": 3, "right_share": 1.0, "lr": 3e-3},
    "mixed": {"num_steps": 2, "right_share": 0.5, "lr": 1e-3},
    "batch_size": 8,
    "seed": 0,
}


def ignore(step: int, num_steps: int) -> None:
    pass


def interrupt(step: int, num_steps: int) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model.make(tmp_path_factory.mktemp("cache"), progress=ignore, recipe=SHORT)


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def test_demo_folder_loads_as_a_small_bfloat16_model(made: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(made)
    assert model.dtype == torch.bfloat16
    assert 400_000 < model.num_parameters() < 1_000_000
    assert model.config.num_attention_heads > model.config.num_key_value_heads
    assert model.config.hidden_size // model.config.num_attention_heads == 64
    assert model.config.tie_word_embeddings


def test_tokenizer_covers_every_problem_and_adds_no_tokens(made: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(made)
    for problem in [*Arithmetic(), *Arithmetic().held_out()]:
        token_ids = tokenizer(problem["prompt"])["input_ids"]
        assert len(token_ids) == len(problem["prompt"])
        assert tokenizer.unk_token_id not in token_ids
        assert tokenizer.decode(token_ids) == problem["prompt"]


def test_model_and_tokenizer_have_the_same_eos_token(made: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(made)
    model: Any = AutoModelForCausalLM.from_pretrained(made)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer("7<eos>")["input_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.decode([*tokenizer("7")["input_ids"], tokenizer.eos_token_id], skip_special_tokens=True) == "7"
    assert model.config.vocab_size == len(tokenizer)


def test_cached_model_is_reused(made: Path) -> None:
    assert demo_model.make(made.parent, progress=interrupt, recipe=SHORT) == made


def test_different_recipe_makes_a_different_model(made: Path) -> None:
    assert demo_model.make(made.parent, progress=ignore, recipe={**SHORT, "seed": 1}) != made


def test_same_recipe_makes_the_same_model(made: Path, tmp_path: Path) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    repeated = parameters(demo_model.make(tmp_path, progress=ignore, recipe=SHORT))
    assert all(torch.equal(weight, repeated[name]) for name, weight in parameters(made).items())
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_progress_counts_every_step(tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    demo_model.make(tmp_path, progress=lambda step, num_steps: progress.append((step, num_steps)), recipe=SHORT)
    assert progress == [(step, 5) for step in range(1, 6)]


def test_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    listings: list[list[Path]] = []

    def break_late(step: int, num_steps: int) -> None:
        listings.append(list(tmp_path.iterdir()))
        if step == num_steps:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_model.make(tmp_path, progress=break_late, recipe=SHORT)
    assert all(len(folders) == 1 and folders[0].name.startswith(".demo-") for folders in listings)
    assert list(tmp_path.iterdir()) == []


def test_model_made_by_a_concurrent_process_is_used(made: Path, tmp_path: Path) -> None:
    def other_process(step: int, num_steps: int) -> None:
        (tmp_path / made.name).mkdir(exist_ok=True)
        (tmp_path / made.name / "config.json").write_text("theirs")

    target = demo_model.make(tmp_path, progress=other_process, recipe=SHORT)
    assert (target / "config.json").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [target]


def test_unwritable_cache_error_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"cannot write the demo's model") as caught:
        demo_model.make(tmp_path / "file" / "bridge", progress=ignore, recipe=SHORT)
    assert "XDG_CACHE_HOME=" in caught.value.hint


def test_cache_folder_follows_the_xdg_standard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model.cache_folder() == tmp_path / "bridge"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert demo_model.cache_folder() == tmp_path / ".cache" / "bridge"
