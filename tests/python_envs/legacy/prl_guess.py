"""Several turns: guess a number from hints. `seconds` makes the environment slow, `fault` breaks it in one way."""

import asyncio
import re

import verifiers as vf
from datasets import Dataset


class GuessEnv(vf.MultiTurnEnv):
    def __init__(self, seconds: float = 0.0, fault: str = "", **kwargs):
        super().__init__(**kwargs)
        self.seconds = seconds
        self.fault = fault

    async def setup_state(self, state):
        state["secret"] = int(state["answer"])
        state["guesses"] = []
        return state

    async def env_response(self, messages, state, **kwargs):
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if self.fault == "raise":
            raise KeyError("the environment is broken")
        if self.fault == "tool":
            raise vf.ToolError("a tool is broken")
        found = re.findall(r"-?\d+", messages[-1].content or "")
        guess = int(found[-1]) if found else None
        state["guesses"].append(guess)
        if guess == state["secret"]:
            state["final_env_response"] = [vf.UserMessage(content="Right.")]
            return state["final_env_response"]
        hint = "Say a number." if guess is None else "Higher." if guess < state["secret"] else "Lower."
        return [vf.UserMessage(content=hint)]


def load_environment(num_rows: int = 20, max_turns: int = 5, seconds: float = 0.0, fault: str = "", **kwargs):
    dataset = Dataset.from_list([{"question": "Guess my number from 1 to 100.", "answer": str(37 * i % 100 + 1)} for i in range(num_rows)])

    def solved(state, **kwargs):
        if fault == "reward":
            raise ZeroDivisionError("the reward is broken")
        if fault == "nan":
            return float("nan")
        return 1.0 if state["guesses"] and state["guesses"][-1] == state["secret"] else 0.0

    def economy(state, **kwargs):
        return 1.0 / max(len(state["guesses"]), 1)

    rubric = vf.Rubric(funcs=[solved, economy], weights=[1.0, 0.25])
    return GuessEnv(dataset=dataset, rubric=rubric, max_turns=max_turns, seconds=seconds, fault=fault, **kwargs)
