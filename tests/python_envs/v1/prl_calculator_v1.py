"""Tools: sums that the model may leave to a calculator, an MCP server of each rollout."""

import verifiers.v1 as vf

__all__ = ["CalculatorTaskset"]


class CalculatorToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "calculator"

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Adds two whole numbers."""
        return a + b

    @vf.tool
    async def fail(self) -> str:
        """Never works."""
        raise RuntimeError("the tool is broken")


class CalculatorData(vf.TaskData):
    answer: str


class CalculatorTaskConfig(vf.TaskConfig):
    calculator: vf.ToolsetConfig = vf.ToolsetConfig()


class CalculatorTask(vf.Task[CalculatorData, vf.State, CalculatorTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [CalculatorToolset(config.calculator)]

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class CalculatorConfig(vf.TasksetConfig):
    task: CalculatorTaskConfig = CalculatorTaskConfig()
    num_rows: int = 20


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    def load(self):
        return [CalculatorTask(CalculatorData(prompt=f"What is {i} + {i + 3}?", answer=str(2 * i + 3)), self.config.task) for i in range(self.config.num_rows)]


if __name__ == "__main__":
    CalculatorToolset.run()
