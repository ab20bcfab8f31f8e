#include "nn/weights.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <future>
#include <map>
#include <tuple>

#include "base/error.hpp"
#include "io/finite.hpp"
#include "nn/exact_parts.hpp"
#include "nn/mtp_head.hpp"
#include "nn/peft.hpp"
#include "nn/shards.hpp"
#include "nn/stored_weights.hpp"
#include "nn/vision_tower.hpp"
#include "nn/weight_blocks.hpp"
#include "ops/eight_bit.hpp"

namespace prl::nn {
namespace {

/// A copy of a small fp32 tensor whose values are those of the compute dtype, so that a holder who read them from a file in
/// that dtype computes with the same numbers.
Tensor rounded(ops::OpContext& ctx, const Tensor& value, DType compute) {
  if (!value.defined()) return {};
  if (compute == DType::kF32) return value.clone();
  const Tensor low = Tensor::empty(ctx.runtime, value.shape(), compute);
  const Tensor out = Tensor::empty(ctx.runtime, value.shape(), DType::kF32);
  ops::cast(ctx, low, value);
  ops::cast(ctx, out, low);
  return out;
}

/// Makes blocks from masters, one by one.
class Packer {
 public:
  Packer(ops::OpContext& ctx, const Parameters& parameters, DType compute, bool with_backward)
      : ctx_(ctx), parameters_(parameters), compute_(compute), with_backward_(with_backward) {}
  Tensor vector(const BlockSpec& block) const { return rounded(ctx_, value(block), compute_); }
  Tensor table(const BlockSpec& block) const {
    const Tensor out = Tensor::empty(ctx_.runtime, block.shape, compute_);
    ops::cast(ctx_, out, value(block));
    return out;
  }
  ops::LinearWeightPtr matrix(const BlockSpec& block, ConstTensorView bias) const {
    return ops::pack_linear(ctx_, value(block), bias, compute_, with_backward_, use_of(block));
  }

