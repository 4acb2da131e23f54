"""The benchmarks' own parts: how runs are summarized, how a side is started and parsed, and the common workload."""

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin, compile_regions
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from benchmarks import (
    _dummy_weights,
    _figures,
    _flash,
    _lengths,
    _results,
    _servers,
    _sides,
    _stamped,
    _trl,
    _trl_async,
    _trl_times,
    _work,
    grpo,
    node,
    one_copy,
    replicas,
    startup,
    train_step,
    turns,
)  # fmt: skip
from benchmarks._lengths import Lognormal
from benchmarks._models import make_whole_model, model_config
from benchmarks._sides import Side, Work
from benchmarks._stamped import Run
from benchmarks.train_step import Case
from bridge.config import TaskConfig
from bridge.processes import server_log
from bridge.server.protocol import COMPLETIONS
from bridge_environments import registry
from tests.unit.http_server import Answer, HttpRequest, as_json, serving
from tests.unit.openai_server import openai

TRL, OURS = Side("trl", "16"), Side("bridge", "adamw-8bit --liger-kernel")
TRL_ON_TWO = Side("trl", "16 --gpus 2")
GIB = 2**30
REGIONAL = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"


def run_of(lines: list[dict[str, float]], *, step_s: float, peak_gib: float) -> Run:
    return Run(
        stamps=[100 + step_s * number for number in range(len(lines))], lines=lines, seconds=60.0,
        baseline_bytes=GIB, peak_bytes=int((peak_gib + 1) * GIB), kv_cache_gib=10.0,
    )  # fmt: skip


def test_runs_become_compared_rows_of_a_table(tmp_path: Path) -> None:
    trl_line = {
        "tokens": 512, "generation_s": 1.0, "training_s": 3.0, "old_logprobs_s": 0.5, "optimizer_s": 0.25,
        "sync_s": 0.125, "peak_allocated_gib": 50.0,
    }  # fmt: skip
    our_line: dict[str, Any] = {
        "tokens_generated": 512, "rollout_s": 1.0, "train_s": 1.5, "fence_pause_s": 0.0625, "fence_write_s": 0.25,
        "fence_publish_s": 0.0625, "peak_memory_gib": 20.0, "train_tokens_per_s": 800.0, "rerouted_share": None,
    }  # fmt: skip
    slow = run_of([{**trl_line, "generation_s": seconds} for seconds in (9.0, 1.0, 1.0, 4.0)], step_s=4.5, peak_gib=110)
    fast = run_of([{**our_line, "mismatch_kl": kl} for kl in (9.0, 0.001, 0.003)], step_s=3, peak_gib=90)
    steps = _figures.steps_of(TRL, slow, warm_up=2)
    assert [step["other_s"] for step in steps] == [4.5 - 1.0 - 3.0 - 0.25 - 0.125, 4.5 - 4.0 - 3.0 - 0.25 - 0.125]
    assert _figures.row(TRL, [slow], warm_up=1)["generation_s"] == 1.0, "a median"
    assert _figures.row(TRL, [slow], warm_up=1, differ=True)["generation_s"] == 2.0, "steps that differ are averaged"
    sleeping = _figures.row(Side("trl", "16 --sleep --liger"), [slow], warm_up=1)
    assert "peak_without_kv_gib" not in sleeping, "its peak holds no KV cache"

    sides = {
        TRL: slow,
        OURS: fast,
        Side("bridge", f"{OURS.variant} --gpus 2"): fast,
        TRL_ON_TWO: Run(failure="no memory"),
    }
    rows = _figures.scale({side: _figures.row(side, [run], warm_up=1) for side, run in sides.items()})
    trl, ours, both, failed = _figures.compare(rows, weights_gib=14.2)
    assert (trl["speed"], ours["speed"], ours["memory_saved_gib"]) == (1, 1.5, 20)
    assert ours["is_fast_enough"]
    assert ours["is_small_enough"]
    assert (ours["mismatch_kl"], ours["trained_per_gpu"], both["trained_per_gpu"]) == (0.002, 800, 400)
    assert (both["scaling"], "scaling" in trl, "scaling" in failed) == (1.0, False, False)
    head, *lines, fault = _figures.table([trl, ours, both, failed]).splitlines()
    assert "rerouted" not in head
    assert {len(line) for line in lines} == {len(head)}
    assert "1.50x" in lines[1]
    assert fault == "trl 16 --gpus 2: no memory"

    path = _results.write("grpo", {"tiny": {"rows": rows}}, tmp_path / "results")
    document = json.loads(path.read_text())
    assert path.name.startswith("grpo-")
    assert {"bridge", "vllm", "torch"} <= set(document["versions"])
    assert document["results"]["tiny"]["rows"][3]["failures"] == ["no memory"]


