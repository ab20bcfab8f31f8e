#include "base/failure.hpp"

namespace prl {

ErrorCode error_code_of_status(int status) noexcept {
  switch (status) {
    case 401:
    case 403: return ErrorCode::kUnauthorized;
    case 404:
    case 405: return ErrorCode::kNotFound;
    case 408:
    case 504: return ErrorCode::kDeadline;
    case 409: return ErrorCode::kAlreadyExists;
    case 421: return ErrorCode::kOutOfSync;
    case 429: return ErrorCode::kOverloaded;
    case 501: return ErrorCode::kNotImplemented;
    case 502:
    case 503: return ErrorCode::kUnavailable;
    default: return status >= 500 ? ErrorCode::kInternal : ErrorCode::kInvalidArgument;
  }
}

bool is_transient(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kOverloaded:
    case ErrorCode::kUnavailable:
    case ErrorCode::kDeadline:
    case ErrorCode::kCorrupt:
    case ErrorCode::kNonFinite:
    case ErrorCode::kInternal: return true;
    default: return false;
  }
}

bool refuses_all(ErrorCode code) noexcept {
  return code == ErrorCode::kUnauthorized || code == ErrorCode::kNotFound || code == ErrorCode::kOutOfSync;
}

}  // namespace prl
