"""Calls of one policy from several threads, nested, after an error, and in forked processes.

Not covered: a real server (`tests/cpu/test_library.py`).
"""

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.errors import AttachError, BridgeError, UsageError
from bridge.processes import children
from bridge.server.client import BridgeClient
from bridge.server.fence import frozen
from tests.logged import logged
from tests.unit import patched_server
from tests.unit.engine.test_policy import client_of, manifest_of

pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("policy_calls")]
SAMPLING = bridge.SamplingConfig(group_size=2, max_new_tokens=4, request_timeout_s=60)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the manifest's path of a patched server without vLLM."""
    with patched_server.tiny_llama(tmp_path_factory.mktemp("server")) as server:
        yield server.path


@pytest.fixture
def policy(path: Path, tmp_path: Path) -> Iterator[bridge.Policy]:
    with closing(bridge.attach(path, sampling=SAMPLING, run_dir=tmp_path / "run")) as made:
        yield made
        if made._failed and not made._closed:
            made.publish(lambda: None)


def optimizer(policy: bridge.Policy) -> torch.optim.Optimizer:
    made = torch.optim.SGD([*policy.parameters()], lr=0.1)
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    return made


CALLS: dict[str, Callable[[bridge.Policy, Path], object]] = {
    "sample": lambda policy, _: policy.sample(["2+2="]),
    "update": lambda policy, _: policy.update(optimizer(policy)),
    "publish": lambda policy, _: policy.publish(lambda: None),
    "resume": lambda policy, _: policy.resume(optimizer(policy)),
    "verify": lambda policy, _: policy.verify(),
    "save": lambda policy, folder: policy.save(folder / "saved"),
    "close": lambda policy, _: policy.close(),
}
"""All calls that use the server or read all weights."""


def outcome(call: str, policy: bridge.Policy, folder: Path) -> str:
    try:
        CALLS[call](policy, folder)
    except BridgeError as error:
        return f"{type(error).__name__}: {error.message}"
    return "works"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("outer", ["publish", "update"])
def test_nested_call_is_refused_immediately(policy: bridge.Policy, tmp_path: Path, call: str, outer: str) -> None:
    found, version = list[str](), policy.version

    def write(*_: object) -> None:
        found.append(outcome(call, policy, tmp_path))
        assert client_of(policy).status().state == "paused"

    if outer == "publish":
        policy.publish(write)
    else:
        stepped = optimizer(policy)
        stepped.register_step_pre_hook(write)
        policy.update(stepped)
    assert found == [f"UsageError: policy.{call} was called inside policy.{outer} of the same policy"]
    assert policy.version == client_of(policy).status().version == version + 1


@pytest.mark.parametrize("call", CALLS)
def test_calls_after_an_error_in_the_fence_do_not_wait(
    policy: bridge.Policy, path: Path, tmp_path: Path, call: str
) -> None:
    def fail() -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        policy.publish(fail)
    refused = f"AttachError: policy.{call}: an error inside policy.publish may have left the weights half-written"
    found = outcome(call, policy, tmp_path)
    if call in {"publish", "resume", "close"}:  # allowed, and resume finds no checkpoint to load
        assert found == "works"
    else:
        assert found.startswith(refused)
    state = {"publish": "serving"}.get(call, "paused")
    with bridge.attach(path, sampling=SAMPLING) as other:
        assert client_of(other).status().state == state
        if state == "paused" and call == "close":
            with pytest.raises(AttachError, match="an error inside an earlier policy of this process may have left"):
                other.sample(["2+2="])
            other.publish(lambda: None)
            assert len(other.sample(["2+2="])) == 1


def test_two_policies_of_a_process_do_not_share_the_fence(policy: bridge.Policy, path: Path) -> None:
    with bridge.attach(path, sampling=SAMPLING) as other:
        refused = "another policy of process [0-9]+ holds the fence"

        def write() -> None:
            with pytest.raises(AttachError, match=refused):
                other.publish(lambda: None)
            with pytest.raises(AttachError, match=refused):
                other.verify()
            assert client_of(policy).status().state == "paused"

        policy.publish(write)
    assert client_of(policy).status().lease is not None, "the first policy still holds it"
    policy.publish(lambda: None)
    policy.close()
    with bridge.attach(path, reads_only=True) as looking:
        assert client_of(looking).status().lease is None


