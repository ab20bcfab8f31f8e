#include "nn/vision_tower.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.hpp"
#include "io/safetensors.hpp"
#include "nn/models/family.hpp"
#include "ops/vision.hpp"

namespace prl::nn {
namespace fs = std::filesystem;
namespace {

constexpr float kTowerEps = 1e-6f;
/// Patches that an MLP and the embedding take at a time: what lies between two products is 4 times as wide as what lies around them.
constexpr std::int64_t kPatchesAtOnce = 4096;

std::int64_t padded_head(std::int64_t head_dim) {
  return *std::ranges::find_if(ops::kHeadDims, [&](std::int64_t d) { return d >= head_dim; });
}

Tensor upload_f32(ops::OpContext& ctx, std::span<const float> values, Shape shape) {
  const Tensor out = Tensor::empty(ctx.runtime, shape, DType::kF32);
  ctx.runtime->copy_from_host(out.data(), values.data(), values.size_bytes());
  return out;
}

/// In the compute dtype.
Tensor upload_rounded(ops::OpContext& ctx, std::span<const float> values, Shape shape, DType compute) {
  const Tensor full = upload_f32(ctx, values, shape);
  if (compute == DType::kF32) return full;
  const Tensor out = Tensor::empty(ctx.runtime, shape, compute);
  ops::cast(ctx, out, full);
  return out;
}

/// Row and column of the patch at `index`: squares of merged patches come one after the other, row after row, and so do the patches of one.
struct PatchPlace {
  std::int64_t row, col;
  PatchPlace(std::int64_t index, std::int64_t grid_cols, std::int64_t merge) {
    const std::int64_t square = index / (merge * merge), within = index % (merge * merge), squares = grid_cols / merge;
    row = square / squares * merge + within / merge;
    col = square % squares * merge + within % merge;
  }
};

/// Where one of `count` points along a side lies between those of the learned grid.
struct AxisTap {
  std::int64_t low, high;
  float part_of_high;
  AxisTap(std::int64_t i, std::int64_t count, std::int64_t side) {
    const float at = count > 1 ? static_cast<float>(i * (side - 1)) / static_cast<float>(count - 1) : 0.0f;
    low = std::min(static_cast<std::int64_t>(at), side - 1);
    high = std::min(low + 1, side - 1);
    part_of_high = at - static_cast<float>(low);
  }
};

}  // namespace

/// Reads the tensors of a tower and notes which there were.
class TowerLoader {
 public:
  TowerLoader(ops::OpContext& ctx, const VisionConfig& config, const fs::path& folder, DType compute)
      : ctx_(ctx), config_(config), compute_(compute), files_(io::SafetensorsFolder::open(folder)) {}

  bool has_tower() const {
    const auto found = files_.tensors().lower_bound(kTowerPrefix);
    return found != files_.tensors().end() && found->first.starts_with(kTowerPrefix);
  }

  std::shared_ptr<const VisionTower> load() {
    const VisionConfig& c = config_;
    const std::int64_t H = c.hidden_size, square = c.patches_of_token() * H;
    std::shared_ptr<VisionTower> tower(new VisionTower());
    tower->config_ = c;
    tower->compute_ = compute_;
    tower->padded_dim_ = padded_head(c.head_dim());
    tower->patches_ = linear("patch_embed.proj", {H, 3, c.temporal_patch, c.patch_size, c.patch_size});
    tower->positions_ = rounded(read("pos_embed.weight", {c.num_positions, H}));
    for (std::int64_t i = 0; i < c.num_layers; ++i) tower->layers_.push_back(layer(fmt::format("blocks.{}.", i), tower->padded_dim_));
    tower->merge_norm_ = norm("merger.norm");
    tower->merge1_ = linear("merger.linear_fc1", {square, square});
    tower->merge2_ = linear("merger.linear_fc2", {c.output_size, square});
    tower->num_bytes_ = num_bytes_;
    for (const auto& [name, ref] : files_.tensors())
      if (name.starts_with(kTowerPrefix) && !known_.contains(name) && !name.ends_with("rotary_pos_emb.inv_freq"))
        fail(ErrorCode::kCorrupt, "{}: tensor '{}' is no part of a vision tower with this config.json", ref.file->path().string(), name);
    return tower;
  }

