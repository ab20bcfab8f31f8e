#include "io/checkpoint_dir.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/json.hpp>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <set>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "io/mapped_file.hpp"

namespace prl::io {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

constexpr std::string_view kTemporaryMark = ".tmp-";
constexpr std::uint64_t kMaxManifestBytes = 16 << 20;

std::string unused_suffix() {
  static std::atomic<int> counter{0};
  return fmt::format("{}{}-{}", kTemporaryMark, ::getpid(), counter.fetch_add(1));
}

std::string hash_of(const fs::path& path) {
  const auto file = MappedFile::open(path);
  const std::uint64_t hash = hash_bytes(file->bytes());
  file->check_whole();
  return fmt::format("{:016x}", hash);
}

/// Regular files below `folder`, relative, sorted, the manifest left out.
std::vector<std::string> list_files(const fs::path& folder) {
  std::vector<std::string> out;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_directory()) continue;
    const std::string name = fs::relative(entry.path(), folder).generic_string();
    if (name != kManifestName) out.push_back(name);
  }
  std::sort(out.begin(), out.end());
  return out;
}

/// Names that were made or renamed in the folder outlive a power loss.
void sync_names(const fs::path& folder) {
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool is_synced = fd >= 0 && ::fsync(fd) == 0;
  const int reason = errno;
  if (fd >= 0) ::close(fd);
  if (!is_synced) fail(ErrorCode::kIo, "cannot sync {}: {}", folder.string(), std::strerror(reason));
}

bool is_complete(const fs::path& folder) {
  std::error_code ignored;
  return fs::is_regular_file(folder / kManifestName, ignored);
}

}  // namespace

fs::path checkpoint_folder(const fs::path& root, std::int64_t step, const std::string& unit) {
  const fs::path folder = root / fmt::format("step_{}", step);
  return unit.empty() ? folder : folder / unit;
}

HashedFile hash_file(const fs::path& folder, const std::string& path) {
  std::error_code error;
  const std::uintmax_t num_bytes = fs::file_size(folder / path, error);
  if (error) fail(ErrorCode::kNotFound, "{}: {}", (folder / path).string(), error.message());
  return {path, num_bytes, hash_of(folder / path)};
}

CheckpointWriter::CheckpointWriter(const fs::path& root, std::int64_t step, const std::string& unit)
    : final_(checkpoint_folder(root, step, unit)), step_(step), has_unit_(!unit.empty()) {
  PRL_CHECK(step >= 0 && unit.find('/') == std::string::npos, "checkpoint of step {} unit '{}'", step, unit);
  if (is_complete(final_))
    fail(ErrorCode::kAlreadyExists, "checkpoint {} exists and is complete; resume from it or remove it", final_.string());
  temporary_ = final_.string() + unused_suffix();
  std::error_code error;
  fs::remove_all(temporary_, error);  // of a process with the same id, before the machine or the container was started again
  fs::create_directories(temporary_, error);
  if (error) fail(ErrorCode::kIo, "cannot make {}: {}", temporary_.string(), error.message());
}

CheckpointWriter::~CheckpointWriter() {
  std::error_code ignored;
  if (!is_done_) fs::remove_all(temporary_, ignored);
}

void CheckpointWriter::commit(std::span<const HashedFile> known) {
  PRL_CHECK(!is_done_, "checkpoint {} committed twice", final_.string());
  try {
    json::array files;
    for (const HashedFile& file : known)
      if (std::error_code missing; fs::file_size(temporary_ / file.path, missing) != file.num_bytes || missing)
        fail(ErrorCode::kIo, "{} does not have the {} bytes that were written", (temporary_ / file.path).string(), file.num_bytes);
    for (const std::string& name : list_files(temporary_)) {
      const auto found = std::ranges::find(known, name, &HashedFile::path);
      const HashedFile file = found != known.end() ? *found : hash_file(temporary_, name);
      files.push_back(json::object{{"path", name}, {"bytes", file.num_bytes}, {"xxh3", file.xxh3}});
    }
    const json::object manifest{{"format", "prl-checkpoint"}, {"version", 1}, {"step", step_}, {"files", std::move(files)}};
    write_file_atomic(temporary_ / kManifestName, json::serialize(manifest) + "\n");
    std::error_code ignored;
    if (fs::exists(final_) && !is_complete(final_)) fs::remove_all(final_, ignored);
    publish_directory(temporary_, final_);
    // The step's own name in the root is new with its first unit.
    if (has_unit_) sync_names(final_.parent_path().parent_path());
  } catch (const fs::filesystem_error& cause) {
    fail(ErrorCode::kIo, "cannot write checkpoint {}: {}", final_.string(), cause.what());
  }
  is_done_ = true;
}