@pytest.mark.parametrize("call", sorted({*CALLS} - {"close"}))
def test_closed_policy_refuses_every_call(policy: bridge.Policy, tmp_path: Path, call: str) -> None:
    policy.close()
    assert outcome(call, policy, tmp_path) == f"UsageError: policy.{call}: the policy is closed"


@pytest.mark.parametrize("call", ["pack", "logprobs", "encode", "optimizer", "log"])
def test_closed_policy_refuses_calls_without_a_server(policy: bridge.Policy, call: str) -> None:
    samples = [policy.encode("a", "b")]
    (batch,) = policy.pack(samples)
    policy.close()
    arguments: dict[str, tuple[object, ...]] = {
        "pack": (samples,), "logprobs": (batch,), "encode": ("a", "b"), "optimizer": ("adamw",), "log": (1,)
    }  # fmt: skip
    given = {"lr": 1e-3} if call == "optimizer" else {}
    with pytest.raises(UsageError, match=rf"policy\.{call}: the policy is closed"):
        getattr(policy, call)(*arguments[call], **given)


def in_fork(act: Callable[[], object]) -> int:
    """Return the exit status of a fork that runs `act` and then leaves the enclosing blocks."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        code = 1
        try:
            act()
            code = 0
        except BaseException:  # noqa: BLE001  pytest must not run here
            traceback.print_exc()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("call", sorted({*CALLS} - {"close"}))
def test_policy_refuses_calls_in_a_forked_process(policy: bridge.Policy, tmp_path: Path, call: str) -> None:
    policy.sample(["2+2="])
    parent = os.getpid()

    def act() -> None:
        expected = (
            f"UsageError: policy.{call}: process {parent} created this policy, and process {os.getpid()} was forked"
        )
        assert outcome(call, policy, tmp_path).startswith(expected)

    assert in_fork(act) == 0


def test_forked_process_that_exits_leaves_the_server_alone(path: Path, tmp_path: Path) -> None:
    """As after `sys.exit()` in a fork: the parent keeps the server, the lease and the run directory."""
    log = tmp_path / "log"
    child = children.start([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, log)
    with bridge.attach(path, sampling=SAMPLING, run_dir=tmp_path / "run") as policy:
        policy.sample(["2+2="])

        def leave() -> None:
            with suppress(SystemExit), policy:
                sys.exit()
            with policy:
                pass
            children.kill(child)
            children.stop(child)

        assert in_fork(leave) == 0
        assert child.is_alive()
        assert client_of(policy).status().lease is not None
        assert len(policy.sample(["2+2="])) == 1
        policy.publish(lambda: None)
    children.stop(child)
    assert not child.is_alive()


def in_threads(count: int, act: Callable[[int], object]) -> list[BaseException]:
    errors = list[BaseException]()

    def run(index: int) -> None:
        try:
            act(index)
        except BaseException as error:  # noqa: BLE001  compared below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def test_threads_that_publish_wait_for_each_other(policy: bridge.Policy) -> None:
    versions, states, first = list[int](), list[str](), policy.version

    def publish(_: int) -> None:
        for _ in range(3):

            def write() -> None:
                states.append(client_of(policy).status().state)
                time.sleep(0.05)
                states.append(client_of(policy).status().state)

            versions.append(policy.publish(write).version)

    assert in_threads(3, publish) == []
    assert set(states) == {"paused"}
    assert sorted(versions) == list(range(first + 1, first + 10))


def test_threads_may_sample_concurrently_and_during_an_update(policy: bridge.Policy) -> None:
    groups = list[int]()

    def act(index: int) -> None:
        for _ in range(3):
            if index == 0:
                policy.update(optimizer(policy))
            else:
                groups.append(len(policy.sample([f"say {index}:", "2+2="])))

    assert in_threads(6, act) == []
    assert groups == [2] * 15


def test_sample_waits_for_another_threads_running_sample(policy: bridge.Policy) -> None:
    async def cancelled() -> int:
        task = asyncio.create_task(asyncio.to_thread(policy.sample, ["long " * 4]))
        await asyncio.sleep(0.01)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return len(await asyncio.to_thread(policy.sample, ["2+2="]))

    assert asyncio.run(cancelled()) == 1


def test_sample_ends_when_another_thread_fails_in_the_fence(policy: bridge.Policy) -> None:
    paused = threading.Event()

    def act(index: int) -> None:
        def fail() -> None:
            paused.set()
            time.sleep(1.0)
            raise ZeroDivisionError

        if index == 0:
            policy.publish(fail)
        paused.wait()
        policy.sample(["2+2="])

    refused, failed = sorted(in_threads(2, act), key=lambda error: type(error).__name__)
    assert isinstance(failed, ZeroDivisionError)
    assert str(refused).startswith("policy.sample: an error inside policy.publish may have left")


def test_sample_ends_when_another_thread_closes_the_policy(policy: bridge.Policy) -> None:
    def act(index: int) -> None:
        if index == 0:
            policy.sample(["2+2="])
        time.sleep(0.5)
        policy.close()

    with BridgeClient(manifest_of(policy), timeout_s=60) as reader, frozen(reader):
        (refused,) = in_threads(2, act)
    assert str(refused).startswith("policy.sample: the policy is closed")


def test_ctrl_c_ends_the_wait_for_another_thread(policy: bridge.Policy) -> None:
    paused, may_end = threading.Event(), threading.Event()

    def write() -> None:
        paused.set()
        may_end.wait(60)

    thread = threading.Thread(target=policy.publish, args=(write,))
    thread.start()
    paused.wait()
    threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        policy.update(optimizer(policy))
    may_end.set()
    thread.join()
    policy.update(optimizer(policy))


def test_sample_async_inside_a_call_is_refused_immediately(policy: bridge.Policy) -> None:
    """Otherwise it would wait for the paused server until the request timed out, and leave the server torn."""

    def write() -> None:
        with pytest.raises(UsageError, match=r"policy\.sample_async was called inside policy\.publish"):
            asyncio.run(policy.sample_async(["2+2="]))

    policy.publish(write)


IDS: dict[str, Any] = {
    "list": [65, 66],
    "array": np.array([65, 66]),
    "tensor": torch.tensor([65, 66]),
    "numbers": [np.int64(65), np.int64(66)],
    "range": range(65, 67),
    "dictionary": {"prompt": [65, 66], "answer": "4"},
}


@pytest.mark.parametrize("kind", IDS)
def test_prompt_may_be_token_ids_of_any_type(policy: bridge.Policy, kind: str) -> None:
    (group,) = policy.sample([IDS[kind]])
    assert group.prompt_token_ids == (65, 66)
    assert isinstance(group.problem["prompt"], str)
    assert group.problem.get("answer") == ("4" if kind == "dictionary" else None)


def test_ids_with_messages_end_like_messages(policy: bridge.Policy) -> None:
    """A completion of chat messages also ends at the end of a turn, which text decoded from ids would not show."""
    messages = [{"role": "user", "content": "a"}]
    (group,) = policy.sample([{"prompt": messages, "prompt_token_ids": [65, 66]}])
    assert group.prompt_token_ids == (65, 66)
    assert group.problem["prompt"] == messages


def test_prompts_may_come_from_a_generator(policy: bridge.Policy) -> None:
    """Otherwise the first check would exhaust it, and nothing would be sampled."""
    assert len(policy.sample(text for text in ("a", "b"))) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, "prompts is None"),
        (5, "prompts is 5"),
        ([None], "a prompt is None"),
        ([b"ab"], "a prompt is b'ab'"),
        ([[-1]], "the token id -1"),
        ([[10**30]], "the token id 10"),
        ([{"prompt": "x", "prompt_token_ids": [-5]}], "the token id -5"),
        ([[]], "no token ids"),
    ],
)
def test_invalid_prompt_is_refused_by_name(policy: bridge.Policy, prompts: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        policy.sample(prompts)


def test_template_argument_without_effect_is_reported_once(policy: bridge.Policy) -> None:
    with logged() as lines:
        for _ in range(2):
            policy.sample(["2+2="], chat_template_kwargs={"enable_thinking": False})
    (line,) = (line for line in lines if "chat_template_kwargs" in line)
    assert line.endswith("has no effect: the model's chat template does not use enable_thinking")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"score": 5}, "score is 5"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"chat_template_kwargs": None}, "chat_template_kwargs is None"),
        ({"n": 0}, "n is 0"),
        ({"n": torch.tensor([2, 3])}, "n is tensor"),
        ({"n": 2, "group_size": 3}, "group_size and n|n and group_size"),
    ],
)
def test_wrong_arguments_of_sample_are_refused_by_name(
    policy: bridge.Policy, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        policy.sample(["2+2="], **given)
