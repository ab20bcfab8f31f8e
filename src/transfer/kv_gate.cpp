#include "transfer/kv_gate.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"

namespace prl::transfer {
namespace {

/// Where weights change while prompts are on their way, one after another is computed where it decodes: all of them are counted, few told.
constexpr std::chrono::minutes kQuiet{1};

std::chrono::milliseconds left_until(Clock::time_point deadline) {
  return std::max(std::chrono::milliseconds(1), std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()));
}

std::string address_of(const KvPlace& place) { return fmt::format("{}:{}", place.host, place.port); }

}  // namespace

KvGate::KvGate(engine::Engine& engine, KvGateOptions options)
    : desk_(engine), options_(std::move(options)), server_(desk_, options_.server) {}

KvPlace KvGate::own_place() const {
  KvPlace place{.host = options_.own_host, .port = server_.port(), .signature = {}};
  place.signature = keyed_hash(options_.server.key, "place" + address_of(place));
  return place;
}

void KvGate::find_uncached(engine::PromptPtr prompt, const std::string& adapter, std::function<void(std::int64_t)> done) {
  const auto num_tokens = static_cast<std::int64_t>(prompt->tokens.size());
  desk_.count_cached(std::move(prompt), adapter, [num_tokens, size = desk_.block_size(), done = std::move(done)](std::int64_t num_cached) {
    done(num_cached < 0 ? -1 : num_tokens - num_cached * size);
  });
}

std::unique_ptr<KvLink> KvGate::take_idle(const KvPlace& place) {
  const std::lock_guard lock(mutex_);
  auto& links = idle_[address_of(place)];
  if (links.empty()) return nullptr;
  auto link = std::move(links.back());
  links.pop_back();
  return link;
}

std::unique_ptr<KvLink> KvGate::connect(const KvPlace& place, Clock::time_point deadline) const {
  return connect_tcp(place.host, place.port, {.key = options_.server.key, .layout = desk_.layout(), .block_size = desk_.block_size()},
                     deadline);
}

std::int64_t KvGate::pull(std::unique_ptr<KvLink>& link, const KvPlace& place, const Ask& ask, std::span<const engine::BlockParts> into,
                          Clock::time_point deadline) {
  if (link != nullptr) return link->pull(ask, into, deadline);
  link = take_idle(place);
  if (link != nullptr) {
    try {
      return link->pull(ask, into, deadline);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnavailable) throw;
      log::debug("[kv transfer] a connection to {} that was kept is of no more use: {}", address_of(place), error.what());
    }
  }
  link = connect(place, deadline);
  return link->pull(ask, into, deadline);
}

void KvGate::keep_link(const KvPlace& place, std::unique_ptr<KvLink> link) {
  const std::lock_guard lock(mutex_);
  auto& links = idle_[address_of(place)];
  if (links.size() < options_.max_idle_links) links.push_back(std::move(link));
}

std::int64_t KvGate::bring_all(engine::KvDesk::Key key, const engine::PromptPtr& prompt, const engine::KvDesk::Standing& standing,
                               const KvPlace& place, Clock::time_point deadline) {
  const auto chunk = std::max<std::int64_t>(1, static_cast<std::int64_t>(options_.chunk_bytes / desk_.block_bytes()));
  Ask ask{.identity = standing.identity, .prompt = *prompt, .first = standing.num_cached};
  std::unique_ptr<KvLink> link;
  while (ask.first < standing.num_useful) {
    ask.max_blocks = std::min(chunk, standing.num_useful - ask.first);
    const auto room = desk_.reserve(key, prompt, ask.identity, ask.first, ask.max_blocks, left_until(deadline));
    if (room.empty()) {
      log::debug("[kv transfer] no room for more than {} blocks of a prompt", ask.first - standing.num_cached);
      break;
    }
    ask.max_blocks = std::ssize(room);
    std::int64_t num_come = 0;
    try {
      num_come = pull(link, place, ask, room, deadline);
    } catch (const Error&) {
      desk_.publish(key, prompt, ask.identity.adapter, 0, left_until(deadline));
      const std::lock_guard lock(mutex_);
      stats_.num_blocks += ask.first - standing.num_cached;  // those stay
      throw;
    }
    const std::int64_t num_found = desk_.publish(key, prompt, ask.identity.adapter, num_come, left_until(deadline));
    ask.first += num_found;
    if (num_found < std::ssize(room)) break;
  }
  if (link != nullptr) keep_link(place, std::move(link));
  return ask.first - standing.num_cached;
}

engine::KvDesk::Key KvGate::bring(engine::PromptPtr prompt, const std::string& adapter, const KvPlace& place) {
  if (!is_same(place.signature, keyed_hash(options_.server.key, "place" + address_of(place))))
    fail(ErrorCode::kUnauthorized, "{} is no engine of this deployment: its signature is wrong", address_of(place));
  const auto begin = Clock::now();
  const engine::KvDesk::Key key = desk_.make_key();
  std::int64_t num_blocks = 0;
  std::string problem;
  try {
    const engine::KvDesk::Standing standing = desk_.standing(prompt, adapter, options_.timeout);
    if (standing.num_cached >= standing.num_useful) return 0;
    num_blocks = bring_all(key, prompt, standing, place, begin + options_.timeout);
    if (num_blocks < standing.num_useful - standing.num_cached)
      problem = fmt::format("{} of {} blocks came", num_blocks, standing.num_useful - standing.num_cached);
  } catch (const Error& error) {
    problem = error.what();
    const std::lock_guard lock(mutex_);
    idle_.erase(address_of(place));  // the others lead to the same process, which may be gone
  }
  const std::lock_guard lock(mutex_);
  if (!problem.empty()) tell(problem);
  stats_.num_transfers += num_blocks > 0 ? 1 : 0;
  stats_.num_fallbacks += problem.empty() ? 0 : 1;
  stats_.num_blocks += num_blocks;
  stats_.seconds += std::chrono::duration<double>(Clock::now() - begin).count();
  return key;
}

void KvGate::tell(const std::string& problem) {
  const auto now = Clock::now();
  if (now < quiet_until_) {
    ++num_untold_;
    log::debug("[kv transfer] the rest of a prompt is computed here: {}", problem);
    return;
  }
  log::warning("[kv transfer] the rest of a prompt is computed here: {}{}", problem,
               num_untold_ > 0 ? fmt::format("; so it was with {} others since this was told last", num_untold_) : "");
  num_untold_ = 0;
  quiet_until_ = now + kQuiet;
}

KvGateStats KvGate::stats() const {
  const std::lock_guard lock(mutex_);
  KvGateStats stats = stats_;
  stats.num_bytes = stats.num_blocks * static_cast<std::int64_t>(desk_.block_bytes());
  stats.num_blocks_given = server_.num_blocks_given();
  stats.num_bytes_given = server_.num_bytes_given();
  return stats;
}

}  // namespace prl::transfer