 private:
  const Tensor& value(const BlockSpec& block) const { return parameters_.value(block.kind, block.layer, block.expert); }
  ops::OpContext& ctx_;
  const Parameters& parameters_;
  DType compute_;
  bool with_backward_;
};

}  // namespace

std::shared_ptr<Weights> start_weights(ops::OpContext& ctx, const ModelConfig& config, TensorTablePtr table, DType compute,
                                       PolicyVersion version, const WeightsPtr& previous) {
  if (compute != DType::kF32 && compute != DType::kBF16)
    fail(ErrorCode::kInvalidArgument, "weights compute in float32 or bfloat16, not in {}", to_string(compute));
  auto weights = std::make_shared<Weights>();
  weights->config = config;
  weights->version = version;
  weights->compute = compute;
  weights->table = std::move(table);
  weights->blocks.resize(weights->table->blocks().size());
  set_rope_tables(*weights, ctx.runtime, previous);
  if (previous != nullptr) weights->vision = previous->vision;
  return weights;
}

const Tensor& Weights::vector(Block block, std::int64_t layer) const {
  static const Tensor kUndefined;
  const std::size_t i = table->find(block, layer);
  return i == TensorTable::kNone ? kUndefined : blocks[i].plain;
}

const Tensor& Weights::norm_scale(Block block, std::int64_t layer) const {
  const Tensor& weight = vector(block, layer);
  if (!config.norms_add_one || !weight.defined() || !is_stream_or_head_norm(block)) return weight;
  return blocks[table->find(block, layer)].plus_one;
}

const ops::LinearWeight& Weights::matrix(Block block, std::int64_t layer, std::int64_t expert) const {
  const std::size_t i = table->find(block, layer, expert);
  PRL_CHECK(i != TensorTable::kNone && blocks[i].packed != nullptr, "a {} model without matrix {} in layer {}", config.model_type,
            static_cast<int>(block), layer);
  return *blocks[i].packed;
}

std::size_t eight_bit_code_bytes(const TensorTable& table, DType compute) {
  std::int64_t bytes = 0;
  for (const BlockSpec& block : table.blocks())
    if (compute == DType::kBF16 && block.is_matrix() && block.rounds_inputs)
      bytes += ops::eight_bit_product_bytes(block.shape[0], block.shape[1]);
    else if (compute == DType::kBF16 && block.is_matrix() && use_of(block) == ops::WeightUse::kEightBit)
      bytes += ops::eight_bit_code_bytes(block.shape[0], block.shape[1]);
  return static_cast<std::size_t>(bytes);
}

CodesAloneBytes codes_alone_bytes(const TensorTable& table, DType compute) {
  CodesAloneBytes bytes;
  std::map<std::tuple<Block, std::int64_t, std::int64_t>, std::size_t> together;  // matrices that are multiplied with at a time
  for (const BlockSpec& block : table.blocks()) {
    const std::size_t of_values = static_cast<std::size_t>(block.shape.num_elements()) * size_of(compute);
    const std::int64_t of_codes = compute == DType::kBF16 && block.is_matrix() && block.rounds_inputs
                                      ? ops::eight_bit_product_bytes(block.shape[0], block.shape[1])
                                      : 0;
    bytes.weights += of_codes > 0 ? static_cast<std::size_t>(of_codes) : of_values;
    if (of_codes > 0) bytes.widened = std::max(bytes.widened, together[{block.kind, block.layer, block.expert < 0 ? -1 : 0}] += of_values);
  }
  return bytes;
}

bool holds_codes_alone(ops::OpContext& ctx, const ModelConfig& config, DType compute) {
  // Asked for a small matrix: which of the others have codes is a matter of their shapes.
  return config.eight_bits == EightBits::kProducts && ops::take_code_memory(ctx, 1, 16, 16, compute).codes.defined();
}

bool gpus_hold_codes_alone(const ModelConfig& config, DType compute) {
  return config.eight_bits == EightBits::kProducts && compute == DType::kBF16 &&
         std::ranges::all_of(list_cuda_devices().devices, [](const CudaDeviceInfo& gpu) { return gpu.compute_major == 9; });
}

WeightsPtr make_weights(ops::OpContext& ctx, const Parameters& parameters, DType compute, PolicyVersion version, bool with_backward,
                        const WeightsPtr& previous, const Tensor& rounded) {
  PRL_CHECK(parameters.table()->num_trainable() == parameters.table()->num_parameters(), "weights from masters of some tensors only");
  std::shared_ptr<Weights> weights = start_weights(ctx, parameters.config(), parameters.table(), compute, version, previous);
  PRL_CHECK(!rounded.defined() || rounded.dtype() == compute, "rounded values of {} for weights in {}", to_string(rounded.dtype()),
            to_string(compute));
  Tensor values = rounded;
  if (!values.defined() && ops::shares_weights(ctx)) {
    values = Tensor::empty(ctx.runtime, parameters.all_values().shape(), compute);
    ops::cast(ctx, values, parameters.all_values());
  }
  if (values.defined()) {
    fill_weights(*weights, ctx, with_backward, Slicer(ctx, *parameters.table(), values, with_backward));
    if (ops::shares_weights(ctx)) weights->flat = values;
  } else {
    fill_weights(*weights, ctx, with_backward, Packer(ctx, parameters, compute, with_backward));
  }
  return weights;
}

Tensor flat_values(ops::OpContext& ctx, const Parameters& parameters, DType compute) {
  PRL_CHECK(parameters.table()->num_trainable() == parameters.table()->num_parameters(), "all values of a model of which some are trained");
  const Tensor rounded = Tensor::empty(ctx.runtime, parameters.all_values().shape(), compute);
  ops::cast(ctx, rounded, parameters.all_values());
  const Tensor host = Tensor::empty(make_cpu_runtime(), rounded.shape(), compute);
  ctx.runtime->copy_to_host(host.data(), rounded.data(), rounded.num_bytes());
  return host;
}

namespace {

/// Of a source of files as the tensor lies in memory.
void read_parts(const TensorSpec& spec, const WeightSource& source, std::int64_t first, std::span<float> out) {
  if (!spec.is_exact()) return source.read(first, out);
  PRL_CHECK(static_cast<std::int64_t>(out.size()) == spec.num_elements(), "{} is read in one piece", spec.name);
  std::vector<float> values(static_cast<std::size_t>(source.shape[0]));
  source.read(0, values);
  split_exact(values, out, spec.name);
}

}  // namespace

Tensor flat_values(const WeightsPtr& weights) {
  PRL_CHECK(weights->adapter == nullptr, "flat values of an adapter");
  if (weights->flat.defined()) return weights->flat;
  const Tensor host = Tensor::zeros(make_cpu_runtime(), {weights->table->num_master_elements()}, weights->compute);
  const std::vector<WeightSource> sources = merged_sources(weights);
  ThreadPool pool;
  pool.parallel_for(static_cast<std::int64_t>(sources.size()), [&](std::int64_t n) {
    const TensorSpec& spec = weights->table->tensors()[static_cast<std::size_t>(n)];
    const std::int64_t step = std::max<std::int64_t>((1 << 20) / spec.shape.num_cols(), 1) * spec.shape.num_cols();
    std::vector<float> values;
    for (std::int64_t first = 0; first < spec.num_elements(); first += step) {
      values.resize(static_cast<std::size_t>(std::min(step, spec.num_elements() - first)));
      read_parts(spec, sources[static_cast<std::size_t>(n)], first, values);
      const std::size_t at = static_cast<std::size_t>(spec.offset + first);
      if (weights->compute == DType::kF32)
        std::ranges::copy(values, host.as<float>() + at);
      else
        std::ranges::transform(values, host.as<BFloat16>() + at, [](float value) { return to_bf16(value); });
    }
  });
  return host;
}

namespace {

/// The values of a table without what lies between tensors for alignment, which nobody writes.
std::vector<ElementRange> filled_ranges(const TensorTable& table) {
  std::vector<ElementRange> ranges;
  for (const TensorSpec& spec : table.tensors()) ranges.push_back({spec.offset, spec.offset + spec.num_elements()});
  std::ranges::sort(ranges, {}, &ElementRange::begin);
  std::vector<ElementRange> merged;
  for (const ElementRange range : ranges) {
    if (!merged.empty() && merged.back().end == range.begin)
      merged.back().end = range.end;
    else
      merged.push_back(range);
  }
  return merged;
}

/// Error{kCorrupt} naming the first tensor of `values`, by its place in them, that holds something that is no finite number.
void check_finite_values(ops::OpContext& ctx, const TensorTable& table, const Tensor& values) {
  for (const ElementRange range : filled_ranges(table)) {
    const std::int64_t found = ops::find_not_finite(ctx, values.slice(range.begin, range.count()));
    if (found < 0) continue;
    const auto spec = std::ranges::find_if(table.tensors(), [at = range.begin + found](const TensorSpec& tensor) {
      return at >= tensor.offset && at < tensor.offset + tensor.num_elements();
    });
    fail(ErrorCode::kCorrupt, "tensor '{}' of the weights that were received holds NaN or infinity at element {}; the former ones stay",
         spec->name, range.begin + found - spec->offset);
  }
}

}  // namespace

namespace {

/// All blocks of weights without gradients from `values` on their device, which become their memory where weights share it.
void fill_flat(Weights& weights, ops::OpContext& ctx, const Tensor& values) {
  const bool codes_alone = holds_codes_alone(ctx, weights.config, weights.compute);
  fill_weights(weights, ctx, /*with_backward=*/false, Slicer(ctx, *weights.table, values, /*with_backward=*/false, codes_alone));
  if (ops::shares_weights(ctx) && !codes_alone) weights.flat = values;
}

/// What makes one device's part of new weights, as the successor of its part of the former ones.
using MakePart = std::function<std::shared_ptr<Weights>(ops::OpContext& ctx, Shard shard, const WeightsPtr& previous)>;

/// All parts, made at the same time.
WeightsPtr make_parts(std::span<ops::OpContext* const> devices, const ModelConfig& config, const WeightsPtr& previous,
                      const MakePart& make) {
  check_shards(config, static_cast<int>(devices.size()));
  const auto of = [&](std::size_t rank) {
    const bool has_previous = previous != nullptr && previous->others.size() + 1 == devices.size();
    const Shard shard{static_cast<int>(rank), static_cast<int>(devices.size())};
    std::shared_ptr<Weights> part = make(*devices[rank], shard,
                                         !has_previous ? nullptr
                                         : rank == 0   ? previous
                                                       : previous->others[rank - 1]);
    part->shard = shard;
    return part;
  };
  std::vector<std::future<std::shared_ptr<Weights>>> others;
  for (std::size_t rank = 1; rank < devices.size(); ++rank) others.push_back(std::async(std::launch::async, of, rank));
  std::shared_ptr<Weights> first = of(0);
  for (auto& other : others) first->others.push_back(other.get());
  return first;
}

}  // namespace

WeightsPtr load_shared_weights(std::span<ops::OpContext* const> devices, const ModelConfig& config, const Tensor& values,
                               PolicyVersion version, const WeightsPtr& previous) {
  const Device holder = values.runtime()->device();
  PRL_CHECK(holder.kind == DeviceKind::kCpu || holder == devices[0]->runtime->device(), "weights of several devices from {}",
            to_string(holder));
  const TensorTablePtr whole = make_tensor_table(config);
  if (values.num_elements() != whole->num_master_elements())
    fail(ErrorCode::kShape, "weights of {} values for a model of {}", values.num_elements(), whole->num_master_elements());
  return make_parts(devices, config, previous, [&](ops::OpContext& ctx, Shard shard, const WeightsPtr& former) {
    std::shared_ptr<Weights> part = start_weights(ctx, config, make_tensor_table(config, shard), values.dtype(), version, former);
    const Tensor own = Tensor::zeros(ctx.runtime, {part->table->num_master_elements()}, values.dtype());
    const std::size_t size = size_of(values.dtype());
    for (std::size_t i = 0; i < whole->tensors().size(); ++i) {
      const TensorSpec& spec = part->table->tensors()[i];
      auto* to = own.as<std::byte>() + static_cast<std::size_t>(spec.offset) * size;
      for (const RowRun& run : spec.held_rows()) {
        const std::int64_t from = whole->tensors()[i].offset + run.first * spec.row_size();
        const void* const source = values.as<std::byte>() + static_cast<std::size_t>(from) * size;
        const std::size_t num_bytes = static_cast<std::size_t>(run.count * spec.row_size()) * size;
        if (holder.kind == DeviceKind::kCpu)
          ctx.runtime->copy_from_host(to, source, num_bytes);
        else
          ctx.runtime->copy_from_device(to, *values.runtime(), source, num_bytes);
        to += num_bytes;
      }
    }
    if (holder.kind != DeviceKind::kCpu) ctx.runtime->synchronize();  // the values may be freed when this returns
    check_finite_values(ctx, *part->table, own);
    fill_flat(*part, ctx, own);
    return part;
  });
}

WeightsPtr load_flat_weights(ops::OpContext& ctx, const ModelConfig& config, const Tensor& values, PolicyVersion version,
                             const WeightsPtr& previous) {
  std::shared_ptr<Weights> weights = start_weights(ctx, config, make_tensor_table(config), values.dtype(), version, previous);
  if (values.num_elements() != weights->table->num_master_elements())
    fail(ErrorCode::kShape, "weights of {} values for a model of {}", values.num_elements(), weights->table->num_master_elements());
  Tensor on_device = values;
  if (const Device device = values.runtime()->device(); device.kind == DeviceKind::kCpu) {
    on_device = Tensor::empty(ctx.runtime, values.shape(), values.dtype());
    ctx.runtime->copy_from_host(on_device.data(), values.data(), values.num_bytes());
  } else {
    PRL_CHECK(device == ctx.runtime->device(), "weights on {} for {}", to_string(device), to_string(ctx.runtime->device()));
  }
  check_finite_values(ctx, *weights->table, on_device);
  fill_flat(*weights, ctx, on_device);
  return weights;
}

namespace {

/// to_bf16() of each; finite numbers alone, and optimized whatever the module is.
[[gnu::optimize("O3")]] void round_finite(std::span<const float> values, BFloat16* out) {
  const float* const from = values.data();
  const std::size_t count = values.size();
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(from[i]);
    out[i].bits = static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
  }
}

/// Makes blocks from the tensors of a folder.
class StoredReader {
 public:
  /// `stored`: one per tensor of `table`, which may hold a part of its rows.
  StoredReader(ops::OpContext& ctx, const TensorTable& table, std::span<const StoredTensor> stored, DType compute, bool with_backward,
               CodePlaces codes = {})
      : ctx_(ctx), tensors_(table.tensors()), stored_(stored), compute_(compute), with_backward_(with_backward), codes_(std::move(codes)) {}

