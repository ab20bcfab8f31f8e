#include "io/gguf.hpp"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>

#include "base/error.hpp"

namespace prl::io {
namespace fs = std::filesystem;
namespace {

constexpr std::uint64_t kMaxNameBytes = 65'535;  // of keys; tensor names are shorter still
constexpr std::uint32_t kMaxDims = 4;
constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint64_t kMaxAlignment = 1 << 20;

/// Types of metadata values, by the numbers of the format.
enum ValueType : std::uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
  kNumValueTypes
};
constexpr std::string_view kValueNames[] = {"uint8", "int8",   "uint16", "int16",  "uint32", "int32",  "float32",
                                            "bool",  "string", "array",  "uint64", "int64",  "float64"};
/// 0 for strings and arrays, whose length varies.
constexpr std::uint64_t kValueBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

template <typename T>
T load(const std::byte* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

}  // namespace

/// Walks the header; every step checks what is left.
class GgufFile::Cursor {
 public:
  Cursor(const fs::path& path, std::span<const std::byte> bytes) : path_(path), bytes_(bytes) {}

  std::uint64_t position() const noexcept { return position_; }
  std::uint64_t left() const noexcept { return bytes_.size() - position_; }
  /// Named in errors: "key 'x'", "tensor 'y'".
  void set_subject(std::string subject) { subject_ = std::move(subject); }

  [[noreturn]] void fail_here(ErrorCode code, std::string_view what) const {
    fail(code, "{}: {}{}at byte {}: {}", path_.string(), subject_, subject_.empty() ? "" : " ", position_, what);
  }
  [[noreturn]] void bad(std::string_view what) const { fail_here(ErrorCode::kCorrupt, what); }

  void skip(std::uint64_t count) {
    if (count > left()) bad(fmt::format("{} bytes wanted, but the file ends after {}: truncated", count, left()));
    position_ += count;
  }
  template <typename T>
  T take() {
    const std::uint64_t at = position_;
    skip(sizeof(T));
    return load<T>(bytes_.data() + at);
  }
  std::string_view take_string(std::uint64_t max_bytes) {
    const auto size = take<std::uint64_t>();
    if (size > max_bytes) bad(fmt::format("a string of {} bytes, the limit is {}", size, max_bytes));
    const std::uint64_t at = position_;
    skip(size);
    return {reinterpret_cast<const char*>(bytes_.data() + at), static_cast<std::size_t>(size)};
  }
  std::uint32_t take_value_type() {
    const auto type = take<std::uint32_t>();
    if (type >= kNumValueTypes) bad(fmt::format("unknown type {} of a value", type));
    return type;
  }

