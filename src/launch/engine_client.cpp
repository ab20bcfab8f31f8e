#include "launch/engine_client.hpp"

#include <utility>

#include "net/async_result.hpp"
#include "text/stop_tracker.hpp"

namespace prl::launch {
namespace {

/// Gathers the events of one request; lives until its last event. Engine thread only, but for `result`.
struct Collector {
  Collector(engine::Engine& e, std::shared_ptr<const text::Tokenizer> t, const wire::SamplingParams& sampling)
      : engine(&e),
        tokenizer(std::move(t)),
        stops(*tokenizer, {.skip_special_tokens = sampling.skip_special_tokens,
                           .stop = sampling.stop,
                           .include_stop = sampling.include_stop_str_in_output,
                           .min_tokens = sampling.min_tokens}) {}

  void on_event(const engine::StepEvent& event) {
    const wire::GenerateOutput& delta = event.delta;
    if (!stops.has_stopped()) append(event);  // else drawn after the stop string
    if (delta.finish_reason == wire::FinishReason::kNone) return;
    output.finish_reason = delta.finish_reason;
    output.prompt_logprobs = delta.prompt_logprobs;
    output.prompt_top_logprobs = delta.prompt_top_logprobs;
    output.routed_experts = delta.routed_experts;
    output.num_prompt_tokens = delta.num_prompt_tokens;
    output.num_cached_tokens = delta.num_cached_tokens;
    output.request_id = delta.request_id;
    output.version_start = delta.version_start;
    output.version_end = delta.version_end;
    if (stops.has_stopped()) {
      output.finish_reason = wire::FinishReason::kStop;
      output.stop_string = stops.stop_string();
    } else {
      output.stop_token_id = delta.stop_token_id;
    }
    if (output.finish_reason == wire::FinishReason::kError)
      result.set_error(Error(ErrorCode::kInternal, delta.error));
    else if (output.finish_reason == wire::FinishReason::kAbort)
      result.set_error(Error(ErrorCode::kCancelled, "the engine ended the request before it was finished"));
    else
      result.set_value(std::move(output));
  }

  void append(const engine::StepEvent& event) {
    const wire::GenerateOutput& delta = event.delta;
    const bool is_over = delta.finish_reason != wire::FinishReason::kNone;
    for (std::size_t i = 0; i < delta.token_ids.size() && !stops.has_stopped(); ++i) {
      const std::int32_t id = delta.token_ids[i];
      output.token_ids.push_back(id);
      output.logprobs.push_back(delta.logprobs[i]);
      output.versions.push_back(delta.versions[i]);
      if (!delta.top_logprobs.empty()) output.top_logprobs.push_back(delta.top_logprobs[i]);
      // The token that ends the reply is no text.
      const bool is_end = is_over && i + 1 == delta.token_ids.size() && delta.stop_token_id == id;
      if (stops.has_stop_strings() && !is_end) stops.push(id);
    }
    if (is_over && stops.has_stop_strings() && !stops.has_stopped()) stops.finish();
    if (stops.has_stopped() && !is_over) engine->stop(event.id, stops.stop_string());
  }

  engine::Engine* engine;
  std::shared_ptr<const text::Tokenizer> tokenizer;
  text::StopTracker stops;
  wire::GenerateOutput output;
  net::AsyncResult<wire::GenerateOutput> result;
};

class EngineClient final : public env::GenerateClient {
 public:
  EngineClient(engine::Engine& engine, std::shared_ptr<const text::Tokenizer> tokenizer)
      : engine_(&engine), tokenizer_(std::move(tokenizer)) {}

  env::asio::awaitable<wire::GenerateOutput> generate(wire::GenerateRequest request, net::TimePoint deadline) override {
    auto collector = std::make_shared<Collector>(*engine_, tokenizer_, request.sampling);
    if (engine_->options().logs_routes && !request.sampling.routed_experts_start) request.sampling.routed_experts_start = 0;
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
