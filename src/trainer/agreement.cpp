#include "trainer/agreement.hpp"

#include <filesystem>
#include <optional>
#include <string>

namespace prl::trainer {

namespace {

/// What `work` throws.
std::optional<Error> error_of(const std::function<void()>& work) {
  try {
    work();
    return std::nullopt;
  } catch (const comm::PeerLost&) {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::filesystem::filesystem_error& error) {
    return Error(ErrorCode::kIo, error.what());
  } catch (const std::exception& error) {
    return Error(ErrorCode::kInternal, error.what());
  }
}

}  // namespace

void agree(comm::Communicator& ranks, const std::function<void()>& work) {
  const std::optional<Error> own = error_of(work);
  std::string told;
  if (own) told = static_cast<char>(static_cast<int>(own->code()) + 1) + std::string(own->what());
  const std::vector<std::string> all = ranks.gather_bytes(told, {.what = "whether all ranks could do their part"});
  if (own) throw SharedError(*own);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty())
      throw SharedError(static_cast<ErrorCode>(all[rank].front() - 1), fmt::format("rank {}: {}", rank, all[rank].substr(1)));
}

void fail_alike(const std::function<void()>& work) {
  if (const std::optional<Error> error = error_of(work)) throw SharedError(*error);
}

}  // namespace prl::trainer
