#include "launch/engine_client.hpp"

#include <utility>

#include "net/async_result.hpp"
#include "text/detokenizer.hpp"

namespace prl::launch {
namespace {

/// Gathers the events of one request; lives until its last event. Engine thread only, but for `result`.
struct Collector {
  Collector(engine::Engine& e, std::shared_ptr<const text::Tokenizer> t, const wire::SamplingParams& sampling)
      : engine(&e), tokenizer(std::move(t)), detokenizer(*tokenizer, sampling.skip_special_tokens), stops(sampling.stop) {
    has_stops = !sampling.stop.empty();
  }

  void on_event(const engine::StepEvent& event) {
    const wire::GenerateOutput& delta = event.delta;
    if (is_stopping && delta.finish_reason == wire::FinishReason::kNone) return;  // drawn after the stop string had matched
    output.token_ids.insert(output.token_ids.end(), delta.token_ids.begin(), delta.token_ids.end());
    output.logprobs.insert(output.logprobs.end(), delta.logprobs.begin(), delta.logprobs.end());
    output.top_logprobs.insert(output.top_logprobs.end(), delta.top_logprobs.begin(), delta.top_logprobs.end());
    output.versions.insert(output.versions.end(), delta.versions.begin(), delta.versions.end());
    if (has_stops && !is_stopping) watch_stop_strings(event);
    if (delta.finish_reason == wire::FinishReason::kNone) return;
    output.finish_reason = delta.finish_reason;
    output.stop_token_id = delta.stop_token_id;
    output.stop_string = delta.stop_string;
    output.prompt_logprobs = delta.prompt_logprobs;
    output.prompt_top_logprobs = delta.prompt_top_logprobs;
    output.num_prompt_tokens = delta.num_prompt_tokens;
    output.num_cached_tokens = delta.num_cached_tokens;
    output.request_id = delta.request_id;
    output.version_start = delta.version_start;
    output.version_end = delta.version_end;
    if (delta.finish_reason == wire::FinishReason::kError)
      result.set_error(Error(ErrorCode::kInternal, delta.error));
    else if (delta.finish_reason == wire::FinishReason::kAbort)
      result.set_error(Error(ErrorCode::kCancelled, "the engine ended the request before it was finished"));
    else
      result.set_value(std::move(output));
  }

  void watch_stop_strings(const engine::StepEvent& event) {
    for (const std::int32_t id : event.delta.token_ids) {
      ++num_seen;
      const auto step = stops.push(detokenizer.push(id));
      if (!step.stop) continue;
      is_stopping = true;
      const auto kept = static_cast<std::size_t>(num_seen);
      output.token_ids.resize(kept);
      output.logprobs.resize(kept);
      output.versions.resize(kept);
      if (!output.top_logprobs.empty()) output.top_logprobs.resize(kept);
      engine->stop(event.id, *step.stop, num_seen);
      return;
    }
  }

  engine::Engine* engine;
  std::shared_ptr<const text::Tokenizer> tokenizer;
  text::IncrementalDetokenizer detokenizer;
  text::StopChecker stops;
  bool has_stops = false;
  bool is_stopping = false;
  std::int64_t num_seen = 0;
  wire::GenerateOutput output;
  net::AsyncResult<wire::GenerateOutput> result;
};

class EngineClient final : public env::GenerateClient {
 public:
  EngineClient(engine::Engine& engine, std::shared_ptr<const text::Tokenizer> tokenizer)
      : engine_(&engine), tokenizer_(std::move(tokenizer)) {}

  env::asio::awaitable<wire::GenerateOutput> generate(wire::GenerateRequest request, net::TimePoint deadline) override {
    auto collector = std::make_shared<Collector>(*engine_, tokenizer_, request.sampling);
    engine::EventSink sink = [collector](const engine::StepEvent& event) { collector->on_event(event); };
    const RequestId id = engine_->submit(std::move(request), std::move(sink));
    try {
      std::string what = "the in-process engine to finish a request";
      auto pending = collector->result.wait(deadline, std::move(what));
      co_return co_await std::move(pending);
    } catch (const Error&) {
      engine_->cancel(id);
      throw;
    }
  }

  env::asio::awaitable<void> check_health(net::TimePoint) override {
    if (!engine_->is_alive(std::chrono::seconds(60))) fail(ErrorCode::kUnavailable, "the in-process engine has not answered for 60 s");
    co_return;
  }

  std::string describe() const override { return "in-process engine"; }

 private:
  engine::Engine* engine_;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
};

}  // namespace

std::unique_ptr<env::GenerateClient> make_engine_client(engine::Engine& engine, std::shared_ptr<const text::Tokenizer> tokenizer) {
  return std::make_unique<EngineClient>(engine, std::move(tokenizer));
}

}  // namespace prl::launch
