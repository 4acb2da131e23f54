"""The real `tinker` client against a running `bridge tinker`, in a Python of its own, without torch.

    TINKER_BASE_URL=... TINKER_API_KEY=tml-local python tinker_client.py EXPECTED.json

EXPECTED has the model's name, token ids of texts, and log-probabilities as transformers computes them. Prints a line
for each check; exits with 1 if one failed.
"""

import asyncio
import contextlib
import inspect
import json
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

given: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
BASE, LR, IS_REAL = given["base"], given["lr"], given["is_real"]
NEAR, IS_LORA = given["tolerance"], given["is_lora"]
results: list[bool] = []


def check(name: str, passed: object, detail: object = "") -> None:
    results.append(bool(passed))
    print(f"{'PASS' if passed else 'FAIL'}  {name}: {str(detail)[:300]}", flush=True)


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    """Turn an exception into a failed check."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        check(name, False, f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def refused(name: str, words: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        check(f"refused: {name}", words in str(error), f"{type(error).__name__}: {error}")
    else:
        check(f"refused: {name}", False, "not refused")


def datum(ids: list[int], num_prompt: int, **inputs: Any) -> types.Datum:
    weights = [0.0] * (num_prompt - 1) + [1.0] * (len(ids) - num_prompt)
    own = {"target_tokens": ids[1:], **(inputs or {"weights": weights})}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=own)


def array(tensor: Any) -> np.ndarray:
    return np.array(tensor.data).reshape(tensor.shape or -1)


def adam(**changes: Any) -> types.AdamParams:
    return types.AdamParams(**{"learning_rate": LR, **changes})


def made(client: Any) -> Any:
    """Return a client; older SDKs return it at once, newer ones a future."""
    return client.result() if hasattr(client, "result") else client


texts = given["texts"]
data = [datum(one["ids"], one["num_prompt"]) for one in texts]
exact = [np.array(one["logprobs"]) for one in texts]
prompt_ids = texts[0]["ids"][: texts[0]["num_prompt"]]
prompt = types.ModelInput.from_ints(prompt_ids)
start = time.time()
service = tinker.ServiceClient()
models = service.get_server_capabilities().supported_models
check("get_server_capabilities", models[0].model_name == BASE, models)
with refused("another base model", "was requested"):
    made(service.create_lora_training_client(base_model="other/model", rank=8))
if IS_LORA:
    with refused("a rank above the server's", "expected 1 to"):
        made(service.create_lora_training_client(base_model=BASE, rank=512))
training = made(service.create_lora_training_client(base_model=BASE, rank=8, seed=1, user_metadata={"who": "me"}))
info = training.get_info()
check("create_lora_training_client, get_info", info.model_data.model_name == BASE, info)
check("get_info.tokenizer_id", info.model_data.tokenizer_id == given["tokenizer"], info.model_data.tokenizer_id)


def forward(client: Any = training, rows: Any = data) -> Any:
    return client.forward(rows, "cross_entropy").result()


def loss_of(client: Any = training, rows: Any = data) -> float:
    return float(forward(client, rows).metrics["loss:sum"])


with section("forward"):
    found = forward()
    far = [
        float(np.abs(array(out["logprobs"]) - own).max()) for out, own in zip(found.loss_fn_outputs, exact, strict=True)
    ]
    check("forward: log-probs of every position, in the order of the data", max(far) < NEAR, far)
    weighed = [
        -float((array(out["logprobs"]) * array(one.loss_fn_inputs["weights"])).sum())
        for out, one in zip(found.loss_fn_outputs, data, strict=True)
    ]
    check("loss:sum is the sum", abs(sum(weighed) - found.metrics["loss:sum"]) < 1e-3, found.metrics)
    again = forward()
    check("a forward leaves no gradient and changes nothing", again.metrics == found.metrics, again.metrics)
    backwards = forward(rows=data[::-1])
    same = all(
        np.array_equal(array(a["logprobs"]), array(b["logprobs"]))
        for a, b in zip(found.loss_fn_outputs, backwards.loss_fn_outputs[::-1], strict=True)
    )
    check("the reversed data give the reversed log-probs", same)
    other = [0] * len(data[0].loss_fn_inputs["target_tokens"].data)
    padded = types.Datum(
        model_input=data[0].model_input, loss_fn_inputs={"target_tokens": other, "weights": [0.0] * len(other)}
    )
    scored = array(forward(rows=[padded]).loss_fn_outputs[0]["logprobs"])
    expected = np.array(texts[0]["zero"])
    near = np.abs(scored - expected).max() < NEAR + 0.02 * np.abs(expected).max()  # unlikely tokens: bf16 rounds more
    check("targets that are no next token, of weight 0", near, f"{scored} {expected}")

with section("several targets"):
    k = np.array(texts[1]["several"])
    weights = np.full(k.shape, 0.5, np.float32)
    one = types.Datum(
        model_input=data[1].model_input,
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=k.flatten().tolist(), dtype="int64", shape=list(k.shape)),
            "weights": types.TensorData(data=weights.flatten().tolist(), dtype="float32", shape=list(k.shape)),
        },
    )
    outs = training.forward([one, data[0]], "cross_entropy").result()
    mine = array(outs.loss_fn_outputs[0]["logprobs"])
    check("targets [T, K]", np.abs(mine - np.array(texts[1]["several_logprobs"])).max() < NEAR, mine.shape)
    check("beside targets [T]", array(outs.loss_fn_outputs[1]["logprobs"]).shape == exact[0].shape)
    both = -float((mine * weights).sum()) + weighed[0]
    check("the loss of both", abs(outs.metrics["loss:sum"] - both) < 1e-2, f"{outs.metrics} {both}")

with section("losses"):
    base = data[1]
    own = array(forward(rows=[base]).loss_fn_outputs[0]["logprobs"]).astype(np.float64)
    length = len(own)
    sampled = own + np.linspace(-0.6, 0.6, length)
    advantages = np.array([0.0] * (length // 2) + [1.5, -1.0] * length)[:length]
    mask = (advantages != 0).astype(np.float64)
    ratio = np.exp(own - sampled)
    s = np.exp(((own - sampled) * mask).sum() / mask.sum())
    inputs = {
        "target_tokens": base.loss_fn_inputs["target_tokens"], "logprobs": sampled.tolist(),
        "advantages": advantages.tolist(),
    }  # fmt: skip
    values = {
        "importance_sampling": (-(ratio * advantages).sum(), {}),
        "ppo": (-np.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages).sum(), {}),
        "cispo": (
            -(ratio.clip(0.0, 1.1) * own * advantages).sum(), {"clip_low_threshold": 0.0, "clip_high_threshold": 1.1},
        ),
        "dro": (-(own * advantages - 0.05 * (own - sampled) ** 2).sum(), {"beta": 0.1}),
        "gspo": (-np.minimum(s * advantages, s.clip(0.8, 1.2) * advantages).sum(), {}),
    }  # fmt: skip
    for name, (value, config) in values.items():
        masked = {"sequence_ratio_mask": mask.tolist()} if name == "gspo" else {}
        try:
            rows = [types.Datum(model_input=base.model_input, loss_fn_inputs=inputs | masked)]
        except Exception:
            continue
        try:
            got = training.forward(rows, name, config or None).result().metrics["loss:sum"]
        except ValueError as error:
            if "validation" in str(error).lower():  # an SDK before this loss
                continue
            raise
        check(f"loss {name}", abs(got - value) < 1e-3 * (1 + abs(value)), f"{got:.4f}, expected {value:.4f}")
    rows = [types.Datum(model_input=base.model_input, loss_fn_inputs=inputs)]
    with refused("dro without beta", "beta is missing"):
        training.forward(rows, "dro").result()
    with refused("an unknown choice", "has 'clip', expected"):
        training.forward(rows, "ppo", {"clip": 0.1}).result()
    with refused("advantages that are not finite", "not finite"):
        bad = inputs | {"advantages": [float("nan")] * length}
        training.forward([types.Datum(model_input=base.model_input, loss_fn_inputs=bad)], "ppo").result()
    with refused("an input of another length", "of shape"):
        bad = inputs | {"advantages": [1.0]}
        training.forward([types.Datum(model_input=base.model_input, loss_fn_inputs=bad)], "ppo").result()
    with refused("a missing input", "has no"):
        training.forward([data[0]], "ppo").result()
    with refused("a token outside of the vocabulary", "token id"):
        training.forward([datum([10**7, 3, 4], 1)], "cross_entropy").result()
with section("stable_reinforce"), refused("stable_reinforce", "importance_sampling"):
    training.forward(rows, "stable_reinforce").result()
with refused("a step without gradients", "no gradients"):
    training.optim_step(adam()).result()

greedy = types.SamplingParams(max_tokens=8, temperature=0.0)
with section("sampling"):
    sampler = made(training.save_weights_and_get_sampling_client())
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=1)
    got = sampler.sample(prompt, 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    lengths = [(len(one.tokens), len(one.logprobs)) for one in got.sequences]
    check(
        "sample: 3 sequences, a log-prob for each token", len(lengths) == 3 and all(a == b for a, b in lengths), lengths
    )
    check("prompt log-probs", got.prompt_logprobs[0] is None and len(got.prompt_logprobs) == len(prompt_ids))
    check("the likeliest prompt tokens", len(got.topk_prompt_logprobs[2]) == 2, got.topk_prompt_logprobs[2])
    repeated = sampler.sample(prompt, 3, params).result()
    check("the same seed, the same tokens", [a.tokens for a in got.sequences] == [a.tokens for a in repeated.sequences])
    logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(texts[0]["ids"])).result()
    far = np.abs(np.array(logprobs[1:], dtype=np.float64) - exact[0])
    check("compute_logprobs against transformers", not IS_REAL or far.mean() < 0.1, f"mean {far.mean():.4f}")
    text = sampler.sample(prompt, 1, greedy).result().sequences[0]
    check("greedy", len(text.tokens) <= 8, text.tokens)
    token = int(text.tokens[1])
    stopped = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=8, temperature=0.0, stop=[token])).result()
    ended = stopped.sequences[0]
    check("stop by a token id, which is kept", not IS_REAL or ended.tokens[-1] == token, ended.tokens)
    check("stop_reason", not IS_REAL or (ended.stop_reason == "stop" and text.stop_reason == "length"))
    clone = pickle.loads(pickle.dumps(sampler))
    check("a pickled client samples", len(clone.sample(prompt, 1, greedy).result().sequences) == 1)
    with refused("a prompt that is too long", "longest sequence") if IS_REAL else contextlib.suppress(Exception):
        sampler.sample(types.ModelInput.from_ints([5] * 5000), 1, greedy).result()
    with refused("an image in a prompt", ""):
        sampler.sample(types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")]), 1, greedy).result()

with section("training"):
    before = loss_of()
    old = made(training.save_weights_and_get_sampling_client())
    base_client = made(service.create_sampling_client(base_model=BASE))
    check("the base can be sampled before a step", len(base_client.sample(prompt, 1, greedy).result().sequences) == 1)
    seconds = []
    for _ in range(given["steps"]):
        begun = time.time()
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(adam(grad_clip_norm=1.0))  # not awaited between
        passed.result()
        metrics = stepped.result().metrics
        seconds.append(time.time() - begun)
    after = loss_of()
    check(
        "steps lower the loss",
        after < 0.8 * before,
        f"{before:.2f} -> {after:.2f}, {np.median(seconds):.2f} s, {metrics}",
    )
    check("metrics of a step", metrics["unclipped_grad_l2:mean"] > 0, metrics)
    if IS_LORA:
        whole = types.ModelInput.from_ints(texts[1]["ids"])
        checks_of = old.compute_logprobs(whole).result()[1:], base_client.compute_logprobs(whole).result()[1:]
        of_old, of_base = (np.array(one, dtype=np.float64) for one in checks_of)
        apart = float(np.abs(of_old - of_base).max())
        check("an older snapshot keeps its weights", apart < 0.02, apart)
    else:
        with refused("an older snapshot", "one copy of all weights"):
            old.sample(prompt, 1, greedy).result()
        with refused("the base after a step", "one copy of all weights"):
            made(service.create_sampling_client(base_model=BASE)).sample(prompt, 1, greedy).result()
    new = made(training.save_weights_and_get_sampling_client())
    served = np.array(new.compute_logprobs(types.ModelInput.from_ints(texts[1]["ids"])).result()[1:], dtype=np.float64)
    trained = array(forward(rows=[data[1]]).loss_fn_outputs[0]["logprobs"])
    far = np.abs(served - trained)
    check("vLLM samples from what was trained", not IS_REAL or far.mean() < 0.1, f"mean {far.mean():.4f}")
    begun = time.time()
    live = None
    if "kind" in inspect.signature(training.save_weights_and_get_sampling_client).parameters:
        live = made(training.save_weights_and_get_sampling_client(kind="inflight"))
    check("a new sampling client is nothing", time.time() - begun < 2.0, f"{time.time() - begun:.3f} s")
    training.forward_backward(data, "cross_entropy")
    training.optim_step(adam()).result()
    if live is not None:
        check("an inflight client lives on", len(live.sample(prompt, 1, greedy).result().sequences) == 1)

with section("order"):
    many = [datum([*texts[0]["ids"][:3], 5 + number], 3) for number in range(40)]
    single = forward(rows=many)
    config = training.holder._client_config
    training.holder._client_config = config.model_copy(update={"fwdbwd_max_chunk_len": 7})
    whole = forward(rows=many)
    training.holder._client_config = config
    farthest = max(
        float(np.abs(array(a["logprobs"]) - array(b["logprobs"])).max())
        for a, b in zip(whole.loss_fn_outputs, single.loss_fn_outputs, strict=True)
    )
    check("6 parts of a batch, the first one sent last", farthest < 0.05, f"{farthest:.4f}")
    check("their losses add up", abs(whole.metrics["loss:sum"] - single.metrics["loss:sum"]) < 0.5, whole.metrics)


def steps(client: Any, number: int = 2, *, custom: bool = False) -> list[float]:
    def own_loss(rows: Any, logprobs: Any) -> Any:
        total = -sum(
            (found * one.loss_fn_inputs["weights"].to_torch()).sum() for one, found in zip(rows, logprobs, strict=True)
        )
        return total, {"own": 1.0}

    values = []
    for _ in range(number):
        if custom:
            client.forward_backward_custom(data, own_loss).result()
        else:
            values.append(client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
        client.optim_step(adam()).result()
    return [*values, loss_of(client)]


with section("accumulation"):
    saved = training.save_state("accumulated").result().path
    training.forward_backward(data, "cross_entropy").result()
    one_call = training.optim_step(adam(beta1=0.8, beta2=0.9, eps=1e-9, weight_decay=0.1)).result().metrics
    together = loss_of()
    training.load_state_with_optimizer(saved).result()
    for row in data:
        training.forward_backward([row], "cross_entropy")
    several = training.optim_step(adam(beta1=0.8, beta2=0.9, eps=1e-9, weight_decay=0.1)).result().metrics
    near = abs(several["unclipped_grad_l2:mean"] / one_call["unclipped_grad_l2:mean"] - 1) < 0.02
    check("gradients of several calls add up", near, f"{several} {one_call}")
    check("to the same step", abs(loss_of() - together) < 0.02 * max(1.0, abs(together)), f"{loss_of()} {together}")

with section("state"):
    saved = training.save_state("one").result().path
    check("save_state", saved == f"tinker://{training.model_id}/weights/one", saved)
    kept = loss_of()
    first = steps(training)
    training.load_state_with_optimizer(saved).result()
    check("load_state_with_optimizer", loss_of() == kept, f"{loss_of()} {kept}")
    check("a resumed client repeats its losses", steps(training) == first, first)
    with refused("a name that exists", "exists already"):
        training.save_state("one").result()
    if IS_REAL:
        training.save_state("one", overwrite=True).result()
        check("overwrite", True)
    with refused("a name with a slash", "no path"):
        training.save_state("../../one").result()
    training.load_state(saved).result()
    check("load_state loads the weights alone", IS_REAL or loss_of() == kept, loss_of())
    path = training.save_weights_for_sampler("served").result().path
    named = made(service.create_sampling_client(model_path=path))
    check("a sampling client by its path", len(named.sample(prompt, 1, greedy).result().sequences) == 1, path)
    with refused("a path that does not exist", "does not exist"):
        gone = f"tinker://{training.model_id}/sampler_weights/gone"
        made(service.create_sampling_client(model_path=gone)).sample(prompt, 1, greedy).result()
    with refused("no path of ours", "no path"):
        made(service.create_sampling_client(model_path="tinker://x/sampler_weights/y")).sample(
            prompt, 1, greedy
        ).result()
    first_tokens = named.sample(prompt, 1, greedy).result().sequences[0].tokens
    steps(training, 1)
    if IS_LORA:
        again = named.sample(prompt, 1, greedy).result().sequences[0].tokens
        check("an older named snapshot keeps its weights", again == first_tokens, again)
        other = made(service.create_sampling_client(model_path=path))
        check("also for a new client", other.sample(prompt, 1, greedy).result().sequences[0].tokens == first_tokens)
    else:
        with refused("an older named snapshot", "one copy of all weights"):
            made(service.create_sampling_client(model_path=path)).sample(prompt, 1, greedy).result()
        with refused("a client of an older named snapshot", "one copy of all weights"):
            named.sample(prompt, 1, greedy).result()

with section("new clients"):
    accumulated = path.replace("sampler_weights/served", "weights/accumulated")
    resumed = made(service.create_training_client_from_state_with_optimizer(accumulated))
    check("create_training_client_from_state_with_optimizer", loss_of(resumed) > 0, resumed.model_id)
    if IS_LORA:
        of_first, of_second = loss_of(training), loss_of(resumed)
        steps(resumed, 1)
        is_apart = loss_of(training) == of_first and loss_of(resumed) != of_second
        check("two models side by side", is_apart, f"{of_first} {of_second}")
    else:
        with refused("the model whose place it took", "took its place"):
            loss_of(training)
    third = made(service.create_training_client_from_state(path))
    check("create_training_client_from_state of sampler weights", loss_of(third) > 0)
    training = made(service.create_lora_training_client(base_model=BASE, rank=4))
    now = loss_of(training)
    if IS_LORA:
        with refused("more models than are trained at once", "--max-adapters"):
            for _ in range(4):
                made(service.create_lora_training_client(base_model=BASE, rank=4))
    check("a new model starts from the base's weights", abs(now - before) < 1e-3, f"{now} {before}")
    again = made(service.create_sampling_client(base_model=BASE))
    check("and the base can be sampled again", len(again.sample(prompt, 1, greedy).result().sequences) == 1)

with section("rest"):
    rest = service.create_rest_client()
    run = path.split("/")[2]
    listed = [one.checkpoint_id for one in rest.list_checkpoints(run).result().checkpoints]
    check("list_checkpoints", {"weights/one", "sampler_weights/served"} <= {*listed}, listed)
    runs = rest.list_training_runs().result()
    check("list_training_runs", run in [one.training_run_id for one in runs.training_runs], runs.cursor)
    shown = rest.get_training_run(run).result()
    check("get_training_run", shown.base_model == BASE and shown.user_metadata == {"who": "me"}, shown)
    every = rest.list_user_checkpoints().result().checkpoints
    check("list_user_checkpoints", len(every) >= len(listed))
    weights = rest.get_weights_info_by_tinker_path(path).result()
    check("get_weights_info_by_tinker_path", weights.base_model == BASE, weights)
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = [one.checkpoint_id for one in rest.list_checkpoints(run).result().checkpoints]
    check("delete_checkpoint", "sampler_weights/served" not in left, left)
    newest: Any = made(training.save_weights_and_get_sampling_client())
    check(
        "get_sampler: the base model of a client",
        newest.get_base_model() == BASE if hasattr(newest, "get_base_model") else True,
    )

with section("many at once"):

    async def many_samples() -> tuple[int, float]:
        begun = time.time()
        params = types.SamplingParams(max_tokens=4)
        answers = await asyncio.gather(
            *(newest.sample_async(prompt=prompt, num_samples=2, sampling_params=params) for _ in range(given["many"]))
        )
        return sum(len(answer.sequences) for answer in answers), time.time() - begun

    number, took = asyncio.run(many_samples())
    check("requests at once", number == 2 * given["many"], f"{given['many']} in {took:.1f} s")

with section("forward_backward_custom"):
    try:
        import torch  # noqa: F401
    except ImportError:
        print("SKIP  forward_backward_custom: no torch in this environment", flush=True)
    else:
        saved = training.save_state("custom").result().path
        plain = steps(training)[-1]
        training.load_state_with_optimizer(saved).result()
        custom = steps(training, custom=True)[-1]
        near = abs(plain - custom) < 0.02 * abs(plain)
        check("forward_backward_custom takes the same steps", near, f"{plain} {custom}")

with section("sampling beside training"):
    saved = made(training.save_weights_and_get_sampling_client())
    params = types.SamplingParams(max_tokens=32, stop=[])
    futures = [saved.sample(prompt, 2, params) for _ in range(8)]
    training.forward_backward(data, "cross_entropy")
    training.optim_step(adam(learning_rate=LR / 10)).result()
    outcomes = []
    for future in futures:
        try:
            outcomes.append(all(len(one.tokens) == 32 for one in future.result().sequences))
        except Exception as error:
            outcomes.append(not IS_LORA and "one copy of all weights" in str(error))
    check("a snapshot's requests end with its weights, or are refused", all(outcomes), outcomes)

if hasattr(service, "close"):
    service.close("success").result()
print(f"{sum(results)} of {len(results)} passed, tinker {tinker.__version__}, {time.time() - start:.0f} s")
sys.exit(0 if all(results) else 1)
