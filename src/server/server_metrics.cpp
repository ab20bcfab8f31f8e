#include "server/server_metrics.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace prl::server {
namespace {

double seconds(ServerMetrics::Duration duration) { return std::chrono::duration<double>(duration).count(); }

std::string escape_label(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out.push_back('\\');
    if (c == '\n')
      out += "\\n";
    else
      out.push_back(c);
  }
  return out;
}

void write_head(std::string& out, std::string_view name, std::string_view type, std::string_view help) {
  out += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
}

// The buckets of vLLM's metrics of the same names.
const std::vector<double> kFirstTokenBounds{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5,
                                            0.75,  1,     2.5,  5,    7.5,  10,   20,   40,  80,   160};
const std::vector<double> kTokenGapBounds{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
                                          0.4,   0.5,    0.75,  1,    2.5,   5,    10,    20,  40,   80};
const std::vector<double> kLatencyBounds{0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
const std::vector<double> kTokenBounds{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000};
const std::vector<double> kChoiceBounds{1, 2, 5, 10, 20};

/// Tokens per step as the engine counted them.
void write_step_tokens(std::string& out, const engine::EngineStats& stats, std::string_view labels) {
  constexpr std::string_view kName = "vllm:iteration_tokens_total";
  write_head(out, kName, "histogram", "Tokens of one engine step, prompts and output together.");
  std::int64_t total = 0;
  for (std::size_t i = 0; i < stats.num_steps_by_tokens.size(); ++i) {
    total += stats.num_steps_by_tokens[i];
    const std::string bound =
        i < engine::EngineStats::kStepTokenBounds.size() ? std::to_string(engine::EngineStats::kStepTokenBounds[i]) : "+Inf";
    out += fmt::format("{}_bucket{{{},le=\"{}\"}} {}\n", kName, labels, bound, total);
  }
  out += fmt::format("{}_sum{{{}}} {}\n{}_count{{{}}} {}\n", kName, labels, stats.num_step_tokens, kName, labels, total);
}

/// What speculative decoding does.
void write_drafts(std::string& out, const engine::EngineStats& stats, std::string_view labels) {
  const auto one = [&](std::string_view name, std::string_view help, std::int64_t value) {
    write_head(out, name, "counter", help);
    out += fmt::format("{}{{{}}} {}\n", name, labels, value);
  };
  one("vllm:spec_decode_num_drafts_total", "Times that a sequence had draft tokens in a step.", stats.num_drafts);
  one("vllm:spec_decode_num_draft_tokens_total", "Draft tokens of these.", stats.num_draft_tokens);
  one("vllm:spec_decode_num_accepted_tokens_total", "Draft tokens that were drawn.", stats.num_accepted_tokens);
}

/// What kv_cache_offload does.
void write_kv_transfer(std::string& out, const transfer::KvGateStats& stats, std::string_view labels) {
  const auto one = [&](std::string_view name, std::string_view help, auto value) {
    write_head(out, name, "counter", help);
    out += fmt::format("{}{{{}}} {}\n", name, labels, value);
  };
  one("prl:kv_transfers_total", "Prompts of which blocks came from another engine.", stats.num_transfers);
  one("prl:kv_transfer_fallbacks_total", "Prompts of which blocks should have come and did not, all or some: they were computed here.",
      stats.num_fallbacks);
  one("prl:kv_transfer_blocks_total", "KV blocks that came from other engines.", stats.num_blocks);
  one("prl:kv_transfer_bytes_total", "Bytes of these blocks.", stats.num_bytes);
  one("prl:kv_transfer_seconds_total", "Time that requests waited for blocks of other engines.", stats.seconds);
  one("prl:kv_given_blocks_total", "KV blocks that were given to other engines.", stats.num_blocks_given);
  one("prl:kv_given_bytes_total", "Bytes of these blocks.", stats.num_bytes_given);
}

void write_host_blocks(std::string& out, const engine::EngineStats& stats, std::string_view labels) {
  const auto one = [&](std::string_view name, std::string_view type, std::string_view help, std::int64_t value) {
    write_head(out, name, type, help);
    out += fmt::format("{}{{{}}} {}\n", name, labels, value);
  };
  one("vllm:external_prefix_cache_hits_total", "counter", "Of vllm:prefix_cache_hits_total the tokens that were not on the device.",
      stats.num_host_hit_tokens);
  one("prl:kv_host_blocks", "gauge", "KV blocks that host memory has room for.", stats.num_host_blocks_total);
  one("prl:kv_host_blocks_used", "gauge", "KV blocks in host memory that can be found.", stats.num_host_blocks_used);
  one("prl:kv_blocks_saved_total", "counter", "KV blocks copied to host memory.", stats.num_blocks_saved);
  one("prl:kv_blocks_restored_total", "counter", "KV blocks copied back to the device.", stats.num_blocks_restored);
  if (stats.num_disk_blocks_total == 0) return;
  one("prl:kv_disk_hits_total", "counter", "Of vllm:external_prefix_cache_hits_total the tokens that were in files alone.",
      stats.num_disk_hit_tokens);
  one("prl:kv_disk_blocks", "gauge", "KV blocks that files have room for.", stats.num_disk_blocks_total);
  one("prl:kv_disk_blocks_used", "gauge", "KV blocks in files that can be found.", stats.num_disk_blocks_used);
  one("prl:kv_disk_off", "gauge", "1 once the disk has refused a write: files are used no more.", stats.disk.is_off ? 1 : 0);
  one("prl:kv_disk_writes_queued", "gauge", "KV blocks that wait to be written.", stats.disk.num_writes_queued);
  one("prl:kv_disk_written_total", "counter", "KV blocks written to files.", stats.disk.num_written);
  one("prl:kv_disk_read_total", "counter", "KV blocks read back.", stats.disk.num_read);
  one("prl:kv_disk_not_queued_total", "counter", "KV blocks that were dropped since too many waited to be written.",
      stats.disk.num_not_queued);
  one("prl:kv_disk_late_total", "counter", "KV blocks not read in time.", stats.disk.num_late);
  one("prl:kv_disk_damaged_total", "counter", "KV blocks that were not what had been written.", stats.disk.num_damaged);
}

}  // namespace

