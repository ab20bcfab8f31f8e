#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/mapped_file.hpp"
#include "tensor/dtype.hpp"

namespace prl::io {

/// Element types a safetensors file may hold; more than the tensors of this project compute with.
enum class StoredType : std::uint8_t { kF64, kF32, kF16, kBF16, kF8E4M3, kF8E5M2, kI64, kI32, kI16, kI8, kU64, kU32, kU16, kU8, kBool };
std::size_t size_of(StoredType type) noexcept;
/// As the format spells it: "F32", "BF16", "F8_E4M3", ...
std::string_view to_string(StoredType type) noexcept;
StoredType stored_type(DType dtype) noexcept;

/// Largest JSON header accepted, the limit of the reference implementation.
inline constexpr std::uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

/// One entry of a header. `begin` and `end` count bytes from the start of the data section.
struct SafetensorsEntry {
  std::string name;
  StoredType type = StoredType::kF32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;

  std::int64_t num_elements() const noexcept;
};

/// A safetensors file, mapped or in memory. Format: u64 little-endian header length, JSON header, data.
///
/// open() and read() check everything a hostile file could get wrong before any tensor is touched: header length and JSON depth,
/// types, negative or overflowing shapes, byte ranges that disagree with the shape, overlap, holes and truncation.
/// Errors    Error{kCorrupt} names the file and the tensor; Error{kNotFound} if there is no such file.
/// Threads   immutable once made.
class SafetensorsFile {
 public:
  static SafetensorsFile open(const std::filesystem::path& path);
  /// The same of a file's bytes in memory, which `owner` keeps as they are; `path` names them in errors.
  static SafetensorsFile read(std::filesystem::path path, std::span<const std::byte> bytes, std::shared_ptr<const void> owner);

  const std::filesystem::path& path() const noexcept { return path_; }
  /// In order of their data.
  std::span<const SafetensorsEntry> entries() const noexcept { return entries_; }
  /// nullptr if absent.
  const SafetensorsEntry* find(std::string_view name) const noexcept;
  /// find() or Error{kCorrupt} that names file and tensor.
  const SafetensorsEntry& at(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }
  /// Raw bytes of a tensor, where the file's are: valid while this object or a copy of it lives. Not aligned for its type in general. Call
  /// check_whole() after reading them.
  std::span<const std::byte> bytes(const SafetensorsEntry& entry) const noexcept;
  /// Elements [first, first + out.size()) as fp32. F64, F32, F16, BF16 only; Error{kCorrupt} otherwise.
  void read_f32(const SafetensorsEntry& entry, std::int64_t first, std::span<float> out) const;
  /// Error{kCorrupt} if a part of the file could not be read since it was opened.
  void check_whole() const {
    if (file_ != nullptr) file_->check_whole();
  }

 private:
  void parse();

  std::filesystem::path path_;
  std::span<const std::byte> all_;
  std::shared_ptr<const void> owner_;       ///< of all_
  std::shared_ptr<const MappedFile> file_;  ///< nullptr: not mapped
  std::uint64_t data_offset_ = 0;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::size_t, std::less<>> by_name_;
  std::map<std::string, std::string> metadata_;
};

/// Writes one safetensors file, or its bytes into memory, front to back: all names and shapes first, then the data of each tensor in that
/// order.
///
/// The header is padded with spaces so that the data section starts at a multiple of 64 bytes. The file is not visible under a
/// final name's guarantee: write into a temporary folder or name, and publish that (base/files.hpp).
/// Errors    Error{kIo} with path and reason (a full disk, say). Not for several threads at once.
class SafetensorsWriter {
 public:
  struct Spec {
    std::string name;
    StoredType type = StoredType::kF32;
    std::vector<std::int64_t> shape;
  };
  SafetensorsWriter(const std::filesystem::path& path, std::vector<Spec> specs, const std::map<std::string, std::string>& metadata);
  /// Appends the file's bytes to `memory`, which is borrowed.
  SafetensorsWriter(std::vector<std::byte>& memory, std::vector<Spec> specs, const std::map<std::string, std::string>& metadata);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// The next bytes of the data section; a tensor may come in several pieces.
  void append(std::span<const std::byte> bytes);
  /// Checks that every byte came; flushes and fsyncs a file.
  void finish();
  std::uint64_t num_bytes() const noexcept { return num_written_; }

 private:
  struct Hasher;
  void begin(const std::map<std::string, std::string>& metadata);
  void write(const void* data, std::size_t size);
  void put_checksum(std::string_view checksum);
  std::filesystem::path path_;
  std::vector<Spec> specs_;
  std::unique_ptr<Hasher> hasher_;
  int fd_ = -1;
  std::vector<std::byte>* memory_ = nullptr;
  std::size_t begins_at_ = 0;  ///< in memory_
  std::uint64_t num_written_ = 0, num_wanted_ = 0;
};

/// A tensor by name in one of the files of a folder.
struct SafetensorsRef {
  const SafetensorsFile* file = nullptr;
  const SafetensorsEntry* entry = nullptr;
};

/// "model.safetensors" of a folder, or "model.safetensors.index.json" and the shards it names.
class SafetensorsFolder {
 public:
  /// Error{kNotFound} if the folder holds neither; Error{kCorrupt} if a shard lacks a tensor the index promises, if a tensor is
  /// in two shards, or if the index names a file outside the folder.
  static SafetensorsFolder open(const std::filesystem::path& folder);
  const std::map<std::string, SafetensorsRef, std::less<>>& tensors() const noexcept { return tensors_; }
  SafetensorsRef find(std::string_view name) const noexcept;
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, SafetensorsRef, std::less<>> tensors_;
};

/// fp16 bits to fp32, and fp32 to fp16 bits (to nearest, ties to even).
float f16_to_f32(std::uint16_t bits) noexcept;
std::uint16_t f32_to_f16(float value) noexcept;

}  // namespace prl::io
