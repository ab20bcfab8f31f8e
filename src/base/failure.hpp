#pragma once

#include "base/error.hpp"

namespace prl {

// What a failed request to a service says about the next one: the rules of training, evaluation, synthetic data and weight updates alike.

/// Whether the same request may succeed later without any change: the one rule of what is retried. A service that is busy, away or slow,
/// fails inside or answers nonsense may do better next time; a refusal (a wrong key, an unknown route, a malformed request) stays one.
bool is_transient(ErrorCode code) noexcept;
/// The code that an HTTP reply with `status` (400 or more) stands for: the inverse of http_status.
ErrorCode error_code_of_status(int status) noexcept;
/// Whether a service that answers so refuses every other request too: a wrong key, no such model or route, a server of another run.
/// Whoever needs the service then stops at once.
bool refuses_all(ErrorCode code) noexcept;

}  // namespace prl
