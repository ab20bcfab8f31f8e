#include "env/python/python_environment.hpp"

#include <boost/asio/this_coro.hpp>
#include <boost/json/monotonic_resource.hpp>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/failure.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "env/python/player.hpp"
#include "net/deadline.hpp"
#include "net/errors.hpp"
#include "net/io_runtime.hpp"
#include "text/json_python.hpp"

namespace prl::env::python {

namespace json = boost::json;
using namespace std::chrono_literals;

namespace {

constexpr const char* kEnvKey = "env";
constexpr std::size_t kMaxHeldGroups = 1024;

const char* to_string(Split split) { return split == Split::kTrain ? "train" : "eval"; }

/// Cancels a rollout whose coroutine goes away before its end, however it does.
class RunGuard {
 public:
  explicit RunGuard(std::shared_ptr<PooledRun> run) : run_(std::move(run)) {}
  ~RunGuard() {
    if (run_) run_->cancel();
  }
  RunGuard(const RunGuard&) = delete;
  RunGuard& operator=(const RunGuard&) = delete;
  void has_ended() { run_.reset(); }

 private:
  std::shared_ptr<PooledRun> run_;
};

/// What verifiers calls the failure, and whether another attempt may go better.
EpisodeError to_episode_error(const json::object& error, const std::optional<Error>& model_error) {
  EpisodeError out;
  const std::string kind = optional_text(error, "class");
  out.type = optional_text(error, "type");
  out.message = optional_text(error, "message");
  out.is_transient = optional_bool(error, "retryable", false);
  if (kind == "timeout") {
    out.type = "TimeoutError";
    out.is_transient = false;
  } else if ((kind == "provider" || kind == "empty") && model_error) {
    // Python saw a copy of what failed here; the decisions of native environments are taken from the original.
    out.type = model_error->code() == ErrorCode::kCorrupt || model_error->code() == ErrorCode::kNonFinite ? "InvalidModelResponseError"
                                                                                                          : "ModelError";
    out.message = model_error->what();
    out.is_transient = is_transient(model_error->code());
    out.refuses_all = refuses_all(model_error->code());
  } else if (kind == "empty") {
    out.type = "InvalidModelResponseError";
  }
  if (out.type.empty()) out.type = kind.empty() ? "Error" : kind;
  return out;
}

/// nullopt for what is absent or no number.
std::optional<double> number_at(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr ? text::as_double(*value) : std::nullopt;
}

void put_scores(Episode& episode, const json::object& sample) {
  for (const auto& item : optional_object(sample, "rewards"))
    if (const json::object* reward = item.value().if_object())
      episode.metrics[std::string(item.key())] = optional_number(*reward, "score", 0);
  for (const auto& item : optional_object(sample, "metrics"))
    if (const auto number = text::as_double(item.value())) episode.metrics[std::string(item.key())] = *number;
}

void set_error(Episode& episode, EpisodeError error) {
  episode.reward = 0;
  episode.is_completed = false;
  if (episode.stop_condition.empty() || episode.stop_condition == "completed") episode.stop_condition = "has_error";
  if (error.type == "TimeoutError") episode.stop_condition = "timeout_reached";
  episode.error = std::move(error);
}

/// The reward of a scored sample, and its advantage if the environment gives one; an error if there is no reward, or one that is no number.
void set_reward(Episode& episode, const json::object& sample) {
  if (const auto advantage = number_at(sample, "advantage")) episode.advantage = static_cast<float>(*advantage);
  const std::optional<double> reward = number_at(sample, "reward");
  if (!reward || !std::isfinite(*reward))
    set_error(episode, {"RewardError", "the environment gave no finite reward", false});
  else if (std::abs(*reward) > Episode::kMaxReward)
    set_error(episode,
              {"RewardError",
               fmt::format("the environment gave a reward of {}; {:g} is the limit, either way", *reward, Episode::kMaxReward), false});
  else
    episode.reward = *reward;
}

/// Whether the messages are the same to the order of their members.
bool is_copy(std::span<const json::value> a, std::span<const json::value> b) {
  const auto is_same_member = [](const json::key_value_pair& x, const json::key_value_pair& y) {
    return x.key() == y.key() && x.value() == y.value();
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](const json::value& x, const json::value& y) {
    const json::object* m = x.if_object();
    const json::object* n = y.if_object();
    return m != nullptr && n != nullptr && std::equal(m->begin(), m->end(), n->begin(), n->end(), is_same_member);
  });
}

/// The messages of a sample. What it leaves out is known here: the messages of its last call, whose turn is not taken yet, and the reply.
void put_messages(Episode& episode, const json::object& sample, const Player& player) {
  const json::array& rest = optional_array(sample, "completion");
  if (!sample.contains("prompt_size")) {
    if (const json::array& prompt = optional_array(sample, "prompt"); !prompt.empty()) episode.prompt = prompt;
    episode.completion = rest;
    return;
  }
  const json::array& calls = array_member(sample, "calls");
  if (calls.empty() || !text::is_text(calls.back())) fail(ErrorCode::kCorrupt, "a sample without calls leaves out its messages");
  const TrajectoryStep& last = player.turn(calls.back().get_string());
  const std::int64_t prompt_size = integer_member(sample, "prompt_size");
  if (prompt_size < 0 || prompt_size > static_cast<std::int64_t>(last.prompt.size()) + 1)
    fail(ErrorCode::kCorrupt, "{}: a prompt of {} messages in a conversation of {}", episode.env_name, prompt_size, last.prompt.size() + 1);
  const auto size = static_cast<std::size_t>(prompt_size);
  const std::size_t num_asked = std::min(size, last.prompt.size());
  const std::span<const json::value> messages(last.prompt.data(), last.prompt.size());
  // Nearly always the task's own, which need not be copied again.
  if (size != num_asked || !is_copy(episode.prompt, messages.first(num_asked))) {
    episode.prompt = json::array(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(num_asked));
    if (size != num_asked) episode.prompt.emplace_back(last.completion);
  }
  episode.completion.reserve(messages.size() + 1 - size + rest.size());
  for (const json::value& message : messages.subspan(num_asked)) episode.completion.push_back(message);
  if (size == num_asked) episode.completion.emplace_back(last.completion);
  for (const json::value& message : rest) episode.completion.push_back(message);
}

/// The rollouts of an episode train together or not at all.
void fail_together(Episode& episode) {
  if (!episode.error)
    for (const Episode& other : episode.others)
      if (other.error && !episode.error) set_error(episode, *other.error);
  for (Episode& other : episode.others)
    if (episode.error && !other.error) set_error(other, *episode.error);
}

}  // namespace

