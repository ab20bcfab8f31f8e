#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "env/environment.hpp"
#include "env/python/conversations.hpp"
#include "env/python/judge.hpp"
#include "env/python/worker_pool.hpp"
#include "net/task_group.hpp"

namespace prl::env::python {

/// The sampling of a rollout under the names of OpenAI and vLLM; without the seed, which stays on this side.
boost::json::object sampling_json(const wire::SamplingParams& sampling);

/// What `called`, the sampling of a call, has that `sent` had not: taken over into `sampling`. In training only what bounds the reply's
/// length (max_tokens, min_tokens, stop): the trainer divides by one temperature. Returns the names that were left out.
std::vector<std::string> apply_sampling(wire::SamplingParams& sampling, const boost::json::object& called, const boost::json::object& sent,
                                        bool is_training);

/// Completes the model calls of one rollout with its chat client, which keeps ids, log-probabilities and versions. The seed of call k of a
/// session is that of turn k of a native rollout.
///
/// Used by one coroutine; the calls run beside it. stop() must have ended before it goes away.
class Player {
 public:
  struct Rules {
    std::shared_ptr<Judge> judge = {};              ///< null: calls of judges are refused
    std::int64_t max_total_completion_tokens = -1;  ///< sampled over all policy calls; -1: no limit
  };
  Player(asio::any_io_executor executor, std::shared_ptr<PooledRun> run, const RolloutContext* context, boost::json::object sent_sampling,
         Rules rules);

  /// Serves calls until the rollout has ended; the last event. nullopt when `deadline` passed first.
  asio::awaitable<std::optional<RunEvent>> until_end(net::TimePoint deadline);
  /// Cancels the calls that are open and waits for their ends.
  asio::awaitable<void> stop();

  /// Takes the turns of these calls, in their order; of all policy calls in the order they were asked if `call_ids` is null. After stop().
  std::vector<TrajectoryStep> take_steps(const boost::json::array* call_ids);
  /// The turn of the call, valid until it is taken. Error{kCorrupt} if it was not completed or has been taken. After stop().
  const TrajectoryStep& turn(std::string_view call_id) const;
  double model_seconds() const { return model_seconds_; }
  /// The last failure of the model's side.
  const std::optional<Error>& model_error() const { return model_error_; }
  /// Why a judge's call was not answered, if one was not.
  const std::optional<Error>& judge_error() const { return judge_error_; }
  /// Whether a call was refused because the rollout may sample no more tokens.
  bool is_out_of_tokens() const { return is_out_of_tokens_; }

 private:
  struct Turn {
    std::string call_id;
    bool is_policy = false;
    bool is_taken = false;
    TrajectoryStep step;
  };
  asio::awaitable<void> complete(boost::json::object call, int attempt);
  asio::awaitable<std::string> answer(const boost::json::object& call, int attempt);
  ChatRequest make_request(const boost::json::object& call, const std::string& session);
  const TrajectoryStep& record(const boost::json::object& call, boost::json::array prompt, ChatTurn& turn);
  asio::awaitable<boost::json::object> judge(const boost::json::object& call);
  std::string frame_of(const boost::json::object& call, boost::json::object reply, std::initializer_list<std::string_view> more = {}) const;
  std::string frame_of(const boost::json::object& call, const TrajectoryStep& step) const;
  void limit_tokens(ChatRequest& request);
  void reap();

  asio::any_io_executor executor_;
  std::shared_ptr<PooledRun> run_;
  const RolloutContext* context_;
  boost::json::object sent_sampling_;
  Rules rules_;
  std::map<std::string, std::unique_ptr<net::TaskGroup>> calls_;

  mutable std::mutex mutex_;  ///< guards what follows: calls end on strands of their own
  Conversations conversations_;
  std::map<std::string, std::pair<std::uint64_t, std::uint64_t>> sessions_;  ///< ordinal and number of calls
  std::list<Turn> turns_;                                                    ///< conversations_ points into them
  int attempt_ = 0;
  double model_seconds_ = 0;
  std::optional<Error> model_error_;
  std::optional<Error> judge_error_;
  std::int64_t num_sampled_ = 0;  ///< tokens, in policy calls
  bool is_out_of_tokens_ = false;
};

}  // namespace prl::env::python
