#include "orchestrator/group_runner.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "base/failure.hpp"
#include "base/log.hpp"
#include "base/rng.hpp"
#include "net/deadline.hpp"
#include "net/errors.hpp"

namespace prl::orchestrator {

using namespace std::chrono_literals;

namespace {

/// The rollouts of a group whose episodes have all ended, in the order of FinishedGroup.
std::vector<env::Episode*> rollouts_of(std::vector<std::optional<env::Episode>>& episodes) {
  std::vector<env::Episode*> rollouts;
  for (std::optional<env::Episode>& episode : episodes) {
    rollouts.push_back(&*episode);
    for (env::Episode& other : episode->others) rollouts.push_back(&other);
  }
  return rollouts;
}

std::string trajectory_of(const EpisodeStart& info) {
  return fmt::format("{}-{}-{}-{}-{}", info.step, info.ordinal, info.task.env_idx, info.task.task_idx, info.rollout_idx);
}

/// A demonstration that is the task's, not the rollout's, goes into the rollout's info.
void keep_demonstration(const std::string& key, const env::Task& task, env::Episode& episode) {
  if (key.empty()) return;
  const auto find = [&key](const boost::json::value* object) -> const boost::json::value* {
    return object != nullptr && object->is_object() ? object->get_object().if_contains(key) : nullptr;
  };
  const boost::json::value info = task.info;
  const boost::json::value* found = find(&info);
  for (const char* part : {"info", "data"})
    if (found == nullptr && task.row) found = find(task.row->values.if_contains(part));
  const boost::json::value answer(key == "answer" && !task.answer.empty() ? boost::json::value(task.answer) : boost::json::value(nullptr));
  if (found == nullptr && !answer.is_null()) found = &answer;
  if (found == nullptr) return;
  if (!episode.info.contains(key)) episode.info[key] = *found;
  for (env::Episode& other : episode.others)
    if (!other.info.contains(key)) other.info[key] = *found;
}

}  // namespace

GroupRunner::GroupRunner(asio::any_io_executor executor, GroupRunnerOptions options, std::vector<TrainEnv> environments,
                         std::shared_ptr<env::ChatClientFactory> chat, std::shared_ptr<env::PromptScorer> teacher)
    : executor_(std::move(executor)), options_(std::move(options)), environments_(std::move(environments)), teacher_(std::move(teacher)) {
  for (const TrainEnv& train_env : environments_) {
    auto activity = std::make_shared<EnvActivity>(std::string(train_env.environment->name()));
    watched_.push_back({"rollouts of " + std::string(train_env.environment->name()), activity, watch_calls(chat, activity)});
  }
}

void GroupRunner::start(const EpisodeStart& info) {
  OpenGroup& group = groups_[info.group.value];
  if (!group.tasks) {
    group.info = info;
    group.episodes.resize(static_cast<std::size_t>(info.group_size));
    if (teacher_) group.scores.resize(static_cast<std::size_t>(info.group_size));
    group.tasks = std::make_unique<net::TaskGroup>(executor_, fmt::format("group {}", info.group.value));
  }
  ++group.num_started;
  ++counts_.num_started;
  group.tasks->spawn(fmt::format("rollout {} of group {}", info.rollout_idx, info.group.value), run(info));
}

env::RolloutState GroupRunner::state_of(const EpisodeStart& info, std::string_view trajectory_id) const {
  return {.trajectory_id = trajectory_id,
          .example_id = info.task.task_idx,
          .rollout_idx = info.rollout_idx,
          .task = environments_[static_cast<std::size_t>(info.task.env_idx)].environment->name()};
}

asio::awaitable<env::Episode> GroupRunner::play(EpisodeStart info, env::RolloutAttempt attempt) {
  const TrainEnv& train_env = environments_[static_cast<std::size_t>(info.task.env_idx)];
  env::ConversationOptions conversation;
  conversation.session_id = trajectory_of(info);
  if (attempt.number > 0) conversation.session_id += fmt::format("-try{}", attempt.number);
  conversation.cache_salt = fmt::format("v{}", info.version.value);
  conversation.wants_roles = train_env.wants_roles;
  conversation.headers = env::state_headers(options_.headers_from_state, state_of(info, conversation.session_id));
  env::RolloutContext rollout;
  rollout.trajectory_id = conversation.session_id;
  rollout.group_id = fmt::format("group-{}", info.group.value);
  rollout.is_training = true;
  const Watched watched = watched_[static_cast<std::size_t>(info.task.env_idx)];
  const spans::Scope span(spans::Detail::kFine, watched.lane, "rollout", info.step, /*may_overlap=*/true);
  const PlayedRollout played(*watched.activity);
  const std::unique_ptr<env::ChatClient> client = watched.chat->open(conversation);
  rollout.client = client.get();
  rollout.open_conversation = env::conversation_opener(watched.chat, std::move(conversation));
  rollout.sampling = train_env.sampling;
  const std::uint64_t base = train_env.sampling.seed.value_or(options_.seed);
  rollout.seed = mix_seed(mix_seed(base, static_cast<std::uint64_t>(info.step), static_cast<std::uint64_t>(info.ordinal)),
                          mix_seed(static_cast<std::uint64_t>(info.task.env_idx), static_cast<std::uint64_t>(info.task.task_idx)),
                          static_cast<std::uint64_t>(info.rollout_idx));
  rollout.seed = attempt.seed_from(*rollout.seed);
  rollout.max_total_completion_tokens = train_env.max_total_completion_tokens;
  rollout.deadline = net::Clock::now() + train_env.rollout_timeout;
  // The environment's own deadline comes first and keeps the partial episode.
  const net::TimePoint deadline = rollout.deadline + 5s;
  auto fetching = train_env.environment->fetch_task(env::Split::kTrain, info.task.task_idx);
  env::Task task = co_await std::move(fetching);
  auto running = train_env.environment->run(task, std::move(rollout));
  auto guarded = net::with_deadline(std::move(running), deadline, fmt::format("a rollout of {}", train_env.environment->name()));
  env::Episode episode = co_await std::move(guarded);
  keep_demonstration(options_.scoring.demonstrations.key, task, episode);
  co_return episode;
}

asio::awaitable<void> GroupRunner::wait_to_retry(EpisodeStart info, int attempt, std::string reason) {
  const auto wait = std::min<std::chrono::milliseconds>(options_.retry_wait * (1 << std::min(attempt, 10)), 60s);
  log::debug("rollout {} of group {} failed ({}); again in {} ms", info.rollout_idx, info.group.value, reason, wait.count());
  // A server that is away fails hundreds of rollouts at once: one line for all of them, and one every ten seconds.
  ++num_unreported_failures_;
  const net::TimePoint now = net::Clock::now();
  if (now >= next_report_) {
    log::warning("{} rollout{} failed and will be tried again, the last one because: {}", num_unreported_failures_,
                 num_unreported_failures_ == 1 ? "" : "s", reason);
    num_unreported_failures_ = 0;
    next_report_ = now + 10s;
  }
  co_await net::sleep_for(wait);
}

/// nullopt when the group was dropped meanwhile.
asio::awaitable<std::optional<env::Episode>> GroupRunner::play_until_done(EpisodeStart info) {
  const TrainEnv& train_env = environments_[static_cast<std::size_t>(info.task.env_idx)];
  for (env::RolloutAttempt attempt;;) {
    std::optional<env::Episode> episode;
    try {
      auto playing = play(info, attempt);
      episode = co_await std::move(playing);
    } catch (const std::exception&) {
      const Error error = net::to_error(std::current_exception());
      const bool is_cancelled = error.code() == ErrorCode::kCancelled;
      if (is_cancelled && !groups_.contains(info.group.value)) co_return std::nullopt;
      // Whatever an environment throws is one failed episode, counted; it never ends the run by itself.
      episode.emplace();
      episode->env_name = train_env.environment->name();
      episode->example_id = info.task.task_idx;
      episode->stop_condition = "has_error";
      episode->error = env::EpisodeError{is_cancelled ? "ModelError" : std::string(to_string(error.code())), error.what(), is_cancelled};
    }
    if (!attempt.try_again(*episode, train_env.max_retries)) co_return episode;
    auto waiting = wait_to_retry(info, attempt.number - 1, episode->error->message);
    co_await std::move(waiting);
  }
}

/// nullopt when the group was dropped meanwhile. A teacher that fails leaves an error in the episode.
asio::awaitable<std::optional<TurnScores>> GroupRunner::score_until_done(EpisodeStart info, env::Episode* episode) {
  const TrainEnv& train_env = environments_[static_cast<std::size_t>(info.task.env_idx)];
  const net::TimePoint begin = net::Clock::now();
  for (int attempt = 0;; ++attempt) {
    std::optional<Error> failure;
    try {
      ReferenceScoring options = options_.scoring;
      options.headers = env::state_headers(options_.teacher_headers_from_state, state_of(info, trajectory_of(info)));
      auto scoring = score_episode(episode, teacher_.get(), std::move(options), net::Clock::now() + train_env.rollout_timeout);
      TurnScores scores = co_await std::move(scoring);
      scoring_time_.seconds += std::chrono::duration<double>(net::Clock::now() - begin).count();
      ++scoring_time_.num_episodes;
      co_return scores;
    } catch (const std::exception&) {
      failure = net::to_error(std::current_exception());
    }
    if (failure->code() == ErrorCode::kCancelled && !groups_.contains(info.group.value)) co_return std::nullopt;
    if (attempt >= train_env.max_retries || !is_transient(failure->code())) {
      episode->stop_condition = "has_error";
      episode->error = env::EpisodeError{"TeacherError", failure->what(), is_transient(failure->code()), refuses_all(failure->code())};
      co_return TurnScores{};
    }
    auto waiting = wait_to_retry(info, attempt, fmt::format("the teacher did not score it: {}", failure->what()));
    co_await std::move(waiting);
  }
}

/// Of the episode and its further seats; a seat that is not scored fails all of them.
asio::awaitable<std::optional<std::vector<TurnScores>>> GroupRunner::score_seats(EpisodeStart info, env::Episode* episode) {
  std::vector<TurnScores> scores(1 + episode->others.size());
  for (std::size_t i = 0; i < scores.size() && !episode->error; ++i) {
    env::Episode* seat = i == 0 ? episode : &episode->others[i - 1];
    auto scoring = score_until_done(info, seat);
    std::optional<TurnScores> found = co_await std::move(scoring);
    if (!found) co_return std::nullopt;
    scores[i] = std::move(*found);
    if (seat->error) episode->error = seat->error;
  }
  for (env::Episode& other : episode->others)
    if (episode->error) other.error = episode->error;
  co_return scores;
}

asio::awaitable<void> GroupRunner::run(EpisodeStart info) {
  auto playing = play_until_done(info);
  std::optional<env::Episode> episode = co_await std::move(playing);
  if (!episode) co_return;
  std::optional<std::vector<TurnScores>> scores(std::vector<TurnScores>(1 + episode->others.size()));
  if (teacher_ && !episode->error) {
    auto scoring = score_seats(info, &*episode);
    scores = co_await std::move(scoring);
    if (!scores) co_return;
  }
  if (!keep(info, std::move(*episode), std::move(*scores))) co_return;
  OpenGroup& group = groups_.at(info.group.value);
  if (group.num_done == group.info.group_size) {
    auto finishing = finish_group(info);
    if (!co_await std::move(finishing)) co_return;
    groups_.at(info.group.value).is_scored = true;
    finished_.push_back(info.group.value);
  }
  if (on_episode_end_) on_episode_end_(info.group);
}

/// What is known only once all episodes of a group have ended; false when it was dropped meanwhile.
asio::awaitable<bool> GroupRunner::finish_group(EpisodeStart info) {
  const TrainEnv& train_env = environments_[static_cast<std::size_t>(info.task.env_idx)];
  if (train_env.environment->scores_groups()) {
    auto scoring = score_group(info);
    if (!co_await std::move(scoring)) co_return false;
  }
  if (train_env.rewards) {
    auto asking = ask_rewards(info);
    if (!co_await std::move(asking)) co_return false;
  }
  if (!train_env.filters.empty()) {
    auto asking = ask_filters(info);
    if (!co_await std::move(asking)) co_return false;
  }
  if (train_env.echo_filter) {
    auto asking = ask_echo(info);
    if (!co_await std::move(asking)) co_return false;
  }
  if (train_env.advantages) {
    auto asking = ask_advantages(info);
    if (!co_await std::move(asking)) co_return false;
  }
  co_return true;
}

/// Scores a group whose episodes have all ended; false when it was dropped meanwhile.
asio::awaitable<bool> GroupRunner::score_group(EpisodeStart info) {
  const TrainEnv& train_env = environments_[static_cast<std::size_t>(info.task.env_idx)];
  std::vector<env::Episode> episodes;
  for (const std::optional<env::Episode>& episode : groups_.at(info.group.value).episodes) episodes.push_back(*episode);
  std::optional<Error> failure;
  try {
    const PlayedRollout scored(*watched_[static_cast<std::size_t>(info.task.env_idx)].activity);
    auto scoring = train_env.environment->score_group(episodes);
    auto guarded = net::with_deadline(std::move(scoring), net::Clock::now() + train_env.rollout_timeout,
                                      fmt::format("the scores of a group of {}", train_env.environment->name()));
    co_await std::move(guarded);
  } catch (const std::exception&) {
    failure = net::to_error(std::current_exception());
  }
  const auto it = groups_.find(info.group.value);
  if (it == groups_.end()) co_return false;  // dropped in the meantime, and counted then
  for (std::size_t i = 0; i < episodes.size(); ++i) {
    if (failure && !episodes[i].error)
      episodes[i].error = env::EpisodeError{std::string(to_string(failure->code())), failure->what(), false};
    it->second.episodes[i] = std::move(episodes[i]);
  }
  co_return true;
}

/// An answer for each rollout of the group that can train, by a function outside this program; where it fails, so do they, with an error
/// of that type. Nullopt when the group was dropped meanwhile.
template <class Answer>
asio::awaitable<std::optional<std::vector<std::optional<Answer>>>> GroupRunner::ask(EpisodeStart info, Ask<Answer> function,
                                                                                    std::string error_type, bool with_branches) {
  boost::json::array rows;
  std::vector<std::size_t> places;
  std::vector<std::optional<Answer>> answers;
  {
    const std::vector<env::Episode*> rollouts = rollouts_of(groups_.at(info.group.value).episodes);
    answers.resize(rollouts.size());
    for (std::size_t i = 0; i < rollouts.size(); ++i)
      if (!rollouts[i]->error && rollouts[i]->num_completion_tokens() > 0) {
        rows.push_back(env::to_json(*rollouts[i]));
        if (with_branches) rows.back().as_object()["branches"] = echo_branches(*rollouts[i], options_.scoring.strategy);
        places.push_back(i);
      }
  }
  std::optional<Error> failure;
  try {
    if (!places.empty()) {
      auto asking = function(std::move(rows));
      std::vector<Answer> given = co_await std::move(asking);
      PRL_CHECK(given.size() == places.size(), "{} answers for {} rollouts", given.size(), places.size());
      for (std::size_t i = 0; i < places.size(); ++i) answers[places[i]] = std::move(given[i]);
    }
  } catch (const std::exception&) {
    failure = net::to_error(std::current_exception());
  }
  const auto it = groups_.find(info.group.value);
  if (it == groups_.end()) co_return std::nullopt;
  if (failure) {
    const std::vector<env::Episode*> rollouts = rollouts_of(it->second.episodes);
    for (const std::size_t place : places) rollouts[place]->error = env::EpisodeError{error_type, failure->what(), false};
  }
  co_return answers;
}

asio::awaitable<bool> GroupRunner::ask_rewards(EpisodeStart info) {
  auto asking = ask<float>(info, environments_[static_cast<std::size_t>(info.task.env_idx)].rewards, "RewardError");
  const auto rewards = co_await std::move(asking);
  if (!rewards) co_return false;
  const std::vector<env::Episode*> rollouts = rollouts_of(groups_.at(info.group.value).episodes);
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    if (!(*rewards)[i]) continue;
    rollouts[i]->metrics["env_reward"] = rollouts[i]->reward;
    rollouts[i]->reward = static_cast<double>(*(*rewards)[i]);
  }
  co_return true;
}

