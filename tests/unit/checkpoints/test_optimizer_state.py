"""The optimizer's state is saved by name, in its own dtypes and bounded files, and loaded completely or not at all."""

import base64
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bridge.checkpoints import optimizer_state
from bridge.checkpoints.optimizer_state import FOLDER, POSITIONS, STATE_NAME
from bridge.errors import CheckpointError, UsageError
from bridge.optimizers.in_place import InPlaceOptimizer
from bridge.optimizers.offloaded_adamw import OffloadedAdamW
from bridge.optimizers.split_adamw import SplitMasterAdamW
from bridge.optimizers.split_master import KINDS
from bridge.weights import stored_tensors

Trained = dict[str, nn.Parameter]
OFFLOADED = "offloaded"
SHAPES = {"layer.b": ((4, 6), torch.bfloat16), "layer.a": ((5,), torch.float32), "head": ((3, 4), torch.bfloat16)}


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def parameters(device: str = "cpu") -> Trained:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape).to(device, dtype)) for name, (shape, dtype) in SHAPES.items()}


def optimizer_of(trained: Trained, lr: float = 1e-3, kind: str = "adamw") -> InPlaceOptimizer:
    if kind == OFFLOADED:
        return OffloadedAdamW(list(trained.values()), lr=lr)
    return SplitMasterAdamW(list(trained.values()), lr=lr, kind=KINDS[kind], seed=3)


def step(trained: Trained, optimizer: InPlaceOptimizer, *, seed: int, without: str = "") -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in trained.items():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
        parameter.grad = None if name == without else gradient
    optimizer.step()


def copies(trained: Trained) -> Trained:
    return {name: nn.Parameter(parameter.detach().clone()) for name, parameter in trained.items()}


def state(trained: Trained, optimizer: InPlaceOptimizer) -> dict[str, dict[str, Tensor | int]]:
    stepped = {name: parameter for name, parameter in trained.items() if optimizer.num_updates(parameter)}
    return {
        name: {"step": optimizer.num_updates(parameter)}
        | {part: tensor.clone() for part, tensor in optimizer.parts(parameter).items()}
        for name, parameter in stepped.items()
    }


def check_equal(one: dict[str, dict[str, Tensor | int]], other: dict[str, dict[str, Tensor | int]]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert sorted(values) == sorted(other[name])
        for part, value in values.items():
            loaded = other[name][part]
            if isinstance(value, Tensor):
                assert isinstance(loaded, Tensor)
                assert (loaded.dtype, loaded.device) == (value.dtype, value.device)
                assert torch.equal(loaded, value), (name, part)
            else:
                assert loaded == value, (name, part)


def stored(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for path in files(folder) for key, tensor in load_file(path).items()}


def files(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*.safetensors"))


def refusal(folder: Path, trained: Trained) -> str:
    """Return the message of a refused load; nothing may change."""
    optimizer = optimizer_of(trained)
    step(trained, optimizer, seed=9)
    weights, before, random = copies(trained), state(trained, optimizer), torch.get_rng_state()
    with pytest.raises(UsageError) as caught:
        optimizer_state.read(folder, trained, optimizer)
    check_equal(before, state(trained, optimizer))
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(weights[name], parameter) for name, parameter in trained.items())
    return caught.value.message


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*KINDS, OFFLOADED])
@pytest.mark.parametrize("shard_bytes", [10**9, 50])
def test_state_resumes_bitwise_with_a_new_learning_rate(
    shard_bytes: int, kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensors, "MAX_SHARD_BYTES", shard_bytes)
    trained = parameters(device)
    optimizer = optimizer_of(trained, kind=kind)
    for seed in (1, 2, 3):
        step(trained, optimizer, seed=seed)
    optimizer_state.write(tmp_path, trained, optimizer)
    assert (len(files(tmp_path)) > 1) == (shard_bytes == 50)

    other = copies(trained)
    if not kind.endswith("bit"):  # without randomness the order does not matter
        other = dict(reversed(other.items()))
    resumed = optimizer_of(other, kind=kind)
    step(other, resumed, seed=9)  # the loaded state replaces everything
    with torch.no_grad():
        for name, parameter in trained.items():
            other[name].copy_(parameter)
    optimizer_state.read(tmp_path, other, resumed)
    check_equal(state(trained, optimizer), {name: state(other, resumed)[name] for name in trained})
    for seed in (4, 5):
        step(trained, optimizer, seed=seed)
        step({name: other[name] for name in trained}, resumed, seed=seed)
    for name, parameter in trained.items():
        assert torch.equal(parameter, other[name]), name
    slower = optimizer_of(other, lr=1e-9, kind=kind)
    optimizer_state.read(tmp_path, other, slower)
    assert slower.param_groups[0]["lr"] == 1e-9


