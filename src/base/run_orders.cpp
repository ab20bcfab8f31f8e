#include "base/run_orders.hpp"

#include <unistd.h>

#include <fstream>
#include <system_error>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"

namespace prl {
namespace fs = std::filesystem;
namespace {

constexpr const char* kFolder = "control";
constexpr const char* kPaused = "paused";
constexpr const char* kCheckpoint = "checkpoint";
constexpr const char* kCheckpointStep = "checkpoint_step";

bool exists(const fs::path& folder, const char* name) noexcept { return !folder.empty() && ::access((folder / name).c_str(), F_OK) == 0; }

void remove_file(const fs::path& path) {
  std::error_code error;
  if (!fs::remove(path, error) && error) fail(ErrorCode::kIo, "cannot remove {}: {}", path.string(), error.message());
}

}  // namespace

RunOrders RunOrders::of(const fs::path& run_folder) {
  std::error_code ignored;
  return fs::is_directory(run_folder / kFolder, ignored) ? RunOrders(run_folder / kFolder) : RunOrders();
}

RunOrders RunOrders::open(const fs::path& run_folder) {
  RunOrders orders(run_folder / kFolder);
  std::error_code error;
  fs::create_directories(orders.folder_, error);
  if (error) fail(ErrorCode::kIo, "cannot make {}: {}", orders.folder_.string(), error.message());
  for (const char* name : {kPaused, kCheckpoint, kCheckpointStep}) remove_file(orders.folder_ / name);
  return orders;
}

void RunOrders::close(const fs::path& run_folder) {
  for (const char* name : {kPaused, kCheckpoint, kCheckpointStep}) remove_file(run_folder / kFolder / name);
  std::error_code ignored;
  fs::remove(run_folder / kFolder, ignored);
}

void RunOrders::set_paused(bool is_paused) const {
  if (is_paused)
    write_file_atomic(folder_ / kPaused, "");
  else
    remove_file(folder_ / kPaused);
}

bool RunOrders::is_paused() const noexcept { return exists(folder_, kPaused); }

void RunOrders::ask_for_checkpoint() const { write_file_atomic(folder_ / kCheckpoint, ""); }

bool RunOrders::wants_checkpoint() const noexcept { return exists(folder_, kCheckpoint); }

void RunOrders::set_checkpoint_step(std::int64_t step) const {
  write_file_atomic(folder_ / kCheckpointStep, std::to_string(step));
  remove_file(folder_ / kCheckpoint);
}

std::optional<std::int64_t> RunOrders::checkpoint_step() const noexcept {
  if (!exists(folder_, kCheckpointStep)) return std::nullopt;
  std::ifstream file(folder_ / kCheckpointStep);
  std::int64_t step = 0;
  return file >> step ? std::optional(step) : std::nullopt;
}

}  // namespace prl