void Histogram::observe(double value, std::uint64_t count) {
  const auto place = std::lower_bound(bounds_.begin(), bounds_.end(), value);
  counts_[static_cast<std::size_t>(place - bounds_.begin())] += count;
  sum_ += value * static_cast<double>(count);
  num_values_ += count;
}

void Histogram::write(std::string& out, std::string_view name, std::string_view labels) const {
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < bounds_.size(); ++i) {
    total += counts_[i];
    out += fmt::format("{}_bucket{{{},le=\"{}\"}} {}\n", name, labels, bounds_[i], total);
  }
  out += fmt::format("{}_bucket{{{},le=\"+Inf\"}} {}\n", name, labels, num_values_);
  out += fmt::format("{}_sum{{{}}} {}\n{}_count{{{}}} {}\n", name, labels, sum_, name, labels, num_values_);
}

ServerMetrics::ServerMetrics()
    : first_token_(kFirstTokenBounds),
      token_gap_(kTokenGapBounds),
      latency_(kLatencyBounds),
      prompt_tokens_(kTokenBounds),
      output_tokens_(kTokenBounds),
      queue_(kLatencyBounds),
      prefill_(kLatencyBounds),
      decode_(kLatencyBounds),
      inference_(kLatencyBounds),
      mean_gap_(kTokenGapBounds),
      params_n_(kChoiceBounds),
      params_max_tokens_(kTokenBounds),
      longest_output_(kTokenBounds) {}

void ServerMetrics::observe_first_token(Duration since_arrival) {
  std::lock_guard lock(mutex_);
  first_token_.observe(seconds(since_arrival));
}

void ServerMetrics::observe_token_gaps(Duration gap, std::int64_t num_gaps) {
  std::lock_guard lock(mutex_);
  token_gap_.observe(seconds(gap), static_cast<std::uint64_t>(num_gaps));
}

void ServerMetrics::observe_finished(const FinishedChoice& choice) {
  std::lock_guard lock(mutex_);
  latency_.observe(seconds(choice.since_arrival));
  prompt_tokens_.observe(static_cast<double>(choice.num_prompt_tokens));
  output_tokens_.observe(static_cast<double>(choice.num_output_tokens));
  params_max_tokens_.observe(static_cast<double>(choice.max_tokens));
  if (choice.queue) queue_.observe(seconds(*choice.queue));
  if (choice.prefill) prefill_.observe(seconds(*choice.prefill));
  if (choice.decode) decode_.observe(seconds(*choice.decode));
  if (choice.prefill && choice.decode) inference_.observe(seconds(*choice.prefill + *choice.decode));
  if (choice.decode && choice.num_output_tokens > 1)
    mean_gap_.observe(seconds(*choice.decode) / static_cast<double>(choice.num_output_tokens - 1));
}

void ServerMetrics::observe_prompt(std::int64_t n, std::int64_t num_output_tokens) {
  std::lock_guard lock(mutex_);
  params_n_.observe(static_cast<double>(n));
  longest_output_.observe(static_cast<double>(num_output_tokens));
}

void ServerMetrics::count_http(int status) {
  std::lock_guard lock(mutex_);
  ++http_by_status_[status];
}