 private:
  VisionTower::Layer layer(const std::string& prefix, std::int64_t padded) {
    const VisionConfig& c = config_;
    const std::int64_t H = c.hidden_size, F = c.intermediate_size;
    return {.norm1 = norm(prefix + "norm1"),
            .norm2 = norm(prefix + "norm2"),
            .qkv = qkv(prefix + "attn.qkv", padded),
            .proj = proj(prefix + "attn.proj", padded),
            .fc1 = linear(prefix + "mlp.linear_fc1", {F, H}),
            .fc2 = linear(prefix + "mlp.linear_fc2", {H, F})};
  }

  /// Where element `d` of a head lies among the padded ones: of queries and keys the halves that turn together stay half a head apart.
  std::int64_t place_of(std::int64_t d, std::int64_t padded, bool is_value) const {
    const std::int64_t half = config_.head_dim() / 2;
    return is_value || d < half ? d : padded / 2 + d - half;
  }

  ops::LinearWeightPtr qkv(const std::string& name, std::int64_t padded) {
    const std::int64_t H = config_.hidden_size, D = config_.head_dim(), heads = config_.num_heads;
    const std::vector<float> w = read(name + ".weight", {3 * H, H}), b = read(name + ".bias", {3 * H});
    std::vector<float> wide(static_cast<std::size_t>(3 * heads * padded * H)), bias(static_cast<std::size_t>(3 * heads * padded));
    for (std::int64_t part = 0; part < 3; ++part)
      for (std::int64_t head = 0; head < heads; ++head)
        for (std::int64_t d = 0; d < D; ++d) {
          const std::int64_t from = (part * heads + head) * D + d, to = (part * heads + head) * padded + place_of(d, padded, part == 2);
          std::copy_n(w.begin() + from * H, H, wide.begin() + to * H);
          bias[static_cast<std::size_t>(to)] = b[static_cast<std::size_t>(from)];
        }
    return pack(wide, bias, {3 * heads * padded, H});
  }

  ops::LinearWeightPtr proj(const std::string& name, std::int64_t padded) {
    const std::int64_t H = config_.hidden_size, D = config_.head_dim(), heads = config_.num_heads;
    const std::vector<float> w = read(name + ".weight", {H, H}), b = read(name + ".bias", {H});
    std::vector<float> wide(static_cast<std::size_t>(H * heads * padded));
    for (std::int64_t row = 0; row < H; ++row)
      for (std::int64_t head = 0; head < heads; ++head)
        std::copy_n(w.begin() + (row * heads + head) * D, D, wide.begin() + (row * heads + head) * padded);
    return pack(wide, b, {H, heads * padded});
  }

  ops::LinearWeightPtr linear(const std::string& name, const std::vector<std::int64_t>& shape) {
    const std::vector<float> w = read(name + ".weight", shape), b = read(name + ".bias", {shape[0]});
    return pack(w, b, {shape[0], static_cast<std::int64_t>(w.size()) / shape[0]});
  }

  ops::LinearWeightPtr pack(const std::vector<float>& w, const std::vector<float>& b, Shape shape) {
    ops::LinearWeightPtr packed = ops::pack_linear(ctx_, upload_f32(ctx_, w, shape), upload_f32(ctx_, rounded(b), {shape[0]}), compute_,
                                                   /*with_backward=*/false);
    num_bytes_ += packed->num_bytes();
    return packed;
  }

  VisionTower::Norm norm(const std::string& name) {
    const std::int64_t H = config_.hidden_size;
    return {upload_f32(ctx_, rounded(read(name + ".weight", {H})), {H}), upload_f32(ctx_, rounded(read(name + ".bias", {H})), {H})};
  }

  std::vector<float> rounded(std::vector<float> values) const {
    if (compute_ == DType::kBF16)
      for (float& v : values) v = to_f32(to_bf16(v));
    return values;
  }

