#include "wire/packing.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <queue>
#include <tuple>

#include "base/error.hpp"
#include "wire/checks.hpp"

namespace prl::wire {

namespace {

constexpr std::int32_t kPadTokenId = 1;

using Bins = std::vector<std::vector<std::size_t>>;

template <typename T>
void truncate(std::vector<T>& values, std::size_t length) {
  if (values.size() > length) values.resize(length);
}

/// Cuts a sample to seq_len, or before an image that would be divided, and gives it an advantage per token.
void prepare(TrainingSample& sample, std::int64_t seq_len) {
  check(sample);
  const std::int64_t cut = uncut_length(sample.images, std::min(seq_len, static_cast<std::int64_t>(sample.token_ids.size())));
  std::erase_if(sample.images, [&](const PromptImage& image) { return image.first >= cut; });
  const auto limit = static_cast<std::size_t>(cut);
  truncate(sample.token_ids, limit);
  truncate(sample.mask, limit);
  truncate(sample.logprobs, limit);
  truncate(sample.temperatures, limit);
  truncate(sample.advantages, limit);
  truncate(sample.ref_logprobs, limit);
  truncate(sample.rl_weights, limit);
  truncate(sample.ce_weights, limit);
  truncate(sample.ref_kl_weights, limit);
  if (!sample.routed_experts.empty()) sample.routed_experts.resize(static_cast<std::int64_t>(sample.token_ids.size()));
  if (!sample.advantages.empty()) return;
  for (std::size_t i = 0; i < sample.token_ids.size(); ++i)
    if (sample.mask[i] != 0 && (sample.rl_weights.empty() || sample.rl_weights[i] != 0))
      fail(ErrorCode::kInvalidArgument,
           "[packing] a sample of environment '{}' has tokens in the rl loss but no advantages: its algorithm must assign them",
           sample.env_name);
  sample.advantages.assign(sample.token_ids.size(), 0.0f);
}

double cost_of(const std::vector<std::size_t>& bin, std::span<const std::int64_t> lengths, const BinCost& cost) {
  double sum = 0;
  for (const std::size_t i : bin) {
    const auto n = static_cast<double>(lengths[i]);
    sum += cost.per_token * n + cost.per_token_squared * n * n;
  }
  return sum;
}

/// Splits heavy bins without images until their number is a multiple of W, or nothing can be split.
void split_to_multiple(Bins& bins, const std::vector<TrainingSample>& samples, std::span<const std::int64_t> lengths,
                       const PackOptions& options) {
  const auto is_text = [&](const auto& bin) { return std::ranges::all_of(bin, [&](std::size_t i) { return samples[i].images.empty(); }); };
  const auto num_ranks = static_cast<std::size_t>(options.num_ranks);
  const std::size_t target = std::max(num_ranks, (bins.size() + num_ranks - 1) / num_ranks * num_ranks);
  while (bins.size() < target) {
    std::size_t heaviest = bins.size();
    double heaviest_cost = 0;
    for (std::size_t b = 0; b < bins.size(); ++b) {
      const double cost = cost_of(bins[b], lengths, options.cost);
      if (bins[b].size() > 1 && is_text(bins[b]) && (heaviest == bins.size() || cost > heaviest_cost)) {
        heaviest = b;
        heaviest_cost = cost;
      }
    }
    if (heaviest == bins.size()) return;
    std::vector<std::size_t> items = std::move(bins[heaviest]);
    std::stable_sort(items.begin(), items.end(), [&](std::size_t a, std::size_t b) { return lengths[a] > lengths[b]; });
    std::vector<std::size_t> left, right;
    double left_cost = 0, right_cost = 0;
    for (const std::size_t i : items) {
      const double cost = cost_of({i}, lengths, options.cost);
      if (left_cost <= right_cost)
        left.push_back(i), left_cost += cost;
      else
        right.push_back(i), right_cost += cost;
    }
    bins[heaviest] = std::move(left);
    bins.push_back(std::move(right));
  }
}

/// Appends `values` (or n times `fill` when they are absent) if any sample of the bin has the stream.
void append_stream(std::vector<float>& out, const std::vector<float>& values, bool is_present, float fill, std::size_t n) {
  if (!is_present) return;
  if (values.empty())
    out.insert(out.end(), n, fill);
  else
    out.insert(out.end(), values.begin(), values.end());
}

/// Of the samples of a row, one behind the other; of those that do not say nothing is known.
RoutedExperts join_experts(const std::vector<std::size_t>& bin, const std::vector<TrainingSample>& samples) {
  RoutedExperts out;
  for (const std::size_t i : bin)
    if (const RoutedExperts& known = samples[i].routed_experts; !known.empty()) {
      if (out.row_size() > 0 && (out.num_layers != known.num_layers || out.top_k != known.top_k))
        fail(ErrorCode::kInvalidArgument, "[packing] samples have experts of {} x {} and of {} x {}: their servers have different models",
             out.num_layers, out.top_k, known.num_layers, known.top_k);
      out.num_layers = known.num_layers;
      out.top_k = known.top_k;
    }
  if (out.row_size() == 0) return out;
  std::int64_t num_tokens = 0;
  for (const std::size_t i : bin) {
    out.ids.insert(out.ids.end(), samples[i].routed_experts.ids.begin(), samples[i].routed_experts.ids.end());
    out.resize(num_tokens += static_cast<std::int64_t>(samples[i].token_ids.size()));
  }
  return out;
}

MicroBatch materialise(const std::vector<std::size_t>& bin, const std::vector<TrainingSample>& samples, std::int64_t pad_multiple) {
  MicroBatch row;
  const auto any = [&](auto member) { return std::ranges::any_of(bin, [&](std::size_t i) { return !(samples[i].*member).empty(); }); };
  const bool has_ref = any(&TrainingSample::ref_logprobs), has_rl = any(&TrainingSample::rl_weights);
  const bool has_ce = any(&TrainingSample::ce_weights), has_ref_kl = any(&TrainingSample::ref_kl_weights);
  for (const std::size_t i : bin) {
    const TrainingSample& s = samples[i];
    const std::size_t n = s.token_ids.size();
    row.input_ids.insert(row.input_ids.end(), s.token_ids.begin(), s.token_ids.end());
    row.loss_mask.insert(row.loss_mask.end(), s.mask.begin(), s.mask.end());
    row.advantages.insert(row.advantages.end(), s.advantages.begin(), s.advantages.end());
    row.inference_logprobs.insert(row.inference_logprobs.end(), s.logprobs.begin(), s.logprobs.end());
    row.temperatures.insert(row.temperatures.end(), s.temperatures.begin(), s.temperatures.end());
    for (PromptImage image : s.images) {
      image.first += static_cast<std::int64_t>(row.input_ids.size() - n);
      row.images.push_back(std::move(image));
    }
    for (std::size_t p = 0; p < n; ++p) row.position_ids.push_back(static_cast<std::int32_t>(p));
    row.sequence_lengths.push_back(static_cast<std::int32_t>(n));
    row.env_names.push_back(s.env_name);
    append_stream(row.ref_logprobs, s.ref_logprobs, has_ref, 0.0f, n);
    append_stream(row.rl_weights, s.rl_weights, has_rl, 1.0f, n);
    append_stream(row.ce_weights, s.ce_weights, has_ce, 0.0f, n);
    append_stream(row.ref_kl_weights, s.ref_kl_weights, has_ref_kl, 0.0f, n);
  }
  row.routed_experts = join_experts(bin, samples);
  const std::size_t multiple = static_cast<std::size_t>(pad_multiple);
  const std::size_t pad = (multiple - row.input_ids.size() % multiple) % multiple;
  if (pad == 0) return row;
  // Padding counts as part of the last sequence; it is masked, and nothing after it reads it.
  row.sequence_lengths.back() += static_cast<std::int32_t>(pad);
  const std::size_t total = row.input_ids.size() + pad;
  row.input_ids.resize(total, kPadTokenId);
  row.loss_mask.resize(total, 0);
  row.advantages.resize(total, 0.0f);
  row.inference_logprobs.resize(total, 0.0f);
  row.temperatures.resize(total, 1.0f);
  for (std::size_t p = 0; p < pad; ++p) row.position_ids.push_back(static_cast<std::int32_t>(p));
  for (auto* stream : {&row.ref_logprobs, &row.rl_weights, &row.ce_weights, &row.ref_kl_weights})
    if (!stream->empty()) stream->resize(total, 0.0f);
  if (!row.routed_experts.empty()) row.routed_experts.resize(static_cast<std::int64_t>(total));
  return row;
}

/// A row of the same shape that takes part in no loss, so that all ranks run the same number of rows.
MicroBatch make_fill_row(const MicroBatch& real) {
  MicroBatch row = real;
  std::ranges::fill(row.loss_mask, std::uint8_t{0});
  for (auto* stream : {&row.advantages, &row.rl_weights, &row.ce_weights, &row.ref_kl_weights}) std::ranges::fill(*stream, 0.0f);
  return row;
}

/// A partial solution of the differencing method: for each rank the items so far, and their sum.
struct Subset {
  double sum = 0;
  std::vector<std::size_t> items;
};
struct Partition {
  std::vector<Subset> subsets;  ///< by descending sum
  std::size_t order = 0;        ///< breaks ties the same way everywhere
  double spread() const { return subsets.front().sum - subsets.back().sum; }
};
struct LargestSpread {
  bool operator()(const Partition& a, const Partition& b) const {
    return a.spread() != b.spread() ? a.spread() < b.spread() : a.order > b.order;
  }
};

std::tuple<double, double> load_of(const std::vector<double>& sums) {
  const auto [low, high] = std::ranges::minmax_element(sums);
  return {*high, *high - *low};
}

/// Takes the best swap of two items of two ranks again and again while it lowers (largest sum, spread).
void improve_by_swaps(std::vector<std::vector<std::size_t>>& ranks, std::span<const double> costs) {
  std::vector<double> sums;
  for (const auto& rank : ranks)
    sums.push_back(std::accumulate(rank.begin(), rank.end(), 0.0, [&](double s, std::size_t i) { return s + costs[i]; }));
  // Each round lowers the load; the bound only guards against rounding that never settles.
  for (std::size_t round = 0; round < 4 * costs.size(); ++round) {
    auto best = load_of(sums);
    bool found = false;
    std::array<std::size_t, 4> swap{};
    const auto [least, most] = std::ranges::minmax_element(sums);
    const auto is_extreme = [&, low = *least, high = *most](std::size_t r) { return sums[r] == low || sums[r] == high; };
    for (std::size_t a = 0; a < ranks.size(); ++a)
      for (std::size_t b = a + 1; b < ranks.size(); ++b) {
        if (!is_extreme(a) && !is_extreme(b)) continue;  // neither the largest sum nor the spread can change
        for (std::size_t i = 0; i < ranks[a].size(); ++i)
          for (std::size_t j = 0; j < ranks[b].size(); ++j) {
            const double delta = costs[ranks[b][j]] - costs[ranks[a][i]];
            if (delta == 0) continue;
            std::vector<double> tried = sums;
            tried[a] += delta;
            tried[b] -= delta;
            const auto load = load_of(tried);
            if (load < best) {
              best = load;
              swap = {a, b, i, j};
              found = true;
            }
          }
      }
    if (!found) return;
    const auto [a, b, i, j] = swap;
    const double delta = costs[ranks[b][j]] - costs[ranks[a][i]];
    sums[a] += delta;
    sums[b] -= delta;
    std::swap(ranks[a][i], ranks[b][j]);
  }
}

}  // namespace

std::vector<std::vector<std::size_t>> first_fit_decreasing(std::span<const std::int64_t> lengths, std::int64_t seq_len) {
  std::vector<std::size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return lengths[a] > lengths[b]; });
  Bins bins;
  std::vector<std::int64_t> totals;
  for (const std::size_t i : order) {
    PRL_CHECK(lengths[i] > 0 && lengths[i] <= seq_len, "length {} is outside (0, {}]", lengths[i], seq_len);
    std::size_t b = 0;
    while (b < bins.size() && totals[b] + lengths[i] > seq_len) ++b;
    if (b == bins.size()) {
      bins.emplace_back();
      totals.push_back(0);
    }
    bins[b].push_back(i);
    totals[b] += lengths[i];
  }
  return bins;
}

