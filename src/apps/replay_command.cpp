#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "apps/commands.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "config/problem.hpp"
#include "config/text_format.hpp"
#include "config/tool_config.hpp"
#include "config/trainer_config.hpp"

namespace prl::apps {
namespace {

namespace fs = std::filesystem;

/// Keys of `prl trainer` that no weight depends on; others may.
constexpr std::string_view kWithoutEffectOnWeights[] = {"ckpt",
                                                        "log",
                                                        "wandb",
                                                        "file_monitor",
                                                        "compute.num_threads",
                                                        "env_vars",
                                                        "record",
                                                        "metrics_server",
                                                        "trace_path",
                                                        "memory_profiler_path",
                                                        "heartbeat",
                                                        "enable_token_export",
                                                        "data.recorded",
                                                        "dist_timeout_seconds",
                                                        "model.ac",
                                                        "model.ac_offloading",
                                                        "model.optim_cpu_offload",
                                                        "model.fsdp_cpu_offload"};

bool may_decide_weights(std::string_view key) {
  return std::ranges::none_of(kWithoutEffectOnWeights,
                              [&](std::string_view name) { return key == name || (key.starts_with(name) && key[name.size()] == '.'); });
}

/// The leaves of a table as words of a command line, and their keys.
void flatten(const config::Value& table, const std::string& prefix, std::vector<std::string>& words, std::vector<std::string>& keys) {
  for (const config::Member& member : table.members()) {
    const std::string key = prefix + member.key;
    if (member.value.is_table() && !member.value.members().empty()) {
      flatten(member.value, key + ".", words, keys);
      continue;
    }
    keys.push_back(key);
    words.push_back(config::to_flag(key));
    words.push_back(member.value.is_null()     ? "None"
                    : member.value.is_string() ? member.value.as_string()
                                               : config::to_compact_json(member.value));
  }
}

fs::path default_folder(const fs::path& run) {
  const fs::path folder = run.has_filename() ? run : run.parent_path();
  return folder.parent_path() / (folder.filename().string() + "-replay");
}

/// The words of `prl trainer` for the replay. What the run's trainer told others, or kept elsewhere, is left out.
std::vector<std::string> trainer_words(const config::ReplayConfig& config) {
  const fs::path file = config.run / "configs" / "trainer.toml";
  if (!fs::exists(file))
    fail(ErrorCode::kNotFound, "{} is not there: is {} the output folder of a run of `prl rl` or `prl trainer`?", file.string(),
         config.run.string());
  std::vector<std::string> words{"@", file.string(), "--data.recorded.run", config.run.string()};
  const config::TrainerConfig run = config::load<config::TrainerConfig>(config::Command::kTrainer, words).config;
  const auto add = [&words](std::string flag, std::string value) { words.insert(words.end(), {std::move(flag), std::move(value)}); };
  const auto unset = [&add](bool is_set, const char* flag) {
    if (is_set) add(flag, "None");
  };
  unset(run.wandb.has_value(), "--wandb");
  unset(run.heartbeat.has_value(), "--heartbeat");
  unset(run.metrics_server.has_value(), "--metrics-server");
  unset(run.healing.has_value(), "--healing");
  unset(run.trace_path.has_value(), "--trace-path");
  unset(run.memory_profiler_path.has_value(), "--memory-profiler-path");
  unset(run.ckpt && run.ckpt->resume_step, "--ckpt.resume-step");
  unset(run.ckpt && run.ckpt->output_dir, "--ckpt.output-dir");
  words.emplace_back("--no-record");
  add("--output-dir", (config.output_dir.empty() ? default_folder(config.run) : config.output_dir).string());
  add("--data.recorded.from-step", std::to_string(config.from_step));
  if (config.last_step) add("--data.recorded.last-step", std::to_string(*config.last_step));
  std::vector<std::string> keys;
  flatten(config.trainer, "", words, keys);
  std::erase_if(keys, [](const std::string& key) { return !may_decide_weights(key); });
  if (!keys.empty() && !config.require_same)
    log::info("other weights than the recorded run's are no error here, since {} may decide them", fmt::join(keys, ", "));
  add("--data.recorded.require-same", config.require_same.value_or(keys.empty()) ? "true" : "false");
  return words;
}

}  // namespace

int run_replay(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::ReplayConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  config::ParsedCommand trainer = parsed;
  trainer.command = config::Command::kTrainer;
  trainer.args = trainer_words(loaded.config);
  if (loaded.config.num_ranks == 1) return run_trainer(trainer);
  config::ParsedCommand ranks = trainer;
  ranks.command = config::Command::kLaunch;
  ranks.args = {"--nproc-per-node", std::to_string(loaded.config.num_ranks), "trainer"};
  ranks.args.insert(ranks.args.end(), trainer.args.begin(), trainer.args.end());
  return run_launch(ranks);
}

}  // namespace prl::apps
