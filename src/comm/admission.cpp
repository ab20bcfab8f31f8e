#include "comm/admission.hpp"

#include <fmt/core.h>

#include <sstream>
#include <thread>

#include "base/log.hpp"
#include "base/waiting.hpp"

namespace prl::comm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kSlot = "join/asks";  // the name of who asks, or nothing: one at a time
constexpr std::chrono::milliseconds kPause{20};
/// For a newcomer that has asked to say that it has read the answer; it may have died meanwhile.
constexpr std::chrono::milliseconds kReadTime{10'000};

std::string answer_key(const std::string& name) { return "join/answer/" + name; }
std::string read_key(const std::string& name) { return "join/read/" + name; }

/// What the others answer.
struct Admission {
  std::int64_t generation = 0;
  int rank = 0, size = 1;
};

std::optional<Admission> ask(Store& store, const std::string& name, Clock::time_point deadline, const std::stop_token& stop) {
  bool has_asked = false;
  Waiting waiting({.who = "'" + name + "'", .what = "the group to let it in", .limit = deadline - Clock::now(), .detail = [&has_asked] {
                     return std::string(has_asked ? "" : "another process asks for the same");
                   }});
  for (;; std::this_thread::sleep_for(kPause)) {
    waiting.check();
    if (stop.stop_requested()) return std::nullopt;
    if (Clock::now() >= deadline) fail(ErrorCode::kDeadline, "[comm] the group did not let '{}' in", name);
    if (!has_asked) {
      const std::optional<std::string> asks = store.get(kSlot);
      has_asked = (!asks || asks->empty()) && store.compare_and_set(kSlot, asks, name) == name;
    }
    const std::optional<std::string> answer = store.get(answer_key(name));
    if (!answer) continue;
    Admission admission;
    std::istringstream text(*answer);
    if (!(text >> admission.generation >> admission.rank >> admission.size))
      fail(ErrorCode::kCorrupt, "[comm] '{}' is no answer to who asks to join", *answer);
    store.set(read_key(name), "yes");
    return admission;
  }
}

}  // namespace

std::unique_ptr<Communicator> join(const CommOptions& options, const std::string& name, std::chrono::milliseconds patience,
                                   std::stop_token stop) {
  const auto deadline = Clock::now() + patience;
  for (int attempt = 1;; ++attempt) {
    // A name of its own each time: answers to an earlier one stay in the store.
    const std::optional<Admission> admission = ask(*options.store, fmt::format("{}.{}", name, attempt), deadline, stop);
    if (!admission) return nullptr;
    CommOptions joined = options;
    joined.rank = admission->rank;
    joined.size = admission->size;
    joined.generation = admission->generation;
    joined.awaits_start = false;
    joined.connect_timeout = kReconnectTimeout;
    try {
      return make_communicator(std::move(joined));
    } catch (const PeerLost& lost) {
      log::warning("{}; asks again", lost.what());
    }
  }
}

std::optional<CommOptions> admit(Communicator& group, std::int64_t generation) {
  std::string name;
  if (group.rank() == 0) {
    Store& store = *group.options().store;
    name = store.get(kSlot).value_or("");
    if (!name.empty()) {
      store.set(answer_key(name), fmt::format("{} {} {}", generation, group.size(), group.size() + 1));
      store.set(kSlot, "");
      try {
        (void)store.wait(read_key(name), kReadTime, name);
      } catch (const Error& error) {
        log::warning("{} asked to join and is gone: {}", name, error.what());
        name.clear();
      }
    }
  }
  if (group.gather_bytes(name, {.what = "who asks to join"}).front().empty()) return std::nullopt;
  CommOptions options = group.options();
  options.size = group.size() + 1;
  options.generation = generation;
  options.awaits_start = false;
  options.connect_timeout = kReconnectTimeout;
  return options;
}

}  // namespace prl::comm