def test_dummy_weights_come_from_a_vllm_plugin(tmp_path: Path) -> None:
    environment = _dummy_weights.installed(tmp_path, {"PYTHONPATH": "other", "VLLM_PLUGINS": "bridge"})
    assert environment["PYTHONPATH"] == f"{tmp_path}{os.pathsep}other"
    assert environment["VLLM_PLUGINS"] == f"bridge,{_dummy_weights.NAME}"
    (distribution,) = metadata.distributions(path=[str(tmp_path)])
    (plugin,) = distribution.entry_points
    assert (plugin.group, plugin.load()) == ("vllm.general_plugins", _dummy_weights.patch)


WORK = Work(completions=32, group=4, tokens=17)
LENGTHS = Work(completions=32, tokens=4096, lengths="lognormal:600:0.6:4096")


@pytest.mark.parametrize(
    ("trl", "ours", "work", "same", "expected"),
    [
        ("16", "adamw", WORK, ("--completions", "--batch-size"), "32"),
        ("16", "adamw", WORK, ("--group", "--group-size"), "4"),
        ("16", "adamw", WORK, ("--tokens", "--max-new-tokens"), "17"),
        ("16", "adamw", WORK, ("--steps", "--training-steps"), "5"),
        ("16", "adamw", LENGTHS, ("--max-model-len", "--max-model-len"), "4224"),
        (None, "adamw --gpus=4 --tensor-parallel-size 2", WORK, ("--batch-size", "--batch-size"), "128"),
        (None, "adamw --gpus=4 --tensor-parallel-size 2", WORK, ("--max-num-seqs", "--max-num-seqs"), "64"),
        (None, "adamw --mode none --trainer-device cuda:1", WORK, ("--batch-size", "--batch-size"), "64"),
        (None, "adamw -- --max-num-seqs 256", WORK, ("--max-num-seqs", "--max-num-seqs"), "256"),
    ],
)
def test_both_sides_get_the_same_work(
    tmp_path: Path, trl: str | None, ours: str, work: Work, same: tuple[str, str], expected: str
) -> None:
    sides = [Side("bridge", ours)] if trl is None else [Side("trl", trl), Side("bridge", ours)]
    for side in sides:
        argv = side.argv(work, tmp_path / "model", tmp_path, 5)
        flag = same[0] if side.name == "trl" else same[1]
        last = max(index for index, argument in enumerate(argv) if argument == flag)
        assert argv[last + 1] == expected, side.name


def test_trl_flags_become_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REGIONAL, raising=False)
    variant = "8 --gpus 4 --no-checkpointing --liger --attention flash --compile layers --sleep"
    argv = Side("trl", variant).argv(WORK, tmp_path, tmp_path, 5)
    at = argv.index("benchmarks._trl")
    assert argv[at - 3 : at] == ["--nproc-per-node", "4", "-m"]
    settings = _trl.settings(_trl.flags().parse_args(argv[at + 1 :]))
    assert settings["gradient_accumulation_steps"] * settings["per_device_train_batch_size"] == 32, "of each process"
    assert settings["model_init_kwargs"]["attn_implementation"] == _flash.NAME
    assert settings["vllm_enable_sleep_mode"]
    assert TorchDynamoPlugin(backend="inductor").use_regional_compilation
    assert settings["use_liger_kernel"]
    assert not settings["gradient_checkpointing"]

    split = Side("trl", "8 --async --optim x").argv(LENGTHS, tmp_path, tmp_path, 5)
    assert split[1:6] == ["-m", "benchmarks._trl_async", "8", "--optim", "x"]
    options = _trl.common_flags(None).parse_args(split[3:])
    options.max_staleness, options.token_budget = 1, 8704
    settings = _trl_async.settings(options, "http://127.0.0.1:1")
    assert settings["token_budget"] == 8704
    assert settings["gradient_accumulation_steps"] * settings["per_device_train_batch_size"] == 64
    assert _lengths.MIDDLEWARE in _servers.fed_command(options).argv


