#include "trainer/token_export.hpp"

#include <fmt/core.h>
#include <boost/json/serialize.hpp>
#include <boost/json/string_view.hpp>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <iterator>

#include "base/error.hpp"
#include "base/files.hpp"

namespace prl::trainer {
namespace {

constexpr int kSchemaVersion = 1;

/// ,"name":[...] of n values; NaN for what there is none of.
template <typename ValueAt>
void put_list(std::string& out, const char* name, std::size_t n, ValueAt value_at) {
  fmt::format_to(std::back_inserter(out), ",\"{}\":[", name);
  for (std::size_t i = 0; i < n; ++i) {
    if (i > 0) out += ',';
    const auto value = value_at(i);
    if (std::isfinite(static_cast<double>(value)))
      fmt::format_to(std::back_inserter(out), "{}", value);
    else
      out += "null";
  }
  out += ']';
}

}  // namespace

TokenExporter::TokenExporter(std::filesystem::path folder, std::int64_t step, int rank)
    : folder_(std::move(folder) / fmt::format("step_{}", step)),
      path_(folder_ / fmt::format("rank_{}.jsonl", rank)),
      step_(step),
      rank_(rank) {
  std::error_code ec;
  std::filesystem::create_directories(folder_, ec);
  std::filesystem::remove(folder_ / "STABLE", ec);
  file_.reset(std::fopen(path_.c_str(), "we"));
  if (!file_) fail(ErrorCode::kIo, "enable_token_export: {} cannot be opened: {}", path_.string(), std::strerror(errno));
}

void TokenExporter::add(const SequenceValues& v) {
  const TokenStreams& s = v.streams;
  const std::size_t n = s.size();
  const auto is_trained = [&](std::size_t i) { return i > 0 && (s.mask[i] != 0 || s.in_ce(i) || s.in_ref_kl(i)); };
  bool has_trained = false;
  for (std::size_t i = 1; i < n && !has_trained; ++i) has_trained = is_trained(i);
  if (!has_trained) return;
  const auto found = [&](auto value_at) {
    return [&, value_at](std::size_t i) { return is_trained(i) ? static_cast<double>(value_at(i)) : std::nan(""); };
  };
  const auto at = [&](const auto& values) { return [&](std::size_t i) { return values[v.first + i]; }; };
  const auto or_else = [](std::span<const float> values, float otherwise) {
    return [values, otherwise](std::size_t i) { return values.empty() ? otherwise : values[i]; };
  };
  std::string out = fmt::format(
      "{{\"schema_version\":{},\"step\":{},\"rank\":{},\"micro_step\":{},\"micro_sequence_idx\":{},\"export_sequence_idx\":{},\"env_name\":"
      "{}",
      kSchemaVersion, step_, rank_, micro_step_, v.sequence, num_sequences_++,
      boost::json::serialize(boost::json::string_view(v.row.env_names[v.sequence])));
  put_list(out, "token_ids", n, at(v.row.input_ids));
  put_list(out, "position_ids", n, at(v.row.position_ids));
  put_list(out, "loss_mask", n, [&](std::size_t i) { return static_cast<int>(s.mask[i]); });
  put_list(out, "advantages", n, [&](std::size_t i) { return s.advantages[i]; });
  put_list(out, "inference_logprobs", n, [&](std::size_t i) { return s.inference_logp[i]; });
  put_list(out, "trainer_logprobs", n, found([&](std::size_t i) { return s.logp[i]; }));
  put_list(out, "entropy", n, found([&](std::size_t i) { return v.entropy[i]; }));
  put_list(out, "mismatch_kl", n, found([&](std::size_t i) { return mismatch_kl(s.log_ratio(i)); }));
  put_list(out, "log_importance_ratio", n, found([&](std::size_t i) { return s.log_ratio(i); }));
  put_list(out, "importance_ratio", n, found([&](std::size_t i) { return std::exp(s.log_ratio(i)); }));
  put_list(out, "prob_delta", n, found([&](std::size_t i) {
             return std::exp(static_cast<double>(s.logp[i])) - std::exp(static_cast<double>(s.inference_logp[i]));
           }));
  put_list(out, "is_masked", n, [&](std::size_t i) { return static_cast<int>(v.marks.is_masked[i]); });
  put_list(out, "is_masked_high", n, [&](std::size_t i) { return static_cast<int>(v.marks.is_high[i]); });
  put_list(out, "is_masked_low", n, [&](std::size_t i) { return static_cast<int>(v.marks.is_low[i]); });
  put_list(out, "rl_weights", n, [&](std::size_t i) { return s.mask[i] != 0 ? static_cast<float>(s.rl_weight(i)) : 0.0f; });
  put_list(out, "ce_weights", n, or_else(s.ce_weights, 0.0f));
  put_list(out, "ref_kl_weights", n, or_else(s.ref_kl_weights, 0.0f));
  out += "}\n";
  if (std::fwrite(out.data(), 1, out.size(), file_.get()) != out.size())
    fail(ErrorCode::kIo, "enable_token_export: {} cannot be written: {}", path_.string(), std::strerror(errno));
}

void TokenExporter::finish() {
  if (std::fflush(file_.get()) != 0)
    fail(ErrorCode::kIo, "enable_token_export: {} cannot be written: {}", path_.string(), std::strerror(errno));
  file_.reset();
}

void TokenExporter::mark_stable() const { write_file_atomic(folder_ / "STABLE", ""); }

}  // namespace prl::trainer
