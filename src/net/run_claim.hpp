#pragma once

#include <mutex>
#include <string>

#include "net/http_message.hpp"

namespace prl::net {

/// By which a run announces itself to a server that it did not start, with every change of the policy's weights.
inline constexpr const char* kClaimHeader = "X-PRL-Claim";

/// The run whose policy a server that was started by hand holds: the first one that changes the weights. Until that run releases it,
/// changes by others, also without the header, are 421. Any thread.
class RunClaim {
 public:
  /// Throws HttpError 421 naming the holder and the remedy. A request without the header takes no claim.
  void take(const HttpRequest& request);
  /// With the header only that run's claim, without it anybody's: an administrator's way out. True if one was given up.
  bool release(const HttpRequest& request);
  /// Empty: nobody.
  std::string holder() const;

 private:
  mutable std::mutex mutex_;
  std::string holder_;
};

}  // namespace prl::net
