#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "text/tokenizer.hpp"
#include "wire/token_rule.hpp"

namespace prl::server {

/// What opens and closes reasoning.
struct ThinkingMarks {
  std::string_view open, close;
};
inline constexpr ThinkingMarks kThinkMarks{"<think>", "</think>"};
inline constexpr ThinkingMarks kAnalysisMarks{"<|channel|>analysis<|message|>", "<|end|>"};

/// Ends the think block at the beginning of an output after `budget` tokens by drawing nothing but its closing tag. Everything else is
/// decided by `form`, which allows a think block there; without one any token may come.
class ThinkingBudget final : public wire::TokenRule {
 public:
  ThinkingBudget(const text::Tokenizer& tokenizer, const ThinkingMarks& marks, std::size_t budget, bool starts_open,
                 std::shared_ptr<const wire::TokenRule> form = nullptr);
  bool allow(std::span<const std::int32_t> output, wire::TokenRuleCursor& cursor, std::span<std::uint64_t> allowed_words) const override;
  bool needs_stop_tokens() const override { return form_ != nullptr && form_->needs_stop_tokens(); }

 private:
  std::vector<std::int32_t> open_, close_;
  std::size_t budget_;
  bool starts_open_;
  std::shared_ptr<const wire::TokenRule> form_;
};

}  // namespace prl::server
