"""Tools with state: each rollout has a counter of its own, which the environment hands to the tool and the model does not see."""

import verifiers as vf
from datasets import Dataset


def count(step: int, counter: list[int]) -> str:
    """Adds to the counter.

    Args:
        step: how much
        counter: the rollout's own
    """
    counter[0] += step
    return f"The counter stands at {counter[0]}."


class CounterEnv(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(tools=[], **kwargs)
        self.add_tool(count, args_to_skip=["counter"])

    async def setup_state(self, state, **kwargs):
        state["counter"] = [0]
        result = await super().setup_state(state, **kwargs)
        return result if result is not None else state

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "counter": state["counter"]}


def load_environment(num_rows: int = 20, max_turns: int = 6):
    dataset = Dataset.from_list([{"question": f"Count to {i % 5 + 2} in steps.", "answer": str(i % 5 + 2)} for i in range(num_rows)])

    def reached(state, answer, **kwargs):
        return 1.0 if state["counter"][0] == int(answer) else 0.0

    return CounterEnv(dataset=dataset, rubric=vf.Rubric(funcs=[reached]), max_turns=max_turns)
