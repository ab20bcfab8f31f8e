#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "net/http_client.hpp"
#include "router/router.hpp"

namespace prl::router {

namespace asio = boost::asio;

/// What an engine's /metrics page says, in vLLM's names; members that it lacks are 0.
struct EngineGauges {
  double num_running = 0;
  double num_waiting = 0;
  double kv_usage = 0;  ///< part of the key-value cache in use, 1 is all
  double num_preemptions = 0;
  double num_prefix_queries = 0;  ///< prompt tokens looked up
  double num_prefix_hits = 0;
  double num_generation_tokens = 0;
  double num_draft_tokens = 0, num_accepted_tokens = 0;  ///< of speculative decoding
  double max_num_seqs = 0;
  double num_cache_tokens = 0;  ///< of the whole key-value cache
  double max_model_len = 0;
};

/// Reads a page in the Prometheus text format; lines that are not understood are skipped.
EngineGauges parse_gauges(std::string_view page);

/// The page of the server at `url`; nullopt if it has none or does not answer in time.
asio::awaitable<std::optional<EngineGauges>> read_gauges(std::shared_ptr<net::HttpClient> client, std::string url,
                                                         std::chrono::milliseconds timeout);
/// What the engine has room for; not known where it does not say.
asio::awaitable<EngineLimits> read_limits(std::shared_ptr<net::HttpClient> client, std::string url, std::chrono::milliseconds timeout);

}  // namespace prl::router
