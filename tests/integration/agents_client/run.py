#!/usr/bin/env python3
"""Conversations of the openai-agents package with /v1/chat/completions: tools, handoffs, structured answers, streams.

    tests/integration/agents_client/run.py                       starts `prl inference` on a tiny model
    tests/integration/agents_client/run.py --instruct FOLDER     also asks a model that can answer

A model of random weights calls no tool by itself, so tools are forced (tool_choice) and answers are structured: what the package
then does with the replies is what is tested. Needs the package of requirements.txt; run outside of such an environment it makes one.
"""
import argparse
import asyncio
import pathlib
import sys
import time
import typing

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import client_venv  # noqa: E402

client_venv.enter("agents", "agents", __file__)

import agents  # noqa: E402
import openai  # noqa: E402
import pydantic  # noqa: E402

import harness  # noqa: E402
from harness import check  # noqa: E402

agents.set_tracing_disabled(True)
ONE_CALL = {"tool_choice": "required", "parallel_tool_calls": False}


class Weather(pydantic.BaseModel):
    place: typing.Literal["Oslo", "Córdoba"]
    degrees: int = pydantic.Field(ge=-30, le=45)
    sky: typing.Literal["clear", "cloudy"]


class Subject:
    def __init__(self, port, name="subject"):
        self.client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", max_retries=0, timeout=600)
        self.model = agents.OpenAIChatCompletionsModel(model=name, openai_client=self.client)

    def agent(self, name="helper", seed=1, **members):
        settings = {"max_tokens": 300, "temperature": 1.0, "extra_body": {"seed": seed}, **members.pop("settings", {})}
        return agents.Agent(name=name, model=self.model, model_settings=agents.ModelSettings(**settings), **members)


def weather_tool(calls):
    @agents.function_tool
    def get_weather(place: typing.Literal["Oslo", "Córdoba"], days: typing.Literal[1, 2, 3]) -> str:
        """The weather of a place.

        Args:
            place: a town
            days: how far ahead
        """
        calls.append((place, days))
        return f"{place}: 7 °C for {days} days"
    return get_weather


def kinds(result):
    return [item.type for item in result.new_items]


async def a_tool_is_called_and_the_conversation_goes_on(subject):
    for seed in range(4):
        calls = []
        agent = subject.agent(seed=seed, instructions="Use the tool.", tools=[weather_tool(calls)], settings=ONE_CALL)
        result = await agents.Runner.run(agent, "How is the weather in Oslo?", max_turns=4)
        check(len(calls) == 1 and calls[0][0] in ("Oslo", "Córdoba") and calls[0][1] in (1, 2, 3), f"calls {calls}")
        check(kinds(result)[:2] == ["tool_call_item", "tool_call_output_item"] and kinds(result)[-1] == "message_output_item", f"{kinds(result)}")
        check(isinstance(result.final_output, str), f"{result.final_output!r}")
        check(len(result.raw_responses) == 2 and all(response.usage.output_tokens > 0 for response in result.raw_responses), "no usage")
        # The next question goes on behind the whole conversation, tool messages included.
        more = await agents.Runner.run(subject.agent(seed=seed), [*result.to_input_list(), {"role": "user", "content": "Thanks. And tomorrow?"}])
        check(isinstance(more.final_output, str), "no answer behind a conversation with tools")


async def the_tool_that_is_named_is_called(subject):
    names = []

    @agents.function_tool
    def first() -> str:
        """One."""
        names.append("first")
        return "1"

    @agents.function_tool
    def second() -> str:
        """Two."""
        names.append("second")
        return "2"
    agent = subject.agent(tools=[first, second], settings={"tool_choice": "second", "parallel_tool_calls": False},
                          tool_use_behavior="stop_on_first_tool")
    result = await agents.Runner.run(agent, "Go.")
    check(names == ["second"] and result.final_output == "2", f"{names} {result.final_output}")


async def an_answer_has_its_type(subject):
    for seed in range(4):
        result = await agents.Runner.run(subject.agent(seed=seed, output_type=Weather), "How is the weather?")
        check(isinstance(result.final_output, Weather), f"{result.final_output!r}")


async def an_agent_hands_over_to_another(subject):
    other = subject.agent("other", output_type=Weather, handoff_description="Knows the weather")
    agent = subject.agent("first", handoffs=[other], settings={"tool_choice": "transfer_to_other"})
    result = await agents.Runner.run(agent, "How is the weather?")
    check(result.last_agent.name == "other" and isinstance(result.final_output, Weather), f"{result.last_agent.name} {result.final_output!r}")


