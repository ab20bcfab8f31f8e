#pragma once

#include <string>
#include <vector>

#include "base/rng.hpp"

namespace prl::fuzz {

/// Damages inputs: bytes changed, removed, doubled and moved, numbers made extreme, pieces of other inputs put in.
class Mutator {
 public:
  static constexpr std::size_t kMaxBytes = 64 << 10;

  Mutator(std::vector<std::string> corpus, std::uint64_t seed) : corpus_(std::move(corpus)), rng_(seed) {}
  /// One input of the corpus with one to eight changes.
  std::string next();
  const std::vector<std::string>& corpus() const { return corpus_; }

 private:
  void change(std::string& text);

  std::vector<std::string> corpus_;
  Rng rng_;
};

}  // namespace prl::fuzz
