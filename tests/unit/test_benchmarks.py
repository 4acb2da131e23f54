"""The benchmarks' own parts: how runs are summarized, how a side is started and parsed, and the common workload."""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
    _gpu_memory,
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
from benchmarks._models import SIZES, make_dummy_model, make_whole_model, model_config
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
GIB = 2**30
REGIONAL = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"


def trl_line(step: int, generation_s: float = 1.0) -> dict[str, float]:
    return {
        "step": step, "tokens": 512, "generation_s": generation_s, "training_s": 3.0, "old_logprobs_s": 0.5,
        "optimizer_s": 0.25, "sync_s": 0.125, "peak_allocated_gib": 50.0 + step,
    }  # fmt: skip


def our_line(step: int) -> dict[str, float]:
    return {
        "step": step, "tokens_generated": 512, "rollout_s": 1.0, "train_s": 1.5, "fence_pause_s": 0.0625,
        "fence_write_s": 0.25, "fence_publish_s": 0.0625, "peak_memory_gib": 20.0,
    }  # fmt: skip


def run_of(lines: list[dict[str, float]], *, step_s: float, peak_gib: float, kv_cache_gib: float = 10.0) -> Run:
    return Run(
        stamps=[100 + step_s * number for number in range(len(lines))], lines=lines, seconds=60.0,
        baseline_bytes=GIB, peak_bytes=int((peak_gib + 1) * GIB), kv_cache_gib=kv_cache_gib,
    )  # fmt: skip


def rows() -> list[_figures.Row]:
    slow = run_of([trl_line(n) for n in range(1, 5)], step_s=4.5, peak_gib=110)
    ours = run_of([our_line(n) for n in range(1, 5)], step_s=3.0, peak_gib=90)
    made = [_figures.row(TRL, [slow], warm_up=2), _figures.row(OURS, [ours], warm_up=2)]
    return _figures.compare(made, weights_gib=14.2)


def test_steps_that_warm_up_are_left_out_and_the_rest_is_timed_from_line_to_line() -> None:
    run = Run(stamps=[0.0, 100.0, 104.5, 109.0], lines=[trl_line(n) for n in range(1, 5)])
    steps = _figures.steps_of(TRL, run, warm_up=2)
    assert [step["step_s"] for step in steps] == [4.5, 4.5]
    assert steps[0]["other_s"] == 4.5 - 1.0 - 3.0 - 0.25 - 0.125


def test_a_run_that_ended_while_it_warmed_up_has_no_steps() -> None:
    for num_lines in range(3):
        run = Run(stamps=[float(n) for n in range(num_lines)], lines=[trl_line(n) for n in range(num_lines)])
        assert _figures.steps_of(TRL, run, warm_up=2) == []


def test_a_row_is_the_median_over_the_steps_of_all_runs_and_the_largest_peak() -> None:
    lines = [trl_line(1), trl_line(2, 1.0), trl_line(3, 9.0)]
    runs = [run_of(lines, step_s=4.5, peak_gib=100), run_of([trl_line(1), trl_line(2, 2.0)], step_s=5.5, peak_gib=99)]
    row = _figures.row(TRL, runs, warm_up=1)
    assert (row["num_steps"], row["generation_s"], row["step_s"]) == (3, 2.0, 4.5)
    assert (row["peak_device_gib"], row["peak_without_kv_gib"]) == (100, 90)
    assert row["peak_allocated_gib"] == 53


def test_a_row_has_the_seconds_since_the_command() -> None:
    lines = [trl_line(n) for n in range(1, 4)]
    runs = [Run(stamps=[begun + end for end in (90.0, 95.0, 99.0)], lines=lines, begun=begun) for begun in (0.0, 500.0)]
    ended = Run(stamps=[20.0], lines=lines[:1], begun=0.0)
    row = _figures.row(TRL, [*runs, ended], warm_up=2)
    assert (row["first_end_s"], row["warm_end_s"]) == (90, 95)
    assert row["ends_s_of_runs"] == [[90, 95, 99], [90, 95, 99], [20]]
    assert "first_end_s" not in _figures.row(TRL, [Run()], warm_up=2)


