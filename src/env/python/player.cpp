#include "env/python/player.hpp"

#include <boost/json/monotonic_resource.hpp>

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "base/rng.hpp"
#include "env/message_match.hpp"
#include "net/deadline.hpp"
#include "net/errors.hpp"
#include "text/json_python.hpp"

namespace prl::env::python {

namespace json = boost::json;
using namespace std::chrono_literals;

json::object sampling_json(const wire::SamplingParams& sampling) {
  const wire::SamplingParams plain;
  json::object out;
  out["temperature"] = sampling.temperature;
  if (sampling.top_p != plain.top_p) out["top_p"] = sampling.top_p;
  if (sampling.top_k > 0) out["top_k"] = sampling.top_k;
  if (sampling.min_p != plain.min_p) out["min_p"] = sampling.min_p;
  if (sampling.repetition_penalty != plain.repetition_penalty) out["repetition_penalty"] = sampling.repetition_penalty;
  if (sampling.presence_penalty != plain.presence_penalty) out["presence_penalty"] = sampling.presence_penalty;
  if (sampling.frequency_penalty != plain.frequency_penalty) out["frequency_penalty"] = sampling.frequency_penalty;
  if (sampling.max_tokens) out["max_tokens"] = *sampling.max_tokens;
  if (sampling.min_tokens != plain.min_tokens) out["min_tokens"] = sampling.min_tokens;
  if (!sampling.stop.empty()) {
    json::array stop;
    for (const std::string& text : sampling.stop) stop.emplace_back(text);
    out["stop"] = std::move(stop);
  }
  return out;
}

namespace {

std::vector<std::string> stop_texts(const json::value& value) {
  std::vector<std::string> texts;
  if (text::is_text(value)) texts.emplace_back(value.get_string());
  if (value.is_array())
    for (const json::value& item : value.get_array())
      if (text::is_text(item)) texts.emplace_back(item.get_string());
  return texts;
}

/// False if the key is none of those that change the distribution.
bool set_number(wire::SamplingParams& sampling, std::string_view key, double value) {
  const auto real = static_cast<float>(value);
  if (key == "temperature")
    sampling.temperature = real;
  else if (key == "top_p")
    sampling.top_p = real;
  else if (key == "top_k")
    sampling.top_k = static_cast<std::int32_t>(value);
  else if (key == "min_p")
    sampling.min_p = real;
  else if (key == "repetition_penalty")
    sampling.repetition_penalty = real;
  else if (key == "presence_penalty")
    sampling.presence_penalty = real;
  else if (key == "frequency_penalty")
    sampling.frequency_penalty = real;
  else
    return false;
  return true;
}

std::string class_of(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kOverlong: return "overlong";
    case ErrorCode::kDeadline: return "timeout";
    case ErrorCode::kUnauthorized: return "auth";
    case ErrorCode::kCancelled: return "cancelled";
    default: return "provider";
  }
}

}  // namespace

std::vector<std::string> apply_sampling(wire::SamplingParams& sampling, const json::object& called, const json::object& sent,
                                        bool is_training) {
  std::vector<std::string> left_out;
  for (const auto& item : called) {
    const std::string key(item.key());
    const json::value& value = item.value();
    const json::value* before = sent.if_contains(key);
    if (value.is_null() || key == "seed" || (before != nullptr && *before == value)) continue;
    if ((key == "max_tokens" || key == "max_completion_tokens") && value.is_int64())
      sampling.max_tokens = static_cast<std::int32_t>(std::clamp<std::int64_t>(value.get_int64(), 1, INT32_MAX));
    else if (key == "min_tokens" && value.is_int64())
      sampling.min_tokens = static_cast<std::int32_t>(std::clamp<std::int64_t>(value.get_int64(), 0, INT32_MAX));
    else if (key == "stop")
      sampling.stop = stop_texts(value);
    else if (const auto number = text::as_double(value); is_training || !number || !set_number(sampling, key, *number))
      left_out.push_back(key);
  }
  return left_out;
}

Player::Player(asio::any_io_executor executor, std::shared_ptr<PooledRun> run, const RolloutContext* context, json::object sent_sampling,
               Rules rules)
    : executor_(std::move(executor)),
      run_(std::move(run)),
      context_(context),
      sent_sampling_(std::move(sent_sampling)),
      rules_(std::move(rules)),
      conversations_(context->client, context->open_conversation) {}

