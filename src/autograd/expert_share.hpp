#pragma once

#include <cstdint>

namespace prl::autograd {

/// Which of each layer's experts one of several ranks holds that train together: neighbours, as many as the others hold or one more.
struct ExpertShare {
  int rank = 0, size = 1;
  std::int64_t first(std::int64_t num_experts) const noexcept { return num_experts * rank / size; }
  std::int64_t count(std::int64_t num_experts) const noexcept { return num_experts * (rank + 1) / size - first(num_experts); }
  bool operator==(const ExpertShare&) const = default;
};

}  // namespace prl::autograd