 private:
  const fs::path& path_;
  std::span<const std::byte> bytes_;
  std::uint64_t position_ = 0;
  std::string subject_;
};

std::int64_t GgufTensor::num_elements() const noexcept {
  std::int64_t n = 1;
  for (const std::int64_t extent : shape) n *= extent;
  return n;
}

bool GgufFile::is_gguf(const fs::path& path) noexcept {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return false;
  std::ifstream in(path, std::ios::binary);
  char magic[4] = {};
  return in.read(magic, 4) && std::memcmp(magic, "GGUF", 4) == 0;
}

GgufFile GgufFile::open(const fs::path& path) {
  GgufFile result;
  result.file_ = MappedFile::open(path);
  const std::span<const std::byte> bytes = result.file_->bytes();
  Cursor cursor(path, bytes);
  cursor.set_subject("header");
  if (bytes.size() < 4 || std::memcmp(bytes.data(), "GGUF", 4) != 0)
    cursor.bad("the file does not start with 'GGUF'; is this a GGUF file?");
  cursor.skip(4);
  result.version_ = cursor.take<std::uint32_t>();
  if ((result.version_ & 0xffffu) == 0)
    cursor.fail_here(ErrorCode::kNotImplemented,
                     "the version number is byte-swapped: a big-endian file; this build reads little-endian ones");
  if (result.version_ != 2 && result.version_ != 3)
    cursor.fail_here(ErrorCode::kNotImplemented, fmt::format("version {}; this build reads versions 2 and 3", result.version_));
  const auto num_tensors = cursor.take<std::uint64_t>();
  const auto num_values = cursor.take<std::uint64_t>();
  result.read_metadata(cursor, num_values);
  result.read_tensors(cursor, num_tensors);
  result.check_data();
  return result;
}

void GgufFile::read_metadata(Cursor& cursor, std::uint64_t count) {
  constexpr std::uint64_t kLeastBytes = 8 + 4 + 1;  // an empty key, a type, one byte of value
  if (count > cursor.left() / kLeastBytes)
    cursor.bad(fmt::format("{} metadata values do not fit in the {} bytes that are left", count, cursor.left()));
  for (std::uint64_t i = 0; i < count; ++i) {
    cursor.set_subject(fmt::format("metadata value {}", i));
    const std::string_view key = cursor.take_string(kMaxNameBytes);
    cursor.set_subject(fmt::format("key '{}'", key));
    Value value;
    value.type = cursor.take_value_type();
    if (value.type == kArray) {
      value.is_array = true;
      value.type = cursor.take_value_type();
      if (value.type == kArray) cursor.fail_here(ErrorCode::kNotImplemented, "an array of arrays; this build reads flat arrays");
      value.count = cursor.take<std::uint64_t>();
    }
    value.offset = cursor.position();
    if (value.type == kString) {
      if (value.count > cursor.left() / 8) cursor.bad(fmt::format("an array of {} strings does not fit in the file", value.count));
      for (std::uint64_t s = 0; s < value.count; ++s) cursor.take_string(cursor.left());
    } else {
      const std::uint64_t each = kValueBytes[value.type];
      if (value.count > cursor.left() / each) cursor.bad(fmt::format("{} values of {} bytes do not fit in the file", value.count, each));
      cursor.skip(value.count * each);
    }
    if (!values_.emplace(std::string(key), value).second) cursor.bad("the key occurs twice");
  }
}

void GgufFile::read_tensors(Cursor& cursor, std::uint64_t count) {
  constexpr std::uint64_t kLeastBytes = 8 + 4 + 8 + 4 + 8;
  cursor.set_subject("tensor list");
  if (count > cursor.left() / kLeastBytes)
    cursor.bad(fmt::format("{} tensors do not fit in the {} bytes that are left", count, cursor.left()));
  for (std::uint64_t i = 0; i < count; ++i) {
    cursor.set_subject(fmt::format("tensor {}", i));
    GgufTensor tensor;
    tensor.name = cursor.take_string(kMaxNameBytes);
    cursor.set_subject(fmt::format("tensor '{}'", tensor.name));
    const auto num_dims = cursor.take<std::uint32_t>();
    if (num_dims < 1 || num_dims > kMaxDims) cursor.bad(fmt::format("{} dimensions, wanted 1 to {}", num_dims, kMaxDims));
    std::uint64_t elements = 1;
    for (std::uint32_t d = 0; d < num_dims; ++d) {
      const auto extent = cursor.take<std::uint64_t>();
      if (extent == 0 || extent > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) / elements)
        cursor.bad(fmt::format("extent {} of dimension {} is 0, or the shape overflows", extent, d));
      elements *= extent;
      tensor.shape.push_back(static_cast<std::int64_t>(extent));
    }
    const auto type = cursor.take<std::uint32_t>();
    const auto info = ggml_type_info(type);
    if (!info)
      cursor.fail_here(ErrorCode::kNotImplemented,
                       fmt::format("stored as {} ({}); this build reads F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K",
                                   ggml_type_name(type), type));
    tensor.type = *info;
    const auto row = static_cast<std::uint64_t>(tensor.shape.front());
    if (row % info->block_elements != 0)
      cursor.bad(fmt::format("rows of {} elements are no whole number of {} blocks of {}", row, info->name, info->block_elements));
    const std::uint64_t blocks = elements / info->block_elements;
    if (blocks > std::numeric_limits<std::uint64_t>::max() / info->block_bytes) cursor.bad("the shape overflows");
    tensor.num_bytes = blocks * info->block_bytes;
    tensor.begin = cursor.take<std::uint64_t>();  // within the data section until that is known
    std::reverse(tensor.shape.begin(), tensor.shape.end());
    if (!by_name_.emplace(tensor.name, tensors_.size()).second) cursor.bad("the name occurs twice");
    tensors_.push_back(std::move(tensor));
  }
  const std::int64_t wanted = integer("general.alignment").value_or(kDefaultAlignment);
  const auto alignment = static_cast<std::uint64_t>(wanted);
  if (wanted <= 0 || alignment > kMaxAlignment || (alignment & (alignment - 1)) != 0)
    fail(ErrorCode::kCorrupt, "{}: key 'general.alignment' is {}, wanted a power of two up to {}", path().string(), wanted, kMaxAlignment);
  data_begin_ = (cursor.position() + alignment - 1) / alignment * alignment;
  for (GgufTensor& tensor : tensors_) {
    if (tensor.begin % alignment != 0)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}': its data starts at byte {} of the data section, wanted a multiple of {}", path().string(),
           tensor.name, tensor.begin, alignment);
    if (tensor.begin > std::numeric_limits<std::uint64_t>::max() - data_begin_)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}': its data offset {} overflows", path().string(), tensor.name, tensor.begin);
    tensor.begin += data_begin_;
  }
}

void GgufFile::check_data() const {
  const std::uint64_t size = file_->bytes().size();
  std::vector<const GgufTensor*> order;
  for (const GgufTensor& tensor : tensors_) {
    if (tensor.begin > size || tensor.num_bytes > size - tensor.begin)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}': its data takes {} bytes from byte {}, but the file ends at {}: truncated",
           path().string(), tensor.name, tensor.num_bytes, tensor.begin, size);
    order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->begin < b->begin; });
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (order[i]->begin < order[i - 1]->begin + order[i - 1]->num_bytes)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}': its data starts at byte {}, inside that of '{}'", path().string(), order[i]->name,
           order[i]->begin, order[i - 1]->name);
  }
}

