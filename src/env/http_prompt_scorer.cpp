#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "env/detail/service_health.hpp"
#include "env/prompt_scorer.hpp"
#include "net/service.hpp"

namespace prl::env {
namespace {

namespace json = boost::json;

/// Words, numbers, code and scripts that tokenizers cut in ways of their own.
constexpr const char* kProbeText =
    "The quick brown fox isn't 1234567.89 years old;\n\n\tdef f(x_1): return {'a': [x_1 ** 2, -3e-7]}  # "
    "na\xC3\xAFve \xE5\x8C\x97\xE4\xBA\xAC \xD0\x9C\xD0\xB8\xD1\x80 \xF0\x9F\x98\x80\xF0\x9F\x8F\xBD   end";

bool lacks_route(int status) { return status == 404 || status == 405 || status == 501; }

/// The value of a token's entry: {"<id>": {"logprob": x, ...}}, or {"<id>": x}.
float logprob_at(const json::value& entry, std::int32_t id, std::size_t position) {
  const std::string key = std::to_string(id);
  const json::value* found = entry.is_object() ? entry.get_object().if_contains(key) : nullptr;
  if (found == nullptr)
    fail(ErrorCode::kCorrupt, "the reply has no log-probability of token {} at position {}: does the model share the tokenizer?", id,
         position);
  const double logprob = found->is_object() ? found->at("logprob").to_number<double>() : found->to_number<double>();
  if (!std::isfinite(logprob)) fail(ErrorCode::kNonFinite, "the log-probability of token {} at position {} is not finite", id, position);
  return static_cast<float>(logprob);
}

std::vector<float> read_prompt_logprobs(const json::value& body, const std::vector<std::int32_t>& ids) {
  const json::value* list = body.as_object().if_contains("prompt_logprobs");
  if (list == nullptr || !list->is_array()) list = body.at("choices").at(0).as_object().if_contains("prompt_logprobs");
  if (list == nullptr || !list->is_array())
    fail(ErrorCode::kCorrupt, "the reply has no prompt_logprobs: a teacher must be able to score prompts");
  const json::array& entries = list->get_array();
  if (entries.size() != ids.size())
    fail(ErrorCode::kCorrupt, "{} tokens were sent, and {} log-probabilities came back", ids.size(), entries.size());
  std::vector<float> out(ids.size(), 0.0f);
  for (std::size_t i = 1; i < ids.size(); ++i) out[i] = logprob_at(entries[i], ids[i], i);
  return out;
}

class HttpPromptScorer final : public PromptScorer {
 public:
  HttpPromptScorer(std::shared_ptr<net::HttpClient> client, HttpScorerOptions options)
      : client_(std::move(client)), options_(std::move(options)) {
    for (const std::string& url : options_.base_urls) roots_.push_back(net::server_root(url));
    if (roots_.empty()) fail(ErrorCode::kInvalidArgument, "client.base_url lists no server");
  }

  asio::awaitable<std::vector<float>> score(std::vector<std::int32_t> ids, net::TimePoint deadline, net::Fields headers) override {
    const std::string root = roots_[next_.fetch_add(1, std::memory_order_relaxed) % roots_.size()];
    const bool tries_generate = !only_completions_.load();
    std::string path = tries_generate ? "/inference/v1/generate" : "/v1/completions";
    auto first = post(root + path, tries_generate ? generate_body(ids) : completion_body(ids), deadline, headers);
    net::HttpReply reply = co_await std::move(first);
    if (tries_generate && lacks_route(reply.status)) {
      path = "/v1/completions";
      auto second = post(root + path, completion_body(ids), deadline, std::move(headers));
      reply = co_await std::move(second);
      if (reply.is_ok()) only_completions_ = true;
    }
    reply.raise_for_status(root + path);
    const json::value body = reply.json();
    try {
      co_return read_prompt_logprobs(body, ids);
    } catch (const Error& error) {
      throw error.with_context(root + path);
    } catch (const std::exception& error) {
      fail(ErrorCode::kCorrupt, "{}{} answered something else than a completion ({}): {}", root, path, error.what(),
           reply.body.substr(0, 200));
    }
  }

