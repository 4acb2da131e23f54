"""The names of `import bridge`: pinned, with their signatures, and cheap to import.

Not covered: what they do with a server (`tests/cpu/test_library.py`).
"""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.errors import ManifestError, UsageError
from bridge.server import discovery, manifest
from bridge.types import Completion, Group
from tests.unit import checks_sample

SURFACE = {
    "attach": (
        "(path, *, sampling, compute, optimizer, loss, lora, publishing, seed, several_adapters, reads_only, run_dir)"
    ),
    "for_trl": "(policy, args, *, callbacks, optimizers, processing_class, peft_config)",
    "policy_loss": "(logprobs_N, batch, loss, *, old_logprobs_N)",
    "samples": "(groups, loss, *, max_new_tokens)",
    "serve": (
        "(model, *vllm_flags, sampling, compute, optimizer, loss, lora, publishing, seed, several_adapters, run_dir,"
        " **choices)"
    ),
    "Policy.adapter": "",
    "Policy.close": "(self)",
    "Policy.device": "",
    "Policy.drop_gradients": "(self)",
    "Policy.encode": "(self, prompt, completion, *, weight)",
    "Policy.forward": "(self, samples, loss, *, are_own)",
    "Policy.forward_backward": "(self, samples, loss, *, old_logprobs, are_own)",
    "Policy.load": "(self, folder)",
    "Policy.load_state": "(self, folder, *, has_optimizer)",
    "Policy.log": "(self, step, groups, **metrics)",
    "Policy.logprobs": "(self, batch)",
    "Policy.max_model_len": "",
    "Policy.model_name": "",
    "Policy.new_adapter": "(self, *, r, alpha, seed, modules)",
    "Policy.optim_step": "(self, *, lr, max_norm, betas, eps, weight_decay, in_flight)",
    "Policy.optimizer": "(self, name, *, lr, weight_decay, betas, eps, seed, params)",
    "Policy.pack": "(self, samples, *, max_tokens)",
    "Policy.publish": "(self, write, *, in_flight)",
    "Policy.parameters": "(self)",
    "Policy.restart_server": "(self)",
    "Policy.resume": "(self, optimizer)",
    "Policy.sampling": "",
    "Policy.sample": "(self, prompts, score, *, seed, chat_template_kwargs, prompt_logprobs, **parameters)",
    "Policy.sample_async": "(self, prompts, score, *, seed, chat_template_kwargs, prompt_logprobs, **parameters)",
    "Policy.save": "(self, folder, *, step, optimizer)",
    "Policy.save_state": "(self, folder, *, step, has_optimizer)",
    "Policy.tokenizer": "",
    "Policy.train_step": "(self, samples, loss, *, old_logprobs, are_own, lr, max_norm, in_flight)",
    "Policy.update": "(self, optimizer, *, max_norm, in_flight)",
    "Policy.url": "",
    "Policy.use": "(self, adapter)",
    "Policy.use_tokenizer": "(self, tokenizer)",
    "Policy.verify": "(self)",
    "Policy.version": "",
}
"""Functions and methods that programs call, by the names of their parameters: changing one breaks those programs."""
ATTRIBUTES = {"model"}
OF_RUNS = {
    "endpoint", "fence", "open", "opened", "prepared", "read_state", "serve_snapshot", "snapshot", "trainable",
    "unload_snapshot", "write_state",
}  # fmt: skip
"""Further members of a policy that `bridge run` and `bridge tinker` use; they may change."""


def test_public_signatures_are_pinned() -> None:
    functions = {name: getattr(bridge, name) for name in bridge.__all__ if name.islower()}
    names = [name for name in dir(bridge.Policy) if not name.startswith("_") and name not in OF_RUNS]
    functions |= {f"Policy.{name}": inspect.getattr_static(bridge.Policy, name) for name in names}
    assert {name: _parameters(function) for name, function in functions.items()} == SURFACE
    assert {name for own in bridge.Policy.__mro__ for name in inspect.get_annotations(own)} == ATTRIBUTES


def _parameters(function: object) -> str:
    if isinstance(function, property | cached_property):
        return ""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


def test_every_name_has_one_place_and_a_docstring() -> None:
    assert sorted(name for names in bridge._MODULES.values() for name in names) == sorted(bridge.__all__)
    assert {module.partition(".")[0] for module in bridge._MODULES} == {"bridge"}, "below the command line"
    for name in bridge.__all__:
        assert inspect.getdoc(getattr(bridge, name)), name
        assert name in dir(bridge)
    with pytest.raises(AttributeError, match="nonsense"):
        bridge.nonsense  # noqa: B018


def test_dir_lists_only_the_interface() -> None:
    assert {name for name in dir(bridge) if not name.startswith("__")} == set(bridge.__all__)


def test_missing_server_error_uses_the_librarys_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOGDIR", raising=False)
    monkeypatch.setattr(manifest, "DEFAULT_FOLDER", tmp_path / "default")
    several = {tmp_path / name: checks_sample.manifest() for name in ("a", "b")}
    for servers, words in (({}, "bridge.attach(PATH)"), (several, f'bridge.attach("{tmp_path / "a"}")')):
        monkeypatch.setattr(discovery, "running", lambda found=servers: found)
        with pytest.raises(ManifestError) as refused:
            bridge.attach()
        assert words in refused.value.hint
        assert "--vllm-config-path" not in refused.value.hint