const GgufFile::Value* GgufFile::find_value(std::string_view key) const noexcept {
  const auto it = values_.find(key);
  return it == values_.end() ? nullptr : &it->second;
}

std::vector<std::string> GgufFile::keys() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : values_) names.push_back(name);
  return names;
}

void GgufFile::bad_key(std::string_view key, const Value& value, std::string_view wanted) const {
  fail(ErrorCode::kCorrupt, "{}: key '{}' at byte {} is {}{}, wanted {}", path().string(), key, value.offset,
       value.is_array ? "an array of " : "", kValueNames[value.type], wanted);
}

std::int64_t GgufFile::integer_at(std::uint32_t type, std::uint64_t offset, std::string_view key) const {
  const std::byte* p = file_->bytes().data() + offset;
  switch (type) {
    case kUint8: return load<std::uint8_t>(p);
    case kInt8: return load<std::int8_t>(p);
    case kUint16: return load<std::uint16_t>(p);
    case kInt16: return load<std::int16_t>(p);
    case kUint32: return load<std::uint32_t>(p);
    case kInt32: return load<std::int32_t>(p);
    case kInt64: return load<std::int64_t>(p);
    case kUint64: {
      const auto v = load<std::uint64_t>(p);
      if (v > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        fail(ErrorCode::kCorrupt, "{}: key '{}' at byte {} is {}, which is out of range", path().string(), key, offset, v);
      return static_cast<std::int64_t>(v);
    }
    default: break;
  }
  fail(ErrorCode::kCorrupt, "{}: key '{}' at byte {} is {}, wanted an integer", path().string(), key, offset, kValueNames[type]);
}

std::optional<std::string_view> GgufFile::string(std::string_view key) const {
  const Value* value = find_value(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_array || value->type != kString) bad_key(key, *value, "a string");
  return strings(key).front();
}

std::optional<std::int64_t> GgufFile::integer(std::string_view key) const {
  const Value* value = find_value(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_array) bad_key(key, *value, "an integer");
  return integer_at(value->type, value->offset, key);
}

std::optional<double> GgufFile::number(std::string_view key) const {
  const Value* value = find_value(key);
  if (value == nullptr) return std::nullopt;
  const std::byte* p = file_->bytes().data() + value->offset;
  if (!value->is_array && value->type == kFloat32) return load<float>(p);
  if (!value->is_array && value->type == kFloat64) return load<double>(p);
  if (value->is_array) bad_key(key, *value, "a number");
  return static_cast<double>(integer_at(value->type, value->offset, key));
}

std::optional<bool> GgufFile::boolean(std::string_view key) const {
  const Value* value = find_value(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_array || value->type != kBool) bad_key(key, *value, "a bool");
  return file_->bytes()[value->offset] != std::byte{0};
}

bool GgufFile::is_array(std::string_view key) const noexcept {
  const Value* value = find_value(key);
  return value != nullptr && value->is_array;
}

std::vector<std::string_view> GgufFile::strings(std::string_view key) const {
  const Value* value = find_value(key);
  std::vector<std::string_view> result;
  if (value == nullptr) return result;
  if (value->type != kString) bad_key(key, *value, "strings");
  const std::byte* p = file_->bytes().data() + value->offset;  // lengths were checked by open()
  for (std::uint64_t i = 0; i < value->count; ++i) {
    const auto size = static_cast<std::size_t>(load<std::uint64_t>(p));
    result.emplace_back(reinterpret_cast<const char*>(p + 8), size);
    p += 8 + size;
  }
  return result;
}

std::vector<std::int64_t> GgufFile::integers(std::string_view key) const {
  const Value* value = find_value(key);
  std::vector<std::int64_t> result;
  if (value == nullptr) return result;
  if (value->type == kString) bad_key(key, *value, "integers");
  for (std::uint64_t i = 0; i < value->count; ++i)
    result.push_back(integer_at(value->type, value->offset + i * kValueBytes[value->type], key));
  return result;
}

const GgufTensor* GgufFile::find(std::string_view name) const noexcept {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

void GgufFile::read_f32(const GgufTensor& tensor, std::int64_t first, std::span<float> out) const {
  const auto block = static_cast<std::int64_t>(tensor.type.block_elements);
  PRL_CHECK(first >= 0 && first % block == 0 && first + static_cast<std::int64_t>(out.size()) <= tensor.num_elements(),
            "tensor {} read past its end", tensor.name);
  const std::uint64_t begin = tensor.begin + static_cast<std::uint64_t>(first / block) * tensor.type.block_bytes;
  dequantize(tensor.type.type, file_->bytes().subspan(begin, out.size() / tensor.type.block_elements * tensor.type.block_bytes), out);
  file_->check_whole();
}

}  // namespace prl::io
