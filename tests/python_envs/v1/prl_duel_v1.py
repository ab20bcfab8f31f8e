"""Scores of a group within an episode: two writers answer, a reader who never learns is asked once, the shorter answer wins."""

import itertools

import verifiers.v1 as vf

__all__ = ["DuelTaskset", "DuelEnv"]


class DuelData(vf.TaskData):
    pass


class DuelTask(vf.Task[DuelData]):
    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class DuelConfig(vf.TasksetConfig):
    pass


class DuelTaskset(vf.Taskset[DuelTask, DuelConfig]):
    INFINITE = True

    def load(self):
        for i in itertools.count():
            yield DuelTask(DuelData(prompt=f"Say something short about {i}."), self.config.task)


class DuelEnvConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    reader: vf.AgentConfig = vf.AgentConfig()


class DuelEnv(vf.Env[DuelEnvConfig]):
    async def setup(self, agents):
        agents.reader.trainable = False

    async def run(self, task, agents):
        one = await agents.first.run(task)
        two = await agents.second.run(task)
        question = vf.Task(vf.TaskData(idx=task.data.idx, prompt=f"Which is better? 1: {one.last_reply} 2: {two.last_reply}"))
        await agents.reader.run(question)

    async def finalize(self, task, episode):
        writers = [trace for trace in episode.traces if trace.agent.name != "reader"]
        shortest = min(len(trace.last_reply) for trace in writers)
        for trace in writers:
            trace.record_reward("shortest", float(len(trace.last_reply) == shortest))
