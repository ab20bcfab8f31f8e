#include "launch/log_folder.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <system_error>
#include <vector>

#include "base/error.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kPrefix = "attempt_", kLatest = "latest";

/// Of "attempt_3"; 0 for another name.
std::int64_t attempt_number(std::string_view name) {
  if (!name.starts_with(kPrefix)) return 0;
  name.remove_prefix(kPrefix.size());
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  return error == std::errc() && end == name.data() + name.size() && number > 0 ? number : 0;
}

fs::path attempt_folder(const fs::path& logs, std::int64_t number) { return logs / fmt::format("{}{}", kPrefix, number); }

/// Numbers of the attempts that have a folder.
std::vector<std::int64_t> attempts_in(const fs::path& logs) {
  std::vector<std::int64_t> found;
  std::error_code error;
  for (fs::directory_iterator it(logs, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    const std::int64_t number = attempt_number(it->path().filename().string());
    if (number > 0 && fs::symlink_status(it->path(), ignored).type() == fs::file_type::directory) found.push_back(number);
  }
  return found;
}

std::int64_t newest_attempt(const fs::path& logs) {
  const std::vector<std::int64_t> found = attempts_in(logs);
  return found.empty() ? 0 : *std::ranges::max_element(found);
}

/// Puts a link in place of another, or where nothing is.
void put_link(const fs::path& target, const fs::path& link) {
  std::error_code error;
  const fs::file_type there = fs::symlink_status(link, error).type();
  if (there != fs::file_type::not_found && there != fs::file_type::symlink) return;
  if (there == fs::file_type::symlink && fs::read_symlink(link, error) == target) return;
  static std::atomic<int> counter{0};
  const fs::path temporary = link.parent_path() / fmt::format(".{}-{}-{}", link.filename().string(), ::getpid(), ++counter);
  fs::create_symlink(target, temporary, error);
  if (!error) fs::rename(temporary, link, error);
  if (error) fs::remove(temporary, error);
}

/// The attempt that a process above this one has begun in `output_dir`.
std::optional<fs::path> given_attempt(const fs::path& output_dir) {
  const char* given = std::getenv(kLogFolderVariable);
  if (given == nullptr) return std::nullopt;
  std::error_code error;
  const fs::path folder(given);
  if (attempt_number(folder.filename().string()) == 0) return std::nullopt;
  if (fs::weakly_canonical(folder.parent_path(), error) != fs::weakly_canonical(output_dir / "logs", error) || error) return std::nullopt;
  return output_dir / "logs" / folder.filename();
}

void set_given(const fs::path& folder) { ::setenv(kLogFolderVariable, fs::absolute(folder).c_str(), 1); }

}  // namespace

fs::path begin_attempt(const fs::path& output_dir) {
  const fs::path logs = output_dir / "logs";
  std::error_code error;
  fs::create_directories(logs, error);
  // Another process may begin one at the same time: whoever makes the folder has it.
  std::int64_t number = newest_attempt(logs) + 1;
  while (!error && !fs::create_directory(attempt_folder(logs, number), error)) ++number;
  if (error) fail(ErrorCode::kIo, "cannot make {}: {}", attempt_folder(logs, number).string(), error.message());
  fs::path folder = attempt_folder(logs, number);
  put_link(folder.filename(), logs / kLatest);
  set_given(folder);
  return folder;
}

fs::path join_attempt(const fs::path& output_dir, std::string_view command) {
  if (const auto given = given_attempt(output_dir)) return *given;
  const fs::path logs = output_dir / "logs";
  std::error_code error;
  fs::create_directories(attempt_folder(logs, 1), error);  // of roles that begin at once, one makes it and the others join
  fs::path folder = attempt_folder(logs, std::max<std::int64_t>(newest_attempt(logs), 1));
  if (error || fs::exists(folder / fmt::format("{}.log", command), error)) return begin_attempt(output_dir);
  put_link(folder.filename(), logs / kLatest);
  set_given(folder);
  return folder;
}

void enter_attempt(const fs::path& output_dir, const std::string& name) {
  if (attempt_number(name) == 0) fail(ErrorCode::kInvalidArgument, "\"{}\" is not the name of an attempt", name);
  set_given(output_dir / "logs" / name);
}

fs::path log_folder(const fs::path& output_dir) {
  if (auto given = given_attempt(output_dir)) return *std::move(given);
  const fs::path logs = output_dir / "logs";
  return attempt_folder(logs, std::max<std::int64_t>(newest_attempt(logs), 1));
}

fs::path log_file(const fs::path& output_dir, const std::string& name) {
  const fs::path folder = log_folder(output_dir);
  fs::path file = folder / name;
  std::error_code error;
  if (!fs::is_directory(folder, error)) return file;
  fs::create_directories(file.parent_path(), error);  // what cannot be made is told by whoever opens the file
  const fs::path first = *fs::path(name).begin();
  put_link(fs::path(kLatest) / first, output_dir / "logs" / first);
  return file;
}

void remove_attempts(const fs::path& output_dir) {
  const fs::path logs = output_dir / "logs";
  const auto is_link_to_ours = [](const fs::path& path) {
    std::error_code error;
    const fs::path target = fs::read_symlink(path, error);
    return !error && !target.empty() && (*target.begin() == kLatest || attempt_number(target.begin()->string()) > 0);
  };
  std::vector<fs::path> links;
  std::error_code error;
  for (fs::directory_iterator it(logs, error), end; !error && it != end; it.increment(error))
    if (is_link_to_ours(it->path())) links.push_back(it->path());
  const std::optional<fs::path> given = given_attempt(output_dir);
  if (!given)
    for (const fs::path& link : links) fs::remove(link, error);
  for (const std::int64_t number : attempts_in(logs)) {
    if (given && given->filename() == attempt_folder(logs, number).filename()) continue;
    fs::remove_all(attempt_folder(logs, number), error);
    if (error) fail(ErrorCode::kIo, "cannot remove {}: {}", attempt_folder(logs, number).string(), error.message());
  }
}

}  // namespace prl::launch