@pytest.mark.parametrize("side", [Side("trl", "16 --sleep --liger"), Side("bridge", "adamw --kv-sleep  always")])
def test_a_kv_cache_that_sleeps_is_not_taken_off_the_peak(side: Side) -> None:
    lines = [trl_line(1), trl_line(2)] if side.name == "trl" else [our_line(1), our_line(2)]
    row = _figures.row(side, [run_of(lines, step_s=4.5, peak_gib=100)], warm_up=1)
    assert row["peak_device_gib"] == 100
    assert "peak_without_kv_gib" not in row


def test_ours_is_compared_with_trl_by_speed_and_by_the_peak_without_the_kv_cache() -> None:
    trl, ours = rows()
    assert trl["speed"] == 1
    assert ours["speed"] == 1.5
    assert ours["is_fast_enough"]
    assert ours["memory_saved_gib"] == 20
    assert ours["is_small_enough"]


def test_a_row_of_bridge_has_means_of_what_it_measured() -> None:
    side = Side("bridge", "adamw --tensor-parallel-size 2")
    measured: dict[str, Any] = {"train_tokens_per_s": 800.0, "mfu": 0.25, "rerouted_share": None}
    lines = [{**our_line(n), **measured, "mismatch_kl": kl} for n, kl in enumerate((9.0, 0.001, 0.003))]
    row = _figures.row(side, [run_of(lines, step_s=3, peak_gib=90)], warm_up=1)
    assert (row["trained_per_gpu"], row["mfu"], row["mismatch_kl"]) == (400, 0.25, 0.002)
    assert "rerouted" not in row
    head, line = _figures.table([row]).splitlines()
    assert "rerouted" not in head
    assert "0.002000" in line


def test_what_is_planned_is_read_from_bridge_plan(tmp_path: Path) -> None:
    model = make_dummy_model("qwen3-moe-tiny", tmp_path / "model")
    both = [Side("bridge", f"adamw-4bit{more} -- --max-num-seqs 8") for more in ("", " --tensor-parallel-size 2")]
    planned = [_sides.planned_gib(side, Work(), model) for side in both]
    assert all(gib is not None and gib > 1 for gib in planned)
    assert _sides.planned_gib(TRL, Work(), model) is None


def test_spread_weights_send_tokens_to_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = {**SIZES["qwen3-moe-tiny"], "num_hidden_layers": 12, "num_experts": 16}
    monkeypatch.setitem(SIZES, "qwen3-moe-deep", deep)
    model: Any = train_step.build("qwen3-moe-deep", torch.device("cpu"))
    routed: list[torch.Tensor] = []
    model.model.layers[-1].mlp.gate.register_forward_hook(lambda _, inputs, output: routed.append(output[2]))
    with torch.no_grad():
        model.get_decoder()(input_ids=torch.arange(400).unsqueeze(0), use_cache=False)
    loads = torch.bincount(routed[0].flatten(), minlength=16) / routed[0].numel() * 16
    assert loads.min() > 0.3
    assert loads.max() < 2.5


def test_dummy_weights_are_spread_by_a_plugin_of_vllm(tmp_path: Path) -> None:
    environment = _dummy_weights.installed(tmp_path, {"PYTHONPATH": "other", "VLLM_PLUGINS": "bridge"})
    assert environment["PYTHONPATH"] == f"{tmp_path}{os.pathsep}other"
    assert environment["VLLM_PLUGINS"] == f"bridge,{_dummy_weights.NAME}"
    assert "VLLM_PLUGINS" not in _dummy_weights.installed(tmp_path, {})
    (distribution,) = metadata.distributions(path=[str(tmp_path)])
    (plugin,) = distribution.entry_points
    assert (plugin.group, plugin.load()) == ("vllm.general_plugins", _dummy_weights.patch)


def test_the_fastest_of_several_rivals_is_compared_with() -> None:
    runs = {TRL: 4.5, Side("trl", "8 --no-checkpointing"): 3.9, OURS: 3.0}
    made = [
        _figures.row(side, [run_of([(our_line if side == OURS else trl_line)(n) for n in range(3)],
                                   step_s=step_s, peak_gib=99)], warm_up=1)
        for side, step_s in runs.items()
    ]  # fmt: skip
    ours = _figures.compare(made, weights_gib=14.2)[2]
    assert ours["speed"] == pytest.approx(1.3)
    assert not ours["is_fast_enough"]
    assert not ours["is_small_enough"]
    (line,) = _figures.verdicts([ours], weights_gib=14.2)
    assert line.count("short of the aim") == 2


