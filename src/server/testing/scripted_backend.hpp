#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "server/backend.hpp"

namespace prl::server::testing {

/// A Backend that says what a script says, one token per request and step, with the engine's rules for limits, stop tokens,
/// queueing, cancellation, pausing and versions. For tests of the server, without a model.
class ScriptedBackend : public Backend {
 public:
  /// The tokens of one reply, without the end token, which follows by itself.
  using Script = std::function<std::vector<std::int32_t>(const wire::GenerateRequest&)>;
  struct Options {
    std::int64_t max_model_len = 256;
    std::int64_t vocab_size = 0;
    std::int32_t end_id = 0;
    std::size_t max_running = 32;
    std::size_t max_queued = 1000;
    std::chrono::microseconds step_time{0};  ///< pause between steps, so that endless scripts do not spin
  };

  ScriptedBackend(Options options, Script script) : options_(options), script_(std::move(script)), thread_([this] { run(); }) {}
  ~ScriptedBackend() override {
    {
      std::lock_guard lock(mutex_);
      is_stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  std::int64_t max_model_len() const override { return options_.max_model_len; }
  std::int64_t vocab_size() const override { return options_.vocab_size; }

  std::int64_t max_open_requests() const override { return static_cast<std::int64_t>(options_.max_running + options_.max_queued); }
  RequestId submit(wire::GenerateRequest request, engine::EventSink sink, const std::string&) override {
    std::lock_guard lock(mutex_);
    if (waiting_.size() >= options_.max_queued)
      fail(ErrorCode::kOverloaded, "the engine's queue of {} requests is full", options_.max_queued);
    const RequestId id{++num_submitted_};
    Sequence sequence{id, std::move(request), std::move(sink), {}, 0, {}};
    sequence.reply = script_(sequence.request);
    last_request_ = sequence.request;
    waiting_.push_back(std::move(sequence));
    changed_.notify_all();
    return id;
  }
  void cancel(RequestId id) override {
    std::lock_guard lock(mutex_);
    ++num_cancels_;
    end_now_[id.value] = {wire::FinishReason::kAbort, ""};
    changed_.notify_all();
  }
  void stop(RequestId id, std::string stop_string) override {
    std::lock_guard lock(mutex_);
    end_now_[id.value] = {wire::FinishReason::kStop, std::move(stop_string)};
    changed_.notify_all();
  }
  void set_stats(const engine::EngineStats& stats) {
    std::lock_guard lock(mutex_);
    stats_ = stats;
  }
  engine::EngineStats stats() const override {
    std::lock_guard lock(mutex_);
    engine::EngineStats stats = stats_;
    stats.num_running = static_cast<std::int64_t>(running_.size());
    stats.num_waiting = static_cast<std::int64_t>(waiting_.size());
    stats.num_blocks_total = 100;
    stats.block_size = 16;
    stats.num_blocks_used = stats.num_running;
    stats.is_paused = is_paused_;
    stats.version = version_;
    return stats;
  }
  bool is_alive(std::chrono::milliseconds) const override { return is_alive_; }
  engine::WeightProof update_weights(WeightSource source, std::optional<PolicyVersion> version, bool may_go_back) override {
    if (source.store.empty() && !std::filesystem::exists(source.folder))
      fail(ErrorCode::kNotFound, "{}: no such folder", source.folder.string());
    std::lock_guard lock(mutex_);
    const PolicyVersion wanted = version.value_or(PolicyVersion{version_.value + 1});
    if (wanted < version_ && !may_go_back) fail(ErrorCode::kAlreadyExists, "version {} is older than {}", wanted.value, version_.value);
    version_ = wanted;
    last_store = source.store;
    return {version_, 0xabcdef, {-1.5f, -2.25f}};
  }
  engine::WeightProof reload_weights() override {
    std::lock_guard lock(mutex_);
    version_ = PolicyVersion{0};
    return {version_, 0x123456, {-1.0f}};
  }
  engine::WeightProof proof() override {
    std::lock_guard lock(mutex_);
    return {version_, 0x123456, {-1.0f}};
  }
  void pause() override {
    std::lock_guard lock(mutex_);
    is_paused_ = true;
  }
  void resume() override {
    std::lock_guard lock(mutex_);
    is_paused_ = false;
    changed_.notify_all();
  }
  void reset_prefix_cache() override { ++num_resets; }

  void set_alive(bool is_alive) { is_alive_ = is_alive; }
  wire::GenerateRequest last_request() const {
    std::lock_guard lock(mutex_);
    return last_request_;
  }
  std::int64_t num_cancels() const {
    std::lock_guard lock(mutex_);
    return num_cancels_;
  }
  std::atomic<int> num_resets{0};
  std::string last_store;  ///< of the last update; of the admin thread

 private:
  struct Sequence {
    RequestId id;
    wire::GenerateRequest request;
    engine::EventSink sink;
    std::vector<std::int32_t> reply;
    std::size_t num_sent = 0;
    std::chrono::steady_clock::time_point first_step{};
  };

  void run() {
    std::unique_lock lock(mutex_);
    while (!is_stopping_) {
      changed_.wait_for(lock, std::chrono::seconds(1),
                        [&] { return is_stopping_ || !end_now_.empty() || (!is_paused_ && !(waiting_.empty() && running_.empty())); });
      end_marked();
      if (is_stopping_ || is_paused_) continue;
      while (!waiting_.empty() && running_.size() < options_.max_running) {
        stats_.num_prompt_tokens += static_cast<std::int64_t>(waiting_.front().request.prompt_ids.size());
        running_.push_back(std::move(waiting_.front()));
        running_.back().first_step = std::chrono::steady_clock::now();
        waiting_.pop_front();
      }
      for (std::size_t i = 0; i < running_.size();)
        if (step(running_[i]))
          running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
        else
          ++i;
      if (options_.step_time.count() > 0) changed_.wait_for(lock, options_.step_time, [&] { return is_stopping_; });
    }
  }

  void end_marked() {
    const auto end_in = [&](auto& sequences) {
      for (auto it = sequences.begin(); it != sequences.end();) {
        const auto mark = end_now_.find(it->id.value);
        if (mark == end_now_.end()) {
          ++it;
          continue;
        }
        engine::StepEvent event{it->id, {}};
        event.delta.finish_reason = mark->second.first;
        event.delta.stop_string = mark->second.second;
        finish(*it, event);
        it = sequences.erase(it);
      }
    };
    end_in(waiting_);
    end_in(running_);
    end_now_.clear();
  }

  /// One token of one sequence; true when it has ended.
  bool step(Sequence& sequence) {
    const wire::SamplingParams& sampling = sequence.request.sampling;
    std::int32_t id = sequence.num_sent < sequence.reply.size() ? sequence.reply[sequence.num_sent] : options_.end_id;
    const auto& stops = sampling.stop_token_ids;
    bool is_stop = std::find(stops.begin(), stops.end(), id) != stops.end();
    if (is_stop && static_cast<std::int32_t>(sequence.num_sent) < sampling.min_tokens) {
      is_stop = false;
      id = sequence.reply.empty() ? 1 : sequence.reply.front();
    }
    engine::StepEvent event{sequence.id, {}};
    event.delta.token_ids = {id};
    event.delta.logprobs = {logprob_of(id)};
    event.delta.versions = {version_.value};
    if (!sampling.logprob_token_ids.empty()) {
      auto& top = event.delta.top_logprobs.emplace_back();
      for (const std::int32_t named : sampling.logprob_token_ids)
        top.push_back({named, named == kImpossible ? -std::numeric_limits<float>::infinity() : logprob_of(named)});
    } else if (const std::int32_t num_top = sampling.logprobs.value_or(0); num_top > 0) {
      auto& top = event.delta.top_logprobs.emplace_back();
      for (std::int32_t k = 0; k < num_top; ++k) {
        const auto other = static_cast<std::int32_t>((id + k) % options_.vocab_size);
        top.push_back({other, logprob_of(id) - static_cast<float>(k)});
      }
    }
    ++sequence.num_sent;
    ++stats_.num_generation_tokens;
    if (is_stop) {
      event.delta.finish_reason = wire::FinishReason::kStop;
      event.delta.stop_token_id = id;
    } else if (static_cast<std::int32_t>(sequence.num_sent) >= sampling.max_tokens.value_or(1 << 30)) {
      event.delta.finish_reason = wire::FinishReason::kLength;
    }
    if (event.delta.finish_reason == wire::FinishReason::kNone) {
      sequence.sink(event);
      return false;
    }
    finish(sequence, event);
    return true;
  }

  void finish(Sequence& sequence, engine::StepEvent& event) {
    event.delta.first_step = sequence.first_step;
    event.delta.num_prompt_tokens = static_cast<std::int64_t>(sequence.request.prompt_ids.size());
    event.delta.num_cached_tokens = sequence.request.session_id.empty() ? 0 : 4;
    event.delta.version_start = event.delta.version_end = version_;
    if (sequence.request.sampling.prompt_logprobs) {
      for (std::size_t i = 0; i < sequence.request.prompt_ids.size(); ++i) {
        event.delta.prompt_logprobs.push_back(i == 0 ? 0.0f : logprob_of(sequence.request.prompt_ids[i]));
        event.delta.prompt_top_logprobs.emplace_back();
        if (sequence.request.sampling.prompt_ranks)
          event.delta.prompt_ranks.push_back(i == 0 ? 0 : rank_of(sequence.request.prompt_ids[i]));
      }
    }
    const auto reason = event.delta.finish_reason;
    ++(reason == wire::FinishReason::kStop     ? stats_.num_finished_stop
       : reason == wire::FinishReason::kLength ? stats_.num_finished_length
                                               : stats_.num_finished_abort);
    sequence.sink(event);
  }

 public:
  /// The log-probability the script gives a token: not a round number, so that lost digits show.
  static constexpr std::int32_t kImpossible = 7;  ///< a token that the script's distribution never gives
  static std::int32_t rank_of(std::int32_t id) { return id + 1; }
  static float logprob_of(std::int32_t id) { return -0.1f - static_cast<float>(id) / 997.0f; }

 private:
  const Options options_;
  const Script script_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Sequence> waiting_;
  std::vector<Sequence> running_;
  std::map<std::uint64_t, std::pair<wire::FinishReason, std::string>> end_now_;
  engine::EngineStats stats_;
  wire::GenerateRequest last_request_;
  PolicyVersion version_;
  std::uint64_t num_submitted_ = 0;
  std::int64_t num_cancels_ = 0;
  bool is_paused_ = false;
  bool is_stopping_ = false;
  std::atomic<bool> is_alive_{true};
  std::thread thread_;
};

}  // namespace prl::server::testing