PythonEnvironment::PythonEnvironment(PythonOptions options) : options_(std::move(options)) {
  options_.pool.name = options_.name;
  options_.pool.load["env_key"] = kEnvKey;
  pages_ = std::make_unique<TaskPages>(
      TaskPages::Options{}, [this](Split split, std::int64_t offset, std::int64_t limit) { return read_rows(split, offset, limit); });
}

asio::awaitable<std::vector<json::object>> PythonEnvironment::read_rows(Split split, std::int64_t offset, std::int64_t limit) const {
  std::vector<json::object> rows;
  const net::TimePoint deadline = net::Clock::now() + options_.page_limit;
  const auto num_rows = [&rows] { return static_cast<std::int64_t>(rows.size()); };
  while (num_rows() < limit) {
    json::object request;
    request["t"] = "tasks";
    request["env_key"] = kEnvKey;
    request["split"] = to_string(split);
    request["offset"] = offset + num_rows();
    request["limit"] = limit - num_rows();
    auto asking = pool().request(std::move(request), deadline, WorkerPool::Who::kCatalogue);
    json::object page = co_await std::move(asking);
    const bool is_last = array_member(page, "tasks").empty() || optional_bool(page, "end", false);
    for (json::value& task : page["tasks"].get_array()) {
      if (!task.is_object() || integer_member(task.get_object(), "index") != offset + num_rows())
        fail(ErrorCode::kCorrupt, "environment {}: row {} is not where it was asked for", name(), offset + num_rows());
      rows.push_back(std::move(task.get_object()));
    }
    if (is_last) break;
  }
  co_return rows;
}

