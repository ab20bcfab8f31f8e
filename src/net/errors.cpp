#include "net/errors.hpp"

#include <boost/asio/error.hpp>
#include <boost/system/system_error.hpp>

#include <filesystem>

namespace prl::net {

Error to_error(const std::exception_ptr& exception) noexcept {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return error;
  } catch (const boost::system::system_error& error) {
    if (error.code() == boost::asio::error::operation_aborted) return Error(ErrorCode::kCancelled, "the task was cancelled");
    return Error(ErrorCode::kIo, error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    return Error(ErrorCode::kIo, fmt::format("{}: {}", error.path1().string(), error.code().message()));
  } catch (const std::exception& error) {
    return Error(ErrorCode::kInternal, error.what());
  }
}

}  // namespace prl::net
