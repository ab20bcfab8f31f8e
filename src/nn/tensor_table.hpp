#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "autograd/expert_share.hpp"
#include "nn/model_config.hpp"
#include "tensor/tensor.hpp"

namespace prl::nn {

/// The tensors of a decoder, as checkpoints store them.
enum class Slot : std::uint8_t {
  kEmbedding,
  kInputNorm,
  kQ,
  kHeadGate,  ///< gates of heads, where these are a matrix of their own
  kK,
  kV,
  kFusedQkv,  ///< in place of the three
  kQBias,
  kKBias,
  kVBias,
  kQNorm,
  kKNorm,
  kO,
  kOBias,
  kAttentionOutNorm,
  kPostNorm,
  kGate,
  kUp,
  kFusedGateUp,  ///< in place of the two
  kDown,
  kMlpOutNorm,
  kFinalNorm,
  kLmHead,
  // Of layers that are mixtures of experts.
  kRouter,
  kExpertGate,
  kExpertUp,
  kExpertDown,
  // Of those whose experts are chosen by scores with a bias, or have shared ones beside them.
  kRouterBias,
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kSharedExpertGate,  ///< of the shared expert's output: one number a token
  // Of layers of linear attention, in place of the others' projections and norms of heads.
  kLinearQkv,
  kLinearZ,
  kLinearB,
  kLinearA,
  kLinearQkvz,  ///< in place of the first two of these
  kLinearBa,    ///< and of the last two
  kLinearConv,
  kDecayRate,
  kDecayBias,
  kLinearNorm,
  kLinearOut,
  // Of GPT-OSS: of all experts of a layer what are vectors, one expert after the other.
  kSinks,
  kRouterOffset,
  kExpertPairs,  ///< rows of gate and up take turns
  kStackedDown,
  kExpertPairsBias,
  kStackedDownBias,
  // Of latent attention, in place of the first projections of others.
  kQueryDown,
  kLatentQuery,  ///< in place of the first and of kQueryUp
  kKvDown,
  kQueryLatentNorm,
  kQueryUp,
  kKvLatentNorm,
  kKvUp,
  // Of layers of state spaces, beside some of those of linear attention.
  kStateIn,
  kConvBias,
  kSkip,
  // Of experts whose rows are narrower than the stream.
  kExpertsIn,
  kExpertsOut,
  // Of heads for multi-token prediction (mtp_head.hpp).
  kMtpEmbeddingNorm,
  kMtpHiddenNorm,
  kMtpProjection,
};

/// What ops compute with: one tensor, or several that share their columns and lie one below the other, so that one product serves all of
/// them (q|k|v and gate|up).
enum class Block : std::uint8_t {
  kEmbedding,
  kInputNorm,
  kQkv,
  kQkvBias,
  kQNorm,
  kKNorm,
  kO,
  kOBias,
  kAttentionOutNorm,
  kPostNorm,
  kGateUp,
  kDown,
  kMlpOutNorm,
  kFinalNorm,
  kLmHead,
  kRouter,      ///< experts have a kGateUp and a kDown each, and so have, without a number, those that are shared
  kRouterBias,  ///< never trained, and exact in every type: see TensorSpec::num_parts
  kSharedExpertGate,
  kLinearConv,  ///< a vector: the taps of channel after channel
  kDecayRate,
  kDecayBias,
  kLinearNorm,
  kSinks,
  kRouterOffset,  ///< what is added to a router's logits
  kGateUpBiases,  ///< of all experts of a layer
  kDownBiases,
  kQueryLatentNorm,  ///< of latent attention, whose first product is kQkv
  kQueryUp,
  kKvLatentNorm,
  kKvUp,
  kConvBias,  ///< of kLinearConv
  kSkip,
  kExpertsIn,
  kExpertsOut,
  kMtpEmbeddingNorm,  ///< of heads for multi-token prediction
  kMtpHiddenNorm,
  kMtpProjection,  ///< of both, the embedding's columns first
  // Low-rank adapters: A of the tensors of a block lie together, as their inputs are the same; each tensor has a B of its own.
  kQkvLoraA,
  kOLoraA,
  kGateUpLoraA,
  kDownLoraA,
  kQueryUpLoraA,
  kKvUpLoraA,
  kExpertsInLoraA,
  kExpertsOutLoraA,
  kQLoraB,
  kKLoraB,
  kVLoraB,
  kOLoraB,
  kGateLoraB,
  kUpLoraB,
  kDownLoraB,
  kFusedQkvLoraB,
  kFusedGateUpLoraB,
  kLinearQkvLoraB,
  kLinearZLoraB,
  kLinearBLoraB,
  kLinearALoraB,
  kHeadGateLoraB,
  kQueryDownLoraB,
  kKvDownLoraB,
  kQueryUpLoraB,
  kKvUpLoraB,
  kStateInLoraB,
  kExpertsInLoraB,
  kExpertsOutLoraB,
};
inline constexpr std::size_t kNumBlockKinds = 66;

/// Elements [begin, end) of the array behind all masters, gradients or moments.
struct ElementRange {
  std::int64_t begin = 0, end = 0;
  std::int64_t count() const noexcept { return end - begin; }
  bool contains(ElementRange other) const noexcept { return other.begin >= begin && other.end <= end; }
  bool operator==(const ElementRange&) const = default;
};
/// Empty if they have nothing in common.
ElementRange intersection(ElementRange a, ElementRange b) noexcept;

/// Rows [first, first + count) of a tensor; of a vector, elements.
struct RowRun {
  std::int64_t first = 0, count = 0;
  bool is_copy = false;  ///< of a device's part: one of a lower rank has them, too
  bool operator==(const RowRun&) const = default;
};

/// One tensor of a model. The table sets the fields below the line from those above.
struct TensorSpec {
  std::string name;  ///< of Hugging Face checkpoints ("model.layers.0.self_attn.q_proj.weight")
  Slot slot = Slot::kEmbedding;
  std::int64_t layer = -1;   ///< -1: outside the layers
  std::int64_t expert = -1;  ///< -1: of no expert
  Shape shape;               ///< a vector or a matrix [outputs, inputs]
  Block block = Block::kEmbedding;
  bool trainable = true;  ///< has an fp32 master, a gradient and optimizer state; otherwise it exists as a packed weight only
  /// More than 1: a vector of files that is fp32 in all of them, as so many vectors one after the other whose sum it is (exact_parts.hpp).
  /// `shape` is that of the parts.
  std::int64_t num_parts = 1;
  std::int64_t num_taps = 0;         ///< more than 0: a vector that is [channels, 1, taps] in files
  std::int64_t num_stored_rows = 0;  ///< more than 0: a vector that files have as a matrix of so many rows
  bool is_shared = false;            ///< devices that share layers hold a part of its rows each; otherwise each holds all of it
  std::vector<RowRun> held = {};     ///< of a part: which rows of the whole model's tensor are `shape`'s, in order; empty: all
  bool is_eight_bit = false;         ///< is multiplied with as ops::WeightUse::kEightBit says (ModelConfig::eight_bits)
  bool rounds_inputs = false;        ///< or as kEightBitProduct says
  float lora_scale = 0;              ///< of an adapter's tensors: what its product is multiplied by; `slot` is that of the tensor it adapts
  // ----
  std::int64_t first_row = 0;  ///< where it begins in its block, along dimension 0
  std::int64_t offset = -1;    ///< of its first element in the array of masters; -1 unless trainable

