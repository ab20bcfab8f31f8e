#include "nn/decode_recorder.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/log.hpp"
#include "nn/layers.hpp"
#include "nn/shards.hpp"

namespace prl::nn {
namespace {

/// Numbers of rows that are recorded: 2, 4, 8, then steps of 8 up to 64, of 16 up to 256, of 64 beyond. A product of one row costs more
/// than one of two.
std::int64_t rows_for(std::int64_t rows) {
  if (rows <= 8) return std::max<std::int64_t>(2, static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(rows))));
  const std::int64_t unit = rows <= 64 ? 8 : rows <= 256 ? 16 : 64;
  return (rows + unit - 1) / unit * unit;
}
/// The same of steps in which sequences have guesses: their numbers of rows differ from step to step, so there are fewer of them.
std::int64_t rows_with_guesses(std::int64_t rows) {
  const std::int64_t power = std::max<std::int64_t>(8, static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(rows))));
  return power >= 128 && rows <= power / 4 * 3 ? power / 4 * 3 : power;
}
std::int64_t rows_of(const PagedBatch& batch) {
  const auto rows = static_cast<std::int64_t>(batch.ids_T.size());
  return batch.context_len.size() == batch.ids_T.size() ? rows_for(rows) : rows_with_guesses(rows);
}

/// What is recorded will come again.
class WhileMeasuring {
 public:
  explicit WhileMeasuring(ops::OpContext& ctx) : ctx_(ctx), before_(std::exchange(ctx.may_measure, true)) {}
  ~WhileMeasuring() { ctx_.may_measure = before_; }
  WhileMeasuring(const WhileMeasuring&) = delete;
  WhileMeasuring& operator=(const WhileMeasuring&) = delete;

 private:
  ops::OpContext& ctx_;
  bool before_;
};

}  // namespace

struct DecodeRecorder::Step {
  std::int64_t rows = 0;
  bool has_next_tokens = false;
  std::vector<std::int32_t> host;
  Tensor device;
  TensorView ids, positions, slots, lengths, states, table;  ///< in `device`
  TensorView read_hidden, write_hidden;                      ///< there too
  TensorView tiles;                                          ///< with adapters, there too
  std::vector<std::int32_t> host_tiles;
  TensorView h_BH;       ///< where the recording leaves its result
  bool is_warm = false;  ///< ran once without being recorded: kernels are chosen, memory has its size
  std::unique_ptr<RecordedWork> work;
};

DecodeRecorder::DecodeRecorder(ops::OpContext& ctx, ops::SharedLayers shared) : ctx_(ctx), shared_(shared), arena_(ctx.runtime) {}
DecodeRecorder::~DecodeRecorder() = default;

bool DecodeRecorder::takes_next_tokens(const Weights& weights, const KvCache& cache, const PagedBatch& batch) {
  // A state is taken on by one token at a time.
  if (!weights.config.linear.layers.empty()) return false;
  // Launches of a layer take some 20 us, in which a card reads 60 to 80 MB; each row reads the keys and values of its sequence again.
  constexpr std::int64_t kMaxTokens = 17, kMaxBytesOfLayer = std::int64_t{32} << 20;
  std::int64_t keys = 0;
  for (std::size_t s = 0; s < batch.context_len.size(); ++s) {
    const std::int64_t tokens = batch.query_start[s + 1] - batch.query_start[s];
    if (tokens < 1 || tokens > kMaxTokens) return false;
    keys += (tokens - 1) * batch.context_len[s];
  }
  const auto bytes_per_key = static_cast<std::int64_t>(KvCache::bytes_per_block(weights.config, weights.compute, cache.block_size())) /
                             cache.block_size() / weights.config.num_layers;
  return keys * bytes_per_key <= kMaxBytesOfLayer;
}

bool DecodeRecorder::takes(const Weights& weights, const KvCache& cache, const PagedBatch& batch, std::span<const AdapterRows> adapters) {
  const auto rows = static_cast<std::int64_t>(batch.ids_T.size());
  if (rows > kMaxRecordedRows || batch.query_start.back() != static_cast<std::int32_t>(rows) || !ops::can_decode_by_index(ctx_))
    return false;
  if (batch.context_len.size() != batch.ids_T.size() && !takes_next_tokens(weights, cache, batch)) return false;
  if (weights.config.num_experts == 0) return true;
  return std::ranges::none_of(adapters, [](const AdapterRows& of) { return of.adapter->adapts_experts(); }) &&
         takes_experts(weights, rows_of(batch));
}