  Tensor vector(const BlockSpec& block) const {
    const Tensor raw = Tensor::empty(ctx_.runtime, block.shape, DType::kF32);
    fill(raw, block);
    return rounded(ctx_, raw, compute_);
  }
  /// All blocks in the array of `flat`.
  void fill_all(const Tensor& flat, const TensorTable& table) const {
    for (const BlockSpec& block : table.blocks()) {
      const Tensor to = flat.slice(block.offset, block.shape.num_elements());
      if (block.kind != Block::kRouterBias) {
        fill(to, block);
        continue;
      }
      const Tensor read = Tensor::empty(ctx_.runtime, to.shape(), DType::kF32);
      fill(read, block);
      ops::cast(ctx_, to, read);
    }
  }
  Tensor table(const BlockSpec& block) const {
    const Tensor out = Tensor::empty(ctx_.runtime, block.shape, compute_);
    fill(out, block);
    return out;
  }
  ops::LinearWeightPtr matrix(const BlockSpec& block, ConstTensorView bias) const {
    return ops::share_linear(ctx_, table(block), bias, with_backward_, use_of(block), codes_.of(block));
  }

 private:
  std::span<const StoredTensor> refs_of(const BlockSpec& block) const { return stored_.subspan(block.first_tensor, block.num_tensors); }
  /// In the type of `out`, fp32 or compute_: the bytes of the file where those are the values, else read as fp32 and rounded once.
  /// Error{kCorrupt} naming a tensor that holds anything but finite numbers.
  void fill(const Tensor& out, const BlockSpec& block) const {
    if (block.kind == Block::kRouterBias) return fill_exact(out, refs_of(block).front());
    const std::size_t size = size_of(out.dtype());
    auto* to = out.as<std::byte>();
    for (std::size_t i = block.first_tensor; i < block.first_tensor + block.num_tensors; ++i) {
      for (const RowRun& run : tensors_[i].held_rows()) {
        const std::int64_t row_size = tensors_[i].row_size();
        fill_run(stored_[i], {.first = run.first * row_size, .count = run.count * row_size}, out.dtype(), to);
        to += static_cast<std::size_t>(run.count * row_size) * size;
      }
      stored_[i].check_whole();
    }
  }
  /// Elements `run` of a tensor.
  void fill_run(const StoredTensor& stored, RowRun run, DType dtype, std::byte* to) const {
    constexpr std::int64_t kLoadPiece = 1 << 18;  // elements; looked at while they are in the cache
    const bool is_on_host = ctx_.runtime->device().kind == DeviceKind::kCpu;
    const std::size_t size = size_of(dtype);
    const std::int64_t count = run.count, begin = run.first;
    const bool as_stored = stored.is_plain() && stored.type() == io::StoredType::kBF16 && dtype == DType::kBF16;
    std::span<const std::byte> bytes;
    if (as_stored) bytes = stored.bytes().subspan(static_cast<std::size_t>(begin) * size, static_cast<std::size_t>(count) * size);
    std::atomic<bool> is_finite{true};
    ctx_.pool->parallel_for((count + kLoadPiece - 1) / kLoadPiece, [&](std::int64_t n) {
      const std::int64_t first = n * kLoadPiece, num = std::min(kLoadPiece, count - first);
      std::byte* const piece = to + static_cast<std::size_t>(first) * size;
      if (!as_stored) {
        if (!fill_piece(stored, begin + first, num, dtype, piece)) is_finite = false;
        return;
      }
      if (is_on_host) ctx_.runtime->copy_from_host(piece, bytes.data() + (piece - to), static_cast<std::size_t>(num) * size);
      if (stored.find_not_finite(begin + first, num, compute_) >= 0) is_finite = false;
    });
    if (!is_finite) check_finite(std::span(&stored, 1), compute_, *ctx_.pool);
    if (as_stored && !is_on_host) ctx_.runtime->copy_from_host(to, bytes.data(), bytes.size());  // overlaps its own pieces
  }
  /// Elements [first, first + num) in `dtype`; whether all are finite in compute_.
  bool fill_piece(const StoredTensor& stored, std::int64_t first, std::int64_t num, DType dtype, std::byte* to) const {
    constexpr std::int64_t kChunk = 1 << 13;  // is read, looked at and rounded in the first cache
    const std::int64_t chunk = stored.is_transposed() ? num : std::min(kChunk, num);
    const bool is_on_host = ctx_.runtime->device().kind == DeviceKind::kCpu;
    const std::size_t size = size_of(dtype);
    std::vector<std::byte> for_device(is_on_host ? 0 : static_cast<std::size_t>(num) * size);
    std::vector<float> values(static_cast<std::size_t>(chunk));
    std::byte* out = is_on_host ? to : for_device.data();
    for (std::int64_t done = 0; done < num; done += chunk) {
      const std::span<float> part = std::span(values).first(static_cast<std::size_t>(std::min(chunk, num - done)));
      stored.read_f32(first + done, part);
      const auto bytes = std::as_bytes(part);
      if (io::find_not_finite(bytes.data(), io::StoredType::kF32, static_cast<std::int64_t>(part.size()), compute_) >= 0) return false;
      if (dtype == DType::kF32)
        std::memcpy(out, bytes.data(), bytes.size());
      else
        round_finite(part, reinterpret_cast<BFloat16*>(out));
      out += part.size() * size;
    }
    if (!is_on_host) ctx_.runtime->copy_from_host(to, for_device.data(), for_device.size());
    return true;
  }
  void fill_exact(const Tensor& out, const StoredTensor& stored) const {
    check_finite(std::span(&stored, 1), DType::kF32, *ctx_.pool);
    std::vector<float> parts(static_cast<std::size_t>(out.num_elements()));
    read_exact(stored, parts);
    ctx_.runtime->copy_from_host(out.data(), parts.data(), parts.size() * sizeof(float));
    stored.check_whole();
  }
  ops::OpContext& ctx_;
  std::span<const TensorSpec> tensors_;
  std::span<const StoredTensor> stored_;
  DType compute_;
  bool with_backward_;
  CodePlaces codes_;
};

/// A folder's tensors as the table of the whole model lists them.
struct StoredModel {
  io::SafetensorsFolder files;
  std::vector<StoredTensor> tensors;
  StoredModel(const std::filesystem::path& folder, const ModelConfig& config)
      : files(io::SafetensorsFolder::open(folder)), tensors(match_stored_weights(files, config, *make_tensor_table(config))) {}
};

std::shared_ptr<Weights> read_weights(ops::OpContext& ctx, const ModelConfig& config, const StoredModel& stored, Shard shard, DType compute,
                                      PolicyVersion version, const WeightsPtr& previous, bool with_backward, bool keeps_values) {
  std::shared_ptr<Weights> weights = start_weights(ctx, config, make_tensor_table(config, shard), compute, version, previous);
  const bool codes_alone = !keeps_values && holds_codes_alone(ctx, config, compute);
  const StoredReader reader(ctx, *weights->table, stored.tensors, compute, with_backward,
                            codes_alone ? CodePlaces(ctx, *weights->table, compute, true) : CodePlaces());
  if (ops::shares_weights(ctx) && !codes_alone) {  // in one array, as every later version has them
    weights->flat = Tensor::empty(ctx.runtime, {weights->table->num_master_elements()}, compute);
    reader.fill_all(weights->flat, *weights->table);
    fill_weights(*weights, ctx, with_backward, Slicer(ctx, *weights->table, weights->flat, with_backward));
  } else {
    fill_weights(*weights, ctx, with_backward, reader);
  }
  return weights;
}

/// The vision tower that a folder has, if the model takes images: whole on each device.
void load_tower(ops::OpContext& ctx, Weights& weights, const std::filesystem::path& folder) {
  if (!weights.config.vision) return;
  if (VisionTowerPtr tower = VisionTower::load(ctx, *weights.config.vision, folder, weights.compute)) weights.vision = std::move(tower);
}

}  // namespace