PythonEnvironment::~PythonEnvironment() = default;

WorkerPool& PythonEnvironment::pool() const {
  std::lock_guard lock(mutex_);
  if (!pool_) {
    PoolOptions options = options_.pool;
    options.states = states_;
    pool_ = std::make_unique<WorkerPool>(std::move(options));
  }
  return *pool_;
}

const json::object& PythonEnvironment::loaded() const {
  WorkerPool& workers = pool();
  {
    std::lock_guard lock(mutex_);
    if (loaded_) return *loaded_;
  }
  const auto begin = net::Clock::now();
  json::object said = workers.wait_loaded(begin + options_.start_limit);
  std::lock_guard lock(mutex_);
  if (!loaded_) {
    log::info("{}: {} environment {} {} in {} Python worker{}, ready after {:.1f} s", name(), optional_text(said, "kind"),
              optional_text(said, "env_id"), optional_text(said, "env_version"), options_.pool.schedule.num_workers,
              options_.pool.schedule.num_workers == 1 ? "" : "s", seconds_since(begin));
    loaded_ = std::move(said);
  }
  return *loaded_;
}

void PythonEnvironment::prepare() const { loaded(); }

std::int64_t PythonEnvironment::num_tasks(Split split) const {
  const json::object& splits = object_member(loaded(), "splits");
  const json::object& part = optional_object(splits, to_string(split));
  // Rows of the train split are no eval split: who evaluates decides what to do without one.
  if (part.empty() || (split == Split::kEval && optional_bool(part, "same_as_train", false))) return 0;
  return optional_integer(part, "num_tasks", options_.num_endless_tasks);
}

asio::awaitable<Task> PythonEnvironment::fetch_task(Split split, std::int64_t index) const {
  auto reading = pages_->row(split, index);
  Task task;
  task.row = co_await std::move(reading);
  task.example_id = index;
  task.env_name = name();
  task.prompt = optional_array(task.row->values, "prompt");
  task.answer = optional_text(task.row->values, "answer");
  task.info["split"] = to_string(split);
  co_return task;
}

Task PythonEnvironment::task(Split split, std::int64_t index) const {
  loaded();
  auto fetching = fetch_task(split, index);
  return pool().runtime().run_blocking(std::move(fetching), options_.page_limit + 10s, fmt::format("task {} of {}", index, name()));
}

std::int64_t PythonEnvironment::num_learners() const {
  std::int64_t count = 0;
  for (const json::value& seat : optional_array(loaded(), "seats"))
    if (seat.is_object() && optional_bool(seat.get_object(), "trainable", true)) ++count;
  return std::max<std::int64_t>(1, count);
}

bool PythonEnvironment::scores_groups() const noexcept {
  std::lock_guard lock(mutex_);
  return loaded_ && optional_bool(*loaded_, "group_scoring", false);
}

asio::awaitable<json::value> PythonEnvironment::save_state() const {
  {
    std::lock_guard lock(mutex_);
    if (!loaded_ || !optional_bool(*loaded_, "is_stateful", false)) co_return json::value(nullptr);
  }
  auto asking = pool().states(net::Clock::now() + options_.page_limit);
  const std::vector<json::value> states = co_await std::move(asking);
  co_return json::value(json::array(states.begin(), states.end()));
}

void PythonEnvironment::load_state(const json::value& state) const {
  if (!state.is_array() || state.get_array().empty()) return;
  std::unique_ptr<WorkerPool> old;
  {
    // Workers take a state only when they load the environment.
    std::lock_guard lock(mutex_);
    states_.assign(state.get_array().begin(), state.get_array().end());
    old = std::move(pool_);
    loaded_.reset();
  }
  old.reset();
  loaded();
}

std::map<std::string, double> PythonEnvironment::gauges() const {
  std::lock_guard lock(mutex_);
  if (!pool_) return {};
  const WorkerPool::Stats stats = pool_->stats();
  return {{"rss_mb", stats.rss_mb},
          {"pss_mb", stats.pss_mb},
          {"loop_lag_ms", stats.max_lag_ms},
          {"workers", static_cast<double>(stats.num_ready)},
          {"worker_deaths", static_cast<double>(stats.num_deaths)},
          {"queued_rollouts", static_cast<double>(stats.num_queued)}};
}

