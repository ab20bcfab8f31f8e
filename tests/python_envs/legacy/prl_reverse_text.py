"""Single turn: the native `reverse-text` as a legacy environment, same rows, same reward."""

from difflib import SequenceMatcher

import verifiers as vf
from datasets import Dataset
from prl_texts import SYSTEM_PROMPT, reverse_texts, tag


def load_environment(seed: int = 0, num_train: int = 1000, num_eval: int = 100, min_words: int = 3, max_words: int = 8, system_prompt: str | None = SYSTEM_PROMPT):
    texts = reverse_texts(seed, num_train, num_eval, min_words, max_words)

    def rows(split):
        return Dataset.from_list([{"question": text, "answer": text[::-1]} for text in texts[split]])

    def lcs_reward_func(completion, answer, **kwargs):
        said = next((message.content or "" for message in reversed(completion) if message.role == "assistant"), "")
        return SequenceMatcher(None, tag(said, "reversed_text"), answer).ratio()

    return vf.SingleTurnEnv(
        dataset=rows("train"), eval_dataset=rows("eval"), system_prompt=system_prompt, rubric=vf.Rubric(funcs=[lcs_reward_func], weights=[1.0])
    )
