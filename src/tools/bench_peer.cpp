#include "tools/bench_peer.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/core.h>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"

extern char** environ;

namespace prl::tools {
namespace fs = std::filesystem;
namespace {

fs::path find_script(const char* name) {
  std::error_code ignored;
  for (fs::path from : {fs::current_path(), fs::read_symlink("/proc/self/exe", ignored).parent_path()})
    for (; !from.empty(); from = from.parent_path()) {
      if (fs::exists(from / "bench" / name)) return from / "bench" / name;
      if (from == from.parent_path()) break;
    }
  fail(ErrorCode::kNotFound, "bench/{} is neither above {} nor above this program; run it inside a clone of the project", name,
       fs::current_path().string());
}

std::string interpreter() {
  const char* named = std::getenv("PRL_BENCH_PYTHON");
  return named != nullptr && *named != '\0' ? named : "python3";
}

/// Runs a program with stdout going to `out` (empty: ours) and waits for it.
void run(const std::vector<std::string>& words, const fs::path& out) {
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  if (!out.empty()) posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  pid_t child = 0;
  const int status = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (status != 0) fail(ErrorCode::kUnavailable, "cannot run {}: {}; PRL_BENCH_PYTHON names the interpreter", words[0], strerror(status));
  int result = 0;
  while (waitpid(child, &result, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(result)) fail(ErrorCode::kUnavailable, "{} {} was ended by signal {}", words[0], words[1], WTERMSIG(result));
  if (WEXITSTATUS(result) != 0)
    fail(ErrorCode::kUnavailable,
         "{} {} ended with status {}; its own message is above. The peer needs torch and transformers: PRL_BENCH_PYTHON names an "
         "interpreter that has them",
         words[0], words[1], WEXITSTATUS(result));
}

}  // namespace

void compare_with_peer(BenchOptions options, const std::string& shape, const std::string& json) {
  const std::string python = interpreter();
  const fs::path script = find_script("peer.py"), table = find_script("compare.py");
  const fs::path scratch = fs::temp_directory_path() / fmt::format("prl-bench-{}", getpid());
  fs::create_directories(scratch);
  write_file_atomic(scratch / "prl.json", json);
  std::string suites;
  if (options.decode) suites += "decode";
  if (options.train) suites += suites.empty() ? "train" : ",train";
  if (suites.empty()) fail(ErrorCode::kInvalidArgument, "the peer has no such work; it decodes and trains");
  const bool is_gpu = options.runtime->device().kind == DeviceKind::kCuda;
  options.runtime.reset();
  log::info("bench: running the peer, {} {}", python, script.string());
  std::vector<std::string> words{python,     script.string(),
                                 "--device", is_gpu ? "cuda" : "cpu",
                                 "--shape",  shape,
                                 "--suites", suites,
                                 "--dtypes", is_gpu ? "bfloat16" : "bfloat16,float32"};
  const auto add = [&](const char* name, std::int64_t value) {
    words.push_back(name);
    words.push_back(std::to_string(value));
  };
  add("--layers", options.model.num_layers);
  add("--threads", options.num_threads);
  add("--sequences", options.num_sequences);
  add("--prompt", options.prompt_tokens);
  add("--new", options.completion_tokens);
  add("--train-tokens", options.train_tokens);
  add("--sequence-tokens", options.sequence_tokens);
  add("--repeats", options.num_repeats);
  run(words, scratch / "peer.json");
  run({python, table.string(), (scratch / "prl.json").string(), (scratch / "peer.json").string()}, {});
  fs::remove_all(scratch);
}

namespace {

/// `script PRL MODEL_FOLDER arguments...` over a model folder that lives as long as the run.
void run_on_model(const char* script, std::vector<std::string> arguments) {
  const fs::path scratch = fs::temp_directory_path() / fmt::format("prl-bench-{}", getpid());
  fs::create_directories(scratch);
  std::vector<std::string> words{interpreter(), find_script(script).string(), fs::read_symlink("/proc/self/exe").string(),
                                 (scratch / "model").string()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  try {
    run(words, {});
  } catch (...) {
    fs::remove_all(scratch);
    throw;
  }
  fs::remove_all(scratch);
}

}  // namespace

void bench_start(const std::string& shape, int num_repeats) { run_on_model("first_token.py", {std::to_string(num_repeats), shape}); }

void bench_rl(const std::string& shape, std::uint64_t seed) { run_on_model("rl.py", {shape, "--seed", std::to_string(seed)}); }

void bench_dashboard(const std::string& shape, int num_pages, int num_turns, const std::optional<fs::path>& output_json) {
  std::vector<std::string> words{shape, "--pages", std::to_string(num_pages), "--turns", std::to_string(num_turns)};
  if (output_json) words.insert(words.end(), {"--json", fs::absolute(*output_json).string()});
  run_on_model("dashboard.py", std::move(words));
}

}  // namespace prl::tools