bool DecodeRecorder::takes_experts(const Weights& weights, std::int64_t num_rows) {
  // Looked at once for the weights that recordings are of: the answer takes about as long as a step.
  const bool is_known = &weights == weights_ && weights.version == version_;
  if (const auto found = takes_experts_.find(num_rows); is_known && found != takes_experts_.end()) return found->second;
  bool takes = weights.layers == nullptr;
  for (std::int64_t layer = 0; takes && layer < weights.config.num_layers; ++layer)
    if (weights.config.is_sparse(layer)) takes = autograd::can_record_experts(ctx_, num_rows, BoundModel{weights}.experts(layer));
  if (is_known) takes_experts_[num_rows] = takes;
  return takes;
}

DecodeRecorder::Step& DecodeRecorder::step_for(const Key& key) {
  std::unique_ptr<Step>& step = steps_[key];
  if (step != nullptr) return *step;
  step = std::make_unique<Step>();
  const std::int64_t B = key.rows, total = B * (7 + key.max_blocks) + key.num_tiles() * ops::kLoraTileWords;
  step->rows = B;
  step->has_next_tokens = key.has_next_tokens;
  step->host.resize(static_cast<std::size_t>(total));
  step->device = Tensor::empty(ctx_.runtime, {total}, DType::kI32);
  std::int64_t at = 0;
  const auto part = [&](Shape shape) {
    const TensorView view = step->device.slice(at, shape.num_elements()).view().reshaped(shape);
    at += shape.num_elements();
    return view;
  };
  step->ids = part({B});
  step->positions = part({B});
  step->slots = part({B});
  step->lengths = part({B});
  step->states = part({B});
  step->read_hidden = part({B});
  step->write_hidden = part({B});
  step->table = part({B, key.max_blocks});
  if (key.has_adapters) step->tiles = part({key.num_tiles(), ops::kLoraTileWords});
  return *step;
}

/// What the step reads, in the order in which it lies on the device.
void DecodeRecorder::fill(Step& step, const Key& key, const PagedBatch& batch) {
  const std::size_t B = static_cast<std::size_t>(key.rows), n = batch.ids_T.size(), width = static_cast<std::size_t>(key.max_blocks);
  std::int32_t* at = step.host.data();
  const auto put = [&](std::span<const std::int32_t> values, std::int32_t rest) {
    std::fill(std::copy(values.begin(), values.end(), at), at + B, rest);
    at += B;
  };
  put(batch.ids_T, 0);
  put(batch.positions_T, 0);
  put(batch.slot_T, -1);
  for (std::size_t s = 0; s < batch.context_len.size(); ++s)
    for (std::int32_t after = batch.query_start[s + 1] - batch.query_start[s]; after-- > 0;) *at++ = batch.context_len[s] - after;
  at = std::fill_n(at, B - n, 0);
  put(key.has_next_tokens ? std::span<const std::int32_t>() : batch.state_slot, -1);
  put(batch.read_hidden_T, 0);
  put(batch.write_hidden_T, -1);
  const auto from = static_cast<std::size_t>(batch.max_blocks);
  for (std::size_t s = 0; s < batch.context_len.size(); ++s)
    for (std::int32_t row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row, at += width)
      std::fill(std::copy_n(batch.block_table.begin() + static_cast<std::ptrdiff_t>(s * from), from, at), at + width, 0);
  at = std::fill_n(at, (B - n) * width, 0);
  if (!key.has_adapters) return;
  std::fill(std::copy(step.host_tiles.begin(), step.host_tiles.end(), at), at + key.num_tiles() * ops::kLoraTileWords, -1);
}

void DecodeRecorder::drop_recordings() {
  ctx_.runtime->synchronize();  // the last one may still run
  for (auto& [key, step] : steps_) step->work.reset();
}

