// From argv to a command, with advice for the commands of other programs.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "config/cli.hpp"

namespace prl::config {
namespace {

struct ForeignTool {
  std::string_view name;
  std::string_view advice;
};
constexpr ForeignTool kForeignTools[] = {
    {"vllm", "start our server with `prl inference --model.name MODEL`"},
    {"vf-eval", "evaluate with `prl eval --env.id ENV --model.name MODEL`"},
    {"prime",
     "install environments with `prl env install NAME`, evaluate with `prl eval --env.id ENV --client.base-url URL --model.name MODEL`, "
     "browse results with `prl results`"},
    {"hf", "upload the folder outputs/weights/step_N with the Hugging Face client itself"},
    {"wandb", "log in with the Weights & Biases client itself"},
    {"python", "there is no Python here; see `prl --help` for the commands"},
    {"pip", "nothing needs to be installed with pip; `prl env install FOLDER` installs an environment"},
    {"bash", "run the script without `prl`"},
};

/// Options of torchrun that `prl launch` has too.
constexpr std::string_view kLaunchOptions[] = {"--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-id"};

/// "prl launch --nproc-per-node 8 sft @ x" for `torchrun --nproc-per-node 8 .../sft/train.py @ x`.
[[noreturn]] void fail_torchrun(const std::vector<std::string>& words) {
  std::string options, script, rest;
  bool is_one_rank = true;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (!script.empty()) {
      rest += " " + word;
      continue;
    }
    if (word.ends_with(".py") || word.starts_with("prime_rl.")) script = word;
    std::string name = word.substr(0, word.find('='));
    std::ranges::replace(name, '_', '-');
    if (std::ranges::find(kLaunchOptions, name) == std::end(kLaunchOptions)) continue;
    std::string value;
    if (const std::size_t equals = word.find('='); equals != std::string::npos)
      value = word.substr(equals + 1);
    else if (i + 1 < words.size())
      value = words[++i];
    options += fmt::format("{} {} ", name, value);
    if ((name == "--nproc-per-node" || name == "--nnodes") && value != "1") is_one_rank = false;
  }
  const bool is_rl = script.find("rl/train") != std::string::npos || script.find("rl.train") != std::string::npos;
  const std::string_view command = is_rl && script.find("sft") == std::string::npos ? "trainer" : "sft";
  fail(ErrorCode::kInvalidArgument, "torchrun is not needed: the program starts its own processes. Type `prl {}{}{}` instead",
       is_one_rank ? "" : "launch " + options, command, rest);
}

[[noreturn]] void fail_unknown(const std::string& word) {
  for (const ForeignTool& tool : kForeignTools)
    if (word == tool.name) fail(ErrorCode::kInvalidArgument, "`{}` is a command of another program: {}", word, tool.advice);
  std::vector<std::string> names;
  for (const CommandInfo& info : all_commands()) names.emplace_back(info.name);
  std::vector<std::string> words = names;
  words.insert(words.end(), {"help", "version"});
  const std::vector<std::string> nearest = nearest_names(word, words, 1);
  if (word.ends_with(".toml") || word.ends_with(".json"))
    fail(ErrorCode::kInvalidArgument, "the command must come first, and an @ before the file: `prl rl @ {}`; see `prl --help`", word);
  if (word.starts_with("-") || word.starts_with("@"))
    fail(ErrorCode::kInvalidArgument, "the command must come first: `prl rl {}`; see `prl --help`", word);
  fail(ErrorCode::kInvalidArgument, "unknown command `{}`;{} the commands are {}", word,
       nearest.empty() ? "" : fmt::format(" did you mean `{}`?", nearest.front()), fmt::join(names, ", "));
}

/// Fills in the command and its words; "help" as the first of them asks for
/// help where it cannot be anything else.
void take_command(ParsedCommand& parsed, Command command, std::vector<std::string> args) {
  parsed.command = command;
  parsed.wants_version = command != Command::kLaunch &&
                         std::any_of(args.begin(), args.end(), [](const std::string& word) { return word == "--version" || word == "-V"; });
  const bool has_positionals = command == Command::kInitModel || command == Command::kMakeData || command == Command::kResults ||
                               command == Command::kBench || command == Command::kConvert || command == Command::kEnv ||
                               command == Command::kK8s || command == Command::kRuns || command == Command::kDashboard ||
                               command == Command::kPlot || command == Command::kReport || command == Command::kReplay ||
                               command == Command::kTop || command == Command::kLaunch || command == Command::kPlan;
  if (!has_positionals && !args.empty() && args[0] == "help") args[0] = "--help";
  parsed.args = std::move(args);
}

/// `prl help rl trainer.optim` is `prl rl --help trainer.optim`.
void take_help(ParsedCommand& parsed, const std::vector<std::string>& words) {
  const auto command = find_command(words[1]);
  if (!command) fail_unknown(words[1]);
  parsed.program = "prl " + words[1];
  std::vector<std::string> args = {"--help"};
  args.insert(args.end(), words.begin() + 2, words.end());
  take_command(parsed, *command, std::move(args));
}

}  // namespace

ParsedCommand parse_command(int argc, const char* const* argv) {
  std::vector<std::string> words(argv + (argc > 0 ? 1 : 0), argv + argc);
  const std::string program = argc > 0 ? std::filesystem::path(argv[0]).filename().string() : "prl";
  ParsedCommand parsed;
  if (const auto command = find_command(program)) {
    parsed.program = program;
    take_command(parsed, *command, std::move(words));
    return parsed;
  }
  parsed.program = "prl";
  if (words.size() >= 2 && words[0] == "uv" && words[1] == "run") words.erase(words.begin(), words.begin() + 2);
  if (!words.empty() && words[0] == "uv")
    fail(ErrorCode::kInvalidArgument, "`uv {}` installs Python packages; nothing here needs that (`prl env install` is for environments)",
         words.size() > 1 ? words[1] : "");
  const bool is_help = !words.empty() && (words[0] == "help" || words[0] == "--help" || words[0] == "-h");
  if (is_help && words.size() > 1 && words[1] != "--help" && words[1] != "all") {
    take_help(parsed, words);
    return parsed;
  }
  if (words.empty() || words[0] == "--help" || words[0] == "-h" || words[0] == "help") return parsed;
  if (words[0] == "--version" || words[0] == "-V" || words[0] == "version") {
    parsed.wants_version = true;
    return parsed;
  }
  if (words[0] == "torchrun") fail_torchrun(words);
  // Other tools call the browser of results "eval tui".
  if (words.size() >= 2 && words[0] == "eval" && (words[1] == "tui" || words[1] == "list" || words[1] == "show")) {
    words.erase(words.begin());
    words[0] = "results";
  }
  const auto command = find_command(words[0]);
  if (!command) fail_unknown(words[0]);
  parsed.program = "prl " + words[0];
  take_command(parsed, *command, {words.begin() + 1, words.end()});
  return parsed;
}

}  // namespace prl::config
