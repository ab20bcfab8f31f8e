#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/files.hpp"
#include "env/python/install.hpp"

namespace prl::env::python {

namespace fs = std::filesystem;

namespace {

constexpr const char* kProject = R"toml([project]
name = "{name}"
version = "0.1.0"
description = "An environment: write a word backwards"
requires-python = ">=3.11,<3.14"
dependencies = ["{verifiers}"]

[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[tool.setuptools]
py-modules = ["{module}"]
)toml";

constexpr const char* kLegacy = R"py("""An environment of the legacy API of verifiers: the model is asked to write a word backwards."""

import random

import verifiers as vf
from datasets import Dataset

SYSTEM_PROMPT = "Write the word backwards. Put the answer between <answer> and </answer>."


def make_rows(num_rows: int, seed: int) -> Dataset:
    """Rows have a prompt (messages) and an answer; a column `info` may hold whatever the rewards need besides."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8))) for _ in range(num_rows)]
    prompts = [[{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": word}] for word in words]
    return Dataset.from_dict({"prompt": prompts, "answer": [word[::-1] for word in words]})


def load_environment(num_train: int = 1000, num_eval: int = 100, seed: int = 0) -> vf.Environment:
    """The arguments are `args` of the configuration."""
    parser = vf.XMLParser(["answer"], answer_field="answer")

    def is_right(completion, answer, **kwargs) -> float:
        return 1.0 if (parser.parse_answer(completion) or "").strip() == answer else 0.0

    rubric = vf.Rubric(funcs=[is_right, parser.get_format_reward_func()], weights=[1.0, 0.1], parser=parser)
    return vf.SingleTurnEnv(
        dataset=make_rows(num_train, seed), eval_dataset=make_rows(num_eval, seed + 1), parser=parser, rubric=rubric
    )
)py";

constexpr const char* kV1 = R"py("""An environment of the v1 API of verifiers: the model is asked to write a word backwards."""

import random

import verifiers.v1 as vf

SYSTEM_PROMPT = "Write the word backwards. Put the answer between <answer> and </answer>."


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        reply = trace.last_reply or ""
        answer = reply.rpartition("<answer>")[2].partition("</answer>")[0].strip()
        return float(answer == self.data.word[::-1])


class WordConfig(vf.TasksetConfig):
    num_tasks: int = 1000
    seed: int = 0


class WordTaskset(vf.Taskset[WordTask, WordConfig]):
    def load(self) -> list[WordTask]:
        rng = random.Random(self.config.seed)
        tasks = []
        for idx in range(self.config.num_tasks):
            word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8)))
            tasks.append(WordTask(WordData(idx=idx, system_prompt=SYSTEM_PROMPT, prompt=word, word=word), self.config.task))
        return tasks


__all__ = ["WordTaskset"]
)py";

constexpr const char* kNativeTasks =
    R"json({"question": "A farmer has 3 fields with 12 trees each. How many trees are that?", "answer": "36"}
{"question": "What is 7 + 8 * 2?", "answer": "23"}
{"question": "A train drives 60 km in half an hour. How many km does it drive in two hours?", "answer": "240"}
{"question": "Half of a number is 21. What is the number?", "answer": "42"}
)json";

constexpr const char* kNativeConfig = R"toml(# prl eval @ eval.toml --model.name MODEL
[[env]]
id = "math-env"                                     # native: each answer is verified as mathematics
name = "{name}"
args = { dataset_path = "{folder}/tasks.jsonl", eval_dataset_path = "{folder}/tasks.jsonl" }
)toml";

std::string replaced(std::string text, const std::string& mark, const std::string& value) {
  for (std::size_t at = 0; (at = text.find(mark, at)) != std::string::npos; at += value.size()) text.replace(at, mark.size(), value);
  return text;
}

}  // namespace

std::string init_environment(const fs::path& folder, const std::string& api, bool overwrite) {
  const fs::path place = fs::absolute(folder).lexically_normal();
  const std::string name = plain_id((place.filename().empty() ? place.parent_path() : place).filename().string());
  if (name.empty()) fail(ErrorCode::kInvalidArgument, "environment {}: the folder's name is the environment's", folder.string());
  if (fs::exists(place) && !fs::is_empty(place) && !overwrite)
    fail(ErrorCode::kAlreadyExists, "{} is not empty; --overwrite writes into it", place.string());
  std::string module = name;
  std::replace(module.begin(), module.end(), '-', '_');
  fs::create_directories(place);
  if (api == "native") {
    write_file_atomic(place / "tasks.jsonl", kNativeTasks);
    write_file_atomic(place / "eval.toml", replaced(replaced(kNativeConfig, "{name}", name), "{folder}", place.string()));
    return fmt::format(
        "{0} holds questions with answers in tasks.jsonl. Play them with\n  prl eval @ {0}/eval.toml --model.name MODEL\nand train with "
        "the "
        "lines of eval.toml under [[orchestrator.train.env]]\n",
        place.string());
  }
  std::string project = replaced(kProject, "{name}", name);
  project = replaced(std::move(project), "{module}", module);
  project = replaced(std::move(project), "{verifiers}", api == "v1" ? "verifiers>=0.4,<0.5" : "verifiers>=0.2,<=0.3.1");
  write_file_atomic(place / "pyproject.toml", project);
  write_file_atomic(place / (module + ".py"), api == "v1" ? kV1 : kLegacy);
  return fmt::format(
      "{0} holds the environment {1}. Install it with\n  prl env install {0}\nand play it with\n  prl eval --env.id {1} --model.name MODEL "
      "--num-examples 5\n",
      place.string(), name);
}

}  // namespace prl::env::python