json::array PythonEnvironment::tools(const Task&) const { return optional_array(loaded(), "tools"); }

/// RunRequest::members of a rollout.
std::string PythonEnvironment::run_members(const Task& task, const RolloutContext& context, const json::object& sampling,
                                           net::TimePoint now) const {
  unsigned char bytes[2048];
  json::monotonic_resource memory(bytes, sizeof bytes);
  json::object message(&memory);
  message.reserve(16);
  message["env_key"] = kEnvKey;
  message["split"] = text_member(task.info, "split");
  message["mode"] = context.is_training ? "train" : "eval";
  if (scores_groups()) {
    message["group_id"] = context.group_id;
    message["hold"] = true;
  }
  if (!options_.state_columns.empty()) {
    json::array columns(options_.state_columns.begin(), options_.state_columns.end());
    message["columns"] = std::move(columns);
  }
  // A group's worker may die before the scores are asked: then the sample has to tell the messages.
  if (!scores_groups()) message["want"] = json::object{{"brief", true}};
  message["model"] = options_.model;
  message["sampling"] = sampling;
  message["deadline_s"] = std::max(0.001, std::chrono::duration<double>(context.deadline - now).count());
  const std::string text = text::to_json_text(message);
  return text.substr(1, text.size() - 2);
}

/// What one sample tells of its rollout, but for the messages and the reward.
void PythonEnvironment::fill_seat(Episode& episode, const json::object& sample, const json::object& result, const Player& player) const {
  if (const std::string answer = optional_text(sample, "answer"); !answer.empty()) episode.answer = answer;
  episode.info = optional_object(sample, "info");
  for (const auto& item : optional_object(sample, "columns")) episode.info[item.key()] = item.value();
  episode.tool_defs = optional_array(sample, "tools");
  episode.stop_condition = optional_text(sample, "stop_condition");
  episode.is_truncated = optional_bool(sample, "is_truncated", false);
  const json::object& timing = optional_object(sample, "timing");
  episode.timing.scoring = optional_number(timing, "scoring_s", 0);
  put_scores(episode, sample);
  if (player.is_out_of_tokens()) episode.stop_condition = "max_total_completion_tokens_reached";
  episode.is_completed = true;
  for (const json::value& warning : optional_array(sample, "warnings"))
    if (text::is_text(warning)) log::warning("{}: task {}: {}", name(), episode.example_id, std::string(warning.get_string()));
  if (!optional_object(result, "error").empty())
    set_error(episode, to_episode_error(optional_object(result, "error"), player.model_error()));
  else if (!optional_bool(sample, "ok", true))
    set_error(episode, to_episode_error(optional_object(sample, "error"), player.model_error()));
}

