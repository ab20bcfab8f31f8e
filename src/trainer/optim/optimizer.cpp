#include "trainer/optim/optimizer.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "base/error.hpp"
#include "ops/optimizer.hpp"
#include "ops/pointwise.hpp"
#include "trainer/optim/host_state.hpp"

namespace prl::trainer {

namespace {

using config::AdamWConfig;
using config::MuonConfig;
using config::SgdConfig;
using config::SignSgdConfig;

/// The library default of the optimizers that this behaviour comes from.
constexpr float kAdamEps = 1e-8f;

bool takes_muon(const nn::TensorSpec& tensor) {
  return tensor.is_matrix() && tensor.slot != nn::Slot::kLmHead && tensor.slot != nn::Slot::kEmbedding;
}

/// Names of what an optimizer keeps of a tensor, each of the tensor's shape.
std::vector<std::string> state_names(const config::OptimConfig& optim, const nn::TensorSpec& tensor) {
  if (std::holds_alternative<SgdConfig>(optim)) return {"momentum_buffer"};
  if (std::holds_alternative<SignSgdConfig>(optim)) return {};
  if (std::holds_alternative<MuonConfig>(optim) && takes_muon(tensor)) return {"momentum"};
  return {"exp_avg", "exp_avg_sq"};
}

TensorView part_of(const TensorView& vector, std::int64_t first, std::int64_t count) {
  return {vector.as<char>() + static_cast<std::size_t>(first) * size_of(vector.dtype), {count}, vector.dtype, vector.device, count};
}

template <typename List, typename Fn>
std::vector<TensorView> views_of(const List& list, Fn view_of) {
  std::vector<TensorView> views;
  for (const auto& item : list) views.push_back(view_of(item));
  return views;
}

/// Elements counted by one worker at a time.
constexpr std::size_t kCountedPiece = std::size_t{1} << 17;

std::int64_t count_zeros(std::span<const float> values) {
  constexpr std::size_t kBlock = 1024;  // of a known length, so that the loop is vectorized
  std::int64_t count = 0;
  for (; values.size() >= kBlock; values = values.subspan(kBlock)) {
    std::int32_t in_block = 0;
    for (std::size_t i = 0; i < kBlock; ++i) in_block += values[i] == 0.0f ? 1 : 0;
    count += in_block;
  }
  return count + std::ranges::count(values, 0.0f);
}

/// At most so many elements at a time, of one range each.
std::vector<ElementRange> pieces_of(const ElementRanges& elements, std::int64_t most) {
  std::vector<ElementRange> pieces;
  for (const ElementRange range : elements.ranges())
    for (std::int64_t begin = range.begin; begin < range.end; begin += most) pieces.push_back({begin, std::min(begin + most, range.end)});
  return pieces;
}

}  // namespace

/// State of one parameter, or of the own part of it: names and tensors, empty for stateless optimizers.
struct Optimizer::Slot {
  nn::NamedParameter* parameter = nullptr;
  bool is_muon = false;
  ElementRange part;  ///< among all values
  std::vector<std::pair<std::string, Tensor>> state;
};

double base_lr(const config::OptimConfig& optim) {
  return std::visit([](const auto& c) { return c.lr; }, optim);
}

std::optional<double> max_grad_norm(const config::OptimConfig& optim) {
  return std::visit([](const auto& c) { return c.max_norm; }, optim);
}

namespace {

std::size_t state_bytes_of(const config::OptimConfig& optim, DType dtype, const nn::TensorSpec& tensor) {
  if (!tensor.trainable) return 0;
  return state_names(optim, tensor).size() * size_of(dtype) * static_cast<std::size_t>(tensor.num_elements());
}

}  // namespace

std::size_t state_bytes_of(const config::OptimConfig& optim, DType dtype, const nn::TensorTable& table) {
  std::size_t sum = 0;
  for (const nn::TensorSpec& tensor : table.tensors()) sum += state_bytes_of(optim, dtype, tensor);
  return sum;
}

std::size_t visit_bytes_of(const config::OptimConfig& optim, const OptimizerMemory& memory, const nn::TensorTable& table) {
  if (memory.host == nullptr) return 0;
  std::size_t most = 0;
  if (std::holds_alternative<MuonConfig>(optim)) {  // whole tensors
    for (const nn::TensorSpec& tensor : table.tensors()) most = std::max(most, state_bytes_of(optim, memory.dtype, tensor));
  } else if (table.num_trainable() > 0) {
    const std::size_t per_element = state_bytes_of(optim, memory.dtype, table) / static_cast<std::size_t>(table.num_trainable()) +
                                    (memory.holds_masters ? sizeof(float) : 0);
    most = per_element * static_cast<std::size_t>(std::min(memory.piece_elements, table.num_trainable()));
  }
  return HostState::kNumBuffers * most;
}

Tensor Optimizer::new_state(Shape shape) const {
  return host_ != nullptr ? host_->zeros(shape, memory_.dtype) : Tensor::zeros(ctx_.runtime, shape, memory_.dtype);
}

bool keeps_whole_blocks(const config::OptimConfig& optim) noexcept { return std::holds_alternative<MuonConfig>(optim); }

Optimizer::Optimizer(ops::OpContext& ctx, nn::Parameters& parameters, const config::OptimConfig& optim, OptimizerMemory memory,
                     ElementRanges own)
    : ctx_(ctx), parameters_(parameters), optim_(optim), memory_(std::move(memory)), own_(std::move(own)) {
  const bool has_muon = std::holds_alternative<MuonConfig>(optim);
  if (memory_.dtype != DType::kF32 && (has_muon || std::holds_alternative<SgdConfig>(optim)))
    fail(ErrorCode::kInvalidArgument, "[optimizer] the state of {} is float32 always; state in {} is for adamw", type_name(),
         to_string(memory_.dtype));
  PRL_CHECK(!memory_.holds_masters || (memory_.host != nullptr && !has_muon), "masters in host memory without a way there");
  PRL_CHECK(memory_.piece_elements > 0, "pieces of {} elements", memory_.piece_elements);
  if (memory_.host != nullptr) host_ = std::make_unique<HostState>(ctx.runtime, memory_.host);
  for (nn::NamedParameter& p : parameters.named()) {
    PRL_CHECK(p.grad.defined() || (p.expert >= 0 && parameters.has_experts_apart()), "parameter {} has no gradient tensor", p.name);
    const std::vector<std::string> names = state_names(optim, p);
    const ElementRange part = own_.part_of(p.range());
    if (part.count() == 0) continue;
    const bool is_whole = part.count() == p.num_elements();
    PRL_CHECK(is_whole || !has_muon, "{} is divided among ranks", p.name);
    const Shape shape = is_whole ? p.shape : Shape{part.count()};
    // The state of element-wise optimizers lies in one array per kind, as the parameters' values do.
    while (!has_muon && flat_state_.size() < names.size()) flat_state_.push_back(new_state({own_.count()}));
    Slot slot{&p, has_muon && takes_muon(p), part, {}};
    for (std::size_t i = 0; i < names.size(); ++i)
      slot.state.emplace_back(names[i],
                              has_muon ? new_state(shape) : flat_state_[i].slice(own_.place_of(part.begin), part.count()).reshaped(shape));
    slots_.push_back(std::move(slot));
  }
}

Optimizer::~Optimizer() = default;

/// What is alike for all elements of a step.
struct Optimizer::Step {
  float lr = 0, grad_scale = 1;
  std::int64_t number = 1;