def test_a_run_that_failed_is_a_row_that_says_why() -> None:
    failed = _figures.row(TRL, [Run(failure="CUDA out of memory")], warm_up=2)
    ours = _figures.row(OURS, [run_of([our_line(n) for n in range(3)], step_s=3, peak_gib=90)], warm_up=1)
    compared = _figures.compare([failed, ours], weights_gib=1.0)
    assert _figures.verdicts(compared, weights_gib=1.0) == []
    assert "trl 16: CUDA out of memory" in _figures.table(compared)
    json.dumps(compared, allow_nan=False)


def test_a_table_has_a_line_for_each_row_and_aligned_columns() -> None:
    lines = _figures.table(rows()).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    assert "1.50x" in lines[2]
    assert _results.table([["", "a"], ["row", "10"]]) == "      a\nrow  10"


def test_results_name_their_command_and_versions(tmp_path: Path) -> None:
    path = _results.write("grpo", {"tiny": {"rows": rows()}}, tmp_path / "results")
    document = json.loads(path.read_text())
    assert path.name.startswith("grpo-")
    assert {"bridge", "vllm", "torch"} <= set(document["versions"])
    assert document["results"]["tiny"]["rows"][1]["speed"] == 1.5


def test_both_sides_are_told_the_same_work(tmp_path: Path) -> None:
    work = Work(completions=32, group=4, tokens=17)
    trl = TRL.argv(work, tmp_path / "model", tmp_path, 5)
    ours = OURS.argv(work, tmp_path / "model", tmp_path, 5)
    flags = dict(zip(trl[4::2], trl[5::2], strict=True))
    assert flags["--completions"] == ours[ours.index("--batch-size") + 1] == "32"
    assert flags["--group"] == ours[ours.index("--group-size") + 1] == "4"
    assert flags["--tokens"] == ours[ours.index("--max-new-tokens") + 1] == "17"
    assert flags["--steps"] == ours[ours.index("--training-steps") + 1] == "5"
    assert ours[ours.index("--optimizer") + 1 : ours.index("--")] == ["adamw-8bit", "--liger-kernel"]


def test_both_sides_have_as_much_work_on_each_of_several_gpus(tmp_path: Path) -> None:
    work = Work(completions=32)
    trl = Side("trl", "8 --gpus 4 --liger").argv(work, tmp_path, tmp_path, 5)
    at = trl.index("benchmarks._trl")
    settings = _trl.settings(_trl.flags().parse_args(trl[at + 1 :]))
    assert trl[at - 3 : at] == ["--nproc-per-node", "4", "-m"]
    assert settings["gradient_accumulation_steps"] * settings["per_device_train_batch_size"] == 32, "of each process"
    replicas = Side("bridge", "adamw --gpus=4 --tensor-parallel-size 2 -- --max-num-seqs 9")
    argv = replicas.argv(work, tmp_path, tmp_path, 5)
    assert argv[argv.index("--batch-size") + 1] == "128"
    assert argv[argv.index("--max-num-seqs") + 1] == "64", "each server has two GPUs"
    assert (replicas.gpus, replicas.on_one.variant) == (4, "adamw -- --max-num-seqs 9")
    assert Side("bridge", "adamw --tensor-parallel-size 2").gpus == 2


def test_trls_server_mode_is_told_the_same_work(tmp_path: Path) -> None:
    work = Work(completions=32, lengths="lognormal:600:0.6:4096")
    trl = Side("trl", "8 --server --optim adamw_bnb_8bit")
    argv = trl.argv(work, tmp_path, tmp_path, 5)
    assert argv[1:4] == ["-m", "benchmarks._trl", "8"]
    options = _trl.flags().parse_args(argv[3:])
    alone, served = _trl.settings(options), _trl.settings(options, "http://127.0.0.1:1")
    same = alone.keys() & served.keys() - {"vllm_mode", "gradient_accumulation_steps"}
    assert {name: alone[name] for name in same} == {name: served[name] for name in same}
    assert served["gradient_accumulation_steps"] * served["per_device_train_batch_size"] == 64
    assert served["optim"] == "adamw_bnb_8bit"
    assert (trl.gpus, trl.is_split, options.share) == (2, True, _sides.SPLIT_SHARE)


