#include "base/error.hpp"

#include <cstdio>
#include <cstdlib>

namespace prl {

std::string_view to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "invalid_argument";
    case ErrorCode::kNotFound: return "not_found";
    case ErrorCode::kAlreadyExists: return "already_exists";
    case ErrorCode::kUnauthorized: return "unauthorized";
    case ErrorCode::kOverloaded: return "overloaded";
    case ErrorCode::kOverlong: return "overlong";
    case ErrorCode::kDeadline: return "deadline";
    case ErrorCode::kCancelled: return "cancelled";
    case ErrorCode::kUnavailable: return "unavailable";
    case ErrorCode::kCorrupt: return "corrupt";
    case ErrorCode::kShape: return "shape";
    case ErrorCode::kNonFinite: return "non_finite";
    case ErrorCode::kOutOfMemory: return "out_of_memory";
    case ErrorCode::kIo: return "io";
    case ErrorCode::kNotImplemented: return "not_implemented";
    case ErrorCode::kOutOfSync: return "out_of_sync";
    case ErrorCode::kPeerLost: return "peer_lost";
    case ErrorCode::kInternal: return "internal";
  }
  return "unknown";
}

int http_status(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kOverlong:
    case ErrorCode::kCorrupt:
    case ErrorCode::kShape: return 400;
    case ErrorCode::kUnauthorized: return 401;
    case ErrorCode::kNotFound: return 404;
    case ErrorCode::kAlreadyExists: return 409;
    case ErrorCode::kOverloaded: return 429;
    case ErrorCode::kCancelled: return 499;
    case ErrorCode::kNotImplemented: return 501;
    case ErrorCode::kPeerLost:
    case ErrorCode::kUnavailable: return 503;
    case ErrorCode::kDeadline: return 504;
    case ErrorCode::kNonFinite:
    case ErrorCode::kOutOfMemory:
    case ErrorCode::kIo:
    case ErrorCode::kOutOfSync:
    case ErrorCode::kInternal: return 500;
  }
  return 500;
}

namespace detail {
void check_failed(const char* expression, const char* file, int line, const std::string& message) {
  std::fprintf(stderr, "PRL_CHECK failed: %s at %s:%d %s\n", expression, file, line, message.c_str());
  std::fflush(stderr);
  std::abort();
}
}  // namespace detail

}  // namespace prl