  bool is_matrix() const noexcept { return shape.num_dims() == 2; }
  /// A vector of which files have rows.
  bool is_matrix_in_files() const noexcept { return num_stored_rows > 0 || num_taps > 0; }
  std::int64_t num_elements() const noexcept { return shape.num_elements(); }
  ElementRange range() const noexcept { return {offset, offset + num_elements()}; }
  /// Elements of a row.
  std::int64_t row_size() const noexcept { return is_matrix() ? shape[1] : 1; }
  /// The rows of the whole model's tensor that this one has.
  std::vector<RowRun> held_rows() const { return held.empty() ? std::vector<RowRun>{{.first = 0, .count = shape[0]}} : held; }
  bool is_exact() const noexcept { return num_parts > 1; }
  /// In files.
  Shape stored_shape() const {
    if (num_taps > 0) return {shape[0] / num_taps, 1, num_taps};
    if (num_stored_rows > 0) return {num_stored_rows, shape[0] / num_stored_rows};
    return is_exact() ? Shape{shape[0] / num_parts} : shape;
  }
};

/// Tensors [first_tensor, first_tensor + num_tensors) of the table, one below the other.
struct BlockSpec {
  Block kind = Block::kEmbedding;
  std::int64_t layer = -1, expert = -1;
  Shape shape;
  bool trainable = true;
  std::size_t first_tensor = 0, num_tensors = 0;
  std::int64_t offset = -1;                          ///< as TensorSpec::offset
  bool is_eight_bit = false, rounds_inputs = false;  ///< as TensorSpec's

