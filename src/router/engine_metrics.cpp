#include "router/engine_metrics.hpp"

#include <charconv>
#include <exception>
#include <utility>

#include "base/error.hpp"
#include "net/errors.hpp"

namespace prl::router {
namespace {

/// The number at the end of a line; 0 if there is none.
double value_of(std::string_view line) {
  const std::size_t space = line.rfind(' ');
  double value = 0;
  if (space == std::string_view::npos) return 0;
  std::from_chars(line.data() + space + 1, line.data() + line.size(), value);
  return value;
}

/// The number in the label `name="..."`; 0 if there is none.
double label_of(std::string_view line, std::string_view name) {
  const std::size_t at = line.find(name);
  if (at == std::string_view::npos || !line.substr(at + name.size()).starts_with("=\"")) return 0;
  double value = 0;
  std::from_chars(line.data() + at + name.size() + 2, line.data() + line.size(), value);
  return value;
}

}  // namespace

EngineGauges parse_gauges(std::string_view page) {
  EngineGauges gauges;
  const std::pair<std::string_view, double*> known[] = {{"vllm:num_requests_running", &gauges.num_running},
                                                        {"vllm:num_requests_waiting", &gauges.num_waiting},
                                                        {"vllm:kv_cache_usage_perc", &gauges.kv_usage},
                                                        {"vllm:num_preemptions_total", &gauges.num_preemptions},
                                                        {"vllm:prefix_cache_queries_total", &gauges.num_prefix_queries},
                                                        {"vllm:prefix_cache_hits_total", &gauges.num_prefix_hits},
                                                        {"vllm:spec_decode_num_draft_tokens_total", &gauges.num_draft_tokens},
                                                        {"vllm:spec_decode_num_accepted_tokens_total", &gauges.num_accepted_tokens},
                                                        {"vllm:generation_tokens_total", &gauges.num_generation_tokens},
                                                        {"prl:max_num_seqs", &gauges.max_num_seqs},
                                                        {"prl:max_model_len", &gauges.max_model_len}};
  while (!page.empty()) {
    const std::size_t end = page.find('\n');
    const std::string_view line = page.substr(0, end);
    page.remove_prefix(end == std::string_view::npos ? page.size() : end + 1);
    if (line.starts_with('#')) continue;
    const std::string_view name = line.substr(0, line.find_first_of("{ "));
    for (const auto& [key, target] : known)
      if (name == key) *target += value_of(line);  // one line per engine behind a server
    if (name == "vllm:cache_config_info") gauges.num_cache_tokens += label_of(line, "block_size") * label_of(line, "num_gpu_blocks");
  }
  return gauges;
}

asio::awaitable<std::optional<EngineGauges>> read_gauges(std::shared_ptr<net::HttpClient> client, std::string url,
                                                         std::chrono::milliseconds timeout) {
  std::exception_ptr failure;
  try {
    net::HttpCall call;
    call.url = url + "/metrics";
    call.timeout = timeout;
    call.max_retries = 0;
    auto calling = client->call(std::move(call));
    const net::HttpReply reply = co_await std::move(calling);
    if (!reply.is_ok()) co_return std::nullopt;
    co_return parse_gauges(reply.body);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  const Error error = net::to_error(failure);
  if (error.code() == ErrorCode::kCancelled) throw error;
  co_return std::nullopt;
}

asio::awaitable<EngineLimits> read_limits(std::shared_ptr<net::HttpClient> client, std::string url, std::chrono::milliseconds timeout) {
  auto reading = read_gauges(std::move(client), std::move(url), timeout);
  const std::optional<EngineGauges> gauges = co_await std::move(reading);
  if (!gauges) co_return EngineLimits{};
  co_return EngineLimits{.max_requests = static_cast<std::int64_t>(gauges->max_num_seqs),
                         .max_tokens = static_cast<std::int64_t>(gauges->num_cache_tokens)};
}

}  // namespace prl::router
