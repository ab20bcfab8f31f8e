#pragma once

#include <boost/json/object.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "env/chat_client.hpp"
#include "env/python/settings.hpp"
#include "net/http_client.hpp"
#include "net/io_runtime.hpp"

namespace prl::env::python {

/// Answers the calls of an environment's judges, which have no network of their own, at an OpenAI-compatible service: a budget of calls,
/// and a memory of those at temperature 0. Has a thread of its own; members may be called from any other.
class Judge {
 public:
  explicit Judge(JudgeSettings settings);
  ~Judge();
  Judge(const Judge&) = delete;
  Judge& operator=(const Judge&) = delete;

  /// Members of a model_reply to `call`, a model_call. Error{kResourceExhausted} when the budget is spent, {kDeadline}, {kUnavailable}.
  asio::awaitable<boost::json::object> answer(boost::json::object call, net::TimePoint deadline);

  struct Stats {
    std::int64_t num_calls = 0;   ///< that went to the service
    std::int64_t num_cached = 0;  ///< answered from memory
  };
  Stats stats() const;

 private:
  static constexpr std::size_t kMaxCached = 65'536;
  /// The answer from memory, or an empty object after counting a call against the budget.
  boost::json::object take(const std::string& key);
  void keep(const std::string& key, const boost::json::object& reply);

  JudgeSettings settings_;
  net::IoRuntime io_{1, "judge"};
  std::unordered_map<std::string, std::shared_ptr<ChatClientFactory>> services_;  ///< by model
  std::shared_ptr<net::HttpClient> http_;
  mutable std::mutex mutex_;  ///< guards what follows
  std::unordered_map<std::string, boost::json::object> cache_;
  Stats stats_;
};

}  // namespace prl::env::python