def test_missing_server_hint_has_the_start_command(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no manifest at") as refused:
        bridge.attach(tmp_path / "none")
    assert refused.value.hint.endswith(f"bridge serve-vllm --model MODEL --vllm-config-path {tmp_path / 'none'}")


@pytest.mark.parametrize("given", [{"path": 3}, {"run_dir": b"runs/x"}])
def test_value_that_is_not_a_path_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"bridge.attach: {next(iter(given))} is .*, expected a path"):
        bridge.attach(**given)


def test_import_loads_no_torch() -> None:
    program = "import json, sys, bridge; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "vllm", "transformers", "httpx", "pydantic"} & set(json.loads(done.stdout))


def test_package_is_marked_as_typed() -> None:
    assert (Path(bridge.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ([1, 0.5], ((1.0,), (0.5,))),
        ([[1, 2], (3, 4)], ((1.0, 2.0), (3.0, 4.0))),
        (torch.tensor([1.0, 0.5]), ((1.0,), (0.5,))),
        (np.array([[1.0, 2.0], [3.0, 4.0]]), ((1.0, 2.0), (3.0, 4.0))),
    ],
)
def test_group_may_have_its_own_advantages(given: Any, held: object) -> None:
    completion = Completion(token_ids=(1, 2), logprobs=(-1.0, -1.0), text="", finish_reason="stop")
    group = Group(problem={"prompt": ""}, prompt_token_ids=(1,), completions=(completion,) * 2, rewards=(0.0, 1.0))
    changed = group.with_advantages(given)
    assert changed.advantages == held
    assert group.advantages is None
    assert len(bridge.samples([changed])) == 2
    with pytest.raises(UsageError, match="they are for 3 completions, but the group has 2"):
        bridge.samples([group.with_advantages([1, 2, 3])])


def two_completions() -> Group:
    one = Completion(token_ids=(1, 2), logprobs=(-1.0, -1.0), text="x", finish_reason="stop")
    return Group(problem={"prompt": "a"}, prompt_token_ids=(1,), completions=(one, one), rewards=(0.0, 1.0))


@pytest.mark.parametrize(
    "given", [["1", "0"], [b"1", b"0"], [np.str_("1"), 0], [None, 0], [1j, 0], [10**400, 0], [[1, "2"], [3, 4]], "10"]
)
def test_advantage_that_is_no_number_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="expected a number, or one number per token"):
        two_completions().with_advantages(given)


@pytest.mark.parametrize(
    "rewards", [(float("nan"), 1.0), (float("inf"), 1.0), (None, 1.0), ("1", "0"), (1e31, 0.0), (1.0,), ()]
)
def test_samples_refuse_rewards_without_advantages(rewards: Any) -> None:
    """NaN would become the advantage of every completion of the group."""
    group = dataclasses.replace(two_completions(), rewards=rewards)
    with pytest.raises(UsageError, match=r"the rewards of group 2 \(prompt 'a'\) are .*, expected a finite number"):
        bridge.samples([two_completions(), group])
    assert len(bridge.samples([group.with_advantages([1.0, 2.0])])) == 2


def test_samples_take_rewards_of_any_kind_of_number() -> None:
    numbers: Any = torch.tensor(0.0), np.float32(1)
    group = dataclasses.replace(two_completions(), rewards=numbers)
    assert [sample.advantages for sample in bridge.samples([group])] == [
        sample.advantages for sample in bridge.samples([two_completions()])
    ]


@pytest.mark.parametrize("given", [None, 5, [None], {"a": 1}])
def test_samples_of_something_else_are_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"group 1 is .*, expected a bridge\.Group"):
        bridge.samples(given)


@pytest.mark.parametrize("kind", [bridge.Group, bridge.Completion, bridge.Sample])
def test_help_documents_every_field_of_a_record(kind: type) -> None:
    text = kind.__doc__ or ""
    for name in dict.fromkeys(re.findall(r"^        (\w+)  ", text, re.MULTILINE)):
        assert name in {field.name for field in dataclasses.fields(kind)}
    required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    assert all(f"{name}  " in text for name in required if name != "reward_parts"), text


def test_loss_that_divides_by_a_length_requires_it() -> None:
    completion = Completion(token_ids=(1, 2), logprobs=(-1.0, -1.0), text="", finish_reason="stop")
    group = Group(problem={"prompt": ""}, prompt_token_ids=(1,), completions=(completion,) * 2, rewards=(0.0, 1.0))
    loss = bridge.LossConfig(name="dr_grpo")
    with pytest.raises(UsageError, match="longest completion"):
        bridge.samples([group], loss)
    made = bridge.samples([group], loss, max_new_tokens=10)
    assert [(sample.weight, sample.advantages) for sample in made] == [(1 / 20, (-0.5, -0.5)), (1 / 20, (0.5, 0.5))]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_tokens": 5}, "SamplingConfig has no choice 'max_tokens'.*did you mean max_new_tokens?"),
        ({"num_generations": 5}, "has no choice 'num_generations'.*did you mean group_size?"),
        ({"nonsense": 5}, "has no choice 'nonsense'.*the choices are group_size, max_new_tokens"),
        ({"temperature": 0}, "SamplingConfig: temperature must be greater than or equal to 0.01, found 0"),
    ],
)
def test_wrong_choice_is_reported_in_one_line(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        bridge.SamplingConfig(**wrong)
    line = f"{caught.value.message} {caught.value.hint}"
    assert re.search(words, line), line
    assert "\n" not in line
