#include "trainer/state_files.hpp"

#include <algorithm>
#include <boost/json.hpp>

#include <fmt/core.h>

#include "base/error.hpp"
#include "base/files.hpp"

namespace prl::trainer {

namespace json = boost::json;

namespace {

constexpr std::uint64_t kMaxLayoutBytes = 64 << 20;
constexpr int kMaxStateDepth = 8;
constexpr std::int64_t kVersion = 1;

std::vector<std::int64_t> extents(const Shape& shape) {
  std::vector<std::int64_t> out;
  for (int d = 0; d < shape.num_dims(); ++d) out.push_back(shape[d]);
  return out;
}

/// Reads members of a JSON object; errors name the file and the key.
class Reader {
 public:
  Reader(const json::value& value, std::string_view source) : source_(source) {
    if (!value.is_object()) bad("an entry is no object");
    object_ = &value.get_object();
  }
  std::int64_t number(const char* key) const {
    const json::value* value = object_->if_contains(key);
    if (value == nullptr || !value->is_int64() || value->get_int64() < 0)
      bad(fmt::format("'{}' must be a whole number of at least 0", key));
    return value->get_int64();
  }
  std::string text(const char* key) const {
    const json::value* value = object_->if_contains(key);
    if (value == nullptr || !value->is_string()) bad(fmt::format("'{}' must be text", key));
    return std::string(value->get_string());
  }
  const json::array& list(const char* key) const {
    const json::value* value = object_->if_contains(key);
    if (value == nullptr || !value->is_array()) bad(fmt::format("'{}' must be a list", key));
    return value->get_array();
  }
  [[noreturn]] void bad(std::string_view what) const { fail(ErrorCode::kCorrupt, "[ckpt] {}: {}", source_, what); }