async def streams_give_the_same(subject):
    calls = []
    agent = subject.agent(seed=3, tools=[weather_tool(calls)], settings=ONE_CALL)
    whole = await agents.Runner.run(agent, "How is the weather?")
    streamed = agents.Runner.run_streamed(agent, "How is the weather?")
    text, events = "", set()
    async for event in streamed.stream_events():
        events.add(event.type)
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    check(calls[0] == calls[1] and len(calls) == 2, f"calls {calls}")
    check(streamed.final_output == whole.final_output, f"streamed {streamed.final_output!r}, whole {whole.final_output!r}")
    check(text == streamed.final_output, f"the pieces {text!r} are not the answer {streamed.final_output!r}")
    check({"raw_response_event", "run_item_stream_event"} <= events, f"{events}")


async def many_at_once(subject):
    async def one(seed):
        calls = []
        agent = subject.agent(seed=seed, tools=[weather_tool(calls)], settings=ONE_CALL)
        result = await agents.Runner.run(agent, f"Question {seed}", max_turns=3)
        return len(calls), isinstance(result.final_output, str)
    check(await asyncio.gather(*(one(seed) for seed in range(16))) == [(1, True)] * 16, "a conversation went wrong")


async def errors_have_their_kind(subject):
    try:
        await agents.Runner.run(subject.agent(settings={"temperature": 17.0}), "Hi")
    except openai.BadRequestError as error:
        check("temperature" in str(error), f"{error}")
        return
    raise harness.Failure("temperature 17 was accepted")


CHECKS = [a_tool_is_called_and_the_conversation_goes_on, the_tool_that_is_named_is_called, an_answer_has_its_type, an_agent_hands_over_to_another,
          streams_give_the_same, many_at_once, errors_have_their_kind]


async def an_instructed_model_answers(subject):
    calls = []
    plain = await agents.Runner.run(subject.agent(instructions="Answer briefly.", settings={"temperature": 0.0}), "What is the capital of France?")
    check("Paris" in plain.final_output, f"{plain.final_output!r}")
    agent = subject.agent(instructions="Answer from what the tool says.", tools=[weather_tool(calls)],
                          settings={"temperature": 0.0, "tool_choice": "required", "max_tokens": 80})
    result = await agents.Runner.run(agent, "How warm is it in Oslo tomorrow?")
    check(calls and calls[0][0] == "Oslo", f"calls {calls}")
    print(f"      called get_weather{calls[0]}, answered {result.final_output!r}")


async def with_client(function, port):
    subject = Subject(port)
    try:
        await function(subject)
    finally:
        await subject.client.close()


def run(port, checks):
    failures = 0
    for function in checks:
        started = time.monotonic()
        try:
            asyncio.run(with_client(function, port))
            print(f"ok    {function.__name__} ({time.monotonic() - started:.1f} s)", flush=True)
        except (harness.Failure, openai.OpenAIError, agents.exceptions.AgentsException, AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
            failures += 1
            print(f"FAIL  {function.__name__}: {type(error).__name__}: {error}", flush=True)
    return failures


def serve_and_run(folder, model, checks):
    port = harness.free_port()
    with harness.running("inference", "--model.name", model, "--model.served-name", "subject", "--server.port", port, "--model.tool-call-parser", "hermes",
                         log=folder / "inference.log") as process:
        harness.wait_until(lambda: process.poll() is not None or harness.is_healthy(port), 120, "the server to start")
        check(process.poll() is None, f"the server ended:\n{(folder / 'inference.log').read_text()[-4000:]}")
        return run(port, checks)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instruct", type=pathlib.Path, help="folder of a model that follows instructions, such as SmolLM2-135M-Instruct")
    parser.add_argument("--skip-without-package", action="store_true", help="exit with 77 instead of installing the package")
    options = parser.parse_args()
    with harness.workspace("agents-client") as folder:
        failures = serve_and_run(folder, harness.tiny_model(folder / "model"), CHECKS)
        count = len(CHECKS)
        if options.instruct:
            failures += serve_and_run(folder, options.instruct, [an_instructed_model_answers])
            count += 1
    print(f"openai-agents {agents.version.__version__}: {count - failures} of {count} checks passed", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