WeightsPtr load_weights(ops::OpContext& ctx, const ModelConfig& config, const std::filesystem::path& folder, DType compute,
                        PolicyVersion version, const WeightsPtr& previous, bool with_backward, bool keeps_values) {
  std::shared_ptr<Weights> weights =
      read_weights(ctx, config, StoredModel(folder, config), {}, compute, version, previous, with_backward, keeps_values);
  // A trainer that takes images loads it beside the weights (VisionTower::load).
  if (!with_backward) load_tower(ctx, *weights, folder);
  return weights;
}

WeightsPtr load_shared_weights(std::span<ops::OpContext* const> devices, const ModelConfig& config, const std::filesystem::path& folder,
                               DType compute, PolicyVersion version, const WeightsPtr& previous) {
  check_shards(config, static_cast<int>(devices.size()));
  const StoredModel stored(folder, config);
  return make_parts(devices, config, previous, [&](ops::OpContext& ctx, Shard shard, const WeightsPtr& former) {
    std::shared_ptr<Weights> part =
        read_weights(ctx, config, stored, shard, compute, version, former, /*with_backward=*/false, /*keeps_values=*/false);
    load_tower(ctx, *part, folder);
    return part;
  });
}

namespace {

std::shared_ptr<Weights> start_mtp_head(ops::OpContext& ctx, const Weights& model) {
  const ModelConfig config = mtp_head_config(model.config);
  const WeightsPtr rope_of(std::shared_ptr<void>(), &model);  // borrowed for its rotary tables
  std::shared_ptr<Weights> head = start_weights(ctx, config, make_tensor_table(config), model.compute, model.version, rope_of);
  head->vision = nullptr;
  share_with_model(*head, model);
  return head;
}

}  // namespace

