#include "net/errors.hpp"

#include <boost/asio/error.hpp>
#include <boost/system/system_error.hpp>

#include <filesystem>
#include <string_view>
#include <system_error>

namespace prl::net {
namespace {

/// Of all calls that throw EAGAIN only the one that starts a thread gets here: the others are tried again where they are made.
Error no_thread(std::string_view what) {
  return Error(
      ErrorCode::kOutOfMemory,
      fmt::format("the operating system starts no more threads ({}): the limit of processes and threads of this user (ulimit -u) or "
                  "control group (pids.max), or of address space (ulimit -v), is reached; raise it, or lower compute.num_threads",
                  what));
}

}  // namespace

Error to_error(const std::exception_ptr& exception) noexcept {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return error;
  } catch (const boost::system::system_error& error) {
    if (error.code() == boost::asio::error::operation_aborted) return Error(ErrorCode::kCancelled, "the task was cancelled");
    if (error.code() == boost::system::errc::resource_unavailable_try_again) return no_thread(error.what());
    if (error.code() == boost::system::errc::too_many_files_open)
      return Error(ErrorCode::kIo, fmt::format("{}: raise the limit of open files of a process (ulimit -n)", error.what()));
    return Error(ErrorCode::kIo, error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    return Error(ErrorCode::kIo, fmt::format("{}: {}", error.path1().string(), error.code().message()));
  } catch (const std::system_error& error) {
    if (error.code() == std::errc::resource_unavailable_try_again) return no_thread(error.what());
    return Error(ErrorCode::kIo, error.what());
  } catch (const std::exception& error) {
    return Error(ErrorCode::kInternal, error.what());
  }
}

}  // namespace prl::net