void PythonEnvironment::fill(Episode& episode, const json::object& result, Player& player, const RolloutContext& context) const {
  std::vector<const json::object*> learners;
  const json::array& samples = array_member(result, "samples");
  for (const json::value& sample : samples) {
    if (!sample.is_object()) fail(ErrorCode::kCorrupt, "{}: a sample of a result is no object", name());
    if (optional_bool(sample.get_object(), "trainable", true)) learners.push_back(&sample.get_object());
    if (samples.size() > 1)
      if (const auto reward = number_at(sample.get_object(), "reward"))
        episode.metrics["reward/" + optional_text(sample.get_object(), "seat")] = *reward;
  }
  if (learners.empty()) {
    set_error(episode, {"EmptyEpisode", "no seat of the rollout that learns has acted", false});
    return;
  }
  const json::object& sample = *learners.front();
  const bool is_split = learners.size() > 1 && context.is_training;
  const Episode blank = is_split ? episode : Episode();
  put_messages(episode, sample, player);
  episode.trajectory = player.take_steps(learners.size() == 1 || is_split ? &optional_array(sample, "calls") : nullptr);
  fill_seat(episode, sample, result, player);
  if (samples.size() > 1 && (learners.size() == 1 || is_split)) episode.seat = optional_text(sample, "seat");
  if (is_split) {
    for (std::size_t i = 1; i < learners.size(); ++i) {
      Episode& other = episode.others.emplace_back(blank);
      other.trajectory_id = fmt::format("{}/{}", blank.trajectory_id, i);
      put_messages(other, *learners[i], player);
      other.trajectory = player.take_steps(&optional_array(*learners[i], "calls"));
      fill_seat(other, *learners[i], result, player);
      other.seat = optional_text(*learners[i], "seat");
      if (!other.error) set_reward(other, *learners[i]);
    }
    if (!episode.error) set_reward(episode, sample);
    fail_together(episode);
  } else if (learners.size() > 1 && !episode.error) {
    double sum = 0;
    for (const json::object* learner : learners) sum += optional_number(*learner, "reward", 0);
    episode.reward = sum / static_cast<double>(learners.size());
  } else if (episode.error) {
    return;
  } else if (optional_bool(result, "held", false)) {
    hold(context, result, sample);
  } else {
    set_reward(episode, sample);
  }
}

