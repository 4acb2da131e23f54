"""Checkpoints of models whose parameters are views: right, small, loadable, whole or absent."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bridge.errors import UsageError
from bridge.training import checkpoint
from bridge.training.checkpoint import MARKER_NAME, is_checkpoint, save, tokenizer_files

PADDED_ROWS, VOCABULARY = 320, 301


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make the folder of a source model: a tokenizer, generation defaults, and a file that is nobody's business."""
    folder = tmp_path / "source"
    folder.mkdir()
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6, "do_sample": true}')
    (folder / "notes.txt").write_text("mine")
    return folder


def shared_model(*, tied: bool) -> LlamaForCausalLM:
    """Make a grouped-query Llama whose parameters are all views into one storage, as an inference engine lays them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).bfloat16()
    storage, start = torch.full((100_000,), 7.0).bfloat16(), 64
    for parameter in model.parameters():
        rows = PADDED_ROWS if len(parameter) == VOCABULARY else len(parameter)
        view = storage[start : start + parameter.numel()].view(parameter.shape)
        parameter.data = view.copy_(parameter.data)
        start += rows * (parameter.numel() // len(parameter))
    return model


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if path.name != "source")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_a_model_of_views_reloads_bit_for_bit_and_takes_no_more_than_its_own_bytes(
    tied: bool, shard_bytes: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "MAX_SHARD_BYTES", shard_bytes)
    model = shared_model(tied=tied)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    folder = save(model, source, tmp_path / "out" / "step_3", step=3, extra={"weight_version": 3})

    files = weight_files(folder)
    assert (len(files) > 1) == (folder / "model.safetensors.index.json").exists() == (shard_bytes < 10**9)
    names = [name for file in files for name in load_file(file)]
    expected = set(model.state_dict()) - ({"lm_head.weight"} if tied else set())
    assert sorted(names) == sorted(expected)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert num_bytes < sum(file.stat().st_size for file in files) < num_bytes + 3000 * len(files)

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].view(torch.int16), tensor.view(torch.int16)), name
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()]


def test_the_folder_holds_the_tokenizer_the_generation_defaults_and_the_step(source: Path, tmp_path: Path) -> None:
    folder = save(shared_model(tied=True), str(source), tmp_path / "step_3", step=3, extra={"weight_version": 4})
    assert sorted(path.name for path in folder.iterdir()) == [
        MARKER_NAME,
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((folder / MARKER_NAME).read_text()) == {"step": 3, "weight_version": 4}
    assert (folder / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    assert AutoTokenizer.from_pretrained(folder).encode("b") == [1]
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_no_tensor_is_copied_on_its_device() -> None:
    model = shared_model(tied=True)
    state = checkpoint._state_of_own_storages(model)
    for name, tensor in model.state_dict().items():
        assert state[name].data_ptr() == tensor.data_ptr() == state[name].untyped_storage().data_ptr()
        assert state[name].untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_older_checkpoint_is_replaced_and_nothing_of_it_stays(
    can_exchange: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(checkpoint, "_exchange", lambda _one, _other: False)
    model = shared_model(tied=True)
    folder = save(model, source, tmp_path / "step_1", step=1, extra={})
    (folder / "model-00009-of-00009.safetensors").write_text("stale")
    with torch.no_grad():
        model.model.norm.weight.fill_(2)
    save(model, source, folder, step=2, extra={})
    assert json.loads((folder / MARKER_NAME).read_text())["step"] == 2
    assert (AutoModelForCausalLM.from_pretrained(folder).model.norm.weight == 2).all()
    assert len(weight_files(folder)) == 1
    assert leftovers(folder) == ["step_1"]


def test_two_folders_change_places_in_one_call(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name)
    if not checkpoint._exchange(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this file system cannot exchange two names")
    assert (tmp_path / "one" / "name").read_text() == "other"
    assert (tmp_path / "other" / "name").read_text() == "one"
    with pytest.raises(FileNotFoundError):
        checkpoint._exchange(tmp_path / "one", tmp_path / "absent")


def test_a_folder_that_is_not_ours_is_refused_and_an_empty_one_is_used(source: Path, tmp_path: Path) -> None:
    folder, model = tmp_path / "step_1", shared_model(tied=True)
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match=rf"step_1 exists and is no checkpoint of ours \(no {MARKER_NAME}"):
        save(model, source, folder, step=1, extra={})
    assert leftovers(folder) == ["step_1"]
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    (folder / "thesis.txt").unlink()
    assert is_checkpoint(save(model, source, folder, step=1, extra={}))


def test_a_save_that_is_interrupted_leaves_the_older_checkpoint_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(shared_model(tied=True), source, tmp_path / "step_1", step=1, extra={})

    def interrupt(_path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(shared_model(tied=True), source, folder, step=2, extra={})
    assert json.loads((folder / MARKER_NAME).read_text())["step"] == 1
    assert leftovers(folder) == ["step_1"]


def test_everything_is_on_disk_before_the_name_appears(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, synced, real_fsync = tmp_path / "step_1", [], checkpoint._fsync

    def fsync(path: Path) -> None:
        synced.append((path.name, folder.exists()))
        real_fsync(path)

    monkeypatch.setattr(checkpoint, "_fsync", fsync)
    save(shared_model(tied=True), source, folder, step=1, extra={})
    *files, scratch, parent = synced
    assert sorted(files) == sorted((path.name, False) for path in folder.iterdir())
    assert scratch[0].startswith(".step_1.")
    assert not scratch[1]
    assert parent == (tmp_path.name, True)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Make the system refuse to let any file of this process grow further, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit_bytes", [30_000, 300])  # in the middle of the weights; in the configuration already
@pytest.mark.parametrize("older", [True, False])
def test_a_disk_that_refuses_is_one_line_with_path_and_bytes_and_leaves_nothing_half(
    limit_bytes: int, older: bool, source: Path, tmp_path: Path
) -> None:
    folder, model = tmp_path / "step_1", shared_model(tied=True)
    if older:
        save(model, source, folder, step=1, extra={})
    with pytest.raises(UsageError) as caught, largest_file(limit_bytes):
        save(model, source, folder, step=2, extra={})
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert caught.value.message.startswith(f"cannot write the checkpoint {folder}: ")
    assert "File too large" in caught.value.message
    assert f"({num_bytes} bytes of weights, " in caught.value.message
    assert "\n" not in caught.value.message
    assert leftovers(folder) == (["step_1"] if older else [])
    assert not older or json.loads((folder / MARKER_NAME).read_text())["step"] == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_one_line(source: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UsageError, match=r"cannot write the checkpoint .*Permission denied"):
        save(shared_model(tied=True), source, tmp_path / "locked" / "step_1", step=1, extra={})


def test_a_parent_that_is_a_file_is_one_line(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write the checkpoint .*Not a directory"):
        save(shared_model(tied=True), source, tmp_path / "file" / "step_1", step=1, extra={})


def test_a_source_without_a_tokenizer_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    assert [path.name for path in tokenizer_files(source)] == [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ]
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").unlink()
    with pytest.raises(UsageError, match="has no tokenizer files"):
        save(shared_model(tied=True), source, tmp_path / "step_1", step=1, extra={})
    assert leftovers(tmp_path / "step_1") == []


def test_a_hub_name_that_is_not_cached_and_cannot_be_reached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def offline(name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append((name, local_files_only))
        raise OSError("no route to host")

    monkeypatch.setattr(checkpoint, "snapshot_download", offline)
    with pytest.raises(UsageError, match="someone/model has no tokenizer files"):
        tokenizer_files("someone/model")
    assert asked == [("someone/model", True), ("someone/model", False)]