  std::vector<float> read(const std::string& within, const std::vector<std::int64_t>& shape) {
    const std::string name = std::string(kTowerPrefix) + within;
    known_.insert(name);
    const io::SafetensorsRef ref = files_.find(name);
    if (ref.entry == nullptr) fail(ErrorCode::kCorrupt, "{}: tensor '{}' of the vision tower is missing", files_.path().string(), name);
    if (ref.entry->shape != shape)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' has shape [{}], vision_config wants [{}]", ref.file->path().string(), name,
           fmt::join(ref.entry->shape, ", "), fmt::join(shape, ", "));
    using io::StoredType;
    if (const StoredType type = ref.entry->type; type != StoredType::kF32 && type != StoredType::kBF16 && type != StoredType::kF16)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' is stored as {}, wanted F32, BF16 or F16", ref.file->path().string(), name,
           io::to_string(type));
    std::vector<float> values(static_cast<std::size_t>(ref.entry->num_elements()));
    ref.file->read_f32(*ref.entry, 0, values);
    ref.file->check_whole();
    for (std::size_t i = 0; i < values.size(); ++i)
      if (!std::isfinite(values[i]))
        fail(ErrorCode::kCorrupt, "{}: tensor '{}' holds {} at element {}; weights must be finite numbers", ref.file->path().string(), name,
             values[i], i);
    return values;
  }

  ops::OpContext& ctx_;
  const VisionConfig& config_;
  const DType compute_;
  io::SafetensorsFolder files_;
  std::set<std::string, std::less<>> known_;
  std::size_t num_bytes_ = 0;
};

std::shared_ptr<const VisionTower> VisionTower::load(ops::OpContext& ctx, const VisionConfig& config, const fs::path& folder,
                                                     DType compute) {
  TowerLoader loader(ctx, config, folder, compute);
  return loader.has_tower() ? loader.load() : nullptr;
}

/// Products of patches and the learned positions: [patches, hidden_size].
Tensor VisionTower::embed_patches(ops::OpContext& ctx, const TowerImage& image) const {
  const VisionConfig& c = config_;
  const std::int64_t P = c.patch_size, K = c.patch_values(), H = c.hidden_size, rows = image.height / P, cols = image.width / P;
  const std::int64_t num_patches = rows * cols, side = std::llround(std::sqrt(static_cast<double>(c.num_positions)));
  std::array<std::array<float, 256>, 3> value_of{};
  for (std::size_t channel = 0; channel < 3; ++channel)
    for (std::size_t byte = 0; byte < 256; ++byte)
      value_of[channel][byte] = (static_cast<float>(byte) - image.mean[channel]) / image.deviation[channel];
  const Tensor x = Tensor::empty(ctx.runtime, {num_patches, H}, compute_);
  std::vector<float> patches, places;
  for (std::int64_t first = 0; first < num_patches; first += kPatchesAtOnce) {
    const std::int64_t count = std::min(kPatchesAtOnce, num_patches - first);
    patches.resize(static_cast<std::size_t>(count * K));
    places.resize(static_cast<std::size_t>(count * H));
    for (std::int64_t i = 0; i < count; ++i) {
      const PatchPlace place(first + i, cols, c.merge_size);
      float* to = patches.data() + i * K;
      for (std::size_t channel = 0; channel < 3; ++channel)
        for (std::int64_t frame = 0; frame < c.temporal_patch; ++frame)
          for (std::int64_t y = 0; y < P; ++y)
            for (std::int64_t px = 0; px < P; ++px)
              *to++ = value_of[channel]
                              [image.rgb[static_cast<std::size_t>(((place.row * P + y) * image.width + place.col * P + px) * 3) + channel]];
      const AxisTap v(place.row, rows, side), h(place.col, cols, side);
      const auto row_of = [&](std::int64_t r, std::int64_t col) { return positions_.data() + (r * side + col) * H; };
      const float *const a = row_of(v.low, h.low), *const b = row_of(v.low, h.high), *const d = row_of(v.high, h.low),
                         *const e = row_of(v.high, h.high);
      const float wa = (1.0f - v.part_of_high) * (1.0f - h.part_of_high), wb = (1.0f - v.part_of_high) * h.part_of_high,
                  wd = v.part_of_high * (1.0f - h.part_of_high), we = v.part_of_high * h.part_of_high;
      for (std::int64_t n = 0; n < H; ++n) places[static_cast<std::size_t>(i * H + n)] = a[n] * wa + b[n] * wb + d[n] * wd + e[n] * we;
    }
    const TensorView to = x.view().rows(first, count);
    ops::linear(ctx, to, upload_rounded(ctx, patches, {count, K}, compute_), *patches_);
    ops::add(ctx, to, to, upload_rounded(ctx, places, {count, H}, compute_));
    ctx.runtime->synchronize();  // host arrays and tensors of this part are reused
  }
  return x;
}

