#include "launch/ranks.hpp"

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/error.hpp"
#include "base/log.hpp"

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
  if (env.size > 1 && env.store.empty())
    fail(ErrorCode::kInvalidArgument, "[PRL_STORE] {} ranks need a place to meet: file:<folder> or tcp://<host>:<port>", env.size);
  return env;
}

comm::Mesh make_mesh(const RankEnv& env, const std::shared_ptr<DeviceRuntime>& runtime, std::chrono::milliseconds timeout) {
  comm::CommOptions options;
  options.rank = env.rank;
  options.size = env.size;
  options.timeout = timeout;
  options.runtime = runtime;
  options.host = env.host;
  if (env.size > 1) {
    options.store = comm::make_store(env.store, timeout);
    options.generation = options.store->generation();
  }
  comm::Mesh mesh(comm::make_communicator(std::move(options)));
  if (env.size > 1) log::info("rank {} of {} over {}", env.rank, env.size, mesh.world().backend());
  return mesh;
}

}  // namespace prl::launch
