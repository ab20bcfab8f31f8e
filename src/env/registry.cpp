#include "env/registry.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/error.hpp"
#include "env/alphabet_sort.hpp"
#include "env/args.hpp"
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
  for (const Entry& entry : kEntries)
    if (id == entry.id) return entry.make(name, Args(id, spec.args));
  fail(ErrorCode::kNotFound, "environment {}: not known; native ones are {}", spec.id, fmt::join(environment_ids(), ", "));
}

}  // namespace prl::env