  template <typename Config>
  ops::AdamWArgs adamw(const Config& c) const {
    return {.lr = lr,
            .beta1 = static_cast<float>(c.betas1),
            .beta2 = static_cast<float>(c.betas2),
            .eps = kAdamEps,
            .weight_decay = static_cast<float>(c.weight_decay),
            .grad_scale = grad_scale,
            .step = number};
  }
};

Tensor Optimizer::grad_part(std::int64_t begin, std::int64_t count) const { return grads_.slice(own_.place_of(begin), count); }

void Optimizer::step_elements(const Step& step, std::int64_t begin, TensorView values, std::span<const TensorView> state,
                              const Tensor& rounded) {
  const ElementRange all{begin, begin + values.shape.num_elements()};
  const auto step_up_to = [&](std::int64_t from, std::int64_t to) {
    if (from == to) return;
    const auto part = [&](const TensorView& of) { return part_of(of, from - begin, to - from); };
    step_unfrozen(step, from, part(values), views_of(state, part), rounded);
  };
  std::int64_t from = begin;
  for (const ElementRange frozen : parameters_.frozen()) {
    const ElementRange here = intersection(frozen, all);
    if (here.count() == 0) continue;
    step_up_to(from, here.begin);
    if (rounded.defined()) ops::cast(ctx_, rounded.slice(here.begin, here.count()), part_of(values, here.begin - begin, here.count()));
    from = here.end;
  }
  step_up_to(from, all.end);
}

void Optimizer::step_unfrozen(const Step& step, std::int64_t begin, TensorView values, std::span<const TensorView> state,
                              const Tensor& rounded) {
  const std::int64_t count = values.shape.num_elements();
  const Tensor grads = grad_part(begin, count);
  if (const auto* adamw = std::get_if<AdamWConfig>(&optim_)) {
    ops::adamw(ctx_, values, state[0], state[1], grads, step.adamw(*adamw),
               rounded.defined() ? rounded.slice(begin, count).view() : TensorView{});
    return;
  }
  if (const auto* sgd = std::get_if<SgdConfig>(&optim_))
    ops::sgd(ctx_, values, state[0], grads,
             {.lr = step.lr,
              .momentum = static_cast<float>(sgd->momentum),
              .weight_decay = static_cast<float>(sgd->weight_decay),
              .grad_scale = step.grad_scale,
              .nesterov = sgd->nesterov,
              .is_first_step = step.number == 1});
  else  // The sign does not change under scaling.
    ops::sign_sgd(ctx_, values, grads, step.lr, static_cast<float>(std::get<SignSgdConfig>(optim_).weight_decay));
  if (rounded.defined()) ops::cast(ctx_, rounded.slice(begin, count), values);
}

void Optimizer::step_slot(const Step& step, const Slot& slot, std::span<const TensorView> state) {
  const auto& muon = std::get<MuonConfig>(optim_);
  const nn::NamedParameter& p = *slot.parameter;
  const ElementRange range{p.offset, p.offset + p.num_elements()};
  if (std::ranges::any_of(parameters_.frozen(), [&](ElementRange frozen) { return frozen.contains(range); })) return;
  const Tensor grad = grad_part(p.offset, p.num_elements()).reshaped(p.shape);
  if (slot.is_muon)
    ops::muon(ctx_, p.value, state[0], grad,
              {.lr = step.lr,
               .mu = static_cast<float>(muon.mu),
               .weight_decay = static_cast<float>(muon.weight_decay),
               .grad_scale = step.grad_scale});
  else
    ops::adamw(ctx_, p.value, state[0], state[1], grad, step.adamw(muon));
}

void Optimizer::step_in_pieces(const Step& step, const Tensor& rounded) {
  std::vector<HostState::Visit> visits;
  if (std::holds_alternative<MuonConfig>(optim_)) {
    for (const Slot& slot : slots_) {
      HostState::Visit& visit = visits.emplace_back();
      for (const auto& [name, tensor] : slot.state) visit.state.push_back(tensor);
      visit.work = [this, &step, of = &slot](std::span<const TensorView> state) { step_slot(step, *of, state); };
    }
  } else {
    for (const ElementRange piece : pieces_of(own_, memory_.piece_elements)) {
      HostState::Visit& visit = visits.emplace_back();
      const Tensor values = parameters_.values_in(piece);
      if (memory_.holds_masters) visit.state.push_back(values);
      for (const Tensor& all : flat_state_) visit.state.push_back(all.slice(own_.place_of(piece.begin), piece.count()));
      visit.work = [this, &step, &rounded, begin = piece.begin, values](std::span<const TensorView> visitors) {
        if (memory_.holds_masters)
          step_elements(step, begin, visitors.front(), visitors.subspan(1), rounded);
        else
          step_elements(step, begin, values.view(), visitors, rounded);
      };
    }
  }
  host_->run(visits);
}

void Optimizer::step(double lr, double grad_scale, const Tensor& rounded, const Tensor& grads) {
  PRL_CHECK(grads.defined() || own_.count() == parameters_.table()->num_master_elements(), "a step of a part without its gradients");
  grads_ = grads.defined() ? grads : parameters_.all_grads();
  PRL_CHECK(grads_.num_elements() == own_.count(), "{} gradients for {} elements", grads_.num_elements(), own_.count());
  const Step step{static_cast<float>(lr), static_cast<float>(grad_scale), num_steps_ + 1};
  const bool is_muon = std::holds_alternative<MuonConfig>(optim_);
  if (host_ != nullptr && (memory_.holds_masters || !std::holds_alternative<SignSgdConfig>(optim_))) {
    step_in_pieces(step, rounded);
  } else if (is_muon) {
    for (const Slot& slot : slots_) {
      const std::vector<TensorView> state = views_of(slot.state, [](const auto& named) { return named.second.view(); });
      step_slot(step, slot, state);
    }
  } else {
    for (const ElementRange range : own_.ranges()) {
      const std::vector<TensorView> state =
          views_of(flat_state_, [&](const Tensor& all) { return all.slice(own_.place_of(range.begin), range.count()).view(); });
      step_elements(step, range.begin, parameters_.values_in(range).view(), state, rounded);
    }
  }
  if (is_muon && rounded.defined())
    for (const ElementRange range : own_.ranges()) ops::cast(ctx_, rounded.slice(range.begin, range.count()), parameters_.values_in(range));
  grads_ = {};
  ++num_steps_;
}

std::vector<io::NamedTensor> Optimizer::state() const {
  std::vector<io::NamedTensor> all;
  for (const Slot& slot : slots_)
    for (const auto& [name, tensor] : slot.state) all.push_back({slot.parameter->name + "." + name, tensor});
  return all;
}

std::vector<Optimizer::StatePart> Optimizer::state_parts() const {
  std::vector<StatePart> parts;
  for (const Slot& slot : slots_)
    for (const auto& [name, tensor] : slot.state) parts.push_back({slot.parameter->name + "." + name, slot.part, tensor});
  return parts;
}

std::vector<io::NamedTensor> Optimizer::copy_state() const {
  std::vector<io::NamedTensor> all = state();
  for (io::NamedTensor& named : all) named.tensor = named.tensor.clone();
  return all;
}

std::string_view Optimizer::type_name() const {
  return std::visit([](const auto& c) { return c.kType; }, optim_);
}

std::size_t Optimizer::state_bytes() const noexcept {
  std::size_t sum = 0;
  for (const Slot& slot : slots_)
    for (const auto& [name, tensor] : slot.state) sum += tensor.num_bytes();
  return sum;
}

void Optimizer::load_state(StateFiles& files) {
  if (files.is_whole() && own_.count() == parameters_.table()->num_master_elements())
    return io::load_tensors(files.folder() / "optimizer.safetensors", state());
  for (const Slot& slot : slots_)
    for (const auto& [name, tensor] : slot.state) files.read(*slot.parameter, name, slot.part.begin - slot.parameter->offset, tensor);
}

double global_grad_norm(ops::OpContext& ctx, const Tensor& own_grads, const ShardPlan& plan, comm::Communicator& group) {
  constexpr std::int64_t kPerChunk = ShardPlan::kChunkElements / ops::kSquaresChunk;
  static_assert(ShardPlan::kChunkElements % ops::kSquaresChunk == 0);
  const ElementRanges& own = plan.elements(group.rank());
  // Chunks end with their block: those in between that are not whole begin a new sum of ops::chunk_squares.
  std::vector<double> sums;
  std::vector<ConstTensorView> runs;  // of chunks that lie together
  std::size_t num_squares = 0;
  const auto squares_of = [](const ConstTensorView& run) {
    return static_cast<std::size_t>((run.shape.num_elements() + ops::kSquaresChunk - 1) / ops::kSquaresChunk);
  };
  const std::span<const std::size_t> mine = plan.chunks_of(group.rank());
  const auto chunk = [&](std::size_t i) { return plan.chunks()[mine[i]]; };
  for (std::size_t first = 0; first < mine.size();) {
    std::size_t end = first + 1;
    while (end < mine.size() && mine[end] == mine[end - 1] + 1 && chunk(end - 1).count() == ShardPlan::kChunkElements) ++end;
    const std::int64_t count = chunk(end - 1).end - chunk(first).begin;
    runs.push_back(own_grads.slice(own.place_of(chunk(first).begin), count));
    num_squares += squares_of(runs.back());
    first = end;
  }
  std::vector<float> squares(num_squares);
  ops::chunk_squares(ctx, squares, runs);
  std::size_t begin = 0;
  for (const ConstTensorView& run : runs) {
    const std::size_t end = begin + squares_of(run);
    for (; begin < end; begin += std::min<std::size_t>(kPerChunk, end - begin)) {
      double sum = 0;
      for (std::size_t i = begin; i < std::min<std::size_t>(end, begin + kPerChunk); ++i) sum += static_cast<double>(squares[i]);
      sums.push_back(sum);
    }
  }
  PRL_CHECK(sums.size() == mine.size(), "{} sums for {} chunks", sums.size(), mine.size());
  // In the order of chunks, whoever owns them.
  std::vector<double> of_chunks(plan.chunks().size());
  const std::string_view bytes(reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof(double));
  const std::vector<std::string> parts = group.gather_bytes(bytes, {.what = "gradient norm"});
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    const std::span<const std::size_t> theirs = plan.chunks_of(static_cast<int>(rank));
    PRL_CHECK(parts[rank].size() == theirs.size() * sizeof(double), "rank {} sends {} bytes of sums", rank, parts[rank].size());
    for (std::size_t i = 0; i < theirs.size(); ++i)
      std::memcpy(&of_chunks[theirs[i]], parts[rank].data() + i * sizeof(double), sizeof(double));
  }
  double total = 0;
  for (const double sum : of_chunks) total += sum;
  return std::sqrt(total);
}

