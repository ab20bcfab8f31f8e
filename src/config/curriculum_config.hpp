#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "config/schema.hpp"

/// Which of an environment's tasks are played, and whose groups are trained on.
namespace prl::config {

struct StandardSampler {
  static constexpr std::string_view kType = "standard";
  template <class V>
  void visit(V&) {}
};
struct DifficultyPoolSampler {
  static constexpr std::string_view kType = "difficulty_pool";
  Value pools = Value::table();
  std::int64_t seed = 42;
  template <class V>
  void visit(V& v) {
    v.field("pools", pools, "NAME = { threshold, weight }; hard (0.25, 0.2), normal (0.75, 1) and easy (1, 0.2) if not set");
    v.field("seed", seed, "Seed of the draws", {.min = 0});
  }
};
using CurriculumSampler = std::variant<StandardSampler, DifficultyPoolSampler>;

struct CurriculumConfig {
  CurriculumSampler sampler = StandardSampler{};
  Value gates = Value::table();
  template <class V>
  void visit(V& v) {
    v.field("sampler", sampler, "standard takes the tasks in their order, difficulty_pool draws them by their last mean reward");
    v.field("gates", gates, "NAME = { type = \"advantage_range\", reject_min, reject_max }: groups with all advantages there do not train");
  }
};

struct DifficultyPool {
  std::string name;
  double threshold = 0;
  double weight = 1;
};
struct AdvantageGate {
  std::string name;
  double reject_min = 0;
  double reject_max = 0;
};

/// The pools by ascending threshold. What is wrong with the section goes to `problems`.
std::vector<DifficultyPool> difficulty_pools(const Value& pools, std::vector<std::string>& problems);
/// In the order of the section.
std::vector<AdvantageGate> advantage_gates(const Value& gates, std::vector<std::string>& problems);

}  // namespace prl::config
