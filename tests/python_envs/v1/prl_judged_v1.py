"""A judge: another model says whether the answer is right."""

import verifiers.v1 as vf

__all__ = ["JudgedTaskset"]


class CorrectJudge(vf.Judge[bool]):
    prompt = "Question: {question}\nAnswer: {answer}\nResponse: {response}\nIs the response right? yes or no"

    def parse(self, response):
        return response.text.strip().lower().startswith("yes")


class JudgedData(vf.TaskData):
    answer: str


class JudgedTaskConfig(vf.TaskConfig):
    judge: vf.JudgeConfig = vf.JudgeConfig(model="a-judge", sampling=vf.SamplingConfig(temperature=0.0, max_tokens=4))


class JudgedTask(vf.Task[JudgedData, vf.State, JudgedTaskConfig]):
    @vf.reward
    async def verdict(self, trace: vf.Trace) -> float:
        judge = CorrectJudge(self.config.judge)
        result = await judge.evaluate(trace=trace, question=self.data.prompt_text, answer=self.data.answer, response=trace.last_reply)
        return float(result.parsed)


class JudgedConfig(vf.TasksetConfig):
    task: JudgedTaskConfig = JudgedTaskConfig()
    num_rows: int = 10


class JudgedTaskset(vf.Taskset[JudgedTask, JudgedConfig]):
    def load(self):
        return [JudgedTask(JudgedData(prompt=f"What is {i} times two?", answer=str(2 * i)), self.config.task) for i in range(self.config.num_rows)]