asio::awaitable<bool> GroupRunner::ask_filters(EpisodeStart info) {
  for (const GroupFilter& filter : environments_[static_cast<std::size_t>(info.task.env_idx)].filters) {
    auto asking = ask<float>(info, filter.find, "FilterError");
    const auto findings = co_await std::move(asking);
    if (!findings) co_return false;
    OpenGroup& group = groups_.at(info.group.value);
    group.filter_findings.resize(findings->size());
    for (std::size_t i = 0; i < findings->size(); ++i)
      if (!group.filter_findings[i] && (*findings)[i].value_or(0) != 0)
        group.filter_findings[i] = FilterFinding{filter.name, filter.enforce};
  }
  co_return true;
}

asio::awaitable<bool> GroupRunner::ask_advantages(EpisodeStart info) {
  auto asking = ask<float>(info, environments_[static_cast<std::size_t>(info.task.env_idx)].advantages, "AdvantageError");
  const auto advantages = co_await std::move(asking);
  if (!advantages) co_return false;
  std::vector<float>& given = groups_.at(info.group.value).advantages;
  given.clear();
  for (const std::optional<float>& advantage : *advantages) given.push_back(advantage.value_or(0.0f));
  co_return true;
}

asio::awaitable<bool> GroupRunner::ask_echo(EpisodeStart info) {
  auto asking = ask<EchoMask>(info, environments_[static_cast<std::size_t>(info.task.env_idx)].echo_filter, "EchoFilterError", true);
  const auto masks = co_await std::move(asking);
  if (!masks) co_return false;
  std::vector<EchoMask>& kept = groups_.at(info.group.value).echo_masks;
  for (const std::optional<EchoMask>& mask : *masks) kept.push_back(mask.value_or(EchoMask{}));
  co_return true;
}