asio::awaitable<std::optional<RunEvent>> Player::until_end(net::TimePoint deadline) {
  for (;;) {
    auto popping = run_->events.pop(deadline);
    std::optional<RunEvent> event = co_await std::move(popping);
    if (!event || event->kind == RunEvent::Kind::kEnded) co_return event;
    switch (event->kind) {
      case RunEvent::Kind::kCall: {
        if (calls_.size() >= 32) reap();
        const std::string id = text_member(event->message, "call_id");
        auto& group = calls_[id];
        if (group != nullptr && group->stats().num_running > 0)
          fail(ErrorCode::kCorrupt, "message 'model_call' of a Python worker: call_id is '{}', that of a call under way", id);
        group = std::make_unique<net::TaskGroup>(executor_, "model call " + id);
        group->spawn("completion", complete(std::move(event->message), attempt_));
        break;
      }
      case RunEvent::Kind::kCallCancelled:
        // It stays until it has ended: what is under way works on this object.
        if (const auto call = calls_.find(optional_text(event->message, "call_id")); call != calls_.end()) call->second->cancel();
        break;
      case RunEvent::Kind::kRestarted: {
        auto stopping = stop();
        co_await std::move(stopping);
        std::lock_guard lock(mutex_);
        ++attempt_;
        conversations_.reset();
        sessions_.clear();
        turns_.clear();
        model_error_.reset();
        judge_error_.reset();
        num_sampled_ = 0;
        is_out_of_tokens_ = false;
        break;
      }
      case RunEvent::Kind::kEnded: break;
    }
  }
}

void Player::reap() {
  std::erase_if(calls_, [](const auto& call) { return call.second->stats().num_running == 0; });
}

asio::awaitable<void> Player::stop() {
  reap();
  for (const auto& [id, group] : calls_) group->cancel();
  for (const auto& [id, group] : calls_) {
    auto joining = group->join(net::Clock::now() + 30s);
    const bool has_ended = co_await std::move(joining);
    PRL_CHECK(has_ended, "model call {} did not end 30 s after its cancellation", id);
  }
  calls_.clear();
}

std::string Player::frame_of(const json::object& call, json::object reply, std::initializer_list<std::string_view> more) const {
  reply["t"] = "model_reply";
  reply["call_id"] = text_member(call, "call_id");
  reply["run_id"] = text_member(call, "run_id");
  return encode_frame(reply, run_->max_frame_bytes, more);
}

std::string Player::frame_of(const json::object& call, const TrajectoryStep& step) const {
  unsigned char bytes[1024];  // of all but the message
  json::monotonic_resource memory(bytes, sizeof bytes);
  json::object reply(&memory);
  reply.reserve(8);
  reply["finish_reason"] = step.finish_reason;
  json::object& usage = reply["usage"].emplace_object();
  usage["prompt_tokens"] = step.num_prompt_tokens;
  usage["completion_tokens"] = step.num_completion_tokens;
  return frame_of(call, std::move(reply), {R"("message":)", text::to_json_text(step.completion)});
}

asio::awaitable<void> Player::complete(json::object call, int attempt) {
  std::string frame;
  std::optional<Error> failure;
  try {
    auto answering = answer(call, attempt);
    frame = co_await std::move(answering);
  } catch (const std::exception&) {
    failure = net::to_error(std::current_exception());
  }
  if (failure) {
    if (failure->code() == ErrorCode::kCancelled) throw *failure;
    json::object error;
    error["class"] = class_of(*failure);
    error["message"] = failure->what();
    error["status"] = http_status(failure->code());
    json::object reply;
    reply["error"] = std::move(error);
    frame = frame_of(call, std::move(reply));
    std::lock_guard lock(mutex_);
    if (failure->code() != ErrorCode::kOverlong && attempt == attempt_) model_error_ = *failure;
  }
  run_->reply(text_member(call, "run_id"), std::move(frame));
}

/// All but the messages.
ChatRequest Player::make_request(const json::object& call, const std::string& session) {
  ChatRequest request;
  request.tools = plain_tools(optional_array(call, "tools"));
  request.sampling = context_->sampling;
  const auto left_out = apply_sampling(request.sampling, optional_object(call, "sampling"), sent_sampling_, context_->is_training);
  for (const std::string& key : left_out) log::debug("rollout {}: the environment's sampling.{} is not used", context_->trajectory_id, key);
  request.deadline = context_->deadline;
  auto [it, is_new] = sessions_.try_emplace(session, sessions_.size(), 0);
  auto& [ordinal, num_calls] = it->second;
  if (context_->seed) {
    const std::uint64_t seed = ordinal == 0 ? *context_->seed : mix_seed(*context_->seed, 0x5ea7, ordinal);
    request.sampling.seed = mix_seed(seed, num_calls) >> 1;  // 63 bits, as in a native rollout
  }
  ++num_calls;
  return request;
}

/// Keeps the turn; its message is taken out of `turn`.
const TrajectoryStep& Player::record(const json::object& call, json::array prompt, ChatTurn& turn) {
  Turn entry;
  entry.call_id = text_member(call, "call_id");
  entry.is_policy = optional_text(call, "purpose") != "side";
  TrajectoryStep& step = entry.step;
  step.prompt = std::move(prompt);
  step.completion = std::move(turn.message);
  step.tokens = std::move(turn.tokens);
  step.has_tokens = turn.has_tokens;
  step.finish_reason = turn.finish_reason;
  step.is_truncated = turn.is_truncated();
  step.num_prompt_tokens = turn.num_prompt_tokens;
  step.num_completion_tokens = turn.num_completion_tokens;
  step.has_versions = turn.has_versions;
  step.version_start = turn.version_start;
  step.version_end = turn.version_end;
  model_seconds_ += turn.seconds;
  if (entry.is_policy) num_sampled_ += turn.num_completion_tokens;
  turns_.push_back(std::move(entry));
  return turns_.back().step;
}