WeightsPtr load_mtp_head(ops::OpContext& ctx, const Weights& model, const std::filesystem::path& folder, bool with_backward) {
  if (!model.config.mtp)
    fail(ErrorCode::kInvalidArgument, "{}: a {} model without a head for multi-token prediction", folder.string(), model.config.model_type);
  std::shared_ptr<Weights> head = start_mtp_head(ctx, model);
  const io::SafetensorsFolder files = io::SafetensorsFolder::open(folder);
  const std::vector<StoredTensor> stored = match_head_weights(files, head->config, *head->table);
  fill_weights(*head, ctx, with_backward, StoredReader(ctx, *head->table, stored, model.compute, with_backward));
  return head;
}

WeightsPtr make_mtp_head(ops::OpContext& ctx, const Parameters& parameters, const Weights& model, bool with_backward) {
  std::shared_ptr<Weights> head = start_mtp_head(ctx, model);
  fill_weights(*head, ctx, with_backward, Packer(ctx, parameters, model.compute, with_backward));
  return head;
}

namespace {

/// `base` with the modules that are trained whole as `packer` makes them; `add_adapter` sets the adapter.
template <typename Maker, typename AddAdapter>
WeightsPtr adapted(ops::OpContext& ctx, const TensorTable& trained, const WeightsPtr& base, PolicyVersion version, const Maker& packer,
                   const AddAdapter& add_adapter) {
  auto weights = std::make_shared<Weights>(*base);
  weights->version = version;
  for (std::size_t i = 0; i < weights->blocks.size(); ++i) {  // vectors first: matrices take biases
    const BlockSpec& spec = base->table->blocks()[i];
    const std::size_t found = trained.find(spec.kind, spec.layer, spec.expert);
    if (found == TensorTable::kNone || spec.is_matrix()) continue;
    set_vector(ctx, *weights, i, packer.vector(trained.blocks()[found]));
    weights->base_checksum = nullptr;
    weights->flat = {};
  }
  for (std::size_t i = 0; i < weights->blocks.size(); ++i) {
    const BlockSpec& of_base = base->table->blocks()[i];
    const std::size_t found = trained.find(of_base.kind, of_base.layer, of_base.expert);
    if (found == TensorTable::kNone || !of_base.is_matrix()) continue;
    const BlockSpec& spec = trained.blocks()[found];
    weights->base_checksum = nullptr;
    weights->flat = {};
    Weights::PackedBlock& to = weights->blocks[i];
    if (spec.kind == Block::kEmbedding) {
      to.plain = packer.table(spec);
      if (base->table->has_tied_head()) to.packed = ops::share_linear(ctx, to.plain, {}, true);
    } else {
      const std::optional<Block> bias = bias_of(spec.kind);
      to.packed = packer.matrix(spec, view_of_bias(bias ? weights->vector(*bias, spec.layer) : Tensor()));
    }
  }
  add_adapter(*weights);
  return weights;
}

}  // namespace

