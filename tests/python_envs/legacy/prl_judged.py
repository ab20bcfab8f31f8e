"""A judge: another model says whether the answer is right. `own_judge` asks the policy itself through `state["client"].client`."""

import verifiers as vf
from datasets import Dataset


def load_environment(num_rows: int = 10, own_judge: bool = False, judge_model: str = "a-judge"):
    dataset = Dataset.from_list([{"question": f"What is {i} times two?", "answer": str(2 * i)} for i in range(num_rows)])
    if own_judge:

        async def self_verdict(completion, answer, state, **kwargs):
            said = completion[-1].content
            reply = await state["client"].client.chat.completions.create(
                model=state["model"], messages=[{"role": "user", "content": f"Is {said!r} equal to {answer}? yes or no"}], temperature=0.0, max_tokens=4
            )
            return 1.0 if "yes" in reply.choices[0].message.content.lower() else 0.0

        return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[self_verdict]))

    rubric = vf.JudgeRubric(judge_model=judge_model, judge_sampling_args={"temperature": 0.0, "max_tokens": 4})

    async def verdict(judge, prompt, completion, answer, state, **kwargs):
        return 1.0 if "yes" in (await judge(prompt, completion, answer, state)).lower() else 0.0

    rubric.add_reward_func(verdict)
    return vf.SingleTurnEnv(dataset=dataset, rubric=rubric)