  bool is_matrix() const noexcept { return shape.num_dims() == 2; }
  ElementRange range() const noexcept { return {offset, offset + shape.num_elements()}; }
};

/// The bias that is added to a matrix's product in models that have it; nullopt for blocks that have none in any model.
std::optional<Block> bias_of(Block matrix) noexcept;
bool is_bias(Block block) noexcept;
bool is_bias(Slot slot) noexcept;
/// Norms that multiply by 1 + weight where ModelConfig::norms_add_one says so.
bool is_stream_or_head_norm(Block block) noexcept;
/// Of adapters: the block that holds A of a block's tensors, and B of one tensor; nullopt for blocks and slots that take no adapter.
std::optional<Block> lora_a_of(Block matrix) noexcept;
std::optional<Block> lora_b_of(Slot slot) noexcept;
bool is_lora(Block block) noexcept;
bool is_lora_a(Block block) noexcept;

/// All tensors of a model: the one list from which parameters, gradients, packed weights, checksums, files, the optimizer and the memory
/// plan follow. Immutable.
///
/// Memory    Masters lie in one array, vectors before matrices, in the order of the table; each block begins on a boundary of 64 bytes
///           with zeros between, so that element-wise work on a model is one call.
class TensorTable {
 public:
  /// Consecutive specs of the same block, layer and expert form one block. PRL_CHECK: they agree in columns and `trainable`.
  /// `ties_head`: the embedding is the head of a table without one; not for tables of some tensors of a model with a head of its own.
  explicit TensorTable(std::vector<TensorSpec> specs, bool ties_head = true);

  std::span<const TensorSpec> tensors() const noexcept { return tensors_; }
  std::span<const BlockSpec> blocks() const noexcept { return blocks_; }
  std::span<const TensorSpec> tensors_of(const BlockSpec& block) const;

  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  /// Index into blocks(); kNone if the model has no such block. A tied head is the embedding.
  std::size_t find(Block kind, std::int64_t layer = -1, std::int64_t expert = -1) const noexcept;
  bool has(Block kind, std::int64_t layer = -1) const noexcept { return find(kind, layer) != kNone; }
  bool has_tied_head() const noexcept { return find(Block::kLmHead) == find(Block::kEmbedding) && find(Block::kLmHead) != kNone; }

  /// Elements of all tensors but those that are exact, which no optimizer changes, and of those that have masters.
  std::int64_t num_parameters() const noexcept { return num_parameters_; }
  std::int64_t num_trainable() const noexcept { return num_trainable_; }
  /// Length of the array of masters, gaps included, and of its part that holds vectors (norms and biases).
  std::int64_t num_master_elements() const noexcept { return num_master_elements_; }
  std::int64_t num_vector_elements() const noexcept { return num_vector_elements_; }

 private:
  void make_blocks(bool ties_head);
  void place_masters();
  std::size_t key(Block kind, std::int64_t layer, std::int64_t expert) const noexcept;

  std::vector<TensorSpec> tensors_;
  std::vector<BlockSpec> blocks_;
  std::vector<std::size_t> index_;  ///< of blocks, by key()
  std::int64_t num_layers_ = 0, num_experts_ = 0;
  std::int64_t num_parameters_ = 0, num_trainable_ = 0, num_master_elements_ = 0, num_vector_elements_ = 0;
};
using TensorTablePtr = std::shared_ptr<const TensorTable>;

/// What one of several devices holds that share the layers of a model: of each of a layer's matrices the outputs (rows) of its number, and
/// all of everything else. Sums over inputs are not divided, so that a number comes out the same however many devices share the work.
struct Shard {
  int rank = 0, size = 1;
};
using autograd::ExpertShare;

/// The table of a decoder, in the fixed order embeddings, layers 0.., final norm, head; in a layer the experts one by one. A tied head is
/// not listed. In that of a head for multi-token prediction what it shares with its model, embedding and head, is not trainable.
TensorTablePtr make_tensor_table(const ModelConfig& config, Shard shard = {});
/// Elements of that table's tensors without making it, which takes long with many experts: of all, and of the matrices that one token is
/// multiplied with: the head's, a tied one too, and of the experts those that are active.
struct ParameterCounts {
  std::int64_t all = 0, active = 0;
};
ParameterCounts count_parameters(const ModelConfig& config);

/// Name of a tensor in Hugging Face checkpoints, and in GGUF files ("blk.3.attn_q.weight"), which hold the experts' as one: gguf_name() is
/// not for them.
std::string checkpoint_name(Slot slot, std::int64_t layer = -1, std::int64_t expert = -1, ExpertNames names = ExpertNames::kProjections);
std::string gguf_name(Slot slot, std::int64_t layer = -1);

}  // namespace prl::nn