 private:
  std::string source_;
  const json::object* object_ = nullptr;
};

}  // namespace

std::int64_t StateLayout::Entry::num_elements() const noexcept {
  std::int64_t n = 1;
  for (const std::int64_t extent : shape) n *= extent;
  return n;
}

std::string rank_file(int rank) { return fmt::format("rank_{}.safetensors", rank); }

StateLayout state_layout(const nn::TensorTable& table, const ShardPlan& plan) {
  StateLayout layout;
  for (const nn::TensorSpec& spec : table.tensors())
    if (spec.trainable) layout.tensors.push_back({spec.name, extents(spec.shape), spec.offset});
  for (const ShardPlan::Section& section : plan.sections())
    for (int rank = 0; rank < plan.num_ranks(); ++rank)
      if (const ElementRange part = section.parts[static_cast<std::size_t>(rank)]; part.count() > 0)
        layout.parts.push_back({rank_file(rank), part});
  return layout;
}

std::string to_json(const StateLayout& layout) {
  json::array tensors, parts;
  for (const StateLayout::Entry& entry : layout.tensors)
    tensors.push_back(json::object{{"name", entry.name}, {"shape", json::value_from(entry.shape)}, {"offset", entry.offset}});
  for (const StateLayout::Part& part : layout.parts)
    parts.push_back(json::object{{"file", part.file}, {"begin", part.range.begin}, {"end", part.range.end}});
  return json::serialize(
             json::object{{"format", "prl-state"}, {"version", kVersion}, {"parts", std::move(parts)}, {"tensors", std::move(tensors)}}) +
         "\n";
}

StateLayout parse_layout(std::string_view text, std::string_view source) {
  boost::system::error_code ec;
  json::parse_options options;
  options.max_depth = kMaxStateDepth;
  const json::value root = json::parse(json::string_view(text.data(), text.size()), ec, {}, options);
  if (ec) fail(ErrorCode::kCorrupt, "[ckpt] {} is no JSON", source);
  const Reader reader(root, source);
  if (reader.text("format") != "prl-state" || reader.number("version") != kVersion) reader.bad("not a layout of version 1");
  StateLayout layout;
  std::int64_t at = 0;
  for (const json::value& value : reader.list("parts")) {
    const Reader part(value, source);
    const ElementRange range{part.number("begin"), part.number("end")};
    const std::string file = part.text("file");
    if (range.begin != at || range.end < range.begin) part.bad(fmt::format("the parts leave a gap at '{}'", file));
    if (file.find('/') != std::string::npos || file.starts_with('.')) part.bad(fmt::format("'{}' is no file of this folder", file));
    at = range.end;
    layout.parts.push_back({file, range});
  }
  for (const json::value& value : reader.list("tensors")) {
    const Reader tensor(value, source);
    StateLayout::Entry entry{tensor.text("name"), {}, tensor.number("offset")};
    std::int64_t left = at - entry.offset;  // elements that may be there
    for (const json::value& extent : tensor.list("shape")) {
      if (!extent.is_int64() || extent.get_int64() < 1 || extent.get_int64() > left)
        tensor.bad(fmt::format("tensor '{}' has a bad shape or lies beyond the parts", entry.name));
      entry.shape.push_back(extent.get_int64());
      left /= extent.get_int64();
    }
    layout.tensors.push_back(std::move(entry));
  }
  return layout;
}

StateFiles::StateFiles(std::filesystem::path folder) : folder_(std::move(folder)) {
  const std::filesystem::path file = folder_ / kLayoutFile;
  if (!std::filesystem::exists(file)) return;
  layout_ = parse_layout(read_file(file, kMaxLayoutBytes), file.string());
  for (const StateLayout::Entry& entry : layout_->tensors) entries_.emplace(entry.name, entry);
}

const io::SafetensorsFile& StateFiles::open(const std::string& file) {
  std::unique_ptr<io::SafetensorsFile>& opened = files_[file];
  if (opened == nullptr) opened = std::make_unique<io::SafetensorsFile>(io::SafetensorsFile::open(folder_ / file));
  return *opened;
}

void StateFiles::read(const nn::TensorSpec& spec, std::string_view state, std::int64_t first, const Tensor& out) {
  const std::string name = state.empty() ? spec.name : fmt::format("{}.{}", spec.name, state);
  const ElementRange wanted{first, first + out.num_elements()};
  // `part` of the tensor lies in `file` as a whole tensor.
  const auto copy_from = [&](const std::string& file, ElementRange part) {
    const ElementRange both = intersection(wanted, part);
    if (both.count() == 0) return;
    const io::SafetensorsFile& stored = open(file);
    const io::SafetensorsEntry& entry = stored.at(name);
    if (entry.num_elements() != part.count() || entry.type != io::stored_type(out.dtype()))
      fail(ErrorCode::kCorrupt, "[ckpt] {}: tensor '{}' has {} elements of {}, wanted {} of {}", stored.path().string(), name,
           entry.num_elements(), io::to_string(entry.type), part.count(), to_string(out.dtype()));
    const std::size_t element = size_of(out.dtype());
    out.runtime()->copy_from_host(static_cast<std::byte*>(out.data()) + static_cast<std::size_t>(both.begin - first) * element,
                                  stored.bytes(entry).data() + static_cast<std::size_t>(both.begin - part.begin) * element,
                                  static_cast<std::size_t>(both.count()) * element);
    stored.check_whole();
  };
  if (!layout_) return copy_from(state.empty() ? "model.safetensors" : "optimizer.safetensors", {0, spec.num_elements()});
  const auto found = entries_.find(spec.name);
  if (found == entries_.end() || found->second.shape != extents(spec.shape))
    fail(ErrorCode::kCorrupt, "[ckpt] {}: tensor '{}' of shape {} is {}", (folder_ / kLayoutFile).string(), spec.name,
         spec.shape.to_string(), found == entries_.end() ? "missing" : "there with another shape");
  const std::int64_t offset = found->second.offset;
  for (const StateLayout::Part& part : layout_->parts) {
    const ElementRange own = intersection(part.range, {offset, offset + spec.num_elements()});
    if (own.count() > 0) copy_from(part.file, {own.begin - offset, own.end - offset});
  }
}

void StateFiles::check_known(const nn::TensorTable& table) const {
  if (!layout_) return;
  for (const StateLayout::Entry& entry : layout_->tensors)
    if (std::ranges::none_of(table.tensors(), [&](const nn::TensorSpec& spec) { return spec.trainable && spec.name == entry.name; }))
      fail(ErrorCode::kCorrupt, "[ckpt] {}: tensor '{}' has no place in this state", (folder_ / kLayoutFile).string(), entry.name);
}

}  // namespace prl::trainer
