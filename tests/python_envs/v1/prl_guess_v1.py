"""Several turns: guess a number; the environment speaks between the agent's turns. `fault` breaks it in one way."""

import re

import verifiers.v1 as vf

__all__ = ["GuessTaskset", "GuessEnv"]


class GuessData(vf.TaskData):
    answer: str
    fault: str = ""


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def solved(self, trace: vf.Trace) -> float:
        if self.data.fault == "reward":
            raise ZeroDivisionError("the reward is broken")
        if self.data.fault == "nan":
            return float("nan")
        return float(self.data.answer in re.findall(r"-?\d+", trace.last_reply)[-1:])

    @vf.reward(weight=0.25)
    async def economy(self, trace: vf.Trace) -> float:
        return 1.0 / max(trace.num_turns, 1)

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessConfig(vf.TasksetConfig):
    num_rows: int = 20
    fault: str = ""


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        return [
            GuessTask(GuessData(prompt=None, answer=str(37 * i % 100 + 1), fault=self.config.fault), self.config.task) for i in range(self.config.num_rows)
        ]


class GuessEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(max_turns=5)


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        if task.data.fault == "raise":
            raise KeyError("the environment is broken")
        async with agents.agent.interaction(task) as agent:
            said = await agent.turn("Guess my number from 1 to 100.")
            while not said.terminated:
                found = re.findall(r"-?\d+", said.last_reply)
                guess = int(found[-1]) if found else None
                if guess == int(task.data.answer):
                    break
                hint = "Say a number." if guess is None else "Higher." if guess < int(task.data.answer) else "Lower."
                said = await agent.turn(hint)
