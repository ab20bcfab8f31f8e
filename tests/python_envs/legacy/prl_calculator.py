"""Tools: sums that the model may leave to a calculator. `max_turns` bounds the calls."""

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Adds two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


async def multiply(a: int, b: int) -> int:
    """Multiplies two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


def load_environment(num_rows: int = 20, max_turns: int = 6):
    dataset = Dataset.from_list([{"question": f"What is {i} + {i + 3}?", "answer": str(2 * i + 3)} for i in range(num_rows)])

    def correct(completion, answer, **kwargs):
        return 1.0 if answer in (completion[-1].content or "") else 0.0

    def used_a_tool(completion, **kwargs):
        return float(any(message.role == "tool" for message in completion))

    rubric = vf.Rubric(funcs=[correct, used_a_tool], weights=[1.0, 0.0])
    return vf.ToolEnv(dataset=dataset, tools=[add, multiply], rubric=rubric, max_turns=max_turns)