@pytest.mark.parametrize(("shown", "of_server", "of_trainer"), [(None, "0", "1"), ("4,7,9", "4", "7")])
def test_trls_trainer_sees_its_own_gpu_alone_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str | None, of_server: str, of_trainer: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    for variant in ("8 --server", "8 --async"):
        side = Side("trl", variant)
        assert side.environment(Work(), tmp_path)["CUDA_VISIBLE_DEVICES"] == of_trainer
        options = _trl.flags().parse_args(side.argv(Work(), tmp_path, tmp_path, 5)[3:])
        served = _servers.fed_command(options)
        assert served.environment["CUDA_VISIBLE_DEVICES"] == of_server
        assert "--enable-sleep-mode" not in served.argv, "as trl's users start it"
    assert TRL.environment(Work(), tmp_path).get("CUDA_VISIBLE_DEVICES") == shown
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(SystemExit, match="need a GPU each, and CUDA_VISIBLE_DEVICES is 3"):
        Side("trl", "8 --server").environment(Work(), tmp_path)


def test_a_trainer_that_sees_the_gpu_of_its_server_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    options = _trl.flags().parse_args(["8", "--server", "--model", "m", "--steps", "1"])
    with pytest.raises(SystemExit, match="sees 2 GPUs"), _servers.on_another_gpu(options):
        pass


def test_stacks_are_written_while_no_step_ends(tmp_path: Path) -> None:
    code = """
import time
from benchmarks import _trl_times
_trl_times.STALL_S = 1
_trl_times.watch_stalls()
def wait_for_the_server(): time.sleep(2)
wait_for_the_server()
"""
    process(code, tmp_path / "log")
    assert "in wait_for_the_server" in (tmp_path / "log").read_text()


def test_only_a_server_that_shares_its_weights_gets_a_manifest(tmp_path: Path) -> None:
    reloads = {"transfer": False, "restart": False, "in-place": True}
    variants = {f"adamw --mode none --reload {reload}": writes for reload, writes in reloads.items()}
    for variant, writes in (variants | {"adamw": True, "adamw --mode lora_only": True}).items():
        assert ("--vllm-config-path" in Side("bridge", variant).argv(Work(), tmp_path, tmp_path, 5)) == writes


def test_a_trainer_and_its_vllm_have_a_gpu_each_on_both_sides(tmp_path: Path) -> None:
    work = Work(completions=32, lengths="lognormal:600:0.6:4096")
    trl, ours = Side("trl", "8 --async --optim x"), Side("bridge", "adamw --mode none --trainer-device cuda:1")
    argv = trl.argv(work, tmp_path, tmp_path, 5)
    assert argv[1:6] == ["-m", "benchmarks._trl_async", "8", "--optim", "x"]
    options = _trl.common_flags(None).parse_args(argv[3:])
    options.max_staleness, options.token_budget = 1, 8704
    settings = _trl_async.settings(options, "http://127.0.0.1:1")
    assert settings["token_budget"] == 8704
    assert settings["gradient_accumulation_steps"] * settings["per_device_train_batch_size"] == 64
    served = _servers.fed_command(options).argv
    assert served[served.index("--max-num-seqs") + 1] == "64"
    assert _lengths.MIDDLEWARE in served
    ours_argv = ours.argv(work, tmp_path, tmp_path, 5)
    assert ours_argv[ours_argv.index("--batch-size") + 1] == "64"
    assert ours_argv[ours_argv.index("--max-num-seqs") + 1] == "64"
    assert (trl.gpus, ours.gpus, OURS.is_split) == (2, 2, False)