@pytest.mark.parametrize("compiled", [False, True])
def test_flash_attention_matches_sdpa(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On rows padded on either side, as TRL pads prompts and completions, and on rows of one length."""
    monkeypatch.setattr(_flash.Calls, "number", 0)
    _flash.register()
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    ids, mask = torch.randint(64, (3, 12)), torch.ones(3, 12, dtype=torch.long)
    mask[0, :4] = mask[1, -5:] = 0
    gradients = dict[str, Tensor]()
    for attention in ("sdpa", _flash.NAME):
        model.set_attn_implementation(attention)
        layers = compile_regions(model, backend="eager") if compiled else model
        for given in (mask, torch.ones_like(mask)):
            logits = layers(input_ids=ids, attention_mask=given, use_cache=False).logits[given.bool()]
            (gradient,) = torch.autograd.grad(logits.pow(2).sum(), model.model.layers[0].self_attn.q_proj.weight)
            expected = gradients.setdefault(f"{given.sum()}", gradient)
            torch.testing.assert_close(gradient, expected)
        if attention == "sdpa":
            with pytest.raises(SystemExit, match="without a call of FlashAttention"):
                _flash.check_used()
    _flash.check_used()


def test_both_sides_get_the_same_lengths(tmp_path: Path) -> None:
    trl, ours = (side.argv(LENGTHS, tmp_path, tmp_path, 5) for side in (TRL, OURS))
    assert trl[trl.index("--lengths") + 1] == _sides.environment(LENGTHS)[_lengths.VARIABLE] == LENGTHS.lengths
    assert ours[ours.index("--middleware") + 1] == _lengths.MIDDLEWARE
    assert _lengths.VARIABLE not in _sides.environment(Work())
    lengths = Lognormal.parse(LENGTHS.lengths)
    prompts = [[number] for number in range(2000)]
    limits = lengths.of_each(prompts)
    assert limits == [lengths.of(prompt, 0) for prompt in prompts]
    assert statistics.median(limits) == pytest.approx(600, rel=0.05)
    assert statistics.fmean(limits) == pytest.approx(600 * math.exp(0.6**2 / 2), rel=0.05)
    assert 2000 < max(limits) <= 4096
    assert lengths.of_each([[1], [2], [1]]) == [lengths.of([1], 0), lengths.of([2], 0), lengths.of([1], 1)]


@pytest.mark.parametrize(
    ("code", "lines", "failure"),
    [
        ("import time\nfor step in (1, 2): print('{\"step\": %d}' % step)\ntime.sleep(600)", 2, None),
        (
            "import sys; print('{}'); print('torch.OutOfMemoryError: CUDA out of memory', file=sys.stderr); 1 / 0",
            1, "torch.OutOfMemoryError: CUDA out of memory",
        ),
    ],
    ids=["stopped after its last line", "died"],
)  # fmt: skip
def test_process_is_timed_until_its_last_line(tmp_path: Path, code: str, lines: int, failure: str | None) -> None:
    used = iter([1 * GIB, 9 * GIB])
    run = _stamped.run(
        [sys.executable, "-u", "-c", code], os.environ, tmp_path / "log",
        num_lines=2, limit_s=60, used_bytes=lambda: next(used, 2 * GIB),
    )  # fmt: skip
    assert (len(run.lines), run.failure, run.peak_gib) == (lines, failure, 8)
    assert run.stamps == sorted(run.stamps)


def test_startup_and_kv_cache_are_read_from_logs(tmp_path: Path) -> None:
    log, server = tmp_path / "log", tmp_path / "run" / "serve.log"
    server.parent.mkdir()
    assert OURS.kv_cache_gib(log, tmp_path) is None
    nothing: dict[str, object] = {"ready_s": None, "server_s": None, "phases_s": {}, "spawned_because": None}
    assert startup.server_times(log, server, 0.0) == nothing
    before = time.time()
    server_log.begin_log(server, "started")
    after, began_at = time.time(), before - 10
    with server.open("a") as file:
        file.write("WARNING We must use the `spawn` multiprocessing start method. Reasons: CUDA is initialized\n")
        file.write("(Worker pid=1) INFO [gpu_worker.py:561] Available KV cache memory: 24.5 GiB\n")
    log.write_text("mode x\nvLLM is ready after 52 s: importing packages 20 s, sizing the KV cache 3 s\n")
    assert OURS.kv_cache_gib(log, tmp_path) == 24.5
    times = startup.server_times(log, server, began_at)
    assert 61 <= times.pop("ready_s") <= 62 + after - before, "the log has whole seconds"
    phases = {"importing packages": 20, "sizing the KV cache": 3}
    assert times == {"server_s": 52, "phases_s": phases, "spawned_because": "CUDA is initialized"}


def test_parts_of_a_trl_step_do_not_overlap() -> None:
    def method(name: str) -> Callable[..., str]:
        return lambda *_: name

    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_generation=SimpleNamespace(generate=method("generate"), sync_weights=method("sync")),
        accelerator=SimpleNamespace(clip_grad_norm_=method("clip")),
        _prepare_inputs=method("prepare"),
        training_step=method("step"),
        _get_per_token_logps_and_entropies=method("logprobs"),
    )
    clock = _trl_times.Clock()
    _trl_times.watch(trainer, clock)
    trainer._get_per_token_logps_and_entropies()
    assert "old_logprobs" not in clock.seconds, "a pass with gradients is a part of training"
    with torch.no_grad():
        assert trainer._get_per_token_logps_and_entropies() == "logprobs"
    assert trainer.vllm_generation.generate() == "generate"
    assert set(clock.seconds) == {"old_logprobs", "generation"}
    assert clock.reward(["a", "b"], completion_ids=[[1, 2], [3]]) == [_work.reward("a"), _work.reward("b")]
    assert clock.num_tokens == 3
    seconds = {"training_step": 5.0, "prepare": 2.5, "generation": 1.5, "sync": 0.25, "old_logprobs": 0.5,
               "clip": 0.125, "optimizer": 0.25}  # fmt: skip
    parts = _trl_times.parts(seconds)
    assert parts["training_s"] == 5.0 - 2.5 + 0.125 + 0.5
    assert (parts["generation_s"], parts["sync_s"], parts["optimizer_s"]) == (1.5, 0.25, 0.25)


def test_task_rewards_differ() -> None:
    environment = registry.load(TaskConfig(environment=f"{_work.__file__}:Hashed"))
    problems = list(environment)
    assert {len(str(problem["prompt"])) for problem in problems} == {_work.PROMPT_TOKENS}
    assert len({environment.score(problems[0], f"t{n}") for n in range(100)}) == 100


def test_dummy_model_loads_and_never_ends(tmp_path: Path) -> None:
    folder = make_whole_model("tiny", tmp_path)
    _, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocabulary = model_config("tiny").vocab_size
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert {len(ids) for ids in tokenizer(_work.prompts())["input_ids"]} == {_work.PROMPT_TOKENS}
    assert tokenizer.eos_token_id == vocabulary
    assert len({tokenizer.decode([token]) for token in range(300, vocabulary)}) == vocabulary - 300


def test_train_step_measures_a_made_up_batch() -> None:
    case = Case("tiny", None, "optimizer=adamw-8bit micro_batch_tokens=300")
    options = argparse.Namespace(completions=4, group=2, tokens=3, steps=2, warm_up=1, profile=True)
    row = train_step.measure(case, options, math.inf)
    assert row["num_steps"] == 2
    assert row["step_s"] >= row["forward_backward_s"] > 0
    assert len(row["kernels"]) == train_step.TOP
    assert "adamw-8bit" in train_step.table([row])


def test_turns_sample_the_same_number_of_tokens(tmp_path: Path) -> None:
    model = turns.make_model("tiny", tmp_path / "model")
    small = {"trajectories": 4, "group": 2, "turns": 3, "tokens": 5, "tool-ms": 20, "rounds": 1}
    options = turns.flags().parse_args([f"--{name}={value}" for name, value in small.items()])

    def bend(document: dict[str, Any], request: HttpRequest) -> dict[str, Any]:
        count, draw = request.body["max_tokens"], random.Random(request.body["seed"])
        for one in document["choices"]:
            one["token_ids"] = draw.choices(range(300, 1024), k=count)
            one |= {"logprobs": {"token_logprobs": [-1.0] * count}, "finish_reason": "length"}
        return document

    with serving(openai(bend, is_bridge=True)) as server:
        row = turns.measure(server.url, model, options)
    bodies = [request.body for request in server.requests if request.method == "POST"]
    assert Counter((body["n"], body["max_tokens"]) for body in bodies) == {(1, 5): 2 * 4 * 3, (2, 15): 2 * 2}
    assert max(max(body["prompt"]) for body in bodies) < model_config("tiny").vocab_size, "each token has an embedding"
    last = max((body["prompt"] for body in bodies), key=len)
    assert AutoTokenizer.from_pretrained(model).decode(last).count(f"<result>{'a' * _work.ANSWER_TOKENS}<model>") == 2
    assert row["turns_tokens_per_s"] == pytest.approx(60 / row["turns_s"])
    assert row["turns_s"] > row["waits_s"] == 0.04
    assert row["tool_s"] > 0.04
    assert row["ratio"] == pytest.approx(row["one_turn_s"] / row["turns_s"])
    assert len(turns.table(row).splitlines()) == 2


def test_rates_send_the_same_requests_to_stock_vllm() -> None:
    def answer(request: HttpRequest) -> Answer:
        if request.path == "/v1/models":
            return as_json({"data": [{"id": "model"}]})
        return as_json({"choices": [{"token_ids": [1] * 4}] * request.body["n"]})

    options = argparse.Namespace(requests=16, tokens=4, rounds=1)
    with serving(answer) as stock, serving(answer) as patched:
        columns = _servers.rates((stock.url, patched.url), options, as_rollouts=True, stock=(stock.url,))
    assert all(rate > 0 for column in columns for rate in column)
    for server, route, logprobs in ((stock, "/v1/completions", 0), (patched, COMPLETIONS, None)):
        (*bodies,) = (request.body for request in server.requests if request.path == route)
        assert len(bodies) == 4, "two groups, in a round to warm up and in one that counts"
        assert {(body["n"], body.get("logprobs")) for body in bodies} == {(8, logprobs)}


def test_node_runs_side_by_side_on_own_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "note.py").write_text(
        "import json, os, sys, time\n"
        "time.sleep(0.5)\n"
        "shown = os.environ['CUDA_VISIBLE_DEVICES']\n"
        "row = {'failures': [], 'shown': shown, 'ended': time.time()}\n"
        "with open(sys.argv[1], 'w') as file: json.dump({'results': {'tiny': {'rows': [row]}}}, file)\n"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(_sides, "environment", lambda _: {**os.environ, "PYTHONPATH": str(tmp_path)})
    runs = [
        node.Measurement(kind="fixed", name=name, gpus=gpus, seconds=60, argv=("note", str(tmp_path / name / "a.json")))
        for name, gpus in (("one", 1), ("three", 3), ("four", 4))
    ]
    node.side_by_side(runs, 4, tmp_path, deadline=time.monotonic() + 100)
    rows = {run.name: run.result(tmp_path) for run in runs}
    shown = {name: row["shown"] for name, row in rows.items() if row is not None}
    assert shown == {"four": "4,5,6,7", "three": "4,5,6", "one": "7"}
    late = node.Measurement(kind="fixed", name="late", gpus=1, seconds=60, argv=("note", str(tmp_path / "late")))
    node.side_by_side([late], 4, tmp_path, deadline=time.monotonic() + 30)
    assert late.result(tmp_path) is None


@pytest.mark.parametrize(("parts", "equal"), [(1, 1), (2, 2), (4, None)])
def test_equal_replicas_are_counted_by_part(tmp_path: Path, parts: int, equal: int | None) -> None:
    for rank in range(4):
        part = rank % 2 if parts > 1 else 0
        lines = [{"step": step, "digest": digest + part} for step, digest in ((1, 7), (2, 8), (3, 9))]
        if rank == 3:
            lines[2]["digest"] += 1  # it differs after the last step
        if parts == 1 and rank == 2:
            lines.pop(1)  # it recorded nothing of the second
        (tmp_path / f"{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    counted = replicas.equal_digests(tmp_path, 4, parts)
    assert counted == {"ranks": 4, "steps": 3, "equal": equal, "different_weights": 3}


@pytest.mark.parametrize(
    ("main", "flags", "why"),
    [
        (grpo.main, "--rounds 0", "--rounds: 0 is less than 1"),
        (grpo.main, "--group -8", "--group: -8 is less than 1"),
        (grpo.main, "--dummy-weights", "give an empty --trl"),
        (node.main, "--gpus 0", "--gpus: 0 is less than 1"),
        (one_copy.main, "--rounds 0", "--rounds: 0 is less than 1"),
        (one_copy.main, "--tensor-parallel-size 2", "goes with --generation-only"),
    ],
)
def test_bad_flags_are_refused_before_a_start(
    main: Callable[[], None],
    flags: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *flags.split()])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert why in capsys.readouterr().err
