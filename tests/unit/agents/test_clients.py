"""Agents of smolagents and of the OpenAI Agents SDK, unchanged, and in CI the requests that they sent.

With the packages installed, `BRIDGE_RECORD_CLIENTS=1 pytest tests/unit/agents/test_clients.py` records the requests
again (smolagents 1.26.0, openai-agents 0.24.0).
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from bridge.agents.recorder import Recorder
from tests.unit.agents.client_agents import REQUESTS
from tests.unit.agents.test_agent_runs import TEXT, check_tokens
from tests.unit.agents.test_trajectories import FORMS, spoken

FILE = Path(__file__).with_name("client_agents.py")
END = "<|im_end|>"
LONGEST = 300
"""Characters of a text that is recorded as it is."""
CLIENTS = {"SmolCode": "smolagents", "SmolTool": "smolagents", "AgentsSdk": "agents", "AgentsSdkStreamed": "agents"}
"""Class of an agent -> the package that it needs."""
CODE = f'Thought: {TEXT}\n<code>\nprint(add(text="abc"))\n</code>\nObservation: 7, as I made it up.'
FINAL = f"Thought: {TEXT}\n<code>\nfinal_answer(42)\n</code>"
STOPS = ["Observation:", "Calling tools:", "</code>"]


def words(prompt: str) -> str:
    """Use the tool in the first turn, by code if the request has no tools, and answer 42 in the second.

    Turns are long, so that no two runs get the same tokens.
    """
    task, has_tools = prompt.rpartition("Begin at ")[2], "<tools>" in prompt
    if not has_tools:
        return f"{FINAL if 'Observation' in task else CODE}{END}"
    if "Observation" in task:
        return FORMS["qwen2_5"]("final_answer", json.dumps({"answer": f"{TEXT}42"}))
    return f"{TEXT}42{END}" if "<tool_response>" in task else FORMS["qwen2_5"]("add", json.dumps({"text": TEXT}))


def trimmed(value: Any) -> Any:
    """Return a JSON value without its long texts, which are the packages' own prompts."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST else f"({len(value):,} characters)"
    if isinstance(value, dict):
        return {name: trimmed(item) for name, item in value.items()}
    return [trimmed(item) for item in value] if isinstance(value, list) else value


def requests_of(sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return only the first run's requests."""
    return [request for request in sent if request["run"] == sent[0]["run"]]


@pytest.mark.parametrize("client", CLIENTS)
def test_third_party_agent_runs_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    pytest.importorskip(CLIENTS[client], reason=f"{CLIENTS[client]} is not installed; see the other test")
    sent, answered = list[dict[str, Any]](), Recorder._answered

    async def kept(self: Recorder, request: Request) -> Response:
        _, run, _, route = request.url.path.split("/", 3)
        sent.append({"run": run, "route": route, "body": trimmed(await request.json())})
        return await answered(self, request)

    monkeypatch.setattr(Recorder, "_answered", kept)
    with spoken(tmp_path, words, environment=f"{FILE}:{client}", max_new_tokens=4000) as ours:
        groups = ours.stream.take(2, step=1)
        check_tokens(ours, groups)
    assert [group.rewards for group in groups] == [(42.0,) * 4] * 2
    requests = [{"route": request["route"], "body": request["body"]} for request in requests_of(sent)]
    recorded = json.loads(REQUESTS.read_text()) if REQUESTS.exists() else {}
    if os.environ.get("BRIDGE_RECORD_CLIENTS"):
        REQUESTS.write_text(json.dumps({**recorded, client: requests}, indent=1, sort_keys=True) + "\n")
    else:
        assert fields(requests) == fields(recorded[client]), "record the requests again"


def fields(requests: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    return [(request["route"], sorted(request["body"])) for request in requests]


def test_recorded_third_party_requests_are_answered(tmp_path: Path) -> None:
    with spoken(tmp_path, words, environment=f"{FILE}:Replayed", group_size=2, max_new_tokens=4000) as ours:
        groups = ours.stream.take(4, step=1)
        check_tokens(ours, groups)
        stops_sent = [request.body.get("stop") for request in ours.requests if request.method == "POST"]
    by_client = {str(group.problem["prompt"]): group for group in groups}
    assert {client: group.rewards for client, group in by_client.items()} == dict.fromkeys(CLIENTS, (1.0, 1.0))
    num_sequences = {client: {len(one.sequences) for one in group.completions} for client, group in by_client.items()}
    assert num_sequences == {"SmolCode": {2}, "SmolTool": {2}, "AgentsSdk": {1}, "AgentsSdkStreamed": {1}}
    assert {one.num_turns for group in groups for one in group.completions} == {2}
    assert {one.finish_reason for group in groups for one in group.completions} == {"stop"}
    assert [stops_sent.count(stops) for stops in (STOPS, STOPS[:2], None)] == [4, 4, 8]
    for one in by_client["SmolCode"].completions:
        for sequence in one.sequences:
            assert sequence.sampled is not None
            own = [token for token, is_own in zip(sequence.token_ids, sequence.sampled, strict=True) if is_own]
            assert ours.tokenizer.decode(own).rstrip().endswith("</code>"), "the stop is trained on"
        assert "made it up" not in one.text
    (line,) = ours.notes
    assert line.startswith("an agent forces a tool call with tool_choice in a request, which is ignored")
