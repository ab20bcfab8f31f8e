#include "engine/paged_runner.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.hpp"
#include "base/spans.hpp"
#include "engine/memory.hpp"
#include "nn/mtp_head.hpp"
#include "nn/shards.hpp"

namespace prl::engine {
namespace {

/// Rows of logits held at once when alternatives to prompt tokens are asked for.
constexpr std::int64_t kPromptLogitRows = 32;
constexpr double kMiB = 1024.0 * 1024.0;

bool is_finite(const ops::SampleResult& result) {
  if (!std::isfinite(result.logprob)) return false;
  return std::all_of(result.top_logprobs.begin(), result.top_logprobs.end(), [](const auto& entry) { return std::isfinite(entry.second); });
}

nn::KvCache make_cache(const std::shared_ptr<DeviceRuntime>& runtime, const nn::Weights& weights, const EngineOptions& options) {
  const std::int64_t num_blocks = options.num_blocks, block_size = options.block_size;
  const nn::ModelConfig config = nn::config_of_shard(weights.config, weights.shard.size);
  const std::int64_t num_states =
      config.linear.layers.empty() ? 0 : num_state_slots(options.max_num_seqs, options.drafts.num_tokens) + options.num_state_snapshots;
  const std::size_t of_hidden = options.drafts.uses_head() ? nn::KvCache::hidden_bytes_per_block(config, weights.compute, block_size) : 0;
  const std::size_t num_bytes =
      static_cast<std::size_t>(num_blocks) * (nn::KvCache::bytes_per_block(config, weights.compute, block_size) + of_hidden) +
      static_cast<std::size_t>(num_states) * nn::KvCache::bytes_per_state(config, weights.compute, runtime->device().kind);
  const std::size_t num_available = runtime->bytes_available();
  if (num_bytes > num_available) {
    fail(ErrorCode::kOutOfMemory, "the KV cache of {} blocks{} needs {:.1f} MiB, {} has {:.1f} MiB left; make the cache smaller{}",
         num_blocks, num_states > 0 ? fmt::format(" and {} states of sequences", num_states) : "", static_cast<double>(num_bytes) / kMiB,
         to_string(runtime->device()), static_cast<double>(num_available) / kMiB, num_states > 0 ? ", or lower max_num_seqs" : "");
  }
  return {runtime, config, weights.compute, num_blocks, block_size, options.logs_routes, num_states};
}

std::string non_finite_error(const Sequence& sequence, std::int64_t position) {
  return fmt::format("request {}: the model's output at token {} is not finite; the weights are damaged or have diverged",
                     sequence.request_id.value, position);
}

}  // namespace

void check_cache_size(const EngineOptions& options, const nn::ModelConfig& config, DType compute) {
  const std::size_t block_bytes = nn::KvCache::bytes_per_block(config, compute, options.block_size);
  const std::int64_t num_needed = (options.max_model_len + options.block_size - 1) / options.block_size;
  if (options.num_blocks < num_needed) {
    fail(ErrorCode::kOutOfMemory,
         "one sequence of max_model_len = {} tokens needs {} KV blocks of {} tokens ({:.1f} MiB), but the cache has {} ({:.1f} MiB); give "
         "the cache more memory or lower max_model_len",
         options.max_model_len, num_needed, options.block_size, static_cast<double>(num_needed) * static_cast<double>(block_bytes) / kMiB,
         options.num_blocks, static_cast<double>(options.num_blocks) * static_cast<double>(block_bytes) / kMiB);
  }
}

PagedRunner::PagedRunner(std::shared_ptr<DeviceRuntime> runtime, const EngineOptions& options, nn::WeightsPtr weights, RunnerShare share)
    : runtime_(runtime),
      block_size_(options.block_size),
      rank_(share.layers.rank),
      has_adapters_(share.has_adapters),
      shift_(share.hidden_of != nullptr ? 1 : 0),
      weights_(std::move(weights)),
      session_(runtime, options.num_threads),
      cache_(make_cache(runtime, *weights_, options)),
      model_(session_.context(), options.record_steps, share.layers),
      sampler_(session_.context(), share.sequences),
      images_(session_.context()),
      drawn_B_(Tensor::empty(runtime, {most_drawn_rows(options.max_num_seqs, options.drafts.num_tokens)}, DType::kI32)),
      times_(options.times),
      stopwatch_(times_ != nullptr || spans::is_on(spans::Detail::kFine) ? runtime->make_stopwatch() : nullptr) {
  session_.context().may_measure = false;  // each prompt has another length
  if (share.hidden_of != nullptr) cache_.share_hidden(*share.hidden_of);
  if (options.drafts.uses_head()) cache_.keep_hidden(runtime, weights_->config, weights_->compute, options.max_num_seqs);
  if (options.num_host_blocks > 0)
    host_.emplace(make_host_link(runtime_, /*page_locked=*/true), cache_, weights_->config.num_layers, options.num_host_blocks);
  if (options.num_disk_blocks > 0)
    host_->open_files(
        {.folder = options.disk_folder, .num_slots = options.num_disk_blocks, .block_bytes = 0, .read_timeout = options.disk_read_timeout});
}

PagedRunner::~PagedRunner() = default;

void PagedRunner::fill_batch(const StepPlan& plan) {
  ids_T_.clear();
  positions_T_.clear();
  heights_T_.clear();
  widths_T_.clear();
  rope_positions_3T_.clear();
  slot_T_.clear();
  read_hidden_T_.clear();
  write_hidden_T_.clear();
  shared_slots_.clear();
  query_start_.assign(1, 0);
  context_len_.clear();
  state_slot_.clear();
  max_blocks_ = 1;
  num_adapters_ = 0;
  for (const PlanRow& row : plan.rows) max_blocks_ = std::max(max_blocks_, static_cast<std::int32_t>(row.sequence->blocks.size()));
  block_table_.assign(plan.rows.size() * static_cast<std::size_t>(max_blocks_), 0);
  for (const PlanRow& row : plan.rows) {
    const Sequence& sequence = *row.sequence;
    const std::int64_t end = row.first_token + row.num_tokens;
    if (end <= shift_) continue;  // a first token, which no row that is sampled has alone
    std::int32_t* const table = block_table_.data() + context_len_.size() * static_cast<std::size_t>(max_blocks_);
    for (std::int64_t token = std::max(row.first_token, shift_); token < end; ++token) add_token(row, token, token + 1 == end);
    if (const auto& served = sequence.request->served; served != nullptr && has_adapters_) {
      PRL_CHECK(served->weights.ready != nullptr, "a row's adapter is not on the device");
      add_adapter_rows(served->weights.ready->part(rank_), query_start_.back(), static_cast<std::int32_t>(ids_T_.size()));
    }
    query_start_.push_back(static_cast<std::int32_t>(ids_T_.size()));
    context_len_.push_back(static_cast<std::int32_t>(end - shift_));
    state_slot_.push_back(row.state_slot);
    for (std::size_t b = 0; b < sequence.blocks.size(); ++b) table[b] = sequence.blocks[b].id().value;
  }
  block_table_.resize(context_len_.size() * static_cast<std::size_t>(max_blocks_));
  if (heights_T_ == positions_T_ && widths_T_ == positions_T_) return;
  for (const std::vector<std::int32_t>* axis : {&positions_T_, &heights_T_, &widths_T_})
    rope_positions_3T_.insert(rope_positions_3T_.end(), axis->begin(), axis->end());
}

void PagedRunner::add_token(const PlanRow& row, std::int64_t token, bool is_last) {
  const Sequence& sequence = *row.sequence;
  const auto slot_of = [&](std::int64_t position) {
    const std::int32_t block = sequence.blocks[static_cast<std::size_t>(position / block_size_)].id().value;
    return static_cast<std::int32_t>(block * block_size_ + position % block_size_);
  };
  const std::int64_t known_end = row.known_end(), position = token - shift_;
  if (token >= known_end)
    ids_T_.push_back(row.drafts[static_cast<std::size_t>(token - known_end)]);
  else
    ids_T_.push_back(row.drawn_row >= 0 ? -1 - row.drawn_row : sequence.tokens[static_cast<std::size_t>(token)]);
  add_position(sequence, position);
  std::int32_t slot = slot_of(position);
  if (shift_ == 0) {
    if (cache_.hidden().defined()) write_hidden_T_.push_back(slot);
  } else {
    // What is guessed of a hidden state lies behind those of blocks, by row, where it is read once: a block's own may still be copied.
    const auto of_guesses = static_cast<std::int32_t>(cache_.num_slots());
    read_hidden_T_.push_back(row.drawn_row >= 0 ? of_guesses + row.drawn_row : slot);
    write_hidden_T_.push_back(row.is_sampled && is_last ? of_guesses + static_cast<std::int32_t>(context_len_.size()) : -1);
    // Behind a prefix that several sequences have in common the last slot is read with what follows it in each: one of them keeps it.
    if (token % block_size_ == 0) {
      if (std::ranges::find(shared_slots_, slot) != shared_slots_.end()) slot = -1;
      shared_slots_.push_back(slot);
    }
  }
  slot_T_.push_back(slot);
}

void PagedRunner::add_position(const Sequence& sequence, std::int64_t token) {
  const std::array<std::int32_t, 3> at = wire::rope_position(sequence.request->images, token);
  positions_T_.push_back(at[0]);
  heights_T_.push_back(at[1]);
  widths_T_.push_back(at[2]);
}

void PagedRunner::add_adapter_rows(const nn::Adapter* adapter, std::int32_t begin, std::int32_t end) {
  std::size_t at = 0;
  while (at < num_adapters_ && rows_of_adapters_[at].first != adapter) ++at;
  if (at == num_adapters_) {
    if (++num_adapters_ > rows_of_adapters_.size()) rows_of_adapters_.emplace_back();
    rows_of_adapters_[at].first = adapter;
    rows_of_adapters_[at].second.clear();
  }
  for (std::int32_t row = begin; row < end; ++row) rows_of_adapters_[at].second.push_back(row);
}

void PagedRunner::begin(const StepPlan& plan, StepOutput& output) {
  PRL_CHECK(num_begun_ - num_finished_ < draws_.size(), "{} steps are in flight", num_begun_ - num_finished_);
  if (output.rows.size() < plan.rows.size()) output.rows.resize(plan.rows.size());
  Marks& marks = marks_[num_begun_ % marks_.size()];
  marks.is_timed = stopwatch_ != nullptr && ((times_ != nullptr && times_->is_on()) || spans::is_on(spans::Detail::kFine));
  if (marks.is_timed) {
    const Marks& last = marks_[(num_begun_ + 1) % marks_.size()];
    marks.before = last.is_timed ? std::optional(last.own.back()) : std::nullopt;
    marks.is_decode = std::ranges::all_of(plan.rows, [](const PlanRow& row) { return row.num_tokens - row.num_drafts == 1; });
  }
  mark(0);
  if (host_) host_->carry_out(plan.copies);
  for (const StateCopy& copy : plan.state_copies) cache_.copy_state(*runtime_, copy.from, copy.to);
  fill_batch(plan);
  if (ids_T_.empty()) {  // of a head that reads first tokens alone, which nothing comes before
    marks.is_timed = false;
    draws_[num_begun_++ % draws_.size()].num_rows = 0;
    return;
  }
  nn::PagedBatch batch;
  batch.ids_T = ids_T_;
  batch.positions_T = positions_T_;
  batch.slot_T = slot_T_;
  batch.query_start = query_start_;
  batch.context_len = context_len_;
  batch.block_table = block_table_;
  batch.max_blocks = max_blocks_;
  batch.state_slot = state_slot_;
  batch.rope_positions_3T = rope_positions_3T_;
  batch.read_hidden_T = read_hidden_T_;
  batch.write_hidden_T = write_hidden_T_;
  batch.features = images_.of_step(plan, query_start_, weights_->vision.get());
  batch.drawn_B = drawn_B_;
  adapters_.clear();
  for (std::size_t i = 0; i < num_adapters_; ++i) adapters_.push_back({rows_of_adapters_[i].first, rows_of_adapters_[i].second});
  batch.adapters = adapters_;
  const ConstTensorView h_TH = model_.forward_paged(*weights_, cache_, batch);
  for (std::size_t r = 0; r < plan.rows.size(); ++r) {
    output.rows[r].error.clear();
    output.rows[r].num_good = 0;
    if (plan.rows[r].num_prompt_logprobs > 0) score_prompt(plan.rows[r], h_TH, query_start_[r], output.rows[r]);
  }
  mark(1);
  begin_draws(plan, h_TH);
  ++num_begun_;
}

void PagedRunner::score_prompt(const PlanRow& row, ConstTensorView h_TH, std::int64_t first_row, StepOutput::Row& out) {
  const Sequence& sequence = *row.sequence;
  const std::int64_t count = row.num_prompt_logprobs;
  const std::int64_t begin = first_row + (row.prompt_logprob_begin - row.first_token);
  if (!logp_T_.defined() || logp_T_.num_elements() < count) {
    logp_T_ = Tensor::empty(runtime_, {count}, DType::kF32);
    entropy_T_ = Tensor::empty(runtime_, {count}, DType::kF32);
    lse_T_ = Tensor::empty(runtime_, {count}, DType::kF32);
  }
  targets_T_.clear();
  for (std::int64_t i = 0; i < count; ++i)
    targets_T_.push_back(sequence.tokens[static_cast<std::size_t>(row.prompt_logprob_begin + i + 1)]);
  temperatures_T_.assign(static_cast<std::size_t>(count), 1.0f);
  ops::lm_head_logprob(session_.context(), logp_T_.slice(0, count), entropy_T_.slice(0, count), lse_T_.slice(0, count),
                       h_TH.rows(begin, count), weights_->lm_head(), targets_T_, temperatures_T_);
  out.prompt_logprobs.resize(static_cast<std::size_t>(count));
  runtime_->copy_to_host(out.prompt_logprobs.data(), logp_T_.data(), out.prompt_logprobs.size() * sizeof(float));
  for (std::int64_t i = 0; i < count; ++i) {
    if (std::isfinite(out.prompt_logprobs[static_cast<std::size_t>(i)])) continue;
    out.error = non_finite_error(sequence, row.prompt_logprob_begin + i + 1);
    return;
  }

  const std::int32_t num_top = *sequence.request->sampling.prompt_logprobs;
  const bool wants_ranks = sequence.request->sampling.prompt_ranks;
  out.prompt_top_logprobs.clear();
  out.prompt_ranks.clear();
  for (std::int64_t done = 0; (num_top > 0 || wants_ranks) && done < count; done += kPromptLogitRows) {
    const std::int64_t chunk = std::min(kPromptLogitRows, count - done);
    sample_rows_B_.clear();
    for (std::int64_t i = 0; i < chunk; ++i) sample_rows_B_.push_back(static_cast<std::int32_t>(begin + done + i));
    const TensorView logits_BV = model_.logits(*weights_, h_TH, sample_rows_B_);
    if (results_B_.size() < static_cast<std::size_t>(chunk)) results_B_.resize(static_cast<std::size_t>(chunk));
    const auto results = std::span(results_B_).first(static_cast<std::size_t>(chunk));
    for (ops::SampleResult& result : results) result.top_logprobs.clear();
    if (num_top > 0) {
      sampler_.top_logprobs(logits_BV, num_top, results);
      for (const ops::SampleResult& result : results) {
        auto& top = out.prompt_top_logprobs.emplace_back();
        for (const auto& [id, logprob] : result.top_logprobs) top.push_back({id, logprob});
      }
    }
    for (std::int64_t i = 0; wants_ranks && i < chunk; ++i)
      out.prompt_ranks.push_back(
          rank_of(targets_T_[static_cast<std::size_t>(done + i)], logits_BV, i, results[static_cast<std::size_t>(i)]));
  }
}

std::int32_t PagedRunner::rank_of(std::int32_t id, ConstTensorView logits_BV, std::int64_t row, const ops::SampleResult& top) {
  for (std::size_t k = 0; k < top.top_logprobs.size(); ++k)
    if (top.top_logprobs[k].first == id) return static_cast<std::int32_t>(k + 1);
  // Outside the list, which is rare where a model knows its text: the row is counted here.
  const ConstTensorView logits_V = logits_BV.rows(row, 1);
  logits_row_.resize(static_cast<std::size_t>(logits_V.shape[1]));
  runtime_->copy_to_host(logits_row_.data(), logits_V.data, logits_row_.size() * sizeof(float));
  const auto at = static_cast<std::size_t>(id);
  const float own = logits_row_[at];
  std::int32_t rank = 1;
  for (std::size_t other = 0; other < logits_row_.size(); ++other)
    rank += logits_row_[other] > own || (logits_row_[other] == own && other < at);
  return rank;
}

void PagedRunner::begin_draws(const StepPlan& plan, ConstTensorView h_TH) {
  ops::PendingSamples& draws = draws_[num_begun_ % draws_.size()];
  sample_rows_B_.clear();
  draws_B_.clear();
  for (std::size_t r = 0; r < plan.rows.size(); ++r) {
    const PlanRow& row = plan.rows[r];
    for (std::int64_t i = 0; i < row.num_samples(); ++i) {
      sample_rows_B_.push_back(query_start_[r + 1] - static_cast<std::int32_t>(row.num_samples() - i));
      draws_B_.push_back({row.sequence, row.output_idx() + i, row.drawn_row, row.num_unseen + i});
    }
  }
  draws.num_rows = 0;
  TensorView logits_BV;
  if (!draws_B_.empty()) {
    const ConstTensorView h_BH = model_.hidden_rows(h_TH, sample_rows_B_);
    if (!sampler_.begin_head(h_BH, weights_->lm_head(), draws_B_, drawn_B_, draws)) logits_BV = model_.logits(*weights_, h_BH);
  }
  mark(2);
  if (logits_BV.data != nullptr) sampler_.begin(logits_BV, draws_B_, drawn_B_, draws);
  mark(3);
}

void PagedRunner::mark(std::size_t which) {
  Marks& marks = marks_[num_begun_ % marks_.size()];
  if (marks.is_timed) marks.own[which] = stopwatch_->mark();
}

void PagedRunner::add_times(const Marks& marks) {
  const auto& [queued, layers, head, draw] = marks.own;
  StepTimes::Parts parts{.num_steps = 1};
  if (marks.before) parts.wait_s = stopwatch_->seconds(*marks.before, queued);
  parts.layers_s = stopwatch_->seconds(queued, layers);
  parts.head_s = stopwatch_->seconds(layers, head);
  parts.draw_s = stopwatch_->seconds(head, draw);
  if (times_ != nullptr && times_->is_on()) times_->add(marks.is_decode, parts);
  if (!spans::is_on(spans::Detail::kFine)) return;
  // The marks' distances are the device's; the last of them has just passed.
  const auto end = spans::Clock::now();
  const auto before = [&](double seconds) {
    return end - std::chrono::duration_cast<spans::Clock::duration>(std::chrono::duration<double>(seconds));
  };
  const std::string lane = fmt::format("{} of the engine", to_string(runtime_->device()));
  const auto head_begin = before(parts.draw_s + parts.head_s), draw_begin = before(parts.draw_s);
  spans::add(spans::Detail::kFine,
             {.lane = lane, .name = "layers", .begin = before(parts.draw_s + parts.head_s + parts.layers_s), .end = head_begin});
  spans::add(spans::Detail::kFine, {.lane = lane, .name = "head", .begin = head_begin, .end = draw_begin});
  spans::add(spans::Detail::kFine, {.lane = lane, .name = "draw", .begin = draw_begin, .end = end});
}

void PagedRunner::finish(const StepPlan& plan, StepOutput& output) {
  PRL_CHECK(num_finished_ < num_begun_, "no step is in flight");
  const std::size_t turn = num_finished_++ % draws_.size();
  ops::PendingSamples& draws = draws_[turn];
  if (marks_[turn].is_timed) add_times(marks_[turn]);
  const auto num_draws = static_cast<std::size_t>(draws.num_rows);
  if (num_draws == 0) return;
  if (results_B_.size() < num_draws) results_B_.resize(num_draws);
  sampler_.finish(std::span(results_B_).first(num_draws), draws);
  std::size_t next = 0;
  for (std::size_t r = 0; r < plan.rows.size(); ++r) {
    const PlanRow& row = plan.rows[r];
    StepOutput::Row& out = output.rows[r];
    const auto num_samples = static_cast<std::size_t>(row.num_samples());
    if (out.samples.size() < num_samples) out.samples.resize(num_samples);
    out.num_good = 0;
    for (std::size_t i = 0; i < num_samples; ++i, ++next) {
      // Swapped, so that both sides keep their buffers.
      std::swap(out.samples[i], results_B_[next]);
      if (!out.error.empty()) continue;
      if (is_finite(out.samples[i]))
        ++out.num_good;
      else
        out.error = non_finite_error(*row.sequence, row.sequence->num_tokens() + static_cast<std::int64_t>(i));
    }
  }
}

void PagedRunner::set_weights(nn::WeightsPtr weights) {
  if (weights == nullptr) fail(ErrorCode::kInvalidArgument, "new weights are missing");
  const nn::ModelConfig& is = weights_->config;
  const nn::ModelConfig& given = weights->config;
  const auto check = [&](const char* name, std::int64_t wanted, std::int64_t found) {
    if (wanted != found) fail(ErrorCode::kInvalidArgument, "new weights have {} = {}, the engine was made for {}", name, found, wanted);
  };
  check("vocab_size", is.vocab_size, given.vocab_size);
  check("hidden_size", is.hidden_size, given.hidden_size);
  check("num_hidden_layers", is.num_layers, given.num_layers);
  check("num_attention_heads", is.num_heads, given.num_heads);
  check("num_key_value_heads", is.num_kv_heads, given.num_kv_heads);
  check("head_dim", is.head_dim, given.head_dim);
  check("elements of a token in the cache", is.cached_width(), given.cached_width());
  if (weights->compute != weights_->compute) {
    fail(ErrorCode::kInvalidArgument, "new weights are packed for {}, the engine computes in {}", to_string(weights->compute),
         to_string(weights_->compute));
  }
  if (weights_->vision != nullptr && weights->vision == nullptr) {
    // The tower is frozen: weights from a trainer, which has none, leave it as it is.
    auto with_tower = std::make_shared<nn::Weights>(*weights);
    with_tower->vision = weights_->vision;
    weights = std::move(with_tower);
  }
  if (weights_->mtp != nullptr && weights->mtp == nullptr) weights = nn::with_mtp_head(weights, weights_->mtp);
  weights_ = std::move(weights);
}

nn::AdapterPtr ModelRunner::make_adapter(const nn::StoredAdapter&) { fail(ErrorCode::kInvalidArgument, "this engine has no adapters"); }
WeightProof ModelRunner::prove_with(const nn::AdapterPtr&) { fail(ErrorCode::kInvalidArgument, "this engine has no adapters"); }

wire::RoutedExperts ModelRunner::routes_of(std::span<const BlockLease>, std::int64_t, std::int64_t) {
  fail(ErrorCode::kInvalidArgument, "this engine keeps no experts of tokens");
}

wire::RoutedExperts PagedRunner::routes_of(std::span<const BlockLease> blocks, std::int64_t begin, std::int64_t end) {
  const nn::ModelConfig& config = weights_->config;
  wire::RoutedExperts out{.start = begin, .num_layers = config.num_layers, .top_k = config.num_active_experts, .ids = {}};
  const Tensor& log = cache_.route_log();
  if (!log.defined() || begin >= end) return out;
  const std::int64_t row_bytes = log.shape()[1];
  const Tensor rows = Tensor::empty(runtime_, {end - begin, row_bytes}, DType::kU8);
  for (std::int64_t position = begin; position < end;) {
    const std::int64_t within = position % block_size_, count = std::min(block_size_ - within, end - position);
    const std::int64_t slot = blocks[static_cast<std::size_t>(position / block_size_)].id().value * block_size_ + within;
    runtime_->copy_within(rows.as<std::byte>() + (position - begin) * row_bytes, log.as<std::byte>() + slot * row_bytes,
                          static_cast<std::size_t>(count * row_bytes));
    position += count;
  }
  out.ids.resize(static_cast<std::size_t>((end - begin) * out.row_size()));
  runtime_->copy_to_host(out.ids.data(), rows.data(), rows.num_bytes());
  return out;
}

nn::AdapterPtr PagedRunner::make_adapter(const nn::StoredAdapter& stored) {
  return nn::pack_adapter(session_.context(), weights_->config, stored, false, weights_->shard);
}

std::vector<float> PagedRunner::probe_logprobs(const nn::AdapterPtr& adapter) {
  nn::Weights with_it = *weights_;
  with_it.adapter = adapter;
  return nn::probe_logprobs(model_, session_.context(), with_it, nn::probe_prompt(with_it.config.vocab_size));
}

WeightProof PagedRunner::prove_with(const nn::AdapterPtr& adapter) {
  nn::Weights with_it = *weights_;
  with_it.adapter = adapter;
  WeightProof proof;
  proof.version = weights_->version;
  proof.checksum = nn::checksum(session_.context(), with_it).combined;
  proof.probe_logprobs = probe_logprobs(adapter);
  return proof;
}

}  // namespace prl::engine
