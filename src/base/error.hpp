#pragma once

#include <fmt/core.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace prl {

/// Why a unit of work ended. HTTP status and process exit codes are derived from this one list (see http_status).
enum class ErrorCode {
  kInvalidArgument,  ///< a caller or user passed something that can never work: bad config value, malformed request
  kNotFound,         ///< a file, model, environment or route that was named does not exist
  kAlreadyExists,    ///< would overwrite something the user did not ask to overwrite
  kUnauthorized,     ///< API key missing or wrong
  kOverloaded,       ///< a queue is full; try again later (429)
  kOverlong,         ///< the prompt does not fit the model's context
  kDeadline,         ///< a wait passed its deadline; the message says who waited for whom
  kCancelled,        ///< the caller went away or the process is stopping
  kUnavailable,      ///< the other side is not reachable or not ready
  kCorrupt,          ///< a file or message is damaged: checksum, truncation, wrong format
  kShape,            ///< tensor shapes, dtypes or devices disagree
  kNonFinite,        ///< NaN or infinity where a number was needed
  kOutOfMemory,      ///< a memory plan does not fit
  kIo,               ///< the operating system refused: disk full, permission, port taken
  kNotImplemented,   ///< a documented feature that this build does not have yet; the message names it
  kOutOfSync,        ///< sampler and trainer do not hold the same weights
  kPeerLost,         ///< another rank of the group died or fell silent; the message names it and what was waited for
  kInternal,         ///< a bug of ours that was caught
};

std::string_view to_string(ErrorCode code) noexcept;
/// HTTP status that answers a request which failed with `code`.
int http_status(ErrorCode code) noexcept;

/// Ends one unit of work. The message is: subject, what was wanted, what was found, what to do.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }
  /// A copy with "context: " put in front of the message.
  Error with_context(std::string_view context) const { return Error(code_, fmt::format("{}: {}", context, what())); }

 private:
  ErrorCode code_;
};

template <typename... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

namespace detail {
[[noreturn]] void check_failed(const char* expression, const char* file, int line, const std::string& message);
}

}  // namespace prl

/// A bug in our own code: always on, prints file, line and message, then aborts. Never for bad input.
#define PRL_CHECK(condition, ...)                                                                 \
  do {                                                                                            \
    if (!(condition)) [[unlikely]]                                                                \
      ::prl::detail::check_failed(#condition, __FILE__, __LINE__, ::fmt::format("" __VA_ARGS__)); \
  } while (false)

#ifdef NDEBUG
#define PRL_DCHECK(condition, ...) \
  do {                             \
  } while (false)
#else
#define PRL_DCHECK(condition, ...) PRL_CHECK(condition, __VA_ARGS__)
#endif
