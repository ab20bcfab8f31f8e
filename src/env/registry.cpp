#include "env/registry.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "base/error.hpp"
#include "env/alphabet_sort.hpp"
#include "env/args.hpp"
#include "env/color_codeword.hpp"
#include "env/env_log.hpp"
#include "env/few_shot.hpp"
#include "env/math_env.hpp"
#include "env/python/setup.hpp"
#include "env/reverse_text.hpp"
#include "env/task_data.hpp"
#include "env/wiki_search.hpp"
#include "env/wordle.hpp"

namespace prl::env {
namespace {

struct Entry {
  const char* id;
  EnvironmentPtr (*make)(const std::string& id, std::string name, Args args);
  /// Whether these arguments make tasks up where the environment has published ones: its name then says so.
  bool (*makes_up)(const boost::json::object& args) = nullptr;
};

template <EnvironmentPtr (*make)(std::string, Args)>
EnvironmentPtr made_by(const std::string&, std::string name, Args args) {
  return make(std::move(name), std::move(args));
}

// The one table of native environments: a new one is a line here and a pair of files.
constexpr std::array kEntries{
    Entry{"reverse-text", &made_by<make_reverse_text>},
    Entry{"alphabet-sort", &made_by<make_alphabet_sort>},
    Entry{"gsm8k", &make_math, &makes_up_math},
    Entry{"gsm8k-synthetic", &make_math},
    Entry{"math-env", &make_math, &makes_up_math},
    Entry{"math-env-synthetic", &make_math},
    Entry{"math500", &make_math},
    Entry{"aime2024", &make_math},
    Entry{"aime2025", &make_math},
    Entry{"color-codeword", &made_by<make_color_codeword>},
    Entry{"wordle", &made_by<make_wordle>},
    Entry{"wiki-search", &make_wiki_search, &makes_up_wiki},
    Entry{"wiki-search-synthetic", &make_wiki_search},
};

}  // namespace

std::vector<std::string> environment_ids() {
  std::vector<std::string> ids;
  for (const Entry& entry : kEntries) ids.emplace_back(entry.id);
  return ids;
}

EnvironmentPtr make_environment(const EnvSpec& spec) {
  std::string id = spec.id;
  std::replace(id.begin(), id.end(), '_', '-');
  const auto native = std::find_if(kEntries.begin(), kEntries.end(), [&](const Entry& entry) { return id == entry.id; });
  const bool is_python = native == kEntries.end() || spec.python.is_asked_for();
  const bool is_made_up = !is_python && native->makes_up != nullptr && native->makes_up(spec.args);
  const std::string name = !spec.name.empty() ? spec.name
                           : is_python        ? python::short_name(spec.id)
                           : is_made_up       ? id + std::string(kSynthetic)
                                              : id;
  // These are scopes of the metrics ("reward/all/mean").
  if (name == "all" || name == "agg")
    fail(ErrorCode::kInvalidArgument, "environment {}: the name '{}' is taken by the metrics over all environments", spec.id, name);
  if (is_python) return python::make_python_environment(spec.id, name, spec.args, spec.python);
  // An argument of every native environment.
  boost::json::object args = spec.args;
  const std::int64_t num_shots = Args(id, args).integer("num_shots", 0, 0, 1000);
  args.erase("num_shots");
  EnvironmentPtr environment = native->make(id, name, Args(id, std::move(args)));
  if (num_shots > 0) environment = with_examples(std::move(environment), num_shots);
  const std::filesystem::path& logs = spec.python.log_folder;
  return logs.empty() ? environment
                      : with_log(std::move(environment), logs / fmt::format("{}.log", name), log::parse_level(spec.python.log_level));
}

}  // namespace prl::env