/// Cuts the reply to what the rollout may still sample. Error{kOverlong} when that is nothing: libraries end a rollout then and score it.
void Player::limit_tokens(ChatRequest& request) {
  if (rules_.max_total_completion_tokens < 0) return;
  const std::int64_t room = rules_.max_total_completion_tokens - num_sampled_;
  if (room <= 0) {
    is_out_of_tokens_ = true;
    fail(ErrorCode::kOverlong, "the rollout has sampled its {} tokens (max_total_completion_tokens)", rules_.max_total_completion_tokens);
  }
  request.sampling.max_tokens = static_cast<std::int32_t>(std::min<std::int64_t>(request.sampling.max_tokens.value_or(INT32_MAX), room));
}

asio::awaitable<json::object> Player::judge(const json::object& call) {
  std::optional<Error> failure;
  try {
    if (!rules_.judge)
      fail(ErrorCode::kInvalidArgument,
           "the environment asks a judge ({}): name its service in [env.judge], or let it use its own client with sandbox = \"off\"",
           optional_text(call, "model"));
    auto answering = rules_.judge->answer(json::object(call, json::storage_ptr()), context_->deadline);
    co_return co_await std::move(answering);
  } catch (const std::exception&) {
    failure = net::to_error(std::current_exception());
  }
  if (failure->code() == ErrorCode::kCancelled) throw *failure;
  {
    std::lock_guard lock(mutex_);
    judge_error_ = *failure;
  }
  json::object reply;
  reply["error"] = json::object{{"class", "refused"}, {"message", failure->what()}, {"status", http_status(failure->code())}};
  co_return reply;
}

/// The frame of the model_reply. `call` lives until then.
asio::awaitable<std::string> Player::answer(const json::object& call, int attempt) {
  const std::string purpose = optional_text(call, "purpose");
  if (purpose == "judge") {
    auto judging = judge(call);
    json::object said = co_await std::move(judging);
    co_return frame_of(call, std::move(said));
  }
  ChatRequest request;
  std::shared_ptr<ChatClient> client;
  Conversations::Conversation* conversation = nullptr;
  {
    std::lock_guard lock(mutex_);
    const std::string session = text_member(call, "session_id") + purpose;
    request = make_request(call, session);
    if (purpose != "side") limit_tokens(request);
    conversation = &conversations_.acquire(session, array_member(call, "messages"), request.messages);
    client = conversation->client;
  }
  std::exception_ptr failure;
  ChatTurn turn;
  try {
    auto completing = client->complete(request);
    turn = co_await std::move(completing);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  std::lock_guard lock(mutex_);
  if (attempt != attempt_) fail(ErrorCode::kCancelled, "the worker that asked has died");
  if (failure) {
    conversations_.release(*conversation, nullptr, nullptr);
    std::rethrow_exception(failure);
  }
  const TrajectoryStep& step = record(call, std::move(request.messages), turn);
  conversations_.release(*conversation, &step.prompt, &step.completion);
  co_return frame_of(call, step);
}

const TrajectoryStep& Player::turn(std::string_view call_id) const {
  std::lock_guard lock(mutex_);
  const auto it = std::find_if(turns_.begin(), turns_.end(), [&](const Turn& turn) { return turn.call_id == call_id; });
  if (it == turns_.end() || it->is_taken) fail(ErrorCode::kCorrupt, "a result names the model call {}, which was not completed", call_id);
  return it->step;
}

std::vector<TrajectoryStep> Player::take_steps(const json::array* call_ids) {
  std::lock_guard lock(mutex_);
  conversations_.reset();
  std::vector<TrajectoryStep> steps;
  const auto take = [&steps](Turn& turn) {
    turn.is_taken = true;
    steps.push_back(std::move(turn.step));
  };
  if (call_ids == nullptr) {
    for (Turn& turn : turns_)
      if (turn.is_policy && !turn.is_taken) take(turn);
    return steps;
  }
  for (const json::value& id : *call_ids) {
    const std::string_view name = text::is_text(id) ? std::string_view(id.get_string()) : std::string_view();
    const auto it = std::find_if(turns_.begin(), turns_.end(), [&](const Turn& turn) { return name == turn.call_id; });
    if (it == turns_.end()) fail(ErrorCode::kCorrupt, "a result names the model call {}, which was not completed", text::to_json_text(id));
    if (it->is_taken) fail(ErrorCode::kCorrupt, "a result names the model call {} twice", text::to_json_text(id));
    take(*it);
  }
  return steps;
}

}  // namespace prl::env::python