std::vector<std::vector<std::size_t>> balanced_partition(std::span<const double> costs, std::int64_t num_ranks) {
  const auto width = static_cast<std::size_t>(num_ranks);
  PRL_CHECK(num_ranks > 0 && costs.size() % width == 0, "{} rows do not divide over {} ranks", costs.size(), num_ranks);
  std::vector<std::vector<std::size_t>> ranks(width);
  if (costs.empty()) return ranks;
  std::vector<std::size_t> order(costs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return costs[a] > costs[b]; });

  // One item per rank and state, so that every merge keeps the counts equal.
  std::priority_queue<Partition, std::vector<Partition>, LargestSpread> queue;
  std::size_t next_order = 0;
  for (std::size_t first = 0; first < order.size(); first += width) {
    Partition state;
    state.order = next_order++;
    for (std::size_t k = 0; k < width; ++k) state.subsets.push_back({costs[order[first + k]], {order[first + k]}});
    queue.push(std::move(state));
  }
  while (queue.size() > 1) {
    Partition a = queue.top();
    queue.pop();
    Partition b = queue.top();
    queue.pop();
    for (std::size_t k = 0; k < width; ++k) {
      Subset& into = a.subsets[k];
      const Subset& from = b.subsets[width - 1 - k];
      into.sum += from.sum;
      into.items.insert(into.items.end(), from.items.begin(), from.items.end());
    }
    std::stable_sort(a.subsets.begin(), a.subsets.end(), [](const Subset& x, const Subset& y) { return x.sum > y.sum; });
    a.order = next_order++;
    queue.push(std::move(a));
  }
  for (std::size_t k = 0; k < width; ++k) ranks[k] = queue.top().subsets[k].items;
  improve_by_swaps(ranks, costs);
  for (auto& rank : ranks) std::ranges::sort(rank);
  return ranks;
}