  asio::awaitable<void> check_ready(net::TimePoint deadline) override {
    for (const std::string& root : roots_) {
      auto waiting = detail::wait_for_service(client_, root, options_.check_model ? options_.model : std::string(), deadline);
      co_await std::move(waiting);
      if (!options_.tokenizer) continue;
      auto comparing = compare_tokenizers(root, deadline);
      co_await std::move(comparing);
    }
  }

  std::string describe() const override {
    std::string text;
    for (const std::string& root : roots_) text += (text.empty() ? "" : ", ") + root;
    return text;
  }

 private:
  asio::awaitable<net::HttpReply> post(std::string url, std::string body, net::TimePoint deadline, net::Fields headers = {}) {
    net::HttpCall call;
    call.method = "POST";
    call.url = std::move(url);
    call.headers = std::move(headers);
    call.body = std::move(body);
    call.deadline = deadline;
    auto calling = client_->call(std::move(call));
    co_return co_await std::move(calling);
  }

  static void put_scoring(json::object& target) {
    // Servers generate at least one token; it is not read.
    target["max_tokens"] = 1;
    target["temperature"] = 1.0;
    target["top_p"] = 1.0;
    target["prompt_logprobs"] = 1;
  }
  static json::array to_array(const std::vector<std::int32_t>& ids) {
    json::array array;
    array.reserve(ids.size());
    for (const std::int32_t id : ids) array.emplace_back(id);
    return array;
  }
  std::string generate_body(const std::vector<std::int32_t>& ids) const {
    json::object sampling;
    put_scoring(sampling);
    json::object body;
    body["model"] = options_.model;
    body["token_ids"] = to_array(ids);
    body["sampling_params"] = std::move(sampling);
    return json::serialize(body);
  }
  std::string completion_body(const std::vector<std::int32_t>& ids) const {
    json::object body;
    body["model"] = options_.model;
    body["prompt"] = to_array(ids);
    put_scoring(body);
    return json::serialize(body);
  }

  /// The texts of a few special tokens and a text of many scripts must become the same ids on both sides.
  asio::awaitable<void> compare_tokenizers(std::string root, net::TimePoint deadline) {
    std::string text = kProbeText;
    for (const std::int32_t id : options_.tokenizer->stop_ids()) text += options_.tokenizer->token_of(id);
    text::EncodeOptions encode;
    encode.add_special_tokens = false;
    const std::vector<std::int32_t> wanted = options_.tokenizer->encode(text, encode);
    json::object body;
    body["model"] = options_.model;
    body["prompt"] = text;
    body["add_special_tokens"] = false;
    auto asking = post(root + "/tokenize", json::serialize(body), deadline);
    const net::HttpReply reply = co_await std::move(asking);
    if (lacks_route(reply.status)) {
      log::warning("{} has no route /tokenize: whether the teacher shares the tokenizer shows only in its replies", root);
      co_return;
    }
    reply.raise_for_status(root + "/tokenize");
    std::vector<std::int32_t> found;
    try {
      const json::value parsed = reply.json();
      for (const json::value& id : parsed.at("tokens").as_array()) found.push_back(id.to_number<std::int32_t>());
    } catch (const std::exception& error) {
      fail(ErrorCode::kCorrupt, "{}/tokenize answered something else than tokens ({}): {}", root, error.what(), reply.body.substr(0, 200));
    }
    const auto [ours, theirs] = std::ranges::mismatch(wanted, found);
    if (ours == wanted.end() && theirs == found.end()) co_return;
    const auto show = [](auto it, const std::vector<std::int32_t>& ids) {
      return it == ids.end() ? std::string("nothing") : std::to_string(*it);
    };
    fail(ErrorCode::kInvalidArgument,
         "the teacher {} at {} has another tokenizer than the model that is trained: token {} of a test text is {} there and {} here. "
         "Its log-probabilities are about other tokens; choose a teacher with the same vocabulary, or training_mode sft",
         options_.model, root, ours - wanted.begin(), show(theirs, found), show(ours, wanted));
  }

  std::shared_ptr<net::HttpClient> client_;
  HttpScorerOptions options_;
  std::vector<std::string> roots_;
  std::atomic<std::size_t> next_{0};
  std::atomic<bool> only_completions_{false};
};

}  // namespace

std::shared_ptr<PromptScorer> make_http_prompt_scorer(std::shared_ptr<net::HttpClient> client, HttpScorerOptions options) {
  return std::make_shared<HttpPromptScorer>(std::move(client), std::move(options));
}

}  // namespace prl::env