/// Of the patches in their order: the first half of a head's pairs turn with rows, the second with columns.
ops::RopeTable VisionTower::rope_of(ops::OpContext& ctx, std::int64_t rows, std::int64_t cols) const {
  const std::int64_t quarter = config_.head_dim() / 4, half = padded_dim_ / 2;
  std::vector<float> frequencies;
  for (std::int64_t i = 0; i < quarter; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(2 * quarter);
    frequencies.push_back(1.0f / static_cast<float>(std::pow(config_.rope_theta, static_cast<double>(exponent))));
  }
  const std::int64_t longest = std::max(rows, cols);
  std::vector<float> cos_of(static_cast<std::size_t>(longest * quarter)), sin_of(cos_of.size());
  for (std::int64_t p = 0; p < longest; ++p)
    for (std::int64_t i = 0; i < quarter; ++i) {
      const auto angle = static_cast<double>(static_cast<float>(p) * frequencies[static_cast<std::size_t>(i)]);
      cos_of[static_cast<std::size_t>(p * quarter + i)] = static_cast<float>(std::cos(angle));
      sin_of[static_cast<std::size_t>(p * quarter + i)] = static_cast<float>(std::sin(angle));
    }
  const std::int64_t count = rows * cols;
  std::vector<float> cosines(static_cast<std::size_t>(count * half), 1.0f), sines(cosines.size(), 0.0f);  // padding does not turn
  for (std::int64_t t = 0; t < count; ++t) {
    const PatchPlace place(t, cols, config_.merge_size);
    for (const auto& [position, first] : {std::pair(place.row, std::int64_t{0}), std::pair(place.col, quarter)}) {
      std::copy_n(cos_of.begin() + position * quarter, quarter, cosines.begin() + t * half + first);
      std::copy_n(sin_of.begin() + position * quarter, quarter, sines.begin() + t * half + first);
    }
  }
  return {upload_f32(ctx, cosines, {count, half}), upload_f32(ctx, sines, {count, half})};
}

/// x = x + attention(norm(x)), then x + mlp(norm(x)), in place.
void VisionTower::run_layer(ops::OpContext& ctx, const Layer& layer, const Tensor& x, const ops::RopeTable& rope,
                            const Tensor& positions) const {
  const std::int64_t T = x.shape()[0], H = config_.hidden_size, heads = config_.num_heads, D = padded_dim_, Q = heads * D;
  const auto make = [&](std::int64_t rows, std::int64_t cols) { return Tensor::empty(ctx.runtime, {rows, cols}, compute_); };
  const Tensor normed = make(T, H), qkv = make(T, 3 * Q), attended = make(T, Q), out = make(T, H);
  ops::layer_norm(ctx, normed, x, layer.norm1.weight, layer.norm1.bias, kTowerEps);
  ops::linear(ctx, qkv, normed, *layer.qkv);
  const auto part = [&](std::int64_t first_head, std::int64_t count) {
    TensorView v = qkv.view().columns(first_head * D, count * D);
    v.shape = Shape{T, count, D};
    v.row_stride = D;
    return v;
  };
  ops::rope(ctx, part(0, 2 * heads), 3 * Q, positions, rope, /*inverse=*/false);
  const std::array<std::int32_t, 2> bounds{0, static_cast<std::int32_t>(T)};
  ops::attention_full(ctx, attended.reshaped({T, heads, D}),
                      {.q_THD = part(0, heads),
                       .k_TKD = part(heads, heads),
                       .v_TKD = part(2 * heads, heads),
                       .q_token_stride = 3 * Q,
                       .k_token_stride = 3 * Q,
                       .v_token_stride = 3 * Q,
                       .cu_seqlens = bounds,
                       .scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim()))});
  ops::linear(ctx, out, attended, *layer.proj);
  ops::add(ctx, x, x, out);
  ops::layer_norm(ctx, normed, x, layer.norm2.weight, layer.norm2.bias, kTowerEps);
  const Tensor hidden = make(std::min(T, kPatchesAtOnce), config_.intermediate_size);
  for (std::int64_t first = 0; first < T; first += kPatchesAtOnce) {
    const std::int64_t count = std::min(kPatchesAtOnce, T - first);
    const TensorView wide = hidden.view().rows(0, count);
    ops::linear(ctx, wide, normed.view().rows(first, count), *layer.fc1);
    ops::gelu(ctx, wide, wide, ops::GeluForm::kTanh);
    ops::linear(ctx, out.view().rows(first, count), wide, *layer.fc2);
  }
  ops::add(ctx, x, x, out);
}