TensorView DecodeRecorder::forward(const Weights& weights, KvCache& cache, const Step& step, ConstTensorView drawn_B,
                                   const AdapterBank* bank, const Adapter* single) {
  arena_.reset();
  const CacheLayers layers = cache.layers();
  const ops::DecodeIndex decode{step.slots, step.lengths, step.table, step.has_next_tokens};
  const auto softmax = std::ranges::find_if(layers.kv, [](const ops::KvLayer& layer) { return layer.k.data != nullptr; });
  const ModelConfig c = config_of_shard(weights.config, weights.shard.size);
  const auto plan_bytes = static_cast<std::int64_t>(ops::decode_plan_bytes(ctx_, decode, cache.block_size()));
  const std::int64_t D = c.cached_key_dim();
  const TensorView like_q{nullptr, {step.rows, c.num_heads, D}, weights.compute, ctx_.runtime->device(), D};
  const auto plan = [&](std::int64_t window) {
    const TensorView memory = arena_.take({plan_bytes}, DType::kU8);
    ops::plan_decode(ctx_, memory, like_q, *softmax, decode, window);
    return memory;
  };
  autograd::AttentionIndex index;
  index.positions_T = step.positions;
  index.decode = &decode;
  if (!c.linear.layers.empty()) index.state_rows = {.start_S = {}, .slot_B = step.states, .context_len_B = step.lengths};
  if (softmax != layers.kv.end() && static_cast<std::int64_t>(c.windowed_layers.size()) < c.num_layers) index.decode_plan = plan(0);
  if (c.window > 0) index.window_plan = plan(c.window);
  autograd::Frame frame{ctx_, arena_};
  BoundModel model{weights};
  // Gathers take turns between two buffers, which recorded ones keep: it is an even number of them in each layer.
  model.shared = shared_;
  if (cache.route_log().defined()) model.route_log = {cache.route_log().view(), step.slots};
  if (bank != nullptr) {
    model.bank = bank;
    model.tiles = {step.tiles, single};
  } else if (weights.adapter != nullptr) {
    model.adapters = {{weights.adapter.get(), {}}};
  }
  if (weights.config.is_mtp_head) {
    // With the embedding of the tokens at the beginning of recorded work.
    const TensorView hidden_TH = arena_.take({step.rows, c.hidden_size}, weights.compute);
    ops::embedding(ctx_, hidden_TH, cache.hidden(), step.read_hidden);
    model.hidden_TH = hidden_TH;
  }
  const TensorView h_TH = decoder_forward(frame, model, {step.ids, drawn_B}, index, &layers, nullptr).value;
  if (cache.hidden().defined()) ops::store_rows(ctx_, cache.hidden(), h_TH, step.write_hidden);
  return h_TH;
}

TensorView DecodeRecorder::run(const Weights& weights, KvCache& cache, const PagedBatch& batch, AdapterBank* bank,
                               std::span<const AdapterRows> adapters) {
  const std::uint64_t bank_generation = bank != nullptr ? bank->generation() : bank_generation_;
  if (&weights != weights_ || weights.version != version_ || &cache != cache_ || batch.drawn_B.data != drawn_ ||
      bank_generation != bank_generation_) {
    drop_recordings();
    takes_experts_.clear();
    weights_ = &weights;
    version_ = weights.version;
    cache_ = &cache;
    drawn_ = batch.drawn_B.data;
    bank_generation_ = bank_generation;
  }
  const auto rows = static_cast<std::int64_t>(batch.ids_T.size());
  const std::size_t shape = bank != nullptr && adapters.size() == 1 ? bank->shape_of(*adapters[0].adapter) : 0;
  const Adapter* single = shape != 0 ? adapters[0].adapter : nullptr;
  if (single != nullptr) bank->use_single(*single);
  const Key key{rows_of(batch), static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::max(batch.max_blocks, 8)))),
                bank != nullptr, batch.context_len.size() != batch.ids_T.size(), shape};
  Step& step = step_for(key);
  step.host_tiles.clear();
  if (bank != nullptr) bank->append_tiles(step.host_tiles, adapters);
  fill(step, key, batch);
  const auto now = [&] {
    ctx_.runtime->copy_from_host(step.device.data(), step.host.data(), step.host.size() * sizeof(std::int32_t));
    return forward(weights, cache, step, batch.drawn_B, bank, single).rows(0, rows);
  };
  if (!step.is_warm) {
    step.is_warm = true;
    const WhileMeasuring measuring(ctx_);
    return now();
  }
  if (num_allocations_ != arena_.num_allocations() || workspace_generation_ != ctx_.workspace->generation()) drop_recordings();
  if (step.work == nullptr) {
    arena_.reset();  // may replace blocks, which recording must not do
    const std::size_t allocations = arena_.num_allocations();
    const std::uint64_t generation = ctx_.workspace->generation();
    step.work = ctx_.runtime->record([&] { step.h_BH = forward(weights, cache, step, batch.drawn_B, bank, single); });
    if (step.work == nullptr) return now();
    if (allocations != arena_.num_allocations() || generation != ctx_.workspace->generation())
      fail(ErrorCode::kInternal, "[decoder] a step of {} rows took memory while it was recorded", step.rows);
    num_allocations_ = allocations;
    workspace_generation_ = generation;
  }
  step.work->upload(step.device.data(), step.host.data(), step.host.size() * sizeof(std::int32_t));
  if (shared_.group != nullptr) shared_.group->meet(shared_.rank);
  step.work->run();
  if (shared_.group != nullptr) shared_.group->meet(shared_.rank);
  return step.h_BH.rows(0, rows);
}

}  // namespace prl::nn
