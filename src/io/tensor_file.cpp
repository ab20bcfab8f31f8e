#include "io/tensor_file.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::io {
namespace {

std::vector<std::int64_t> extents(const Shape& shape) {
  std::vector<std::int64_t> out;
  for (int i = 0; i < shape.num_dims(); ++i) out.push_back(shape[i]);
  return out;
}

}  // namespace

void save_tensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                  const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsWriter::Spec> specs;
  for (const NamedTensor& item : tensors) specs.push_back({item.name, stored_type(item.tensor.dtype()), extents(item.tensor.shape())});
  SafetensorsWriter writer(path, std::move(specs), metadata);
  constexpr std::size_t kPiece = std::size_t{4} << 20;
  std::vector<std::byte> piece;
  for (const NamedTensor& item : tensors) {
    const auto* data = static_cast<const std::byte*>(item.tensor.data());
    const std::size_t size = item.tensor.num_bytes();
    if (item.tensor.runtime()->device().kind == DeviceKind::kCpu) {
      writer.append({data, size});
      continue;
    }
    for (std::size_t done = 0; done < size; done += kPiece) {
      piece.resize(std::min(kPiece, size - done));
      item.tensor.runtime()->copy_to_host(piece.data(), data + done, piece.size());
      writer.append(piece);
    }
  }
  writer.finish();
}

void load_tensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  for (const NamedTensor& item : tensors) {
    const SafetensorsEntry& entry = file.at(item.name);
    if (entry.shape != extents(item.tensor.shape()) || entry.type != stored_type(item.tensor.dtype()))
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' is {} of {} elements, wanted {} of shape {}", path.string(), item.name,
           to_string(entry.type), entry.num_elements(), to_string(stored_type(item.tensor.dtype())), item.tensor.shape().to_string());
    const auto bytes = file.bytes(entry);
    item.tensor.runtime()->copy_from_host(item.tensor.data(), bytes.data(), bytes.size());
  }
  if (file.entries().size() == tensors.size()) return;
  for (const SafetensorsEntry& entry : file.entries()) {
    const bool is_known = std::any_of(tensors.begin(), tensors.end(), [&](const NamedTensor& t) { return t.name == entry.name; });
    if (!is_known) fail(ErrorCode::kCorrupt, "{}: tensor '{}' has no place in this state", path.string(), entry.name);
  }
}

}  // namespace prl::io