void verify_checkpoint(const fs::path& root, std::int64_t step, const std::string& unit, int reader, int num_readers) {
  const fs::path folder = checkpoint_folder(root, step, unit);
  const fs::path path = folder / kManifestName;
  if (!is_complete(folder))
    fail(ErrorCode::kNotFound, "checkpoint {} does not exist or is incomplete ({} is missing)", folder.string(), kManifestName);
  const auto bad = [&](std::string_view what) { fail(ErrorCode::kCorrupt, "checkpoint {}: {}", folder.string(), what); };
  json::parse_options options;
  options.max_depth = 8;
  json::error_code error;
  const json::value manifest = json::parse(read_file(path, kMaxManifestBytes), error, json::storage_ptr(), options);
  const json::object* object = error.failed() ? nullptr : manifest.if_object();
  const json::value* format = object == nullptr ? nullptr : object->if_contains("format");
  const json::value* files = object == nullptr ? nullptr : object->if_contains("files");
  if (format == nullptr || *format != json::value("prl-checkpoint") || files == nullptr || !files->is_array())
    bad("manifest.json is damaged");
  const json::value* stored_step = object->if_contains("step");
  if (stored_step == nullptr || !stored_step->is_int64() || stored_step->get_int64() != step) bad("manifest.json belongs to another step");
  std::set<std::string> listed;
  for (const json::value& item : files->get_array()) {
    const json::object* file = item.if_object();
    const json::value* name = file == nullptr ? nullptr : file->if_contains("path");
    const json::value* bytes = file == nullptr ? nullptr : file->if_contains("bytes");
    const json::value* hash = file == nullptr ? nullptr : file->if_contains("xxh3");
    if (name == nullptr || !name->is_string() || bytes == nullptr || !bytes->is_number() || hash == nullptr || !hash->is_string())
      bad("manifest.json is damaged");
    const std::string relative(name->get_string().data(), name->get_string().size());
    if (fs::path(relative).is_absolute() || relative.find("..") != std::string::npos)
      bad("manifest.json names a file outside the checkpoint");
    std::error_code missing;
    const std::uintmax_t size = fs::file_size(folder / relative, missing);
    if (missing) bad(fmt::format("file '{}' is missing", relative));
    json::error_code not_whole;
    if (size != bytes->to_number<std::uint64_t>(not_whole) || not_whole.failed())
      bad(fmt::format("file '{}' has {} bytes, the manifest says {}", relative, size, json::serialize(*bytes)));
    const bool is_mine = static_cast<int>(listed.size()) % num_readers == reader;
    if (is_mine && hash->get_string() != json::string_view(hash_of(folder / relative)))
      bad(fmt::format("file '{}' does not match its checksum", relative));
    listed.insert(relative);
  }
  for (const std::string& name : list_files(folder)) {
    // Other units of the step, each with a manifest of its own, are not this one's files.
    const bool in_other_unit = unit.empty() && name.find('/') != std::string::npos;
    if (listed.count(name) == 0 && !in_other_unit) bad(fmt::format("file '{}' is not in the manifest", name));
  }
}

std::vector<std::int64_t> list_checkpoints(const fs::path& root, std::span<const std::string> units) {
  std::vector<std::int64_t> steps;
  std::error_code error;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    const std::int64_t step = parse_step_dir(it->path().filename().string());
    if (step < 0) continue;
    const bool whole = units.empty()
                           ? is_complete(it->path())
                           : std::all_of(units.begin(), units.end(), [&](const std::string& u) { return is_complete(it->path() / u); });
    if (whole) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<std::int64_t> latest_checkpoint(const fs::path& root, std::span<const std::string> units) {
  std::vector<std::int64_t> steps = list_checkpoints(root, units);
  for (; !steps.empty(); steps.pop_back()) {
    try {
      if (units.empty()) verify_checkpoint(root, steps.back());
      for (const std::string& unit : units) verify_checkpoint(root, steps.back(), unit);
      return steps.back();
    } catch (const Error& cause) {
      log::warning("skipping step {}: {}", steps.back(), cause.what());
    }
  }
  return std::nullopt;
}

std::vector<std::int64_t> expired_steps(std::span<const std::int64_t> steps, const CheckpointRetention& retention) {
  std::vector<std::int64_t> expired;
  if (!retention.keep_last && !retention.keep_interval) return expired;
  for (std::size_t i = 0; i + 1 < steps.size(); ++i) {
    const bool is_recent = retention.keep_last && static_cast<std::int64_t>(steps.size() - i) <= *retention.keep_last;
    const bool is_milestone = retention.keep_interval && *retention.keep_interval > 0 && steps[i] % *retention.keep_interval == 0;
    if (!is_recent && !is_milestone) expired.push_back(steps[i]);
  }
  return expired;
}

bool remove_published_folder(const fs::path& folder) {
  std::error_code error;
  if (fs::symlink_status(folder, error).type() != fs::file_type::directory) return !fs::exists(fs::symlink_status(folder, error));
  const fs::path doomed = folder.string() + unused_suffix();
  fs::rename(folder, doomed, error);
  if (error == std::errc::no_such_file_or_directory) return true;  // another role was faster
  if (!error) fs::remove_all(doomed, error);
  if (error) log::warning("cannot remove {}: {}", folder.string(), error.message());
  return !error;
}

std::vector<std::int64_t> clean_checkpoints(const fs::path& root, std::span<const std::string> units,
                                            const CheckpointRetention& retention) {
  std::vector<std::int64_t> removed;
  for (const std::int64_t step : expired_steps(list_checkpoints(root, units), retention))
    if (remove_published_folder(checkpoint_folder(root, step))) removed.push_back(step);
  return removed;
}

int remove_stale_checkpoints(const fs::path& root) {
  std::vector<fs::path> stale;
  std::error_code error;
  const auto look_in = [&](const fs::path& folder) {
    for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
      const std::string name = it->path().filename().string();
      const std::size_t at = name.rfind(kTemporaryMark);
      if (at == std::string::npos || !it->is_directory(error)) continue;
      pid_t pid = 0;
      const char* first = name.data() + at + kTemporaryMark.size();
      if (std::from_chars(first, name.data() + name.size(), pid).ec != std::errc{} || pid <= 0 || pid == ::getpid()) continue;
      if (::kill(pid, 0) != 0 && errno == ESRCH) stale.push_back(it->path());
    }
  };
  look_in(root);
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error))
    if (parse_step_dir(it->path().filename().string()) >= 0) look_in(it->path());
  int removed = 0;
  for (const fs::path& path : stale) {
    fs::remove_all(path, error);
    if (!error) ++removed;
  }
  return removed;
}

}  // namespace prl::io