def test_the_stand_in_for_trls_attention_attends_within_spans() -> None:
    q_TAD, k_UKD, v_UKD = (torch.randn(count, heads, 4) for count, heads in ((5, 2), (8, 1), (8, 1)))
    starts_q, starts_k = torch.tensor([0, 2, 5]), torch.tensor([0, 5, 8])
    packed = _flash.flash_attn_varlen_func(q_TAD, k_UKD, v_UKD, starts_q, starts_k, 3, 5, 0.5, causal=True)
    scores_K = (k_UKD[:4] * q_TAD[0, :1]).sum(-1)[:, 0] * 0.5  # the first query is the fourth of five keys
    assert torch.allclose(packed[0, 0], scores_K.softmax(0) @ v_UKD[:4, 0], atol=1e-6)
    assert torch.allclose(packed[2, 1], v_UKD[5, 0], atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_flash_attention_gives_trl_the_logits_of_sdpa(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_single_completions_of_a_prompt_get_the_lengths_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_lengths.VARIABLE, "lognormal:600:0.6:4096")
    received = list[dict[str, Any]]()

    async def app(scope: Any, receive: Any, _: Any) -> None:
        received.append({"headers": scope["headers"], **json.loads((await receive())["body"])})

    async def post(capped: _lengths.Capped, prompt: list[Any], **more: Any) -> None:
        body = json.dumps({"prompt": prompt, "max_tokens": 4096, **more}).encode()
        parts = iter([body[:5], body[5:]])
        scope = {"path": "/v1/completions", "headers": [(b"content-length", b"9"), (b"a", b"b")]}
        await capped(scope, lambda: next_part(parts), None)

    async def next_part(parts: Iterator[bytes]) -> dict[str, Any]:
        part = next(parts)
        return {"type": "http.request", "body": part, "more_body": not part.endswith(b"}")}

    capped = _lengths.Capped(app)
    for prompt in ([1], [2], [1]):
        asyncio.run(post(capped, prompt))
    lengths = Lognormal.parse("lognormal:600:0.6:4096")
    assert [request["max_tokens"] for request in received] == lengths.of_each([[1], [2], [1]])
    assert received[0]["headers"] == [(b"a", b"b")], "of another length now"
    for prompts in ([1], [[1], [2]]):
        asyncio.run(post(capped, prompts, n=8))
        assert received.pop()["max_tokens"] == 4096, "each completion gets its own length later"


def test_several_gpus_are_compared_with_as_many_and_with_one() -> None:
    sides = {TRL: 4.0, Side("trl", "16 --gpus 2"): 8.0, OURS: 2.0, Side("bridge", f"{OURS.variant} --gpus 2"): 2.5}
    made = {
        side: _figures.row(side, [run_of([(our_line if side.name == "bridge" else trl_line)(n) for n in range(3)],
                                         step_s=step_s, peak_gib=99)], warm_up=1)
        for side, step_s in sides.items()
    }  # fmt: skip
    trl, trls, ours, both = _figures.compare(_figures.scale(made), weights_gib=14.2)
    assert (trls["scaling"], both["scaling"]) == (0.5, 0.8)
    assert (ours["speed"], both["speed"]) == (2.0, 3.2)
    assert "scaling" not in trl
    split = Side("trl", "16 --server")
    assert "scaling" not in _figures.scale({split: made[TRL]})[0], "it has no other number of GPUs"
    assert "scaling" not in _figures.scale({side: row for side, row in made.items() if side.gpus == 2})[0]


def test_both_sides_get_the_same_lengths_and_room_for_the_longest(tmp_path: Path) -> None:
    work = Work(tokens=4096, lengths="lognormal:600:0.6:4096")
    trl = TRL.argv(work, tmp_path / "model", tmp_path, 5)
    ours = Side("bridge", "adamw --max-staleness 4 -- --max-num-seqs 256").argv(work, tmp_path, tmp_path, 5)
    assert trl[trl.index("--max-model-len") + 1] == ours[ours.index("--max-model-len") + 1] == "4224"
    assert trl[trl.index("--lengths") + 1] == _sides.environment(work)[_lengths.VARIABLE] == work.lengths
    assert ours[ours.index("--middleware") + 1] == _lengths.MIDDLEWARE
    assert ours[-2:] == ["--max-num-seqs", "256"], "the last of several counts"
    assert _lengths.VARIABLE not in _sides.environment(Work())


def test_lengths_have_the_chosen_distribution_and_are_always_the_same() -> None:
    lengths = Lognormal.parse("lognormal:600:0.6:4096")
    prompts = [[number] for number in range(2000)]
    limits = lengths.of_each(prompts)
    assert limits == [lengths.of(prompt, 0) for prompt in prompts]
    assert statistics.median(limits) == pytest.approx(600, rel=0.05)
    assert statistics.fmean(limits) == pytest.approx(600 * math.exp(0.6**2 / 2), rel=0.05)
    assert 2000 < max(limits) <= 4096
    assert lengths.of_each([[1], [2], [1]]) == [lengths.of([1], 0), lengths.of([2], 0), lengths.of([1], 1)]
    assert Lognormal.parse("lognormal:600:0:100").of([1], 0) == 100


@pytest.mark.parametrize("text", ["600", "uniform:1:2:3", "lognormal:600:0.6", "lognormal:0:1:2", "lognormal:a:1:2"])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"lognormal|float"):
        Lognormal.parse(text)