/// Puts an episode that has ended into its group; false if that was dropped in the meantime, and counted then.
bool GroupRunner::keep(const EpisodeStart& info, env::Episode episode, std::vector<TurnScores> scores) {
  const auto it = groups_.find(info.group.value);
  if (it == groups_.end()) return false;
  OpenGroup& group = it->second;
  std::optional<env::Episode>& slot = group.episodes[static_cast<std::size_t>(info.rollout_idx)];
  PRL_CHECK(!slot.has_value(), "rollout {} of group {} ended twice", info.rollout_idx, info.group.value);
  slot = std::move(episode);
  if (teacher_) group.scores[static_cast<std::size_t>(info.rollout_idx)] = std::move(scores);
  ++group.num_done;
  return true;
}

std::optional<FinishedGroup> GroupRunner::take_finished() {
  if (finished_.empty()) return std::nullopt;
  const std::int64_t id = options_.ordered ? groups_.begin()->first : finished_.front();
  if (!groups_.at(id).is_scored) return std::nullopt;
  OpenGroup group = std::move(groups_.at(id));
  groups_.erase(id);
  std::erase(finished_, id);
  FinishedGroup out;
  out.id = GroupId{id};
  out.task = group.info.task;
  out.step = group.info.step;
  out.version = group.info.version;
  for (std::size_t play = 0; play < group.episodes.size(); ++play) {
    std::vector<env::Episode> others = std::move(group.episodes[play]->others);
    group.episodes[play]->others.clear();
    out.episodes.push_back(std::move(*group.episodes[play]));
    std::move(others.begin(), others.end(), std::back_inserter(out.episodes));
    out.plays.resize(out.episodes.size(), static_cast<std::int64_t>(play));
    if (teacher_) std::move(group.scores[play].begin(), group.scores[play].end(), std::back_inserter(out.scores));
  }
  out.advantages = std::move(group.advantages);
  out.filter_findings = std::move(group.filter_findings);
  out.echo_masks = std::move(group.echo_masks);
  counts_.num_processed += group.info.group_size;
  return out;
}

void GroupRunner::drop(GroupId id) {
  const auto it = groups_.find(id.value);
  if (it == groups_.end()) return;
  OpenGroup& group = it->second;
  counts_.num_dropped += group.num_done;
  counts_.num_cancelled += group.num_started - group.num_done;
  group.tasks->cancel();
  cancelled_.emplace(id.value, std::move(group.tasks));
  groups_.erase(it);
  std::erase(finished_, id.value);
}

std::vector<GroupId> GroupRunner::open_groups() const {
  std::vector<GroupId> ids;
  for (const auto& [id, group] : groups_) ids.push_back(GroupId{id});
  return ids;
}

void GroupRunner::drop_all() {
  for (const GroupId id : open_groups()) drop(id);
}

void GroupRunner::reap() {
  std::erase_if(cancelled_, [](const auto& entry) { return entry.second->stats().num_running == 0; });
}

}  // namespace prl::orchestrator