double global_grad_norm(ops::OpContext& ctx, const nn::Parameters& parameters) {
  const auto alone = comm::make_local_communicator(ctx.runtime);
  return global_grad_norm(ctx, parameters.all_grads(), ShardPlan(*parameters.table(), 1, false), *alone);
}

std::optional<double> zero_grad_ratio(ops::OpContext& ctx, const nn::Parameters& parameters, const Tensor& own_grads, const ShardPlan& plan,
                                      comm::Communicator& group) {
  if (ctx.runtime->device().kind != DeviceKind::kCpu || ctx.pool == nullptr) return std::nullopt;
  const ElementRanges& own = plan.elements(group.rank());
  std::vector<std::span<const float>> pieces;  // of all tensors, of which many are one piece
  for (const nn::NamedParameter& p : parameters.named()) {
    const ElementRange part = own.part_of(p.range());
    if (part.count() == 0) continue;
    std::span<const float> rest(own_grads.as<float>() + own.place_of(part.begin), static_cast<std::size_t>(part.count()));
    for (; !rest.empty(); rest = rest.subspan(pieces.back().size())) pieces.push_back(rest.first(std::min(rest.size(), kCountedPiece)));
  }
  std::atomic<std::int64_t> num_zeros{0};
  ctx.pool->parallel_for(static_cast<std::int64_t>(pieces.size()), [&](std::int64_t n) {
    num_zeros.fetch_add(count_zeros(pieces[static_cast<std::size_t>(n)]), std::memory_order_relaxed);
  });
  double all = 0;
  for (const double count : group.gather_number(static_cast<double>(num_zeros.load()), {.what = "zeros of the gradient"})) all += count;
  const std::int64_t total = parameters.table()->num_trainable();
  return total == 0 ? 0 : all / static_cast<double>(total);
}

double clip_scale(double norm, std::optional<double> max_norm) { return max_norm ? std::min(1.0, *max_norm / (norm + 1e-6)) : 1.0; }

}  // namespace prl::trainer