def test_steps_that_differ_are_averaged() -> None:
    run = run_of([trl_line(1), trl_line(2, 1.0), trl_line(3, 1.0), trl_line(4, 4.0)], step_s=4.0, peak_gib=99)
    row = _figures.row(TRL, [run], warm_up=1, differ=True)
    assert (row["generation_s"], row["tokens_per_s"]) == (2.0, 128.0)


def test_the_rivals_flags_are_understood_by_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = "8 --no-checkpointing --liger --attention flash --compile layers --sleep"
    argv = Side("trl", variant).argv(Work(), tmp_path, tmp_path, 5)
    monkeypatch.delenv(REGIONAL, raising=False)
    settings = _trl.settings(_trl.flags().parse_args(argv[3:]))
    assert settings["model_init_kwargs"]["attn_implementation"] == _flash.NAME
    assert settings["vllm_enable_sleep_mode"]
    assert settings["torch_compile"]
    assert TorchDynamoPlugin(backend="inductor").use_regional_compilation
    assert settings["gradient_accumulation_steps"] * settings["per_device_train_batch_size"] == 64
    assert settings["use_liger_kernel"]
    assert not settings["gradient_checkpointing"]


def test_the_kv_cache_is_read_where_each_sides_vllm_logs(tmp_path: Path) -> None:
    line = "(Worker pid=1) INFO [gpu_worker.py:561] Available KV cache memory: 24.61 GiB\n"
    log = tmp_path / "log"
    log.write_text(line)
    assert TRL.kv_cache_gib(log, tmp_path) == 24.61
    assert OURS.kv_cache_gib(log, tmp_path) is None
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "serve.log").write_text(line.replace("24.61", "24.5"))
    assert OURS.kv_cache_gib(log, tmp_path) == 24.5
    assert Side("trl", "16 --server").kv_cache_gib(log, tmp_path) == 24.5


def process(code: str, log: Path, *, num_lines: int = 2, limit_s: float = 60) -> Run:
    argv = [sys.executable, "-u", "-c", code]
    return _stamped.run(argv, os.environ, log, num_lines=num_lines, limit_s=limit_s)


def test_lines_are_stamped_and_the_process_is_ended_after_the_last(tmp_path: Path) -> None:
    run = process("import time\nfor step in (1, 2): print('{\"step\": %d}' % step)\ntime.sleep(600)", tmp_path / "log")
    assert run.lines == [{"step": 1}, {"step": 2}]
    assert run.stamps == sorted(run.stamps)
    assert run.failure is None
    assert run.peak_gib is None


def test_lines_after_the_last_are_left_out(tmp_path: Path) -> None:
    run = process('print(\'{"step": 1}\\n{"step": 2}\\n{"steps": 2}\')', tmp_path / "log")
    assert run.lines == [{"step": 1}, {"step": 2}]
    assert len(run.stamps) == len(run.lines)


def test_a_process_that_dies_keeps_its_lines_and_says_why(tmp_path: Path) -> None:
    code = "import sys; print('{}'); print('torch.OutOfMemoryError: CUDA out of memory. Tried', file=sys.stderr); 1 / 0"
    run = process(code, tmp_path / "log")
    assert run.lines == [{}]
    assert run.failure == "torch.OutOfMemoryError: CUDA out of memory. Tried"


def test_a_process_that_hangs_is_ended_when_its_time_is_up(tmp_path: Path) -> None:
    run = process("import time; time.sleep(600)", tmp_path / "log", limit_s=0.5)
    assert run.failure == "not done after 0 s"


def test_the_most_memory_while_a_process_ran_is_kept(tmp_path: Path) -> None:
    used, measured = iter([1 * GIB, 3 * GIB, 9 * GIB]), tmp_path / "measured"

    def used_bytes() -> int:
        held = next(used, None)
        if held is None:
            measured.touch()
        return held or 2 * GIB

    code = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"
    run = _stamped.run(
        [sys.executable, "-c", code, str(measured)], os.environ, tmp_path / "log",
        num_lines=1, limit_s=60, used_bytes=used_bytes,
    )  # fmt: skip
    assert run.peak_gib == 8


def test_memory_settles_once_no_more_is_held() -> None:
    used = iter([5, 3, 1])
    assert _gpu_memory.settle(lambda: next(used), 2, limit_s=60) == 1
    assert _gpu_memory.settle(lambda: 5, 2, limit_s=0) == 5


