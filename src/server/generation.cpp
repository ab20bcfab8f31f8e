#include "server/generation.hpp"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <utility>

#include "wire/slow_token_rule.hpp"

namespace prl::server {
namespace {

/// Clients take -9999 for "no log-probability"; a real one so small is told as this.
constexpr float kMinLogprob = -9998.0f;

float clean_logprob(float value) { return std::isfinite(value) ? std::max(value, kMinLogprob) : kMinLogprob; }

/// Appends what a step added; the last one also has the rest of the fields.
void append_delta(wire::GenerateOutput& to, const wire::GenerateOutput& from) {
  const auto append = [](auto& target, const auto& source) { target.insert(target.end(), source.begin(), source.end()); };
  if (from.finish_reason != wire::FinishReason::kNone) {
    wire::GenerateOutput last = from;
    last.token_ids = std::move(to.token_ids);
    last.logprobs = std::move(to.logprobs);
    last.top_logprobs = std::move(to.top_logprobs);
    last.versions = std::move(to.versions);
    to = std::move(last);
  }
  append(to.token_ids, from.token_ids);
  append(to.logprobs, from.logprobs);
  append(to.top_logprobs, from.top_logprobs);
  append(to.versions, from.versions);
}

/// Each token is at most one event, and the last one may come alone.
std::size_t event_capacity(const ServerContext& context, const PreparedRequest& request, std::size_t num_choices) {
  return num_choices *
         (static_cast<std::size_t>(request.sampling.max_tokens.value_or(static_cast<std::int32_t>(context.backend->max_model_len()))) + 8);
}

}  // namespace

Generation::Generation(std::shared_ptr<ServerContext> context, std::shared_ptr<const PreparedRequest> request)
    : context_(std::move(context)),
      request_(std::move(request)),
      events_(event_capacity(*context_, *request_, request_->prompts.size() * static_cast<std::size_t>(request_->sampling.n))),
      arrival_(net::Clock::now()),
      created_(static_cast<std::int64_t>(std::time(nullptr))) {
  const std::size_t num_choices = request_->prompts.size() * static_cast<std::size_t>(request_->sampling.n);
  choices_.resize(num_choices);
  tracks_.reserve(num_choices);
  for (std::size_t i = 0; i < num_choices; ++i) {
    choices_[i].prompt_idx = i / static_cast<std::size_t>(request_->sampling.n);
    text::StopTracker stops(*context_->tokenizer, {.skip_special_tokens = request_->sampling.skip_special_tokens,
                                                   .stop = request_->sampling.stop,
                                                   .include_stop = request_->sampling.include_stop_str_in_output,
                                                   .min_tokens = request_->sampling.min_tokens});
    tracks_.push_back(Track{RequestId{}, std::move(stops), false, arrival_, arrival_});
  }
  context_->live.add(*this);
}

Generation::~Generation() {
  context_->live.remove(*this);
  for (std::size_t i = 0; i < tracks_.size(); ++i)
    if (tracks_[i].is_submitted && !choices_[i].is_finished) context_->backend->cancel(tracks_[i].id);
}

void Generation::submit(std::uint64_t kv_key) {
  const auto n = static_cast<std::size_t>(request_->sampling.n);
  for (std::size_t i = 0; i < tracks_.size(); ++i) {
    wire::GenerateRequest request;
    request.prompt_ids = request_->prompts[i / n];
    request.sampling = request_->sampling;
    request.sampling.n = 1;
    request.images = request_->images;
    request.sampling.prompt_ranks = request_->return_prompt_logprobs;
    if (request.sampling.seed) *request.sampling.seed += i % n;
    if (i % n != 0) request.sampling.prompt_logprobs.reset();  // once per prompt is enough
    request.session_id = request_->session_id;
    request.cache_salt = request_->cache_salt;
    request.priority = request_->priority;
    if (i == 0) request.kv_key = kv_key;
    engine::EventSink sink = make_sink(i);
    tracks_[i].id = context_->backend->submit(std::move(request), std::move(sink), request_->adapter);
    tracks_[i].is_submitted = true;
  }
}

engine::EventSink Generation::make_sink(std::size_t choice_idx) const {
  // Whole replies without stop strings need no look at single tokens: one event at the end spares the engine's cores a
  // thread switch per token and request.
  const bool is_batched = !request_->is_stream && request_->sampling.stop.empty();
  auto collected = std::make_shared<Event>();  // engine thread only
  collected->choice_idx = choice_idx;
  return [events = events_, collected, is_batched](const engine::StepEvent& step) {
    if (!step.delta.token_ids.empty()) {
      collected->last_token = net::Clock::now();
      if (collected->delta.token_ids.empty()) collected->first_token = collected->last_token;
    }
    append_delta(collected->delta, step.delta);
    if (is_batched && step.delta.finish_reason == wire::FinishReason::kNone) return;
    Event event = std::move(*collected);
    *collected = Event();
    collected->choice_idx = event.choice_idx;
    // Never full: the capacity covers every token of every choice.
    PRL_CHECK(events.try_push(event) || events.is_closed(), "the event queue of a request is full");
  };
}

net::asio::awaitable<std::optional<ChoiceNews>> Generation::next(net::TimePoint deadline) {
  for (;;) {
    // A queue that always holds something would never wait, and so never notice that time is up.
    if (net::Clock::now() >= deadline) co_return std::nullopt;
    auto popping = events_.pop(deadline);
    std::optional<Event> event = co_await std::move(popping);
    if (!event && events_.is_closed()) fail(ErrorCode::kUnavailable, "the server is stopping; send the request again");
    if (!event) co_return std::nullopt;
    if (choices_[event->choice_idx].is_finished) continue;
    std::optional<ChoiceNews> news = apply(std::move(*event));
    co_return news;
  }
}

ChoiceNews Generation::apply(Event event) {
  Choice& choice = choices_[event.choice_idx];
  Track& track = tracks_[event.choice_idx];
  const wire::GenerateOutput& delta = event.delta;
  ChoiceNews news{event.choice_idx, choice.token_ids.size(), {}, false};
  const std::size_t num_shown = request_->is_prompt_only ? 0 : delta.token_ids.size();
  if (num_shown > 0 && !track.stops.has_stopped()) measure(choice, track, event);
  for (std::size_t i = 0; i < num_shown && !track.stops.has_stopped(); ++i) add_token(choice, track, delta, i, news.text);
  if (delta.finish_reason != wire::FinishReason::kNone) {
    finish(choice, track, delta, news.text);
    news.is_finished = true;
    measure_end(choice, track, delta);
  }
  return news;
}

void Generation::measure_end(const Choice& choice, const Track& track, const wire::GenerateOutput& delta) {
  FinishedChoice finished;
  finished.since_arrival = net::Clock::now() - arrival_;
  finished.num_prompt_tokens = static_cast<std::int64_t>(request_->prompts[choice.prompt_idx].size());
  finished.num_output_tokens = static_cast<std::int64_t>(choice.token_ids.size());
  finished.max_tokens = request_->sampling.max_tokens.value_or(0);
  if (delta.first_step != net::TimePoint()) {
    finished.queue = std::max(net::Clock::duration::zero(), delta.first_step - arrival_);
    if (!choice.token_ids.empty()) {
      finished.prefill = std::max(net::Clock::duration::zero(), track.first_token - delta.first_step);
      finished.decode = track.last_token - track.first_token;
    }
  }
  context_->metrics.observe_finished(finished);
  if (!is_done()) return;
  const auto n = static_cast<std::size_t>(request_->sampling.n);
  for (std::size_t begin = 0; begin < choices_.size(); begin += n) {
    std::size_t longest = 0;
    for (std::size_t i = begin; i < begin + n; ++i) longest = std::max(longest, choices_[i].token_ids.size());
    context_->metrics.observe_prompt(request_->sampling.n, static_cast<std::int64_t>(longest));
  }
}

void Generation::measure(const Choice& choice, Track& track, const Event& event) {
  auto num_gaps = static_cast<std::int64_t>(event.delta.token_ids.size());
  net::TimePoint begin = track.last_token;
  if (choice.token_ids.empty()) {
    context_->metrics.observe_first_token(event.first_token - arrival_);
    track.first_token = begin = event.first_token;
    --num_gaps;
  }
  if (num_gaps > 0) context_->metrics.observe_token_gaps((event.last_token - begin) / num_gaps, num_gaps);
  track.last_token = event.last_token;
}

void Generation::add_token(Choice& choice, Track& track, const wire::GenerateOutput& delta, std::size_t i, std::string& text) {
  const std::int32_t id = delta.token_ids[i];
  choice.token_ids.push_back(id);
  choice.logprobs.push_back(i < delta.logprobs.size() ? clean_logprob(delta.logprobs[i]) : kMinLogprob);
  choice.versions.push_back(i < delta.versions.size() ? delta.versions[i] : delta.version_end.value);
  std::vector<wire::TopLogprob> top;
  if (i < delta.top_logprobs.size()) top = delta.top_logprobs[i];
  const auto& named = request_->sampling.logprob_token_ids;
  if (!named.empty() && std::find(named.begin(), named.end(), id) == named.end()) top.insert(top.begin(), {id, choice.logprobs.back()});
  for (wire::TopLogprob& entry : top) entry.logprob = clean_logprob(entry.logprob);
  choice.top_logprobs.push_back(std::move(top));
  const bool is_stop_token =
      delta.finish_reason == wire::FinishReason::kStop && delta.stop_token_id == id && i + 1 == delta.token_ids.size();
  if ((is_stop_token && !request_->sampling.include_stop_str_in_output) || !request_->detokenize) return;
  const std::string piece = track.stops.push(id);
  choice.text += piece;
  text += piece;
  if (track.stops.has_stopped() && delta.finish_reason == wire::FinishReason::kNone)
    context_->backend->stop(track.id, track.stops.stop_string());
}

void Generation::finish(Choice& choice, Track& track, const wire::GenerateOutput& delta, std::string& text) {
  const wire::SlowTokenRule* const rule = wire::as_slow(request_->sampling.token_rule);
  if (delta.finish_reason == wire::FinishReason::kError && rule != nullptr && !rule->failure().empty())
    net::fail_param(request_->rule_param, rule->failure());
  if (delta.finish_reason == wire::FinishReason::kError) fail(ErrorCode::kInternal, "the engine failed on the request: {}", delta.error);
  if (delta.finish_reason == wire::FinishReason::kAbort && !track.stops.has_stopped())
    fail(ErrorCode::kUnavailable, "the engine ended the request before it was finished; it is probably shutting down");
  if (!track.stops.has_stopped() && request_->detokenize) {
    const std::string rest = track.stops.finish();
    choice.text += rest;
    text += rest;
  }
  choice.finish_reason = track.stops.has_stopped() ? wire::FinishReason::kStop : delta.finish_reason;
  choice.stop_string = track.stops.stop_string();
  if (request_->is_prompt_only) {
    choice.finish_reason = wire::FinishReason::kLength;
  } else if (!track.stops.has_stopped()) {
    choice.stop_token_id = delta.stop_token_id;
  }
  choice.prompt_logprobs = delta.prompt_logprobs;
  choice.prompt_top_logprobs = delta.prompt_top_logprobs;
  choice.prompt_ranks = delta.prompt_ranks;
  choice.routed_experts = delta.routed_experts;
  for (float& logprob : choice.prompt_logprobs) logprob = clean_logprob(logprob);
  for (auto& top : choice.prompt_top_logprobs)
    for (wire::TopLogprob& entry : top) entry.logprob = clean_logprob(entry.logprob);
  choice.num_cached_tokens = delta.num_cached_tokens;
  choice.version_start = choice.versions.empty() ? delta.version_start : PolicyVersion{choice.versions.front()};
  choice.version_end = choice.versions.empty() ? delta.version_end : PolicyVersion{choice.versions.back()};
  choice.is_finished = true;
  ++num_finished_;
}

std::int64_t Generation::num_output_tokens() const {
  std::int64_t count = 0;
  for (const Choice& choice : choices_) count += static_cast<std::int64_t>(choice.token_ids.size());
  return count;
}

std::int64_t Generation::num_cached_tokens() const {
  // As for prompt tokens, each prompt counts once, by its first choice.
  std::int64_t count = 0;
  for (std::size_t i = 0; i < choices_.size(); i += static_cast<std::size_t>(request_->sampling.n)) count += choices_[i].num_cached_tokens;
  return count;
}

}  // namespace prl::server
