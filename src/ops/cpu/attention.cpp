#include <algorithm>
#include <cmath>

#include "ops/cpu/bodies.hpp"
#include "ops/cpu/gemm.hpp"
#include "ops/cpu/parallel.hpp"
#include "ops/cpu/table.hpp"

namespace prl::ops::cpu {
namespace {

/// Rows (tokens times heads of a group) that share one packing of a tile of keys.
constexpr std::int64_t kTaskRows = 128;

/// Consecutive queries of one sequence.
struct Unit {
  std::int32_t sequence;
  std::int32_t first;  ///< query within the sequence's new tokens
  std::int32_t count;
  std::int32_t first_chunk, chunks;  ///< of keys, from the first that its queries see to that of the last query
  std::int64_t state;                ///< chunks of earlier units: where its split states start
};

/// Chunks of keys that queries at `position`, ..., `position + count - 1` see.
struct Chunks {
  std::int64_t first, count;
  static Chunks of(std::int64_t position, std::int64_t count, std::int64_t window) {
    const std::int64_t first = window == 0 ? 0 : std::max<std::int64_t>(0, position - window + 1) / kAttentionChunk;
    return {first, ceil_div(position + count, kAttentionChunk) - first};
  }
};

/// Running state of a block of rows: [rows] maxima, [rows] sums, [rows, value_dim] outputs.
struct State {
  float *max, *sum, *out;
  static std::int64_t floats(std::int64_t rows, std::int64_t value_dim) { return (rows * (value_dim + 2) + 15) / 16 * 16; }
  State(float* p, std::int64_t rows, std::int64_t value_dim) : max(p + rows * value_dim), sum(p + rows * (value_dim + 1)), out(p) {}
};

/// One attention call, dense or paged: who asks, and how task, keys and result of a unit are found.
struct Call {
  const Kernels* kernels;
  int group, head_dim, value_dim;
  bool values_are_in_keys;  ///< the last value_dim elements of each
  std::int64_t num_kv_heads;
  DType dtype;
  const char* q;
  std::int64_t q_token_stride;
  char* out;
  float* lse;
  float scale;
  std::int64_t window;
  const float* sinks;
  const Unit* units;
  std::int64_t num_units;
  bool sees_all = false;  ///< each query sees all keys of its sequence; dense only

  const VarlenAttention* dense = nullptr;
  const PagedAttention* paged = nullptr;

  std::int64_t size() const { return static_cast<std::int64_t>(size_of(dtype)); }
  std::int64_t first_token(const Unit& u) const {
    return (dense != nullptr ? dense->cu_seqlens : paged->query_start)[static_cast<std::size_t>(u.sequence)] + u.first;
  }
  std::int64_t length_of(const Unit& u) const {
    const auto s = static_cast<std::size_t>(u.sequence);
    return dense->cu_seqlens[s + 1] - dense->cu_seqlens[s];
  }
  std::int64_t first_position(const Unit& u) const {
    if (sees_all) return length_of(u) - 1;
    if (dense != nullptr) return u.first;
    const auto s = static_cast<std::size_t>(u.sequence);
    return paged->context_len[s] - (paged->query_start[s + 1] - paged->query_start[s]) + u.first;
  }
  KeySource keys(const Unit& u, std::int64_t head) const {
    KeySource k = keys_apart(u, head);
    if (!values_are_in_keys) return k;
    if (paged != nullptr) k.k_stride = head_dim;
    k.v_stride = k.k_stride;
    k.v = static_cast<const char*>(k.k) + (head_dim - value_dim) * size();
    return k;
  }
  KeySource keys_apart(const Unit& u, std::int64_t head) const {
    KeySource k;
    if (dense != nullptr) {
      const std::int64_t start = dense->cu_seqlens[static_cast<std::size_t>(u.sequence)];
      k.k = static_cast<const char*>(dense->k_TKD.data) + (start * dense->k_token_stride + head * head_dim) * size();
      if (!values_are_in_keys)
        k.v = static_cast<const char*>(dense->v_TKD.data) + (start * dense->v_token_stride + head * head_dim) * size();
      k.k_stride = dense->k_token_stride;
      k.v_stride = dense->v_token_stride;
      return k;
    }
    k.block_size = paged->layer.k.shape[2];
    k.block_stride = num_kv_heads * k.block_size * head_dim;
    k.k = paged->layer.k.as<char>() + head * k.block_size * head_dim * size();
    if (!values_are_in_keys) k.v = paged->layer.v.as<char>() + head * k.block_size * head_dim * size();
    k.v_stride = head_dim;
    k.blocks = paged->block_table.data() + static_cast<std::int64_t>(u.sequence) * paged->max_blocks;
    return k;
  }

