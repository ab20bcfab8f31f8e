"""Scores of a group: the shortest reply of a group gets 1, the longest 0, those between by rank; a length penalty for each alone."""

import verifiers as vf
from datasets import Dataset


def load_environment(num_rows: int = 10, fault: str = ""):
    dataset = Dataset.from_list([{"question": f"Say something short about {i}.", "answer": ""} for i in range(num_rows)])

    def length(completion):
        return len(completion[-1].content or "") if completion else 0

    def brevity_rank(completions, **kwargs) -> list[float]:
        if fault == "raise":
            raise ValueError("the group cannot be ranked")
        lengths = [length(completion) for completion in completions]
        last = max(len(lengths) - 1, 1)
        return [1.0 - sum(other < own for other in lengths) / last for own in lengths]

    def is_long(completion, **kwargs):
        return float(length(completion) > 100)

    return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[brevity_rank, is_long], weights=[1.0, -0.5]))
