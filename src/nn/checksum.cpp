#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/thread_pool.hpp"
#include "nn/models/family.hpp"
#include "nn/weights.hpp"

namespace prl::nn {
namespace {

/// Elements per run; a run holds whole rows. Its buffers stay within the second-level cache.
constexpr std::int64_t kRunElements = 1 << 14;

/// Rows [first, first + num_rows) of one stored thing are one named tensor: of a packed matrix, or of a plain tensor.
struct Source {
  std::string name;
  const ops::LinearWeight* packed = nullptr;
  const Tensor* plain = nullptr;
  std::int64_t first_row = 0, num_rows = 0, num_cols = 0;

  std::int64_t rows_per_run() const { return std::max<std::int64_t>(1, kRunElements / num_cols); }
  std::int64_t num_runs() const { return (num_rows + rows_per_run() - 1) / rows_per_run(); }
};

std::vector<Source> list_sources(const Weights& w) {
  const ModelConfig& c = w.config;
  const Family& family = find_family(c.model_type, "checksum");
  const std::int64_t Q = c.num_heads * c.head_dim, K = c.num_kv_heads * c.head_dim, F = c.intermediate_size;
  std::vector<Source> out;
  const auto matrix = [&](Slot slot, std::int64_t layer, const ops::LinearWeightPtr& weight, std::int64_t first, std::int64_t rows) {
    out.push_back({family.name_of(slot, layer), weight.get(), nullptr, first, rows, weight->num_inputs()});
  };
  const auto vector = [&](Slot slot, std::int64_t layer, const Tensor& tensor, std::int64_t first, std::int64_t count) {
    if (tensor.defined()) out.push_back({family.name_of(slot, layer), nullptr, &tensor, first, count, 1});
  };
  out.push_back({family.name_of(Slot::kEmbedding, -1), nullptr, &w.embedding_VH, 0, c.vocab_size, c.hidden_size});
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const Weights::Layer& l = w.layers[static_cast<std::size_t>(i)];
    vector(Slot::kInputNorm, i, l.input_norm, 0, c.hidden_size);
    matrix(Slot::kQ, i, l.qkv, 0, Q);
    matrix(Slot::kK, i, l.qkv, Q, K);
    matrix(Slot::kV, i, l.qkv, Q + K, K);
    vector(Slot::kQBias, i, l.qkv_bias, 0, Q);
    vector(Slot::kKBias, i, l.qkv_bias, Q, K);
    vector(Slot::kVBias, i, l.qkv_bias, Q + K, K);
    vector(Slot::kQNorm, i, l.q_norm, 0, c.head_dim);
    vector(Slot::kKNorm, i, l.k_norm, 0, c.head_dim);
    matrix(Slot::kO, i, l.o, 0, c.hidden_size);
    vector(Slot::kOBias, i, l.o_bias, 0, c.hidden_size);
    vector(Slot::kPostNorm, i, l.post_norm, 0, c.hidden_size);
    matrix(Slot::kGate, i, l.gate_up, 0, F);
    matrix(Slot::kUp, i, l.gate_up, F, F);
    matrix(Slot::kDown, i, l.down, 0, c.hidden_size);
  }
  vector(Slot::kFinalNorm, -1, w.final_norm, 0, c.hidden_size);
  if (!c.tie_word_embeddings) matrix(Slot::kLmHead, -1, w.lm_head, 0, c.vocab_size);
  return out;
}

/// fp32 values that are values of `compute` already, as bytes of `compute`.
void append_values(std::vector<std::byte>& bytes, const float* values, std::size_t count, DType compute) {
  const std::size_t at = bytes.size();
  if (compute == DType::kF32) {
    bytes.resize(at + 4 * count);
    std::memcpy(bytes.data() + at, values, 4 * count);
    return;
  }
  bytes.resize(at + 2 * count);
  std::byte* out = bytes.data() + at;
  // Two at a time: the upper halves of two neighbours make one word (little-endian, as all supported machines are).
  static_assert(std::endian::native == std::endian::little);
  for (std::size_t i = 0; i + 1 < count; i += 2) {
    std::uint64_t pair;
    std::memcpy(&pair, values + i, 8);
    const auto halves = static_cast<std::uint32_t>(((pair >> 16) & 0xffffu) | ((pair >> 32) & 0xffff0000u));
    std::memcpy(out + 2 * i, &halves, 4);
  }
  if (count % 2 != 0) {
    const auto half = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(values[count - 1]) >> 16);
    std::memcpy(out + 2 * (count - 1), &half, 2);
  }
}

std::uint64_t hash_run(const Source& source, std::int64_t run, DType compute) {
  const std::int64_t first = run * source.rows_per_run();
  const std::int64_t count = std::min(source.rows_per_run(), source.num_rows - first);
  const auto cols = static_cast<std::size_t>(source.num_cols);
  std::vector<std::byte> bytes;
  bytes.reserve(static_cast<std::size_t>(count) * cols * size_of(compute));
  if (source.packed != nullptr) {
    std::vector<float> row(cols);
    for (std::int64_t r = 0; r < count; ++r) {
      source.packed->unpack_row(source.first_row + first + r, row.data());
      append_values(bytes, row.data(), cols, compute);
    }
    return hash_bytes(bytes);
  }
  const Tensor& tensor = *source.plain;
  const std::size_t offset = static_cast<std::size_t>(source.first_row + first) * cols * size_of(tensor.dtype());
  const std::size_t size = static_cast<std::size_t>(count) * cols * size_of(tensor.dtype());
  const auto* data = static_cast<const std::byte*>(tensor.data()) + offset;
  std::vector<std::byte> host;
  if (tensor.runtime()->device().kind != DeviceKind::kCpu) {
    host.resize(size);
    tensor.runtime()->copy_to_host(host.data(), data, size);
    data = host.data();
  }
  if (tensor.dtype() == compute) return hash_bytes(std::span(data, size));
  append_values(bytes, reinterpret_cast<const float*>(data), static_cast<std::size_t>(count) * cols, compute);
  return hash_bytes(bytes);
}

}  // namespace

WeightsChecksum checksum(const Weights& weights, ThreadPool* pool) {
  const std::vector<Source> sources = list_sources(weights);
  struct Run {
    std::size_t source;
    std::int64_t run;
  };
  std::vector<Run> runs;
  for (std::size_t s = 0; s < sources.size(); ++s)
    for (std::int64_t r = 0; r < sources[s].num_runs(); ++r) runs.push_back({s, r});
  std::vector<std::uint64_t> hashes(runs.size());
  std::optional<ThreadPool> own;
  if (pool == nullptr) pool = &own.emplace();
  pool->parallel_for(static_cast<std::int64_t>(runs.size()), [&](std::int64_t i) {
    const Run run = runs[static_cast<std::size_t>(i)];
    hashes[static_cast<std::size_t>(i)] = hash_run(sources[run.source], run.run, weights.compute);
  });

  WeightsChecksum out;
  std::size_t next = 0;
  std::string all;
  for (const Source& source : sources) {
    const auto count = static_cast<std::size_t>(source.num_runs());
    const std::uint64_t hash = hash_bytes(std::as_bytes(std::span(hashes).subspan(next, count)));
    next += count;
    out.tensors.emplace_back(source.name, hash);
    all.append(source.name).append(1, '\0').append(reinterpret_cast<const char*>(&hash), sizeof hash);
  }
  out.combined = hash_bytes(std::string_view(all));
  return out;
}

}  // namespace prl::nn