  /// State of the unit's rows over one of its chunks of keys.
  void chunk(const Unit& u, std::int64_t head, std::int64_t index, const State& state, char* scratch) const {
    AttentionTask t;
    t.q = q + (first_token(u) * q_token_stride + head * group * head_dim) * size();
    t.q_token_stride = q_token_stride;
    t.head_stride = head_dim;
    t.num_tokens = u.count;
    t.group = group;
    t.head_dim = head_dim;
    t.value_dim = value_dim;
    t.first_position = first_position(u);
    t.position_step = sees_all ? 0 : 1;
    t.keys = keys(u, head);
    t.key_begin = (u.first_chunk + index) * kAttentionChunk;
    t.key_end = t.key_begin + kAttentionChunk;
    t.window = window;
    t.scale = scale;
    t.dtype = dtype;
    t.row_max = state.max;
    t.row_sum = state.sum;
    t.row_out = state.out;
    t.scratch = scratch;
    kernels->attention(t);
  }
  void merge(const Unit& u, const State& total, const State& next) const {
    kernels->attention_merge(total.max, total.sum, total.out, next.max, next.sum, next.out, static_cast<std::int64_t>(u.count) * group,
                             value_dim);
  }
  void finish(const Unit& u, std::int64_t head, const State& state) const {
    const std::int64_t num_heads = num_kv_heads * group;
    AttentionFinish f;
    f.num_rows = static_cast<std::int64_t>(u.count) * group;
    f.group = group;
    f.head_dim = value_dim;
    f.row_max = state.max;
    f.row_sum = state.sum;
    f.row_out = state.out;
    f.out = out + (first_token(u) * num_heads + head * group) * value_dim * size();
    f.out_token_stride = num_heads * value_dim;
    f.head_stride = value_dim;
    f.dtype = dtype;
    f.lse = lse == nullptr ? nullptr : lse + first_token(u) * num_heads + head * group;
    f.lse_token_stride = num_heads;
    f.sinks = sinks == nullptr ? nullptr : sinks + head * group;
    kernels->attention_finish(f);
  }
};

std::int64_t tokens_per_unit(int group) { return std::max<std::int64_t>(1, kTaskRows / group); }

template <typename Count>
std::int64_t count_units(std::size_t sequences, int group, const Count& queries) {
  std::int64_t units = 0;
  for (std::size_t s = 0; s < sequences; ++s) units += ceil_div(queries(s), tokens_per_unit(group));
  return units;
}

/// Chunks of keys that `count` queries from `first` on see, of a sequence of `queries` new tokens behind which there are `context`.
Chunks chunks_of(const Call& call, std::int64_t context, std::int64_t queries, std::int64_t first, std::int64_t count) {
  return call.sees_all ? Chunks::of(context - 1, 1, 0) : Chunks::of(context - queries + first, count, call.window);
}

/// Fills units, the ones with most keys first so that threads end together, and returns the number of key chunks of all.
template <typename Count, typename Context>
std::int64_t fill_units(Unit* units, std::int64_t num_units, std::size_t sequences, const Call& call, const Count& queries,
                        const Context& context) {
  std::int64_t at = num_units, chunks = 0;
  const std::int64_t step = tokens_per_unit(call.group);
  for (std::size_t s = 0; s < sequences; ++s)
    for (std::int64_t first = 0; first < queries(s); first += step) {
      const std::int64_t count = std::min(step, queries(s) - first);
      const Chunks seen = chunks_of(call, context(s), queries(s), first, count);
      units[--at] = {static_cast<std::int32_t>(s),          static_cast<std::int32_t>(first),      static_cast<std::int32_t>(count),
                     static_cast<std::int32_t>(seen.first), static_cast<std::int32_t>(seen.count), chunks};
      chunks += units[at].chunks;
    }
  return chunks;
}

/// Rows of the largest unit.
std::int64_t unit_rows(const Unit* units, std::int64_t num_units, int group) {
  std::int64_t tokens = 0;
  for (std::int64_t i = 0; i < num_units; ++i) tokens = std::max<std::int64_t>(tokens, units[i].count);
  return tokens * group;
}

/// Each task walks the chunks of a unit and head itself.
void run_whole(OpContext& ctx, const Call& call, std::int64_t rows, char* memory, std::size_t slot_bytes) {
  const std::int64_t floats = State::floats(rows, call.value_dim);
  parallel_slots(ctx, call.num_units * call.num_kv_heads, [&](std::int64_t task, std::int64_t slot) {
    const Unit& u = call.units[task / call.num_kv_heads];
    const std::int64_t head = task % call.num_kv_heads, own_rows = static_cast<std::int64_t>(u.count) * call.group;
    float* states = reinterpret_cast<float*>(memory + static_cast<std::size_t>(slot) * slot_bytes);
    char* scratch = reinterpret_cast<char*>(states + 2 * floats);
    const State total(states, own_rows, call.value_dim), next(states + floats, own_rows, call.value_dim);
    call.chunk(u, head, 0, total, scratch);
    for (std::int64_t c = 1; c < u.chunks; ++c) {
      call.chunk(u, head, c, next, scratch);
      call.merge(u, total, next);
    }
    call.finish(u, head, total);
  });
}

/// Few queries over long contexts: chunks are tasks of their own and are merged in order afterwards. The same bits.
void run_split(OpContext& ctx, const Call& call, std::int64_t rows, std::int64_t total_chunks, float* states, char* memory,
               std::size_t slot_bytes) {
  const std::int64_t floats = State::floats(rows, call.value_dim), heads = call.num_kv_heads;
  const auto state = [&](const Unit& u, std::int64_t head, std::int64_t chunk) {
    return State(states + ((u.state + chunk) * heads + head) * floats, static_cast<std::int64_t>(u.count) * call.group, call.value_dim);
  };
  parallel_slots(ctx, total_chunks * heads, [&](std::int64_t task, std::int64_t slot) {
    const std::int64_t chunk = task / heads, head = task % heads;
    const Unit* u = call.units;
    while (chunk < u->state || chunk >= u->state + u->chunks) ++u;
    call.chunk(*u, head, chunk - u->state, state(*u, head, chunk - u->state), memory + static_cast<std::size_t>(slot) * slot_bytes);
  });
  parallel(ctx, call.num_units * heads, [&](std::int64_t task) {
    const Unit& u = call.units[task / heads];
    const State total = state(u, task % heads, 0);
    for (std::int64_t c = 1; c < u.chunks; ++c) call.merge(u, total, state(u, task % heads, c));
    call.finish(u, task % heads, total);
  });
}

template <typename Count, typename Context>
void run(OpContext& ctx, Call& call, std::size_t sequences, const Count& queries, const Context& context) {
  constexpr std::int64_t kSplitRows = 32;
  const std::int64_t num_units = count_units(sequences, call.group, queries);
  std::int64_t longest = 0;
  for (std::size_t s = 0; s < sequences; ++s) longest = std::max<std::int64_t>(longest, queries(s));
  const std::int64_t rows = std::min(longest, tokens_per_unit(call.group)) * call.group;
  // The number of key chunks, before the units are written.
  std::int64_t total_chunks = 0;
  for (std::size_t s = 0; s < sequences; ++s)
    for (std::int64_t first = 0; first < queries(s); first += tokens_per_unit(call.group))
      total_chunks += chunks_of(call, context(s), queries(s), first, std::min(queries(s) - first, tokens_per_unit(call.group))).count;
  const bool split =
      num_threads(ctx) > 1 && total_chunks > num_units && num_units * call.num_kv_heads < 4 * num_threads(ctx) && rows <= kSplitRows;

  const std::size_t state_bytes = static_cast<std::size_t>(State::floats(rows, call.value_dim)) * sizeof(float);
  const std::size_t scratch_bytes = aligned_bytes(kernels(ctx).attention_scratch_bytes(rows, call.head_dim));
  const std::size_t slot_bytes = scratch_bytes + (split ? 0 : 2 * state_bytes);
  const std::size_t units_bytes = aligned_bytes(static_cast<std::size_t>(num_units) * sizeof(Unit));
  const std::size_t states_bytes = split ? static_cast<std::size_t>(total_chunks * call.num_kv_heads) * state_bytes : 0;
  char* memory =
      static_cast<char*>(ctx.workspace->require(units_bytes + states_bytes + slot_bytes * static_cast<std::size_t>(num_threads(ctx))));
  Unit* units = reinterpret_cast<Unit*>(memory);
  fill_units(units, num_units, sequences, call, queries, context);
  call.units = units;
  call.num_units = num_units;
  char* slots = memory + units_bytes + states_bytes;
  PRL_DCHECK(unit_rows(units, num_units, call.group) <= rows);
  if (split)
    run_split(ctx, call, rows, total_chunks, reinterpret_cast<float*>(memory + units_bytes), slots, slot_bytes);
  else
    run_whole(ctx, call, rows, slots, slot_bytes);
}

}  // namespace

namespace {

void run_dense(OpContext& ctx, TensorView out_THD, float* lse, const VarlenAttention& args, bool sees_all) {
  Call call{.kernels = &kernels(ctx),
            .group = static_cast<int>(args.q_THD.shape[1] / args.k_TKD.shape[1]),
            .head_dim = static_cast<int>(args.q_THD.shape[2]),
            .value_dim = static_cast<int>(out_THD.shape[2]),
            .values_are_in_keys = args.v_TKD.data == nullptr,
            .num_kv_heads = args.k_TKD.shape[1],
            .dtype = args.q_THD.dtype,
            .q = args.q_THD.as<char>(),
            .q_token_stride = args.q_token_stride,
            .out = out_THD.as<char>(),
            .lse = lse,
            .scale = args.scale,
            .window = args.window,
            .sinks = args.sinks_H.as<float>(),
            .units = nullptr,
            .num_units = 0,
            .sees_all = sees_all,
            .dense = &args};
  const auto length = [&](std::size_t s) { return static_cast<std::int64_t>(args.cu_seqlens[s + 1] - args.cu_seqlens[s]); };
  run(ctx, call, args.cu_seqlens.size() - 1, length, length);
}

}  // namespace

void attention_varlen(OpContext& ctx, TensorView out_THD, TensorView lse_TH, const VarlenAttention& args) {
  run_dense(ctx, out_THD, lse_TH.as<float>(), args, /*sees_all=*/false);
}

void attention_full(OpContext& ctx, TensorView out_THD, const VarlenAttention& args) {
  run_dense(ctx, out_THD, nullptr, args, /*sees_all=*/true);
}

void attention_paged(OpContext& ctx, TensorView out_THD, const PagedAttention& args) {
  Call call{.kernels = &kernels(ctx),
            .group = static_cast<int>(args.q_THD.shape[1] / args.layer.k.shape[1]),
            .head_dim = static_cast<int>(args.q_THD.shape[2]),
            .value_dim = static_cast<int>(out_THD.shape[2]),
            .values_are_in_keys = args.layer.v.data == nullptr,
            .num_kv_heads = args.layer.k.shape[1],
            .dtype = args.q_THD.dtype,
            .q = args.q_THD.as<char>(),
            .q_token_stride = args.q_token_stride,
            .out = out_THD.as<char>(),
            .lse = nullptr,
            .scale = args.scale,
            .window = args.window,
            .sinks = args.sinks_H.as<float>(),
            .units = nullptr,
            .num_units = 0,
            .paged = &args};
  const auto queries = [&](std::size_t s) { return static_cast<std::int64_t>(args.query_start[s + 1] - args.query_start[s]); };
  const auto context = [&](std::size_t s) { return static_cast<std::int64_t>(args.context_len[s]); };
  run(ctx, call, args.context_len.size(), queries, context);
}

void attention_varlen_backward(OpContext& ctx, TensorView dq_THD, TensorView dk_TKD, TensorView dv_TKD, std::int64_t dq_token_stride,
                               std::int64_t dk_token_stride, std::int64_t dv_token_stride, ConstTensorView dout_THD,
                               ConstTensorView out_THD, ConstTensorView lse_TH, const VarlenAttention& args) {
  const std::int64_t Hq = args.q_THD.shape[1], Hkv = args.k_TKD.shape[1], D = args.q_THD.shape[2];
  const int group = static_cast<int>(Hq / Hkv);
  const auto size = static_cast<std::int64_t>(size_of(args.q_THD.dtype));
  const auto sequences = static_cast<std::int64_t>(args.cu_seqlens.size()) - 1;
  std::int64_t longest = 0;
  for (std::int64_t s = 0; s < sequences; ++s)
    longest =
        std::max<std::int64_t>(longest, args.cu_seqlens[static_cast<std::size_t>(s + 1)] - args.cu_seqlens[static_cast<std::size_t>(s)]);
  const Kernels& k = kernels(ctx);
  const std::size_t slot_bytes = aligned_bytes(k.attention_backward_scratch_bytes(longest, group, static_cast<int>(D)));
  char* memory = static_cast<char*>(ctx.workspace->require(slot_bytes * static_cast<std::size_t>(num_threads(ctx))));
  parallel_slots(ctx, sequences * Hkv, [&](std::int64_t task, std::int64_t slot) {
    const std::int64_t s = task / Hkv, head = task % Hkv, start = args.cu_seqlens[static_cast<std::size_t>(s)];
    AttentionBackwardTask t;
    t.length = args.cu_seqlens[static_cast<std::size_t>(s + 1)] - start;
    if (t.length == 0) return;
    const std::int64_t q_head = head * group * D;
    t.q = args.q_THD.as<char>() + (start * args.q_token_stride + q_head) * size;
    t.k = args.k_TKD.as<char>() + (start * args.k_token_stride + head * D) * size;
    t.v = args.v_TKD.as<char>() + (start * args.v_token_stride + head * D) * size;
    t.dout = dout_THD.as<char>() + (start * Hq * D + q_head) * size;
    t.out = out_THD.as<char>() + (start * Hq * D + q_head) * size;
    t.lse = lse_TH.as<float>() + start * Hq + head * group;
    t.dq = dq_THD.as<char>() + (start * dq_token_stride + q_head) * size;
    t.dk = dk_TKD.as<char>() + (start * dk_token_stride + head * D) * size;
    t.dv = dv_TKD.as<char>() + (start * dv_token_stride + head * D) * size;
    t.q_stride = args.q_token_stride;
    t.k_stride = args.k_token_stride;
    t.v_stride = args.v_token_stride;
    t.out_stride = t.dout_stride = Hq * D;
    t.dq_stride = dq_token_stride;
    t.dk_stride = dk_token_stride;
    t.dv_stride = dv_token_stride;
    t.lse_stride = Hq;
    t.window = args.window;
    t.group = group;
    t.head_dim = static_cast<int>(D);
    t.scale = args.scale;
    t.dtype = args.q_THD.dtype;
    t.scratch = memory + static_cast<std::size_t>(slot) * slot_bytes;
    k.attention_backward(t);
  });
}

void attention_sinks_backward(OpContext& ctx, TensorView dsinks_H, ConstTensorView dout_THD, ConstTensorView out_THD,
                              ConstTensorView lse_TH, ConstTensorView sinks_H) {
  const std::int64_t T = out_THD.shape[0], H = out_THD.shape[1], D = out_THD.shape[2];
  const auto row_bytes = D * static_cast<std::int64_t>(size_of(out_THD.dtype));
  const Kernels& k = kernels(ctx);
  parallel(ctx, H, [&](std::int64_t h) {
    float sum = 0.0f;
    for (std::int64_t i = h; i < T * H; i += H)
      sum += std::exp(sinks_H.as<float>()[h] - lse_TH.as<float>()[i]) *
             k.dot_row(dout_THD.as<char>() + i * row_bytes, out_THD.as<char>() + i * row_bytes, D, out_THD.dtype);
    dsinks_H.as<float>()[h] -= sum;
  });
}

void kv_write(OpContext& ctx, const KvLayer& layer, ConstTensorView k_TKD, std::int64_t k_token_stride, ConstTensorView v_TKD,
              std::int64_t v_token_stride, std::span<const std::int32_t> slot_T) {
  const std::int64_t heads = layer.k.shape[1], block_size = layer.k.shape[2], D = layer.k.shape[3];
  const auto size = static_cast<std::int64_t>(size_of(layer.k.dtype));
  const auto write = [&](auto* k_cache, const auto* k) {
    parallel_rows(ctx, static_cast<std::int64_t>(slot_T.size()), 4 * heads * D, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const std::int64_t slot = slot_T[static_cast<std::size_t>(t)];
        if (slot < 0) continue;
        for (std::int64_t h = 0; h < heads; ++h) {
          const std::int64_t block = (slot / block_size * heads + h) * block_size * D, offset = slot % block_size;
          const auto* const from = k + t * k_token_stride + h * D;
          if (layer.v.data == nullptr) {
            std::copy_n(from, D, k_cache + block + offset * D);
            continue;
          }
          for (std::int64_t d = 0; d < D; ++d) k_cache[block + d * block_size + offset] = from[d];
          __builtin_memcpy(layer.v.as<char>() + (block + offset * D) * size, v_TKD.as<char>() + (t * v_token_stride + h * D) * size,
                           static_cast<std::size_t>(D * size));
        }
      }
    });
  };
  if (layer.k.dtype == DType::kBF16)
    write(layer.k.as<BFloat16>(), k_TKD.as<BFloat16>());
  else
    write(layer.k.as<float>(), k_TKD.as<float>());
}

}  // namespace prl::ops::cpu
