#include "io/safetensors.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <boost/json.hpp>
#include <cstring>
#include <limits>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/regular_file.hpp"
#include "io/chunked_hash.hpp"
#include "io/safetensors_checksum.hpp"

namespace prl::io {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

struct TypeInfo {
  StoredType type;
  std::string_view name;
  std::size_t size;
};
constexpr std::array<TypeInfo, 15> kStoredTypes{{{StoredType::kF64, "F64", 8},
                                                 {StoredType::kF32, "F32", 4},
                                                 {StoredType::kF16, "F16", 2},
                                                 {StoredType::kBF16, "BF16", 2},
                                                 {StoredType::kF8E4M3, "F8_E4M3", 1},
                                                 {StoredType::kF8E5M2, "F8_E5M2", 1},
                                                 {StoredType::kI64, "I64", 8},
                                                 {StoredType::kI32, "I32", 4},
                                                 {StoredType::kI16, "I16", 2},
                                                 {StoredType::kI8, "I8", 1},
                                                 {StoredType::kU64, "U64", 8},
                                                 {StoredType::kU32, "U32", 4},
                                                 {StoredType::kU16, "U16", 2},
                                                 {StoredType::kU8, "U8", 1},
                                                 {StoredType::kBool, "BOOL", 1}}};

const TypeInfo& info_of(StoredType type) noexcept { return kStoredTypes[static_cast<std::size_t>(type)]; }

/// Parses one value of the header. Every message starts with the file and names the tensor.
SafetensorsEntry parse_entry(const fs::path& path, std::string_view name, const json::value& value) {
  const auto bad = [&](std::string_view what) { fail(ErrorCode::kCorrupt, "{}: tensor '{}': {}", path.string(), name, what); };
  const json::object* object = value.if_object();
  if (object == nullptr) bad("wanted an object with dtype, shape and data_offsets");
  SafetensorsEntry entry;
  entry.name = name;

  const json::value* type = object->if_contains("dtype");
  if (type == nullptr || !type->is_string()) bad("dtype is missing or no string");
  const std::string_view type_name(type->get_string().data(), type->get_string().size());
  const auto found = std::find_if(kStoredTypes.begin(), kStoredTypes.end(), [&](const TypeInfo& t) { return t.name == type_name; });
  if (found == kStoredTypes.end()) bad(fmt::format("unknown dtype '{}'", type_name.substr(0, 32)));
  entry.type = found->type;

  const json::value* shape = object->if_contains("shape");
  if (shape == nullptr || !shape->is_array()) bad("shape is missing or no list");
  std::uint64_t elements = 1;
  for (const json::value& extent : shape->get_array()) {
    json::error_code error;
    const auto n = extent.to_number<std::int64_t>(error);
    if (error.failed() || n < 0) bad("an extent of the shape is not a non-negative integer");
    if (n != 0 && elements > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) / static_cast<std::uint64_t>(n))
      bad("the shape overflows");
    elements *= static_cast<std::uint64_t>(n);
    entry.shape.push_back(n);
  }

  const json::value* offsets = object->if_contains("data_offsets");
  if (offsets == nullptr || !offsets->is_array() || offsets->get_array().size() != 2) bad("data_offsets is missing or no pair");
  json::error_code error0, error1;
  entry.begin = offsets->get_array()[0].to_number<std::uint64_t>(error0);
  entry.end = offsets->get_array()[1].to_number<std::uint64_t>(error1);
  if (error0.failed() || error1.failed() || entry.begin > entry.end) bad("data_offsets is not an increasing pair of integers");
  const std::uint64_t size = found->size;
  if (elements > std::numeric_limits<std::uint64_t>::max() / size || entry.end - entry.begin != elements * size)
    bad(fmt::format("data_offsets spans {} bytes, but the shape wants {} elements of {} bytes", entry.end - entry.begin, elements, size));
  return entry;
}

/// Error{kCorrupt} unless the file's bytes, with '0' in place of the checksum, have that checksum.
void check_checksum(const fs::path& path, std::span<const std::byte> bytes, std::uint64_t header_size, const std::string& key,
                    const std::string& wanted) {
  constexpr std::size_t kDigits = 16;
  const std::string_view header(reinterpret_cast<const char*>(bytes.data() + 8), header_size);
  const std::size_t key_at = header.find(fmt::format("\"{}\"", key));
  const std::size_t at =
      wanted.size() == kDigits && key_at != std::string_view::npos ? header.find(wanted, key_at) : std::string_view::npos;
  std::string found = "none";
  if (at != std::string_view::npos) {
    const auto hash = key == kPlainChecksumKey ? &hash_with_zeros : &chunked_hash_with_zeros;
    found = fmt::format("{:016x}", hash(bytes, 8 + at, kDigits));
  }
  if (found != wanted)
    fail(
        ErrorCode::kCorrupt,
        "{}: its bytes have the checksum {}, its header says {}: it was damaged after it was written, so take another copy. A program that "
        "changes tensors on purpose must leave out the key {} of __metadata__",
        path.string(), found, wanted, key);
}

}  // namespace

