"""Single turn: the native `reverse-text` as a v1 task set, same rows, same reward."""

from difflib import SequenceMatcher

import verifiers.v1 as vf
from prl_texts import SYSTEM_PROMPT, reverse_texts, tag

__all__ = ["ReverseTextTaskset"]


class ReverseTextData(vf.TaskData):
    answer: str


class ReverseTextTask(vf.Task[ReverseTextData]):
    @vf.reward
    async def lcs_reward_func(self, trace: vf.Trace) -> float:
        return SequenceMatcher(None, tag(trace.last_reply, "reversed_text"), self.data.answer).ratio()


class ReverseTextConfig(vf.TasksetConfig):
    split: str = "train"
    seed: int = 0
    num_train: int = 1000
    num_eval: int = 100
    min_words: int = 3
    max_words: int = 8


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    def load(self):
        config = self.config
        texts = reverse_texts(config.seed, config.num_train, config.num_eval, config.min_words, config.max_words)[config.split]
        return [ReverseTextTask(ReverseTextData(prompt=text, system_prompt=SYSTEM_PROMPT, answer=text[::-1]), config.task) for text in texts]
