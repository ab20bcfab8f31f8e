#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/advantage_config.hpp"
#include "config/curriculum_config.hpp"
#include "config/schema.hpp"

/// Environments and how completions are sampled in them.
namespace prl::config {

enum class ReasoningEffort { kMinimal, kLow, kMedium, kHigh };
std::span<const EnumEntry> enum_entries(ReasoningEffort);

enum class EnvKind { kAuto, kLegacy, kV1, kFake };
std::span<const EnumEntry> enum_entries(EnvKind);
enum class SandboxMode { kAuto, kOff };
std::span<const EnumEntry> enum_entries(SandboxMode);
enum class WorkerStart { kFork, kSpawn };
std::span<const EnumEntry> enum_entries(WorkerStart);

/// What one worker process of a Python environment may use.
struct WorkerLimitsConfig {
  int rollouts = 128;
  double memory_gb = 16;
  int processes = 1024;
  int files = 65536;
  std::int64_t cpu_seconds = 0;
  template <class V>
  void visit(V& v) {
    v.field("rollouts", rollouts, "Rollouts at once in one worker", {.unit = "rollouts", .min = 1});
    v.field("memory_gb", memory_gb, "Address space of a worker, 0 for no limit", {.unit = "GB", .min = 0});
    v.field("processes", processes, "Processes and threads of a worker, 0 for no limit", {.min = 0});
    v.field("files", files, "Open files of a worker, 0 for no limit", {.min = 0});
    v.field("cpu_seconds", cpu_seconds, "Processor time of a worker, after which it is replaced; 0 for no limit",
            {.unit = "seconds", .min = 0});
  }
};

/// Who answers the calls of an environment's judges; without it they use their own clients, which want sandbox "off".
struct JudgeConfig {
  std::string base_url = "https://api.openai.com/v1";
  std::optional<std::string> model;
  std::string api_key_var = "OPENAI_API_KEY";
  std::int64_t max_calls = -1;
  bool cache = true;
  double timeout = 120;
  template <class V>
  void visit(V& v) {
    v.field("base_url", base_url, "OpenAI-compatible service of the judge");
    v.field("model", model, "Model that judges; what the environment asks for if not set");
    v.field("api_key_var", api_key_var, "Environment variable that holds the service's key");
    v.field("max_calls", max_calls, "Most calls in the life of the process, after which rollouts that need a judge fail; -1 for no limit",
            {.unit = "calls", .min = -1});
    v.field("cache", cache, "Answer a call at temperature 0 that was made before from memory");
    v.field("timeout", timeout, "Longest time of one call", {.unit = "seconds", .min = 0, .is_open_min = true});
  }
};

/// How the workers of a Python environment run; native environments have none.
struct PythonEnvConfig {
  std::optional<std::string> path;
  std::optional<std::string> python;
  EnvKind kind = EnvKind::kAuto;
  SandboxMode sandbox = SandboxMode::kAuto;
  WorkerStart worker_start = WorkerStart::kFork;
  std::vector<std::string> pass_env;
  WorkerLimitsConfig limits;
  std::optional<std::string> address;
  IntOrWord num_workers{};
  Value agent = Value::table();
  std::optional<JudgeConfig> judge;
  template <class V>
  void visit_python(V& v) {
    v.field("path", path,
            "Folders, with colons, of a Python environment that is not installed: its module or package, and what it imports");
    v.field("python", python, "Interpreter or virtual environment of a Python environment; the one it was installed into if not set");
    v.field("kind", kind, "API that a Python environment is written for; auto looks at its module");
    v.field("sandbox", sandbox, "Workers without network and capabilities, where the machine allows it");
    v.field("worker_start", worker_start,
            "fork: workers come from a process that has imported what they need; spawn: each imports for itself");
    v.field("pass_env", pass_env, "Variables, keys of judges for instance, that workers get besides the usual ones");
    v.field("limits", limits, "What one worker may use");
    v.field("address", address, "host:port of workers that run already (prl env-server), with commas between several");
    v.field("num_workers", num_workers, "Worker processes; auto goes by rollouts at once and cores", {.min = 1, .words = "auto"});
    v.field("agent", agent, "Agent of a v1 environment: max_turns, harness, runtime, ...");
    v.field("judge", judge, "Service that answers the calls of a Python environment's judges");
  }
};

/// Sampling of training rollouts.
struct TrainSamplingConfig {
  double temperature = 1.0;
  double repetition_penalty = 1.0;
  std::optional<int> max_completion_tokens;
  int min_tokens = 0;
  std::optional<std::int64_t> seed;
  Value extra_body = Value::table();
  template <class V>
  void visit(V& v) {
    v.field("temperature", temperature, "Logits are divided by this; 0 takes the most likely token", {.min = 0, .max = 2});
    v.field("repetition_penalty", repetition_penalty, "Penalty of tokens seen before; 1 for none", {.min = 0, .is_open_min = true});
    v.field("max_completion_tokens", max_completion_tokens, "Most tokens of one reply; what fits the context if not set",
            {.unit = "tokens", .min = 1});
    v.field("min_tokens", min_tokens, "Tokens before the reply may end", {.unit = "tokens", .min = 0});
    v.field("seed", seed, "Seed of the sampler");
    v.field("extra_body", extra_body, "More fields of each request, as they are");
  }
};

/// Sampling of evaluations; what is not set is left to the server.
struct EvalSamplingConfig {
  std::optional<double> temperature;
  std::optional<double> repetition_penalty;
  std::optional<double> top_p;
  std::optional<int> top_k;
  std::optional<double> min_p;
  std::optional<int> max_completion_tokens;
  std::optional<int> min_tokens;
  std::optional<ReasoningEffort> reasoning_effort;
  std::optional<std::int64_t> seed;
  Value extra_body = Value::table();
  template <class V>
  void visit(V& v) {
    v.field("temperature", temperature, "Logits are divided by this; 0 takes the most likely token", {.min = 0, .max = 2});
    v.field("repetition_penalty", repetition_penalty, "Penalty of tokens seen before; 1 for none", {.min = 0, .is_open_min = true});
    v.field("top_p", top_p, "Sample from the most likely tokens that together have this probability", {.min = 0, .max = 1});
    v.field("top_k", top_k, "Sample from this many most likely tokens, -1 for all", {.min = -1});
    v.field("min_p", min_p, "Least probability, relative to the most likely token", {.min = 0, .max = 1});
    v.field("max_completion_tokens", max_completion_tokens, "Most tokens of one reply", {.unit = "tokens", .min = 1});
    v.field("min_tokens", min_tokens, "Tokens before the reply may end", {.unit = "tokens", .min = 0});
    v.field("reasoning_effort", reasoning_effort, "How long reasoning models think");
    v.field("seed", seed, "Seed of the sampler");
    v.field("extra_body", extra_body, "More fields of each request, as they are");
  }
};

/// One training environment.
struct EnvConfig : PythonEnvConfig {
  std::string id = "reverse-text";
  std::optional<std::string> name;
  std::optional<std::string> data;
  Value args = Value::table();
  Value extra_env_kwargs = Value::table();
  std::optional<double> ratio;
  int max_retries = 3;
  std::int64_t max_total_completion_tokens = -1;
  std::optional<double> timeout;
  std::vector<std::string> state_columns;
  std::optional<int> group_size;
  std::optional<TrainSamplingConfig> sampling;
  std::optional<AdvantageConfig> algo;
  std::optional<CurriculumConfig> curriculum;
  std::optional<CustomRewardConfig> reward;
  template <class V>
  void visit(V& v) {
    v.field("id", id, "Native (reverse-text, alphabet-sort, gsm8k, math-env, wordle, wiki-search, color-codeword) or in Python");
    v.field("name", name, "Unique name in metrics and logs; the id if not set");
    v.field("data", data, "Local JSONL file of tasks instead of the environment's own generator", {.status = passed_on("args")});
    v.field("args", args, "Arguments of the environment");
    v.field("extra_env_kwargs", extra_env_kwargs, "Settings applied to a Python environment of the legacy API after it is made");
    visit_python(v);
    v.field("ratio", ratio, "Share among the environments; sizes of their data sets if no one sets it", {.min = 0, .is_open_min = true});
    v.field("max_retries", max_retries, "Attempts after a failed episode", {.min = 0});
    v.field("max_total_completion_tokens", max_total_completion_tokens, "Most generated tokens of one episode, -1 for no limit",
            {.unit = "tokens", .min = -1});
    v.field("timeout", timeout, "Longest time of one episode", {.unit = "seconds", .min = 0, .is_open_min = true});
    v.field("state_columns", state_columns, "Fields of a Python environment's state that are saved with the rollout, in its info");
    v.field("group_size", group_size, "Rollouts per task, if it differs from the orchestrator's", {.unit = "rollouts", .min = 1});
    v.field("sampling", sampling, "Sampling, if it differs from [orchestrator.train.sampling]");
    v.field("algo", algo, "Advantages of this environment, if they differ from [orchestrator.advantage]");
    v.field("curriculum", curriculum, "Choice and admission of this environment's tasks; at random, all admitted if not set");
    v.field("reward", reward, "Rewards by a Python function, in place of the environment's");
  }
};

/// One evaluation environment.
struct EvalEnvConfig : PythonEnvConfig {
  std::string id = "reverse-text";
  std::optional<std::string> name;
  std::optional<std::string> data;
  Value args = Value::table();
  Value extra_env_kwargs = Value::table();
  std::optional<int> num_examples;
  std::optional<int> group_size;
  std::optional<int> interval;
  int skip_first = 0;
  int max_retries = 3;
  std::optional<double> timeout;
  std::vector<std::string> state_columns;
  std::optional<EvalSamplingConfig> sampling;
  template <class V>
  void visit(V& v) {
    v.field("id", id, "Native (reverse-text, alphabet-sort, gsm8k, math-env, wordle, wiki-search, color-codeword) or in Python");
    v.field("name", name, "Unique name in metrics and logs; the id if not set");
    v.field("data", data, "Local JSONL file of tasks instead of the environment's own generator", {.status = passed_on("args")});
    v.field("args", args, "Arguments of the environment");
    v.field("extra_env_kwargs", extra_env_kwargs, "Settings applied to a Python environment of the legacy API after it is made");
    visit_python(v);
    v.field("num_examples", num_examples, "Tasks, -1 for all; the section's value if not set", {.min = -1});
    v.field("group_size", group_size, "Rollouts per task; the section's value if not set", {.unit = "rollouts", .min = 1});
    v.field("interval", interval, "Steps between two evaluations; the section's value if not set", {.unit = "steps", .min = 1});
    v.field("skip_first", skip_first, "Tasks to leave out at the start", {.min = 0});
    v.field("max_retries", max_retries, "Attempts after a failed episode", {.min = 0});
    v.field("timeout", timeout, "Longest time of one episode", {.unit = "seconds", .min = 0, .is_open_min = true});
    v.field("state_columns", state_columns, "Fields of a Python environment's state that are saved with the rollout, in its info");
    v.field("sampling", sampling, "Sampling, if it differs from the section's");
  }
};

}  // namespace prl::config
