"""Tools with state: the tool server counts in the state that it shares with the task."""

import verifiers.v1 as vf

__all__ = ["CounterTaskset"]


class CounterState(vf.State):
    value: int = 0


class CounterToolset(vf.Toolset[vf.ToolsetConfig, CounterState]):
    TOOL_PREFIX = None

    async def setup_task(self, task) -> None:
        self.unit = task.unit

    @vf.tool
    async def count(self, step: int) -> str:
        """Adds to the counter."""
        self.state.value += step
        return f"The counter stands at {self.state.value} {self.unit}."


class CounterData(vf.TaskData):
    answer: str
    unit: str


class CounterTaskConfig(vf.TaskConfig):
    counter: vf.ToolsetConfig = vf.ToolsetConfig()


class CounterTask(vf.Task[CounterData, CounterState, CounterTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [CounterToolset(config.counter)]

    @vf.stop
    async def overshot(self, trace: vf.Trace) -> bool:
        return trace.state.value > int(self.data.answer)

    @vf.reward
    async def reached(self, trace: vf.Trace) -> float:
        return float(trace.state.value == int(self.data.answer))


class CounterConfig(vf.TasksetConfig):
    task: CounterTaskConfig = CounterTaskConfig()
    num_rows: int = 20


class CounterTaskset(vf.Taskset[CounterTask, CounterConfig]):
    def load(self):
        return [
            CounterTask(CounterData(prompt=f"Count to {i % 5 + 2} in steps.", answer=str(i % 5 + 2), unit="apples"), self.config.task)
            for i in range(self.config.num_rows)
        ]


if __name__ == "__main__":
    CounterToolset.run()
