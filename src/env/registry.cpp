#include "env/registry.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/error.hpp"
#include "env/alphabet_sort.hpp"
#include "env/args.hpp"
#include "env/few_shot.hpp"
#include "env/math_env.hpp"
#include "env/reverse_text.hpp"
#include "env/wiki_search.hpp"
#include "env/wordle.hpp"

namespace prl::env {
namespace {

struct Entry {
  const char* id;
  EnvironmentPtr (*make)(std::string name, Args args);
};

// The one table of native environments: a new one is a line here and a pair of files.
constexpr std::array kEntries{
    Entry{"reverse-text", &make_reverse_text},
    Entry{"alphabet-sort", &make_alphabet_sort},
    Entry{"gsm8k", &make_math},
    Entry{"math-env", &make_math},
    Entry{"wordle", &make_wordle},
    Entry{"wiki-search", &make_wiki_search},
};

}  // namespace

std::vector<std::string> environment_ids() {
  std::vector<std::string> ids;
  for (const Entry& entry : kEntries) ids.emplace_back(entry.id);
  return ids;
}

EnvironmentPtr make_environment(const EnvSpec& spec) {
  if (spec.id.find('/') != std::string::npos)
    fail(ErrorCode::kNotImplemented,
         "environment {}: ids of the form org/name are verifiers environments in Python worker processes, which this build does "
         "not have yet; native ones are {}",
         spec.id, fmt::join(environment_ids(), ", "));
  std::string id = spec.id;
  std::replace(id.begin(), id.end(), '_', '-');
  const std::string name = spec.name.empty() ? id : spec.name;
  // These are scopes of the metrics ("reward/all/mean").
  if (name == "all" || name == "agg")
    fail(ErrorCode::kInvalidArgument, "environment {}: the name '{}' is taken by the metrics over all environments", spec.id, name);
  // An argument of every environment.
  boost::json::object args = spec.args;
  const std::int64_t num_shots = Args(id, args).integer("num_shots", 0, 0, 1000);
  args.erase("num_shots");
  for (const Entry& entry : kEntries)
    if (id == entry.id) {
      EnvironmentPtr environment = entry.make(name, Args(id, std::move(args)));
      return num_shots > 0 ? with_examples(std::move(environment), num_shots) : environment;
    }
  fail(ErrorCode::kNotFound, "environment {}: not known; native ones are {}", spec.id, fmt::join(environment_ids(), ", "));
}

}  // namespace prl::env