namespace {

struct RowGroup {
  std::vector<MicroBatch> rows;
  std::vector<double> costs;
};

/// Fills the group up and gives each rank as many of its rows.
void distribute(RowGroup& group, std::vector<std::vector<MicroBatch>>& ranks) {
  while (group.rows.size() % ranks.size() != 0) {
    group.rows.push_back(make_fill_row(group.rows.front()));
    group.costs.push_back(group.costs.front());
  }
  const auto assignment = balanced_partition(group.costs, static_cast<std::int64_t>(ranks.size()));
  for (std::size_t r = 0; r < ranks.size(); ++r)
    for (const std::size_t row : assignment[r]) ranks[r].push_back(std::move(group.rows[row]));
}

}  // namespace

std::vector<std::vector<MicroBatch>> pack(std::vector<TrainingSample> samples, const PackOptions& options, PackLosses* losses) {
  PRL_CHECK(options.seq_len > 0 && options.num_ranks > 0 && options.pad_to_multiple_of > 0, "seq_len {}, ranks {}, pad multiple {}",
            options.seq_len, options.num_ranks, options.pad_to_multiple_of);
  std::vector<std::vector<MicroBatch>> ranks(static_cast<std::size_t>(options.num_ranks));
  if (samples.empty()) return ranks;
  PackLosses lost;
  for (TrainingSample& sample : samples) {
    const auto before = static_cast<std::int64_t>(sample.token_ids.size());
    prepare(sample, options.seq_len);
    const auto after = static_cast<std::int64_t>(sample.token_ids.size());
    lost.num_cut_tokens += before - after;
    if (after < before) ++(after == 0 ? lost.num_lost : lost.num_cut);
  }
  if (losses != nullptr) *losses = lost;
  if (lost.num_lost == static_cast<std::int64_t>(samples.size()))
    fail(ErrorCode::kInvalidArgument,
         "[packing] all {} samples begin with an image longer than a row of {} tokens: raise seq_len, or lower the most pixels of an image",
         samples.size(), options.seq_len);
  // A picture that begins a sample and is longer than a row leaves nothing of it.
  std::erase_if(samples, [](const TrainingSample& sample) { return sample.token_ids.empty(); });
  std::vector<std::int64_t> lengths;
  for (const TrainingSample& sample : samples) lengths.push_back(static_cast<std::int64_t>(sample.token_ids.size()));
  Bins bins = first_fit_decreasing(lengths, options.seq_len);
  if (options.num_ranks > 1) split_to_multiple(bins, samples, lengths, options);
  // Rows with images come first, as many on each rank, so that ranks compute them side by side.
  RowGroup with_images, of_text;
  for (const auto& bin : bins) {
    MicroBatch row = materialise(bin, samples, options.pad_to_multiple_of);
    RowGroup& group = row.images.empty() ? of_text : with_images;
    group.rows.push_back(std::move(row));
    group.costs.push_back(cost_of(bin, lengths, options.cost));
  }
  for (RowGroup* group : {&with_images, &of_text}) distribute(*group, ranks);
  return ranks;
}

LossTokenCounts& LossTokenCounts::operator+=(const LossTokenCounts& other) noexcept {
  rl += other.rl;
  ce += other.ce;
  ref_kl += other.ref_kl;
  return *this;
}

LossTokenCounts count_loss_tokens(const MicroBatch& b) noexcept {
  LossTokenCounts counts;
  for (std::size_t i = 0; i < b.loss_mask.size(); ++i) {
    if (b.loss_mask[i] != 0 && (b.rl_weights.empty() || b.rl_weights[i] != 0)) ++counts.rl;
    if (!b.ce_weights.empty() && b.ce_weights[i] != 0) ++counts.ce;
    if (!b.ref_kl_weights.empty() && b.ref_kl_weights[i] != 0) ++counts.ref_kl;
  }
  return counts;
}

bool has_loss(const MicroBatch& batch) noexcept {
  const LossTokenCounts counts = count_loss_tokens(batch);
  return counts.rl + counts.ce + counts.ref_kl > 0;
}

}  // namespace prl::wire
