#include "launch/ranks.hpp"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include <fmt/core.h>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/thread_pool.hpp"
#include "comm/admission.hpp"
#include "comm/meeting.hpp"

namespace prl::launch {

namespace {

constexpr int kMaxRanks = 4096;

int number_in(const char* name, const char* text, int least, int most) {
  int number = 0;
  const char* end = text + std::strlen(text);
  const auto [at, error] = std::from_chars(text, end, number);
  if (error != std::errc() || at != end || number < least || number > most)
    fail(ErrorCode::kInvalidArgument, "[{}] is '{}', a whole number from {} to {} is wanted", name, text, least, most);
  return number;
}

}  // namespace

RankEnv rank_env() {
  RankEnv env;
  const char* size = std::getenv("PRL_WORLD_SIZE");
  if (size == nullptr) return env;
  env.size = number_in("PRL_WORLD_SIZE", size, 1, kMaxRanks);
  const char* rank = std::getenv("PRL_RANK");
  if (rank == nullptr) fail(ErrorCode::kInvalidArgument, "[PRL_RANK] is not set, though PRL_WORLD_SIZE is: each rank has its own number");
  env.rank = number_in("PRL_RANK", rank, 0, env.size - 1);
  if (const char* host = std::getenv("PRL_HOST")) env.host = host;
  if (const char* store = std::getenv("PRL_STORE")) env.store = store;
  if (const char* local = std::getenv("PRL_LOCAL_WORLD_SIZE")) env.local_size = number_in("PRL_LOCAL_WORLD_SIZE", local, 1, env.size);
  if (const char* join = std::getenv("PRL_JOIN")) env.joins_as = join;
  env.is_told = true;
  if (env.size > 1 && env.store.empty())
    fail(ErrorCode::kInvalidArgument, "[PRL_STORE] {} ranks need a place to meet: file:<folder> or tcp://<host>:<port>", env.size);
  return env;
}

void use_replicas(RankEnv& env, int num_replicas) {
  if (env.size % num_replicas != 0)
    fail(ErrorCode::kInvalidArgument,
         "model.dp_replicate: {} copies of the state cannot be divided among {} trainer {}; use a divisor of that", num_replicas, env.size,
         env.size == 1 ? "rank" : "ranks");
  env.num_replicas = num_replicas;
}

void check_ranks_per_row(const RankEnv& env, int ranks_per_row) {
  if (env.size % ranks_per_row != 0)
    fail(ErrorCode::kInvalidArgument, "model.cp: {} ranks to a row cannot divide {} trainer {}; use a divisor of that", ranks_per_row,
         env.size, env.size == 1 ? "rank" : "ranks");
}

void check_expert_ranks(const RankEnv& env, const config::TrainerModelConfig& model) {
  const std::int64_t ep = model.ep.number.value_or(1);
  if (ep != 1 && ep != env.size)
    fail(ErrorCode::kInvalidArgument, "model.ep: {} ranks cannot divide the experts among {} trainer {}; use 1{}", ep, env.size,
         env.size == 1 ? "rank" : "ranks", env.size == 1 ? std::string() : fmt::format(", or {}", env.size));
}

void share_masters(trainer::PolicyOptions& policy, const RankEnv& env, const trainer::GradientStepOptions& step,
                   const config::TrainerModelConfig& model) {
  check_expert_ranks(env, model);
  const bool divides_experts = model.ep.number.value_or(1) > 1;
  if (divides_experts) trainer::check_experts_divide(trainer::model_config(policy), env.size);
  const int num_shards = env.size / env.num_replicas;
  policy.share = {env.rank % num_shards,
                  num_shards,
                  trainer::keeps_whole_blocks(step.optim),
                  trainer::divides_grads(env.size, step.reduce),
                  trainer::splits_tied_grads(step.cut.num_leaves, step.reduce),
                  trainer::num_grad_places(step.overlaps_exchange, env.size),
                  divides_experts};
  // Where a copy of the state is one rank's there is nobody to gather from.
  policy.gathers_layers = (model.reshard_after_forward || divides_experts) && num_shards > 1;
}

namespace {

constexpr const char* kStartKey = "run/start";
constexpr std::chrono::milliseconds kStoreTimeout{60'000}, kLookTimeout{2'000};
/// Newcomers are let in between two steps, and a step may wait for its samples.
constexpr std::chrono::milliseconds kJoinPatience{2 * 3'600'000};
constexpr std::string_view kGo = "go", kFinished = "finished";

}  // namespace

void tell_start(const RankEnv& env, bool is_finished) {
  if (env.size > 1) comm::make_store(env.store, kStoreTimeout)->set(kStartKey, is_finished ? kFinished : kGo);
}

bool was_start_told(const RankEnv& env) {
  if (env.size == 1) return false;
  const std::optional<std::string> word = comm::make_store(env.store, kStoreTimeout)->get(kStartKey);
  return word == kGo || word == kFinished;
}

bool have_met(const std::string& store) noexcept {
  try {
    return comm::has_met(*comm::make_store(store, kLookTimeout));
  } catch (const std::exception& error) {
    log::warning("whether the ranks have met cannot be seen: {}", error.what());
    return true;
  }
}

void tell_failure(const RankEnv& env, std::string_view reason) noexcept {
  try {
    if (env.size > 1) comm::make_store(env.store, kStoreTimeout)->set(kStartKey, reason.substr(0, 4096));
  } catch (const std::exception&) {
    // The others wait for their deadline then.
  }
}

bool wait_for_start(const RankEnv& env, std::chrono::milliseconds timeout) {
  std::string word;
  try {
    word = comm::make_store(env.store, timeout)->wait(kStartKey, timeout, "rank 0");
  } catch (const Error& error) {
    throw comm::PeerLost({0}, error.what());
  }
  if (word != kGo && word != kFinished) throw comm::PeerLost({0}, fmt::format("[ranks] rank 0 could not start: {}", word));
  return word == kFinished;
}

config::ComputeConfig rank_compute(const RankEnv& env, config::ComputeConfig compute) {
  if (compute.num_threads == 0 && env.local_size > 1) compute.num_threads = std::max(1, num_available_cores() / env.local_size);
  return compute;
}

namespace {

comm::CommOptions comm_options(const RankEnv& env, const std::shared_ptr<DeviceRuntime>& runtime, std::chrono::milliseconds timeout) {
  comm::CommOptions options;
  options.rank = env.rank;
  options.size = env.size;
  options.timeout = timeout;
  options.runtime = runtime;
  options.host = env.host;
  if (env.size > 1) options.store = comm::make_store(env.store, timeout);
  return options;
}

}  // namespace

std::optional<comm::Mesh> join_mesh(const RankEnv& env, const std::shared_ptr<DeviceRuntime>& runtime, std::chrono::milliseconds timeout,
                                    std::stop_token stop) {
  const comm::CommOptions options = comm_options(env, runtime, timeout);
  log::info("asks as '{}' to join the ranks that go on", env.joins_as);
  std::unique_ptr<comm::Communicator> group = comm::join(options, env.joins_as, kJoinPatience, std::move(stop));
  if (group == nullptr) return std::nullopt;
  const comm::MeshShape shape = comm::replicated_shape(group->size(), env.num_replicas);
  return comm::Mesh(std::move(group), shape);
}

StopWhileMeeting::StopWhileMeeting(std::stop_token stop, std::chrono::milliseconds grace)
    : thread_([stop = std::move(stop), grace](std::stop_token has_met) {
        std::mutex mutex;
        std::condition_variable_any wake;
        std::unique_lock lock(mutex);
        const auto pause = [&](std::chrono::milliseconds time) { wake.wait_for(lock, has_met, time, [] { return false; }); };
        while (!has_met.stop_requested() && !stop.stop_requested()) pause(std::chrono::milliseconds(100));
        pause(grace);
        if (has_met.stop_requested()) return;
        log::warning("stopped while the ranks come together: this one ends without the others");
        ::_exit(130);
      }) {}

comm::Mesh make_mesh(const RankEnv& env, const std::shared_ptr<DeviceRuntime>& runtime, std::chrono::milliseconds timeout) {
  comm::CommOptions options = comm_options(env, runtime, timeout);
  comm::Mesh mesh = comm::meet(std::move(options), comm::replicated_shape(env.size, env.num_replicas));
  if (env.size > 1) log::info("rank {} of {} over {}", env.rank, env.size, mesh.world().backend());
  return mesh;
}

std::optional<comm::Mesh> meet(const RankEnv& env, const std::shared_ptr<DeviceRuntime>& runtime, std::chrono::milliseconds timeout,
                               std::stop_token stop) {
  if (!env.joins_as.empty()) return join_mesh(env, runtime, timeout, std::move(stop));
  const StopWhileMeeting watch(std::move(stop));
  return make_mesh(env, runtime, timeout);
}

}  // namespace prl::launch