Tensor VisionTower::features(ops::OpContext& ctx, const TowerImage& image) const {
  const VisionConfig& c = config_;
  const std::int64_t unit = c.patch_size * c.merge_size, rows = image.height / c.patch_size, cols = image.width / c.patch_size;
  if (image.height <= 0 || image.width <= 0 || image.height % unit != 0 || image.width % unit != 0 ||
      static_cast<std::int64_t>(image.rgb.size()) != 3 * image.height * image.width)
    fail(ErrorCode::kShape, "[vision_tower] an image of {} x {} pixels in {} bytes; wanted multiples of {} pixels, 3 bytes each",
         image.width, image.height, image.rgb.size(), unit);
  const std::int64_t T = rows * cols, tokens = T / c.patches_of_token(), square = c.patches_of_token() * c.hidden_size;
  const Tensor x = embed_patches(ctx, image);
  const ops::RopeTable rope = rope_of(ctx, rows, cols);
  std::vector<std::int32_t> in_order(static_cast<std::size_t>(T));
  for (std::int64_t t = 0; t < T; ++t) in_order[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(t);
  const Tensor positions = Tensor::empty(ctx.runtime, {T}, DType::kI32);
  ctx.runtime->copy_from_host(positions.data(), in_order.data(), in_order.size() * sizeof(std::int32_t));
  for (const Layer& layer : layers_) run_layer(ctx, layer, x, rope, positions);
  ops::layer_norm(ctx, x, x, merge_norm_.weight, merge_norm_.bias, kTowerEps);
  const Tensor merged = x.reshaped({tokens, square}), hidden = Tensor::empty(ctx.runtime, {tokens, square}, compute_);
  const Tensor out = Tensor::empty(ctx.runtime, {tokens, c.output_size}, compute_);
  ops::linear(ctx, hidden, merged, *merge1_);
  ops::gelu(ctx, hidden, hidden, ops::GeluForm::kErf);
  ops::linear(ctx, out, hidden, *merge2_);
  ctx.runtime->synchronize();  // what lies between is freed when this returns
  return out;
}

std::size_t tower_bytes(const VisionConfig& c, DType compute) noexcept {
  const std::int64_t H = c.hidden_size, Q = c.num_heads * padded_head(c.head_dim()), square = c.patches_of_token() * H;
  const std::int64_t of_layer = 4 * Q * H + 2 * H * c.intermediate_size;
  return static_cast<std::size_t>(c.num_layers * of_layer + H * c.patch_values() + square * (square + c.output_size)) * size_of(compute);
}

std::size_t tower_pass_bytes(const VisionConfig& c, std::int64_t num_tokens, DType compute) noexcept {
  const std::int64_t H = c.hidden_size, D = padded_head(c.head_dim()), Q = c.num_heads * D, patches = num_tokens * c.patches_of_token();
  const auto size = static_cast<std::int64_t>(size_of(compute));
  const std::int64_t parts = kPatchesAtOnce * (c.intermediate_size * size + (c.patch_values() + H) * (4 + size));
  const std::int64_t merged = num_tokens * (c.patches_of_token() * H + c.output_size) * size;
  return static_cast<std::size_t>(patches * ((3 * H + 4 * Q) * size + 4 * (D + 1)) + parts + merged);
}

std::vector<WeightSource> tower_sources(const VisionConfig& config) {
  const auto files = std::make_shared<const io::SafetensorsFolder>(io::SafetensorsFolder::open(config.folder));
  std::vector<WeightSource> sources;
  for (auto at = files->tensors().lower_bound(kTowerPrefix); at != files->tensors().end() && at->first.starts_with(kTowerPrefix); ++at) {
    const io::SafetensorsRef ref = at->second;
    const std::int64_t count = ref.entry->num_elements(), rows = ref.entry->shape.empty() ? 1 : ref.entry->shape[0];
    const bool is_vector = ref.entry->shape.size() < 2;
    sources.push_back({.name = at->first,
                       .shape = is_vector ? Shape{count} : Shape{rows, count / std::max<std::int64_t>(rows, 1)},
                       .read =
                           [files, ref](std::int64_t first, std::span<float> out) {
                             ref.file->read_f32(*ref.entry, first, out);
                             ref.file->check_whole();
                           },
                       .is_exact = ref.entry->type == io::StoredType::kF32,
                       .file_shape = ref.entry->shape});
  }
  return sources;
}

}  // namespace prl::nn
