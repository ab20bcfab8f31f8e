#include <fcntl.h>
#include <unistd.h>
#include <boost/json.hpp>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"
#include "io/chunked_hash.hpp"
#include "io/safetensors.hpp"
#include "io/safetensors_checksum.hpp"

namespace prl::io {
namespace json = boost::json;
namespace {
/// The data section starts at a multiple of this, so that a mapped tensor is usable in place.
constexpr std::uint64_t kDataAlignment = 64;
/// Stands for the checksum until the data is known, and while it is computed.
constexpr std::string_view kNoChecksum = "0000000000000000";
}  // namespace

struct SafetensorsWriter::Hasher {
  ChunkedHash hash;
  std::uint64_t checksum_at = 0;  ///< place of the checksum in the file
};

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::vector<Spec> specs,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path), specs_(std::move(specs)), hasher_(std::make_unique<Hasher>()) {
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) fail(ErrorCode::kIo, "cannot write {}: {}", path.string(), std::strerror(errno));
  try {
    begin(metadata);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

SafetensorsWriter::SafetensorsWriter(std::vector<std::byte>& memory, std::vector<Spec> specs,
                                     const std::map<std::string, std::string>& metadata)
    : path_("a file in memory"),
      specs_(std::move(specs)),
      hasher_(std::make_unique<Hasher>()),
      memory_(&memory),
      begins_at_(memory.size()) {
  begin(metadata);
}

void SafetensorsWriter::begin(const std::map<std::string, std::string>& metadata) {
  json::object header;
  json::object notes;
  notes[kChecksumKey] = json::string_view(kNoChecksum.data(), kNoChecksum.size());
  for (const auto& [key, value] : metadata) notes[key] = value;
  header["__metadata__"] = std::move(notes);
  std::uint64_t offset = 0;
  for (const Spec& spec : specs_) {
    std::uint64_t bytes = size_of(spec.type);
    json::array shape;
    for (const std::int64_t extent : spec.shape) {
      PRL_CHECK(extent >= 0, "tensor {} has a negative extent", spec.name);
      bytes *= static_cast<std::uint64_t>(extent);
      shape.emplace_back(extent);
    }
    PRL_CHECK(!header.contains(spec.name), "tensor {} written twice to {}", spec.name, path_.string());
    header[spec.name] = json::object{{"dtype", json::string_view(to_string(spec.type).data(), to_string(spec.type).size())},
                                     {"shape", std::move(shape)},
                                     {"data_offsets", json::array{offset, offset + bytes}}};
    offset += bytes;
  }
  num_wanted_ = offset;
  std::string text = json::serialize(header);
  hasher_->checksum_at = 8 + text.find(kNoChecksum);  // the metadata comes first, and the checksum is first in it
  text.append((kDataAlignment - (8 + text.size()) % kDataAlignment) % kDataAlignment, ' ');
  unsigned char length[8];
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(text.size() >> (8 * i));
  write(length, sizeof length);
  write(text.data(), text.size());
  num_wanted_ += num_written_;
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void SafetensorsWriter::write(const void* data, std::size_t size) {
  const std::span<const std::byte> bytes(static_cast<const std::byte*>(data), size);
  hasher_->hash.update(bytes);
  if (memory_ != nullptr) {
    memory_->insert(memory_->end(), bytes.begin(), bytes.end());
    num_written_ += size;
    return;
  }
  const char* next = static_cast<const char*>(data);
  for (std::size_t left = size; left > 0;) {
    const ssize_t put = ::write(fd_, next, left);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail(ErrorCode::kIo, "cannot write {} after {} bytes: {}", path_.string(), num_written_, std::strerror(errno));
    next += put;
    left -= static_cast<std::size_t>(put);
    num_written_ += static_cast<std::uint64_t>(put);
  }
}

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  PRL_CHECK((fd_ >= 0 || memory_ != nullptr) && num_written_ + bytes.size() <= num_wanted_, "more data than the header of {} promises",
            path_.string());
  write(bytes.data(), bytes.size());
}

void SafetensorsWriter::put_checksum(std::string_view checksum) {
  if (memory_ != nullptr) {
    std::memcpy(memory_->data() + begins_at_ + hasher_->checksum_at, checksum.data(), checksum.size());
    return;
  }
  if (::pwrite(fd_, checksum.data(), checksum.size(), static_cast<off_t>(hasher_->checksum_at)) != static_cast<ssize_t>(checksum.size()))
    fail(ErrorCode::kIo, "cannot write the checksum of {}: {}", path_.string(), std::strerror(errno));
}

void SafetensorsWriter::finish() {
  PRL_CHECK(num_written_ == num_wanted_, "{} holds {} bytes, its header promises {}", path_.string(), num_written_, num_wanted_);
  put_checksum(fmt::format("{:016x}", hasher_->hash.digest()));
  if (memory_ != nullptr) return;
  if (::fsync(fd_) != 0) fail(ErrorCode::kIo, "cannot sync {}: {}", path_.string(), std::strerror(errno));
  const int fd = fd_;
  fd_ = -1;
  if (::close(fd) != 0) fail(ErrorCode::kIo, "cannot close {}: {}", path_.string(), std::strerror(errno));
}

}  // namespace prl::io
