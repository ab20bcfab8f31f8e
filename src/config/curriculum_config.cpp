#include "config/curriculum_config.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <initializer_list>

namespace prl::config {
namespace {

/// The number at `key`, or `absent`. Members of `table` that are not in `known` are problems.
double number_of(const Value& table, std::string_view key, double absent, const std::string& where, std::vector<std::string>& problems) {
  const Value* value = table.find(key);
  if (value == nullptr || value->is_null()) return absent;
  if (value->is_int() || value->is_float()) return as_number(*value);
  problems.push_back(fmt::format("{}.{} must be a number", where, key));
  return absent;
}

bool check_members(const Value& table, std::initializer_list<std::string_view> known, const std::string& where,
                   std::vector<std::string>& problems) {
  if (!table.is_table()) {
    problems.push_back(fmt::format("{} must be a table", where));
    return false;
  }
  for (const Member& member : table.members())
    if (std::find(known.begin(), known.end(), member.key) == known.end())
      problems.push_back(fmt::format("{}.{} is not known; known are {}", where, member.key, fmt::join(known, ", ")));
  return true;
}

}  // namespace

std::vector<DifficultyPool> difficulty_pools(const Value& section, std::vector<std::string>& problems) {
  std::vector<DifficultyPool> pools;
  if (!section.is_table()) {
    problems.emplace_back("pools must be a table of pools");
    return pools;
  }
  for (const Member& member : section.members()) {
    const std::string where = "pools." + member.key;
    if (!check_members(member.value, {"threshold", "weight"}, where, problems)) continue;
    if (member.value.find("threshold") == nullptr) problems.push_back(where + ".threshold is missing");
    DifficultyPool pool{member.key, number_of(member.value, "threshold", 0, where, problems),
                        number_of(member.value, "weight", 1, where, problems)};
    if (!(pool.weight >= 0)) problems.push_back(where + ".weight must be at least 0");
    pools.push_back(std::move(pool));
  }
  if (section.members().empty()) pools = {{"hard", 0.25, 0.2}, {"normal", 0.75, 1.0}, {"easy", 1.0, 0.2}};
  std::stable_sort(pools.begin(), pools.end(), [](const auto& a, const auto& b) { return a.threshold < b.threshold; });
  return pools;
}

std::vector<AdvantageGate> advantage_gates(const Value& section, std::vector<std::string>& problems) {
  std::vector<AdvantageGate> gates;
  if (!section.is_table()) {
    problems.emplace_back("gates must be a table of gates");
    return gates;
  }
  for (const Member& member : section.members()) {
    const std::string where = "gates." + member.key;
    if (!check_members(member.value, {"type", "reject_min", "reject_max"}, where, problems)) continue;
    const Value* type = member.value.find("type");
    if (type != nullptr && !(type->is_string() && type->as_string() == "advantage_range"))
      problems.push_back(where + ".type must be advantage_range");
    AdvantageGate gate{member.key, number_of(member.value, "reject_min", 0, where, problems),
                       number_of(member.value, "reject_max", 0, where, problems)};
    if (gate.reject_min > gate.reject_max) problems.push_back(where + ".reject_min is above its reject_max");
    gates.push_back(std::move(gate));
  }
  return gates;
}

}  // namespace prl::config
