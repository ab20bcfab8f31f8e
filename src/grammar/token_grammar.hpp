#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "grammar/automaton.hpp"
#include "grammar/matcher.hpp"
#include "grammar/vocabulary.hpp"
#include "wire/token_rule.hpp"

namespace prl::grammar {

/// The texts of an automaton as a rule over tokens. The mask of a state is found by walking the vocabulary's trie, and kept.
///
/// Memory  states and masks are dropped and found anew when they grow beyond kMaxBytes; cursors notice by their epoch.
/// Time    a mask seen before is a copy; a new one is a walk (milliseconds for 150,000 tokens), bounded by kMaxWalkCost. A walk that
/// reaches the bound leaves
///         out long tokens, never a way to go on: single bytes are always tried.
class TokenGrammar final : public wire::TokenRule {
 public:
  static constexpr std::size_t kMaxBytes = std::size_t{32} << 20;
  static constexpr std::size_t kMaxWalkCost = std::size_t{4} << 20;

  /// The automaton must have been finished with the bytes of vocabulary->usable_bytes().
  TokenGrammar(std::shared_ptr<const Automaton> automaton, std::shared_ptr<const Vocabulary> vocabulary, std::size_t max_bytes = kMaxBytes);

  bool allow(std::span<const std::int32_t> output, wire::TokenRuleCursor& cursor, std::span<std::uint64_t> allowed_words) const override;

 private:
  void advance(std::span<const std::int32_t> output, wire::TokenRuleCursor& cursor) const;
  const std::vector<std::uint64_t>& mask_of(Matcher::StateId state) const;

  std::shared_ptr<const Vocabulary> vocabulary_;
  std::size_t max_bytes_;
  mutable std::mutex mutex_;  // guards all below
  mutable Matcher matcher_;
  mutable std::uint64_t epoch_ = 1;
  mutable std::unordered_map<Matcher::StateId, std::vector<std::uint64_t>> masks_;
  mutable std::size_t mask_bytes_ = 0;
  mutable std::vector<Matcher::StateId> path_;
};

}  // namespace prl::grammar