std::size_t size_of(StoredType type) noexcept { return info_of(type).size; }
std::string_view to_string(StoredType type) noexcept { return info_of(type).name; }

StoredType stored_type(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF32: return StoredType::kF32;
    case DType::kBF16: return StoredType::kBF16;
    case DType::kF16: return StoredType::kF16;
    case DType::kI32: return StoredType::kI32;
    case DType::kI64: return StoredType::kI64;
    case DType::kU8: return StoredType::kU8;
  }
  return StoredType::kU8;
}

std::int64_t SafetensorsEntry::num_elements() const noexcept {
  std::int64_t n = 1;
  for (const std::int64_t extent : shape) n *= extent;
  return n;
}

SafetensorsFile SafetensorsFile::open(const fs::path& path) {
  SafetensorsFile result;
  result.file_ = MappedFile::open(path);
  result.path_ = path;
  result.all_ = result.file_->bytes();
  result.owner_ = result.file_;
  result.parse();
  return result;
}

SafetensorsFile SafetensorsFile::read(fs::path path, std::span<const std::byte> bytes, std::shared_ptr<const void> owner) {
  SafetensorsFile result;
  result.path_ = std::move(path);
  result.all_ = bytes;
  result.owner_ = std::move(owner);
  result.parse();
  return result;
}

void SafetensorsFile::parse() {
  const fs::path& path = path_;
  const std::span<const std::byte> bytes = all_;
  const auto bad = [&](std::string_view what) { fail(ErrorCode::kCorrupt, "{}: {}", path.string(), what); };
  if (bytes.size() < 8) bad(fmt::format("{} bytes are too few for a safetensors file (the header length takes 8)", bytes.size()));
  std::uint64_t header_size = 0;
  for (std::size_t i = 8; i-- > 0;) header_size = (header_size << 8) | static_cast<std::uint64_t>(bytes[i]);
  if (header_size > kMaxSafetensorsHeaderBytes)
    bad(fmt::format("the header claims {} bytes, the limit is {}; is this a safetensors file?", header_size, kMaxSafetensorsHeaderBytes));
  if (header_size > bytes.size() - 8)
    bad(fmt::format("the header claims {} bytes, but the file ends after {}: truncated", header_size, bytes.size() - 8));
  if (header_size == 0 || bytes[8] != std::byte{'{'}) bad("the header does not start with '{'; is this a safetensors file?");

  json::parse_options options;
  options.max_depth = 8;
  json::error_code error;
  const json::value header =
      json::parse(json::string_view(reinterpret_cast<const char*>(bytes.data() + 8), header_size), error, json::storage_ptr(), options);
  if (error.failed()) bad(fmt::format("the header is not valid JSON: {}", error.message()));

  const std::uint64_t data_size = bytes.size() - 8 - header_size;
  data_offset_ = 8 + header_size;
  for (const auto& member : header.get_object()) {
    const std::string name(member.key().data(), member.key().size());
    if (name == "__metadata__") {
      if (!member.value().is_object()) bad("__metadata__ is no object");
      for (const auto& item : member.value().get_object()) {
        if (!item.value().is_string()) bad("__metadata__ holds a value that is no string");
        metadata_.emplace(std::string(item.key().data(), item.key().size()),
                          std::string(item.value().get_string().data(), item.value().get_string().size()));
      }
      continue;
    }
    SafetensorsEntry entry = parse_entry(path, name, member.value());
    if (entry.end > data_size)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}': its data ends at byte {}, but the file holds {} bytes of data: truncated", path.string(),
           name, entry.end, data_size);
    entries_.push_back(std::move(entry));
  }
  // Like the reference implementation, the data must be covered exactly once. A repeated name also ends here: the JSON
  // parser keeps one of the two, and the bytes of the other are a hole.
  std::sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end != b.end ? a.end < b.end : a.name < b.name;
  });
  std::uint64_t covered = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const SafetensorsEntry& entry = entries_[i];
    if (entry.begin != covered)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}': its data starts at byte {}, wanted {}: tensors overlap, or leave a hole", path.string(),
           entry.name, entry.begin, covered);
    covered = entry.end;
    by_name_.emplace(entry.name, i);
  }
  if (covered != data_size) bad(fmt::format("{} bytes follow the last tensor", data_size - covered));
  for (const char* key : {kChecksumKey, kPlainChecksumKey})
    if (const auto checksum = metadata_.extract(key)) check_checksum(path, bytes, header_size, key, checksum.mapped());
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const noexcept {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &entries_[it->second];
}

const SafetensorsEntry& SafetensorsFile::at(std::string_view name) const {
  const SafetensorsEntry* entry = find(name);
  if (entry == nullptr) fail(ErrorCode::kCorrupt, "{}: tensor '{}' is missing", path().string(), name);
  return *entry;
}

std::span<const std::byte> SafetensorsFile::bytes(const SafetensorsEntry& entry) const noexcept {
  return all_.subspan(static_cast<std::size_t>(data_offset_ + entry.begin), static_cast<std::size_t>(entry.end - entry.begin));
}