asio::awaitable<Episode> PythonEnvironment::run(Task task, RolloutContext context) const {
  PRL_CHECK(context.client != nullptr && task.row != nullptr, "{}: a rollout needs a chat client and a task of this environment", name());
  Episode episode;
  episode.trajectory_id = context.trajectory_id;
  episode.example_id = task.example_id;
  episode.env_name = name();
  episode.prompt = std::move(task.prompt);
  episode.answer = std::move(task.answer);
  episode.temperature = context.sampling.temperature;
  episode.timing.start_time = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const net::TimePoint begin = net::Clock::now();
  json::object sampling = sampling_json(context.sampling);
  RunRequest request{.members = run_members(task, context, sampling, begin),
                     .session = context.trajectory_id,
                     .row = std::shared_ptr<const std::string>(task.row, &task.row->text),
                     .task = fmt::format("{}:{}", text_member(task.info, "split"), task.example_id),
                     .group = scores_groups() ? context.group_id : std::string()};
  const std::shared_ptr<PooledRun> run = pool().submit(std::move(request));
  RunGuard guard(run);
  const auto executor = co_await asio::this_coro::executor;
  Player player(executor, run, &context, std::move(sampling),
                {.judge = options_.judge, .max_total_completion_tokens = context.max_total_completion_tokens});
  std::optional<RunEvent> end;
  std::exception_ptr failure;
  try {
    // The worker keeps the deadline itself, and says what it was doing.
    auto playing = player.until_end(context.deadline + 3s);
    end = co_await std::move(playing);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  if (end) guard.has_ended();
  co_await asio::this_coro::reset_cancellation_state();
  auto stopping = player.stop();
  co_await std::move(stopping);
  if (failure) std::rethrow_exception(failure);
  try {
    if (!end) {
      set_error(episode, {"TimeoutError", "the worker did not end the rollout at its deadline", false});
    } else if (end->failure) {
      set_error(episode, {end->failure->type, end->failure->message, end->failure->is_transient});
    } else if (text_member(end->message, "t") == "result") {
      fill(episode, end->message, player, context);
    } else if (text_member(end->message, "t") == "cancelled") {
      set_error(episode, {"CancelledError", "the worker cancelled the rollout", true});
    } else {
      set_error(episode, to_episode_error(optional_object(end->message, "error"), player.model_error()));
    }
    if (episode.trajectory.empty()) episode.trajectory = player.take_steps(nullptr);
  } catch (const Error& error) {
    set_error(episode, {"ProtocolError", error.what(), false});
  }
  // The library scores 0 where a reward function fails; what a judge did not say is no reward.
  if (player.judge_error() && (!episode.error || episode.error->type != "TimeoutError"))
    set_error(episode, {"JudgeError", player.judge_error()->what(), is_transient(player.judge_error()->code())});
  fail_together(episode);
  const double seconds = seconds_since(begin);
  const auto finish = [&](Episode& rollout) {
    for (const TrajectoryStep& step : rollout.trajectory) rollout.is_truncated = rollout.is_truncated || step.is_truncated;
    rollout.metrics["num_turns"] = static_cast<double>(rollout.num_turns());
    rollout.timing.model = player.model_seconds();
    rollout.timing.total = seconds;
    rollout.timing.generation = std::max(0.0, rollout.timing.total - rollout.timing.scoring);
    rollout.timing.env = std::max(0.0, rollout.timing.generation - rollout.timing.model);
  };
  finish(episode);
  for (Episode& other : episode.others) finish(other);
  co_return episode;
}

/// Remembers a rollout that a worker keeps until its group is scored; groups that nobody asked the scores of are forgotten, oldest first.
void PythonEnvironment::hold(const RolloutContext& context, const json::object& result, const json::object& sample) const {
  std::optional<std::string> forgotten;
  {
    std::lock_guard lock(mutex_);
    held_[context.trajectory_id] = Held{text_member(result, "run_id"), context.group_id, json::object(sample, json::storage_ptr())};
    if (std::find(held_groups_.begin(), held_groups_.end(), context.group_id) == held_groups_.end())
      held_groups_.push_back(context.group_id);
    if (held_groups_.size() > kMaxHeldGroups) {
      forgotten = std::move(held_groups_.front());
      held_groups_.pop_front();
      std::erase_if(held_, [&](const auto& item) { return item.second.group_id == *forgotten; });
    }
  }
  if (forgotten) pool().release_group(*forgotten);
}

std::vector<std::optional<PythonEnvironment::Held>> PythonEnvironment::take_held(std::span<const Episode> group) const {
  std::vector<std::optional<Held>> members;
  std::lock_guard lock(mutex_);
  for (const Episode& episode : group) {
    auto& member = members.emplace_back();
    const auto it = held_.find(episode.trajectory_id);
    if (it == held_.end()) continue;
    if (!episode.error) member = std::move(it->second);
    held_.erase(it);
  }
  for (const auto& member : members)
    if (member) std::erase(held_groups_, member->group_id);
  return members;
}

asio::awaitable<void> PythonEnvironment::score_group(std::span<Episode> group) const {
  std::vector<std::optional<Held>> members = take_held(group);
  const auto first = std::find_if(members.begin(), members.end(), [](const auto& member) { return member.has_value(); });
  if (first == members.end()) co_return;
  const std::string group_id = (*first)->group_id;
  json::object request;
  request["t"] = "score_group";
  request["env_key"] = kEnvKey;
  request["group_id"] = group_id;
  json::array entries;
  for (const auto& member : members) {
    json::object entry;
    entry["run_id"] = member ? member->run_id : std::string("failed");
    entry["sample"] = member ? json::value(member->sample) : json::value(nullptr);
    if (!member) entry["failed"] = true;
    entries.push_back(std::move(entry));
  }
  request["members"] = std::move(entries);
  std::optional<Error> failure;
  try {
    auto asking = pool().request(std::move(request), net::Clock::now() + options_.start_limit, WorkerPool::Who::kGroup, group_id);
    const json::object reply = co_await std::move(asking);
    const json::array& samples = array_member(reply, "samples");
    if (samples.size() != group.size()) fail(ErrorCode::kCorrupt, "{}: {} scores for a group of {}", name(), samples.size(), group.size());
    for (std::size_t i = 0; i < group.size(); ++i) {
      if (!members[i]) continue;
      if (!samples[i].is_object()) fail(ErrorCode::kCorrupt, "{}: no scores for rollout {} of a group", name(), i);
      put_scores(group[i], samples[i].get_object());
      set_reward(group[i], samples[i].get_object());
    }
  } catch (const std::exception&) {
    failure = net::to_error(std::current_exception());
  }
  pool().release_group(group_id);
  if (!failure) co_return;
  if (failure->code() == ErrorCode::kCancelled) throw *failure;
  for (std::size_t i = 0; i < group.size(); ++i)
    if (members[i] && !group[i].error) set_error(group[i], {"ScoringError", failure->what(), false});
}

}  // namespace prl::env::python
