#pragma once

#include <fmt/core.h>

#include <chrono>
#include <cstdint>
#include <string>

/// What engines are told in kv_transfer_params (docs/http-api.md) where prompts have engines of their own.
namespace prl::router {

/// To a prefill engine.
inline constexpr const char* kPrefillOnly = R"({"do_remote_decode":true})";
/// How an engine answers that leaves a prompt to another.
inline constexpr int kNeedsPrefill = 412;
/// To a decode engine: answer kNeedsPrefill if it would have to compute more tokens of the prompt than that.
inline std::string ask_for_prefill(std::int64_t max_uncached_tokens) {
  return fmt::format(R"({{"max_uncached_tokens":{}}})", max_uncached_tokens);
}
/// Prefill engines that are tried for one request.
inline constexpr int kMaxPrefills = 2;
/// For a prefill engine with room: where that takes longer, prompts come faster than they compute them, and decode engines help.
inline constexpr std::chrono::seconds kPrefillPatience{10};

}  // namespace prl::router