std::string ServerMetrics::render(const engine::EngineStats& stats, std::string_view model, std::size_t num_connections,
                                  const std::optional<transfer::KvGateStats>& kv) const {
  const std::string labels = fmt::format("engine=\"0\",model_name=\"{}\"", escape_label(model));
  std::string out;
  const auto one = [&](std::string_view name, std::string_view type, std::string_view help, double value) {
    write_head(out, name, type, help);
    out += fmt::format("{}{{{}}} {}\n", name, labels, value);
  };
  const auto number = [](std::int64_t value) { return static_cast<double>(value); };
  const double usage = stats.num_blocks_total > 0 ? number(stats.num_blocks_used) / number(stats.num_blocks_total) : 0;
  one("vllm:num_requests_running", "gauge", "Requests in the running batch.", number(stats.num_running));
  one("vllm:num_requests_waiting", "gauge", "Requests that wait to run.", number(stats.num_waiting));
  one("vllm:kv_cache_usage_perc", "gauge", "Part of the KV blocks in use, 1 is all.", usage);
  one("vllm:gpu_cache_usage_perc", "gauge", "The same under its older name.", usage);
  one("vllm:num_preemptions_total", "counter", "Requests that gave their KV blocks up.", number(stats.num_preemptions));
  one("vllm:prompt_tokens_total", "counter", "Prompt tokens processed.", number(stats.num_prompt_tokens));
  one("vllm:generation_tokens_total", "counter", "Tokens generated.", number(stats.num_generation_tokens));
  one("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.",
      number(stats.num_prefix_queries_tokens));
  one("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", number(stats.num_prefix_hit_tokens));
  if (stats.max_draft_tokens > 0) write_drafts(out, stats, labels);
  if (stats.num_host_blocks_total > 0) write_host_blocks(out, stats, labels);
  if (kv) write_kv_transfer(out, *kv, labels);
  write_head(out, "vllm:request_success_total", "counter", "Finished requests by reason.");
  for (const auto& [reason, count] :
       {std::pair{"stop", stats.num_finished_stop}, {"length", stats.num_finished_length}, {"abort", stats.num_finished_abort}})
    out += fmt::format("vllm:request_success_total{{{},finished_reason=\"{}\"}} {}\n", labels, reason, count);
  write_head(out, "vllm:cache_config_info", "gauge", "The KV cache, in labels.");
  out += fmt::format("vllm:cache_config_info{{{},block_size=\"{}\",num_gpu_blocks=\"{}\"}} 1\n", labels, stats.block_size,
                     stats.num_blocks_total);
  write_step_tokens(out, stats, labels);
  one("prl:policy_version", "gauge", "Optimizer steps behind the weights in use.", number(stats.version.value));
  one("prl:max_num_seqs", "gauge", "Most requests in the running batch.", number(stats.max_num_seqs));
  one("prl:max_model_len", "gauge", "Longest prompt and completion.", number(stats.max_model_len));
  one("prl:engine_paused", "gauge", "1 while the engine is paused.", stats.is_paused ? 1 : 0);
  one("prl:http_connections", "gauge", "Open client connections.", static_cast<double>(num_connections));

  std::lock_guard lock(mutex_);
  const auto histogram = [&](std::string_view name, std::string_view help, const Histogram& values) {
    write_head(out, name, "histogram", help);
    values.write(out, name, labels);
  };
  histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", first_token_);
  histogram("vllm:inter_token_latency_seconds", "Between tokens of one request.", token_gap_);
  histogram("vllm:time_per_output_token_seconds", "The same under its older name.", token_gap_);
  histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", latency_);
  histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", queue_);
  histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.", prefill_);
  histogram("vllm:request_decode_time_seconds", "From the first token to the last.", decode_);
  histogram("vllm:request_inference_time_seconds", "From the first step to the last token.", inference_);
  histogram("vllm:request_time_per_output_token_seconds", "Mean time between the tokens of one request.", mean_gap_);
  histogram("vllm:request_params_n", "Choices asked for per prompt.", params_n_);
  histogram("vllm:request_params_max_tokens", "Most tokens a choice may have.", params_max_tokens_);
  histogram("vllm:request_max_num_generation_tokens", "Tokens of the longest choice of a prompt.", longest_output_);
  histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", prompt_tokens_);
  histogram("vllm:request_generation_tokens", "Generated tokens per request.", output_tokens_);
  write_head(out, "prl:http_replies_total", "counter", "HTTP replies by status.");
  for (const auto& [status, count] : http_by_status_) out += fmt::format("prl:http_replies_total{{status=\"{}\"}} {}\n", status, count);
  return out;
}

}  // namespace prl::server
