"""Agents from other packages, written as in their documentation, that use the base URL of a run."""

import json
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseCompletedEvent, ResponseStreamEvent
from pydantic import TypeAdapter

REQUESTS = Path(__file__).with_name("client_requests.json")


def answer_in(text: Any) -> float:
    return float(str(text).rpartition(" ")[2])


class Problems:
    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(10):
            yield {"prompt": f"Begin at {number}: ", "start": number}


class Smolagents(Problems):
    """Runs a smolagents agent with one custom tool."""

    kind: str

    def run(self, problem: dict[str, Any], base_url: str) -> float:
        smolagents: Any = import_module("smolagents")

        @smolagents.tool  # type: ignore[untyped-decorator]
        def add(text: str) -> int:
            """Add the length of a text.

            Args:
                text: The text.
            """
            return int(problem["start"]) + len(text)

        model = smolagents.OpenAIModel(model_id="any", api_base=base_url, api_key="any")
        agent = getattr(smolagents, self.kind)(tools=[add], model=model, max_steps=4, verbosity_level=0)
        return answer_in(agent.run(problem["prompt"]))


class SmolCode(Smolagents):
    kind = "CodeAgent"


class SmolTool(Smolagents):
    kind = "ToolCallingAgent"


class AgentsSdk(Problems):
    """Runs an agent of the OpenAI Agents SDK, which uses `/v1/responses` by default."""

    is_streamed = False

    async def run(self, problem: dict[str, Any], base_url: str) -> float:
        agents: Any = import_module("agents")

        @agents.function_tool  # type: ignore[untyped-decorator]
        def add(text: str) -> str:
            """Add the length of a text.

            Args:
                text: The text.
            """
            return str(problem["start"] + len(text))

        client = AsyncOpenAI(base_url=base_url, api_key="any")  # the SDK's default client is shared by all event loops
        provider = agents.OpenAIProvider(openai_client=client)
        config = agents.RunConfig(model_provider=provider, tracing_disabled=True)
        agent = agents.Agent(name="Adder", instructions="Use your tool.", tools=[add], model="any")
        if not self.is_streamed:
            return answer_in((await agents.Runner.run(agent, problem["prompt"], run_config=config)).final_output)
        result = agents.Runner.run_streamed(agent, problem["prompt"], run_config=config)
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == result.final_output
        return answer_in(result.final_output)


class AgentsSdkStreamed(AgentsSdk):
    is_streamed = True


class Replayed:
    """Replays the requests that each of the other agents sent in one run, from `client_requests.json`."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for client, requests in json.loads(REQUESTS.read_text()).items():
            yield {"prompt": client, "requests": requests}

    def run(self, problem: dict[str, Any], base_url: str) -> float:
        for request in problem["requests"]:
            answer = httpx.post(f"{base_url}/{request['route']}", json=request["body"], timeout=60)
            answer.raise_for_status()
            if request["body"].get("stream"):
                check_stream(answer.text)
                continue
            kind: Any = {"chat/completions": ChatCompletion, "responses": Response}[request["route"]]
            kind.model_validate(answer.json(), strict=True)
        return 1.0


@cache
def events_of_a_stream() -> TypeAdapter[ResponseStreamEvent]:
    return TypeAdapter(ResponseStreamEvent)


def check_stream(text: str) -> None:
    """Check that a response's events follow the protocol, and that their pieces add up to its output."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [events_of_a_stream().validate_json(line) for line in lines]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    (*_, last) = events
    assert isinstance(last, ResponseCompletedEvent)
    assert [event.item for event in events if event.type == "response.output_item.done"] == last.response.output
