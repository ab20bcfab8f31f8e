#include "net/run_claim.hpp"

#include <fmt/format.h>

#include "base/log.hpp"
#include "net/errors.hpp"

namespace prl::net {
namespace {

constexpr std::size_t kMaxIdBytes = 128;

std::string id_of(const HttpRequest& request) {
  std::string id(request.headers.get(kClaimHeader));
  if (id.size() > kMaxIdBytes)
    fail(ErrorCode::kInvalidArgument, "{} has {} bytes, at most {} are taken", kClaimHeader, id.size(), kMaxIdBytes);
  return id;
}

}  // namespace

void RunClaim::take(const HttpRequest& request) {
  const std::string id = id_of(request);
  const std::lock_guard lock(mutex_);
  if (id == holder_) return;
  if (!holder_.empty())
    throw HttpError(
        421, ErrorCode::kOutOfSync,
        fmt::format("this server holds the policy of run {}, and {}: give the other run a server of its own. If run {} has ended "
                    "without releasing it, POST /release does, or a new start",
                    holder_, id.empty() ? std::string("only that run may change its weights") : "the request is of run " + id, holder_));
  holder_ = id;
  log::info("this server takes its weights from run {} alone from now on", id);
}

bool RunClaim::release(const HttpRequest& request) {
  const std::string id = id_of(request);
  const std::lock_guard lock(mutex_);
  if (holder_.empty() || (!id.empty() && id != holder_)) return false;
  log::info("this server is no longer of run {}", holder_);
  holder_.clear();
  return true;
}

std::string RunClaim::holder() const {
  const std::lock_guard lock(mutex_);
  return holder_;
}

}  // namespace prl::net