void SafetensorsFile::read_f32(const SafetensorsEntry& entry, std::int64_t first, std::span<float> out) const {
  PRL_CHECK(first >= 0 && first + static_cast<std::int64_t>(out.size()) <= entry.num_elements(), "tensor {} read past its end", entry.name);
  const std::byte* source = bytes(entry).data() + static_cast<std::size_t>(first) * size_of(entry.type);
  switch (entry.type) {
    case StoredType::kF32: std::memcpy(out.data(), source, out.size() * sizeof(float)); break;
    case StoredType::kBF16:
      for (std::size_t i = 0; i < out.size(); ++i) {
        BFloat16 v;
        std::memcpy(&v.bits, source + 2 * i, 2);
        out[i] = to_f32(v);
      }
      break;
    case StoredType::kF16:
      for (std::size_t i = 0; i < out.size(); ++i) {
        std::uint16_t v;
        std::memcpy(&v, source + 2 * i, 2);
        out[i] = f16_to_f32(v);
      }
      break;
    case StoredType::kF64:
      for (std::size_t i = 0; i < out.size(); ++i) {
        double v;
        std::memcpy(&v, source + 8 * i, 8);
        out[i] = static_cast<float>(v);
      }
      break;
    default:
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' is stored as {}, wanted F32, BF16, F16 or F64", path().string(), entry.name,
           to_string(entry.type));
  }
  check_whole();
}

SafetensorsFolder SafetensorsFolder::open(const fs::path& folder) {
  SafetensorsFolder result;
  result.path_ = folder;
  const fs::path single = folder / "model.safetensors";
  const fs::path index_path = folder / "model.safetensors.index.json";
  const auto exists = [](const fs::path& path) {
    std::error_code error;
    const bool is_there = fs::exists(path, error);
    if (error) fail(ErrorCode::kNotFound, "cannot look for {}: {}", path.string(), error.message());  // a ring of links, say
    return is_there;
  };
  if (exists(single)) {
    result.files_.push_back(std::make_unique<SafetensorsFile>(SafetensorsFile::open(single)));
    const SafetensorsFile* file = result.files_.back().get();
    for (const SafetensorsEntry& entry : file->entries()) result.tensors_.emplace(entry.name, SafetensorsRef{file, &entry});
    return result;
  }
  if (!exists(index_path))
    fail(ErrorCode::kNotFound,
         "{} holds neither model.safetensors nor model.safetensors.index.json; a Hugging Face folder with safetensors weights is wanted",
         folder.string());

  const auto bad = [&](std::string_view what) { fail(ErrorCode::kCorrupt, "{}: {}", index_path.string(), what); };
  json::parse_options options;
  options.max_depth = 8;
  json::error_code error;
  const json::value index = json::parse(read_regular_file(index_path, kMaxSafetensorsHeaderBytes), error, json::storage_ptr(), options);
  if (error.failed() || !index.is_object()) bad("not a JSON object");
  const json::value* map = index.get_object().if_contains("weight_map");
  if (map == nullptr || !map->is_object()) bad("weight_map is missing");

  std::map<std::string, const SafetensorsFile*> shards;
  for (const auto& member : map->get_object()) {
    const std::string name(member.key().data(), member.key().size());
    if (!member.value().is_string()) bad(fmt::format("tensor '{}': its shard is no string", name));
    const std::string shard(member.value().get_string().data(), member.value().get_string().size());
    if (shard.empty() || fs::path(shard).filename() != fs::path(shard))
      bad(fmt::format("tensor '{}': its shard '{}' is not a file of this folder", name, shard));
    auto it = shards.find(shard);
    if (it == shards.end()) {
      if (!exists(folder / shard)) bad(fmt::format("shard '{}' is missing", shard));
      result.files_.push_back(std::make_unique<SafetensorsFile>(SafetensorsFile::open(folder / shard)));
      it = shards.emplace(shard, result.files_.back().get()).first;
    }
    if (it->second->find(name) == nullptr) bad(fmt::format("tensor '{}' is promised in '{}' but is not there", name, shard));
  }
  for (const auto& file : result.files_) {
    for (const SafetensorsEntry& entry : file->entries()) {
      if (!result.tensors_.emplace(entry.name, SafetensorsRef{file.get(), &entry}).second)
        bad(fmt::format("tensor '{}' is in more than one shard", entry.name));
    }
  }
  return result;
}

SafetensorsRef SafetensorsFolder::find(std::string_view name) const noexcept {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? SafetensorsRef{} : it->second;
}

float f16_to_f32(std::uint16_t bits) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1.0p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

std::uint16_t f32_to_f16(float value) noexcept {
  const auto u = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
  const std::uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                                                    // below 2^-14: subnormal steps of 2^-24
    const float scaled = std::bit_cast<float>(magnitude) * 0x1.0p24f;
    auto steps = static_cast<std::uint32_t>(scaled);
    const float rest = scaled - static_cast<float>(steps);
    if (rest > 0.5f || (rest == 0.5f && (steps & 1u))) ++steps;
    return static_cast<std::uint16_t>(sign | steps);
  }
  const std::uint32_t rebased = magnitude - 0x38000000u;
  return static_cast<std::uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
}

}  // namespace prl::io