def test_the_rivals_parts_do_not_overlap() -> None:
    seconds = {"training_step": 5.0, "prepare": 2.5, "generation": 1.5, "sync": 0.25, "old_logprobs": 0.5,
               "clip": 0.125, "optimizer": 0.25}  # fmt: skip
    parts = _trl_times.parts(seconds)
    assert parts["training_s"] == 5.0 - 2.5 + 0.125 + 0.5
    assert (parts["generation_s"], parts["sync_s"], parts["optimizer_s"]) == (1.5, 0.25, 0.25)


def test_the_rivals_methods_are_timed_and_only_passes_without_gradient_are_old_logprobs() -> None:
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
    assert "old_logprobs" not in clock.seconds
    with torch.no_grad():
        assert trainer._get_per_token_logps_and_entropies() == "logprobs"
    assert trainer.vllm_generation.generate() == "generate"
    assert set(clock.seconds) == {"old_logprobs", "generation"}
    assert clock.reward(["a", "b"], completion_ids=[[1, 2], [3]]) == [_work.reward("a"), _work.reward("b")]
    assert clock.num_tokens == 3


def test_the_task_is_an_environment_whose_rewards_differ() -> None:
    environment = registry.load(TaskConfig(environment=f"{_work.__file__}:Hashed"))
    problems = list(environment)
    assert {len(str(problem["prompt"])) for problem in problems} == {_work.PROMPT_TOKENS}
    assert len({environment.score(problems[0], f"t{n}") for n in range(100)}) == 100


def test_a_made_up_batch_has_the_shape_of_a_sampled_one() -> None:
    groups = _work.batch(1024, 8, group=4, num_tokens=5)
    assert [len(group.completions) for group in groups] == [4, 4]
    assert {len(c.token_ids) == len(c.logprobs) == 5 for group in groups for c in group.completions} == {True}
    assert all(len(set(group.rewards)) == 4 for group in groups)


def test_a_whole_model_loads_and_its_end_token_cannot_be_sampled(tmp_path: Path) -> None:
    folder = make_whole_model("tiny", tmp_path)
    _, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocabulary = model_config("tiny").vocab_size
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert {len(ids) for ids in tokenizer(_work.prompts())["input_ids"]} == {_work.PROMPT_TOKENS}
    assert tokenizer.eos_token_id == vocabulary
    assert len({tokenizer.decode([token]) for token in range(300, vocabulary)}) == vocabulary - 300


def train_step_options(**others: object) -> argparse.Namespace:
    return argparse.Namespace(
        **{"completions": 4, "group": 2, "tokens": 3, "steps": 2, "warm_up": 1, "profile": False, **others}
    )


def test_the_trainer_alone_is_measured_on_a_made_up_batch() -> None:
    case = Case("tiny", None, "optimizer=adamw-8bit micro_batch_tokens=300")
    row = train_step.measure(case, train_step_options(profile=True), math.inf)
    assert row["num_steps"] == 2
    assert row["step_s"] >= row["forward_backward_s"] > 0
    assert len(row["kernels"]) == train_step.TOP
    assert "adamw-8bit" in train_step.table([row])


def test_the_trainers_step_changes_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    built = train_step.build("tiny", torch.device("cpu"))
    before = {name: parameter.detach().clone() for name, parameter in built.named_parameters()}
    monkeypatch.setattr(train_step, "build", lambda *_: built)
    train_step.measure(Case("tiny", None, "lr=0.01"), train_step_options(), math.inf)
    assert all((parameter != before[name]).any() for name, parameter in built.named_parameters())


@pytest.mark.parametrize("setting", ["", "mode=lora_only lora_r=2"])
def test_one_long_sequence_is_measured_with_and_without_an_adapter(setting: str) -> None:
    row = train_step.measure(Case("qwen3-tiny", 300, setting), train_step_options(), math.inf)
    assert row["tokens"] == 300
    assert row["tokens_per_s"] == 300 / row["step_s"]
    model = train_step.build("qwen3-tiny", torch.device("cpu"))
    layers = sum(p.numel() for p in model.model.layers.parameters() if p.ndim > 1)
    assert row["train_flops"] > (4 if setting else 6) * 300 * layers