def test_state_files_are_bounded_and_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_tensors, "MAX_SHARD_BYTES", 200)
    trained = parameters()
    optimizer = optimizer_of(trained)
    step(trained, optimizer, seed=1)
    optimizer_state.write(tmp_path, trained, optimizer)
    count = len(files(tmp_path))
    expected = [f"optimizer-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    assert [path.name for path in files(tmp_path)] == expected
    assert all(sum(tensor.nbytes for tensor in load_file(path).values()) <= 200 for path in files(tmp_path))
    assert sorted(stored(tmp_path)) == sorted(
        f"{name}.{part}"
        for name, (_, dtype) in SHAPES.items()
        for part in ("exp_avg", "exp_avg_sq", *(["remainder"] if dtype == torch.bfloat16 else []))
    )


def test_vllm_does_not_load_the_optimizer_state(tmp_path: Path) -> None:
    trained = parameters()
    optimizer_state.write(tmp_path, trained, optimizer_of(trained))
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]


def test_writing_holds_one_file_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = parameters()
    optimizer = optimizer_of(trained)
    step(trained, optimizer, seed=1)
    held: list[int] = []

    def save(tensors: dict[str, Tensor], path: Path, metadata: None) -> None:
        held.append(sum(tensor.nbytes for tensor in tensors.values()))
        save_file(tensors, path)

    monkeypatch.setattr(stored_tensors, "MAX_SHARD_BYTES", 200)
    monkeypatch.setattr(stored_tensors, "save_file", save)
    optimizer_state.write(tmp_path, trained, optimizer)
    assert len(held) == len(files(tmp_path)) > 1
    assert max(held) <= 200


def test_loaded_state_is_independent_of_the_file(tmp_path: Path) -> None:
    trained = parameters()
    optimizer = optimizer_of(trained)
    step(trained, optimizer, seed=1)
    optimizer_state.write(tmp_path, trained, optimizer)
    resumed = optimizer_of(trained)
    optimizer_state.read(tmp_path, trained, resumed)
    before = state(trained, optimizer)
    for path in files(tmp_path):
        path.write_bytes(bytes(path.stat().st_size))
    check_equal(before, state(trained, resumed))
    step(trained, resumed, seed=2)  # in writable memory


def test_parameter_without_an_update_has_no_state(tmp_path: Path) -> None:
    trained = parameters()
    optimizer = optimizer_of(trained)
    optimizer_state.write(tmp_path, trained, optimizer)
    resumed = optimizer_of(trained)
    optimizer_state.read(tmp_path, trained, resumed)
    assert state(trained, resumed) == {}
    (tmp_path / "later").mkdir()
    step(trained, optimizer, seed=1, without="head")
    optimizer_state.write(tmp_path / "later", trained, optimizer)
    optimizer_state.read(tmp_path / "later", trained, resumed)
    assert resumed.num_updates(trained["head"]) == 0
    assert resumed.num_updates(trained["layer.a"]) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_random_state_resumes(device: str, tmp_path: Path) -> None:
    trained = parameters(device)
    torch.manual_seed(5)
    torch.rand(3, device=device)
    optimizer_state.write(tmp_path, trained, optimizer_of(trained))
    expected = torch.rand(1000, device=device)
    torch.manual_seed(6)
    optimizer_state.read(tmp_path, trained, optimizer_of(trained))
    assert torch.equal(torch.rand(1000, device=device), expected)


def test_random_states_of_missing_gpus_are_skipped(tmp_path: Path) -> None:
    trained = parameters()
    optimizer_state.write(tmp_path, trained, optimizer_of(trained))
    document = json.loads((tmp_path / FOLDER / STATE_NAME).read_text())
    document["cuda_random"] += ["AAAAAAAAAAAAAAAAAAAAAA=="] * 99
    (tmp_path / FOLDER / STATE_NAME).write_text(json.dumps(document))
    optimizer_state.read(tmp_path, trained, optimizer_of(trained))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    trained = parameters()
    optimizer = optimizer_of(trained)
    step(trained, optimizer, seed=1)
    optimizer_state.write(tmp_path, trained, optimizer)
    return tmp_path


def test_state_for_different_parameters_is_refused(written: Path) -> None:
    trained = parameters()
    message = refusal(written, trained | {"new": nn.Parameter(torch.ones(2))})
    assert message == f"{written / FOLDER} does not fit the model: new is absent, expected trained"
    message = refusal(written, {"layer.a": trained["layer.a"]})
    assert "head is trained, expected no such tensor; layer.b is" in message
    message = refusal(written, trained | {"head": nn.Parameter(torch.ones(3, 5).bfloat16())})
    assert "head.exp_avg is F32 (3, 4), expected F32 (3, 5); head.exp_avg_sq is " in message
    message = refusal(written, trained | {"head": nn.Parameter(torch.ones(3, 4))})
    assert "head.remainder is I16 (3, 4), expected no such tensor" in message


@pytest.mark.parametrize("other", ["adamw-8bit", OFFLOADED])
def test_incompatible_state_is_refused_with_its_flags(written: Path, other: str) -> None:
    trained = parameters()
    optimizer = optimizer_of(trained, kind=other)
    step(trained, optimizer, seed=9)
    before, weights = state(trained, optimizer), copies(trained)
    with pytest.raises(CheckpointError) as caught:
        optimizer_state.read(written, trained, optimizer)
    assert "was written with --optimizer adamw --no-offload-optimizer, but this run has " in caught.value.message
    assert caught.value.message.count(optimizer.flags) == 1
    assert caught.value.hint == "resume with --optimizer adamw --no-offload-optimizer"
    check_equal(before, state(trained, optimizer))
    assert all(torch.equal(weights[name], parameter) for name, parameter in trained.items())