WeightsPtr adapt_weights(ops::OpContext& ctx, const Parameters& parameters, const AdapterConfig& config, DType adapter_dtype,
                         const WeightsPtr& base, PolicyVersion version, const Tensor& rounded) {
  const TensorTable& trained = *parameters.table();
  if (!rounded.defined() && ops::shares_weights(ctx) && adapter_dtype == base->compute && parameters.holds_all()) {
    // One cast in place of one for each of the thousands of matrices that adapters of experts have.
    const Tensor values = Tensor::empty(ctx.runtime, parameters.all_values().shape(), adapter_dtype);
    ops::cast(ctx, values, parameters.all_values());
    return adapt_weights(ctx, parameters, config, adapter_dtype, base, version, values);
  }
  if (!rounded.defined())
    return adapted(ctx, trained, base, version, Packer(ctx, parameters, base->compute, true), [&](Weights& to) {
      const Packer of_adapter(ctx, parameters, adapter_dtype, true);
      to.adapter = make_adapter(config, base->config, parameters.table(), adapter_dtype,
                                [&](const BlockRows& rows) { return of_adapter.matrix(rows.block, {}); });
    });
  PRL_CHECK(rounded.dtype() == adapter_dtype && rounded.dtype() == base->compute, "rounded values of {} for an adapter in {}",
            to_string(rounded.dtype()), to_string(adapter_dtype));
  const Slicer slicer(ctx, trained, rounded, true);
  return adapted(ctx, trained, base, version, slicer, [&](Weights& to) {
    to.adapter = make_adapter(config, base->config, parameters.table(), adapter_dtype,
                              [&](const BlockRows& rows) { return slicer.matrix(rows.block, {}); });
  });
}

}  // namespace prl::nn