def test_kernels_lengths_and_rounds_are_measured_in_turns() -> None:
    options = argparse.Namespace(sizes=["tiny"], settings=["", "seed=1"], lengths=[300], attention=["flash"], rounds=2)
    names = [case.name for case in train_step.cases(options)]
    assert names == ["300: attention=flash", "300: seed=1 attention=flash"] * 2


def test_a_setting_that_cannot_be_trained_by_is_a_row_and_one_that_is_none_is_refused() -> None:
    row = train_step.measure(Case("tiny", None, "liger_kernel=true"), train_step_options(), math.inf)
    assert "--liger-kernel" in row["failure"]
    assert row["failure"] in train_step.table([row])
    with pytest.raises(ValueError, match="nonsense"):
        train_step.config_of("nonsense=1")


def test_no_step_of_the_trainer_is_begun_once_the_time_is_up() -> None:
    row = train_step.measure(Case("tiny", None, ""), train_step_options(), -math.inf)
    assert row["failure"] == "no time was left"


def test_turns_end_by_their_number_of_tokens_and_both_sides_sample_as_many(tmp_path: Path) -> None:
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


def test_a_start_is_read_from_both_logs(tmp_path: Path) -> None:
    log, server = tmp_path / "log", tmp_path / "serve.log"
    nothing: dict[str, object] = {"ready_s": None, "server_s": None, "phases_s": {}, "spawned_because": None}
    assert startup.server_times(log, server, 0.0) == nothing
    before = time.time()
    server_log.begin_log(server, "started")
    after, began_at = time.time(), before - 10
    with server.open("a") as file:
        file.write("WARNING We must use the `spawn` multiprocessing start method. Reasons: CUDA is initialized\n")
    log.write_text("mode x\nvLLM is ready after 52 s: importing packages 20 s, sizing the KV cache 3 s\n")
    times = startup.server_times(log, server, began_at)
    assert 61 <= times.pop("ready_s") <= 62 + after - before, "the log has whole seconds"
    phases = {"importing packages": 20, "sizing the KV cache": 3}
    assert times == {"server_s": 52, "phases_s": phases, "spawned_because": "CUDA is initialized"}


def test_starts_are_compared_by_kind(tmp_path: Path) -> None:
    options = argparse.Namespace(model="tiny", before=None)
    bench = startup.Bench(options, tmp_path, deadline=0.0)
    for kind, seconds in (("stock first", 90.0), ("ours first", 60.0), ("ours first", 50.0), ("ours first", 40.0)):
        bench.rows[kind].append({"ready_s": seconds - 10, "first_step_s": seconds, "failure": None})
    bench.rows["stock second"].append({"ready_s": None, "first_step_s": None, "failure": "killed"})
    heading, *rows = bench._table()
    assert heading[0] == "median, s"
    assert rows == [
        ("ours first", "3", "40.0", "50.0", "0.56"),
        ("stock first", "1", "80.0", "90.0", "1.00"),
        ("ours second", "0", "-", "-", "-"),
        ("stock second", "1", "-", "-", "-"),
    ]


def test_a_stock_server_is_asked_for_what_a_run_samples() -> None:
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


def test_a_node_measures_every_number_of_gpus_and_replicas_of_two(tmp_path: Path) -> None:
    def sizes(gpus: int) -> list[tuple[int, int]]:
        host = node.Host(gpus=gpus, size="tiny", models=tmp_path, out=tmp_path)
        sides = [Side("bridge", run.argv[run.argv.index("--ours") + 1]) for run in host.fixed()]
        return [(side.gpus, side.num_parts) for side in sides]

    assert sizes(1) == [(1, 1)]
    assert sizes(4) == [(1, 1), (2, 1), (4, 1), (4, 2)]


def test_large_models_are_measured_where_there_are_enough_gpus(tmp_path: Path) -> None:
    for gpus, names in ((1, []), (2, ["14b", "32b"]), (4, [*node.LARGE])):
        host = node.Host(gpus=gpus, size=None, models=tmp_path, out=tmp_path)
        assert [run.name for run in host.sizes()] == names
        assert all(run.gpus <= gpus for run in host.sizes())


def test_runs_are_side_by_side_on_gpus_of_their_own_and_those_with_results_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_equal_replicas_are_counted_part_by_part(tmp_path: Path, parts: int, equal: int | None) -> None:
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
def test_flags_that_cannot_be_measured_are_refused_before_anything_starts(
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
