#include "env/python/judge.hpp"

#include <fmt/core.h>
#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.hpp"
#include "env/openai_chat_client.hpp"
#include "env/python/frame.hpp"
#include "env/python/player.hpp"
#include "net/async_result.hpp"
#include "net/errors.hpp"
#include "net/http_client.hpp"
#include "text/json_python.hpp"

namespace prl::env::python {

namespace json = boost::json;
using namespace std::chrono_literals;

namespace {

asio::awaitable<void> ask(std::shared_ptr<ChatClientFactory> service, ChatRequest request, net::AsyncResult<ChatTurn> result) {
  try {
    ConversationOptions conversation;
    conversation.session_id = "judge";
    const std::unique_ptr<ChatClient> client = service->open(std::move(conversation));
    auto completing = client->complete(request);
    result.set_value(co_await std::move(completing));
  } catch (const std::exception&) {
    result.set_exception(std::current_exception());
  }
}

}  // namespace

Judge::Judge(JudgeSettings settings) : settings_(std::move(settings)) {
  net::HttpClient::Options options;
  options.timeout = settings_.timeout;
  options.bearer = settings_.api_key;
  http_ = std::make_shared<net::HttpClient>(io_.executor(), std::move(options));
}

Judge::~Judge() { io_.stop(2s); }

Judge::Stats Judge::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

json::object Judge::take(const std::string& key) {
  std::lock_guard lock(mutex_);
  if (const auto known = cache_.find(key); !key.empty() && known != cache_.end()) {
    ++stats_.num_cached;
    return known->second;
  }
  if (settings_.max_calls >= 0 && stats_.num_calls >= settings_.max_calls)
    fail(ErrorCode::kOverloaded, "the judge's budget of {} calls (judge.max_calls) is spent", settings_.max_calls);
  ++stats_.num_calls;
  return {};
}

void Judge::keep(const std::string& key, const json::object& reply) {
  if (key.empty()) return;
  std::lock_guard lock(mutex_);
  if (cache_.size() >= kMaxCached) cache_.clear();
  cache_.emplace(key, reply);
}

asio::awaitable<json::object> Judge::answer(json::object call, net::TimePoint deadline) {
  const std::string model = !settings_.model.empty() ? settings_.model : optional_text(call, "model");
  ChatRequest request;
  request.messages = array_member(call, "messages");
  const json::object& sampling = optional_object(call, "sampling");
  apply_sampling(request.sampling, sampling, {}, false);
  request.deadline = std::min(deadline, net::Clock::now() + settings_.timeout);
  std::string key;
  if (settings_.has_cache && request.sampling.temperature == 0)
    key = model + text::to_json_text(request.messages) + text::to_json_text(sampling);
  if (json::object known = take(key); !known.empty()) co_return known;
  std::shared_ptr<ChatClientFactory> service;
  {
    std::lock_guard lock(mutex_);
    auto& entry = services_[model];
    if (!entry) {
      OpenAIChatOptions options;
      options.base_url = settings_.base_url;
      options.model = model;
      entry = std::make_shared<OpenAIChatClientFactory>(http_, std::move(options));
    }
    service = entry;
  }
  const net::AsyncResult<ChatTurn> result;
  const net::TimePoint until = request.deadline + 1s;
  auto asking = ask(service, std::move(request), result);
  io_.spawn("judge call", std::move(asking));
  auto waiting = result.wait(until, fmt::format("the judge {} at {}", model, settings_.base_url));
  const ChatTurn turn = co_await std::move(waiting);
  json::object reply;
  reply["message"] = turn.message;
  reply["finish_reason"] = turn.finish_reason;
  reply["usage"] = json::object{{"prompt_tokens", turn.num_prompt_tokens}, {"completion_tokens", turn.num_completion_tokens}};
  keep(key, reply);
  co_return reply;
}

}  // namespace prl::env::python
