#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/safetensors.hpp"
#include "nn/fp8.hpp"
#include "tensor/dtype.hpp"

namespace prl::nn {
struct RowRun;

/// Elements of a block of MXFP4 (Open Compute Project, "OCP Microscaling Formats", 2023): 4-bit numbers (E2M1), two to a byte, the lower
/// half first, times a power of two that all have in common.
inline constexpr std::int64_t kMxfp4Block = 32;

/// A tensor of a model where a folder holds it: as it is, with rows in another order, or as one expert's part of a tensor of all; each of
/// these in FP8, too. Borrows the folder's files.
class StoredTensor {
 public:
  StoredTensor() = default;
  /// As it is.
  explicit StoredTensor(io::SafetensorsRef ref) : ref_(ref), count_(ref.entry->num_elements()) {}
  /// `count` elements from `first` on.
  static StoredTensor part(io::SafetensorsRef ref, std::int64_t first, std::int64_t count);
  /// A matrix [rows, cols] whose rows `ref` has in the order of `runs`: see stored_rows().
  static StoredTensor reordered(io::SafetensorsRef ref, const std::vector<RowRun>& runs, std::int64_t cols);
  /// The matrix [rows, cols] of an expert, of which `ref` [E, cols, rows] holds the transpose.
  static StoredTensor transposed(io::SafetensorsRef ref, std::int64_t expert, std::int64_t rows, std::int64_t cols);
  /// The matrix [rows, cols] of an expert in MXFP4: blocks [E, rows, cols / 32, 16] and their exponents plus 127 [E, rows, cols / 32].
  static StoredTensor mxfp4(io::SafetensorsRef blocks, io::SafetensorsRef scales, std::int64_t expert, std::int64_t rows,
                            std::int64_t cols);
  /// The same of a file's tensor that is FP8.
  StoredTensor scaled(const Fp8Scales& scales) const;

  bool is_there() const noexcept { return ref_.entry != nullptr; }
  /// Whether the bytes of the file are the tensor's.
  bool is_plain() const noexcept { return layout_ == Layout::kPlain && !fp8_; }
  bool is_fp8() const noexcept { return fp8_.has_value(); }
  /// Whether it is read in long runs only if many of its rows are read at a time.
  bool is_transposed() const noexcept { return layout_ == Layout::kTransposed; }
  io::StoredType type() const noexcept { return ref_.entry->type; }
  /// Of the file's tensor.
  const std::string& name() const noexcept { return ref_.entry->name; }
  const std::filesystem::path& path() const noexcept { return ref_.file->path(); }
  std::int64_t num_elements() const noexcept { return count_; }

  /// Of a plain one; see io::SafetensorsFile::bytes().
  std::span<const std::byte> bytes() const noexcept {
    const std::size_t size = io::size_of(type());
    return ref_.file->bytes(*ref_.entry).subspan(static_cast<std::size_t>(begin_) * size, static_cast<std::size_t>(count_) * size);
  }
  /// Elements [first, first + out.size()) as fp32. Error{kCorrupt} as io::SafetensorsFile::read_f32().
  void read_f32(std::int64_t first, std::span<float> out) const;
  /// See io::find_not_finite().
  std::int64_t find_not_finite(std::int64_t first, std::int64_t count, DType as) const;
  void check_whole() const;
  /// Behind the name of a tensor whose numbers are products: of what. Empty for others.
  std::string scale_note() const;

 private:
  enum class Layout : std::uint8_t { kPlain, kReordered, kTransposed, kMxfp4 };
  /// Rows of a matrix that lie together in the file, too.
  struct Run {
    std::int64_t first = 0, count = 0, in_file = 0;
  };
  /// Elements of the file's tensor.
  void read_file(std::int64_t first, std::span<float> out) const;
  void read_reordered(std::int64_t first, std::span<float> out) const;
  void read_transposed(std::int64_t first, std::span<float> out) const;
  void read_mxfp4(std::int64_t first, std::span<float> out) const;

  io::SafetensorsRef ref_, scales_;
  Layout layout_ = Layout::kPlain;
  std::int64_t begin_ = 0, count_ = 0;  ///< begin_: of a plain one, in the file's tensor
  std::int64_t expert_ = 0, rows_ = 0, cols_ = 0;
  std::shared_ptr<const std::vector<Run>> runs_;  ///< by `first`
  std::optional<Fp8Scales> fp8_;
};

}  // namespace prl::nn