def test_state_without_flags_counts_as_adamw(written: Path) -> None:
    path = written / FOLDER / STATE_NAME
    document = json.loads(path.read_text())
    del document["flags"]
    path.write_text(json.dumps(document))
    trained = parameters()
    resumed = optimizer_of(trained)
    optimizer_state.read(written, trained, resumed)
    assert resumed.num_updates(trained["head"]) == 1


Edit = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("head.exp_avg"), "head.exp_avg is absent, expected F32 (3, 4)"),
        (lambda t: t.update({"head.more": torch.ones(1)}), "head.more is F32 (1,), expected no such tensor"),
        (
            lambda t: t.update({"head.exp_avg": torch.ones(3, 4).bfloat16()}),
            "head.exp_avg is BF16 (3, 4), expected F32 (3, 4)",
        ),
    ],
)
def test_edited_state_file_is_refused(written: Path, edit: Edit, message: str) -> None:
    tensors = stored(written)
    edit(tensors)
    save_file(tensors, files(written)[0])
    assert message in refusal(written, parameters())


def test_truncated_state_file_is_refused(written: Path) -> None:
    path = files(written)[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path} cannot be read" in refusal(written, parameters())


def test_checkpoint_without_state_is_refused_in_one_line(tmp_path: Path) -> None:
    trained = parameters()
    with pytest.raises(CheckpointError, match=r"holds no optimizer state .* saved with --no-save-optimizer") as caught:
        optimizer_state.read(tmp_path, trained, optimizer_of(trained))
    assert f"--model-name {tmp_path}" in caught.value.hint


@pytest.mark.parametrize("text", ["", "{}", "[]"])
def test_damaged_state_record_is_refused(written: Path, text: str) -> None:
    (written / FOLDER / STATE_NAME).write_text(text)
    assert "cannot be used: it is damaged" in refusal(written, parameters())


ODD_RECORDS: dict[str, dict[str, object]] = {
    "random state that is not base64": {"cpu_random": "***"},
    "random state of no bytes": {"cpu_random": ""},
    "random state of few bytes": {"cpu_random": "AAAA"},
    "random state of zeros": {"cpu_random": base64.b64encode(bytes(5056)).decode()},
    "flags with an escape": {"flags": "\x1b[2J"},
    "steps below zero": {"steps": {"layer.a": -1}},
    "steps as text": {"steps": {"layer.a": "x"}},
}


@pytest.mark.parametrize("case", ODD_RECORDS)
def test_invalid_state_record_is_refused_in_one_line(case: str, written: Path) -> None:
    path = written / FOLDER / STATE_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | ODD_RECORDS[case]))
    assert refusal(written, parameters()) == f"{path} cannot be used: it is damaged"


class Runs:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def linear_with_state(folder: Path) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer_state.write_foreign(folder, model, optimizer)
    return model, optimizer


ENTRY = (("weight", [2, 3]), {"exp_avg": torch.zeros(2, 3)}, ["exp_avg"])
ODD_CONTENT: dict[str, Callable[[Path], object]] = {
    "a pickle that runs code": lambda path: path.write_bytes(pickle.dumps(Runs(path.with_name("ran")))),
    "an object": lambda path: torch.save([Runs(path.with_name("ran"))], path),
    "a file cut short": lambda path: path.write_bytes(path.read_bytes()[:200]),
    "zeros": lambda path: path.write_bytes(bytes(1000)),
    "nothing": lambda path: path.write_bytes(b""),
    "a list of numbers": lambda path: torch.save([1, 2], path),
    "a number": lambda path: torch.save(3, path),
    "a state that is a list": lambda path: torch.save([(ENTRY[0], [], [])] * 2, path),
    "a state of lists": lambda path: torch.save([(ENTRY[0], {"exp_avg": [1]}, [])] * 2, path),
    "a device key without a value": lambda path: torch.save([(ENTRY[0], {}, ["exp_avg"])] * 2, path),
    "a tensor of a terabyte": lambda path: torch.save([(ENTRY[0], {"x": torch.zeros(1).expand(2**40)}, [])] * 2, path),
}


@pytest.mark.parametrize("case", ODD_CONTENT)
def test_invalid_foreign_optimizer_state_is_one_line(case: str, tmp_path: Path) -> None:
    model, optimizer = linear_with_state(tmp_path)
    path = tmp_path / FOLDER / POSITIONS
    ODD_CONTENT[case](path)
    before = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    with pytest.raises(CheckpointError) as caught:
        optimizer_state.checked_foreign(tmp_path, model, optimizer)
    assert caught.value.message == f"{path} cannot be used: it is damaged"
    assert not path.with_name("ran").exists()
    assert all(torch.equal(before[key], value) for key, value in optimizer.state[model.weight].items())
