#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "config/schema.hpp"
#include "config/shared_config.hpp"

/// The trained model and how it is laid out, `trainer.model` and `sft.model`.
namespace prl::config {

enum class ParamDType { kFloat32, kBFloat16 };
std::span<const EnumEntry> enum_entries(ParamDType);
enum class GradientReduce { kExact, kFast };
std::span<const EnumEntry> enum_entries(GradientReduce);
enum class AttentionImpl { kAuto, kSdpa, kEager, kFlash2, kFlash3, kFlash4 };
std::span<const EnumEntry> enum_entries(AttentionImpl);
enum class ModelImpl { kAuto, kHf, kCustom, kLiger };
std::span<const EnumEntry> enum_entries(ModelImpl);
enum class CheckpointMode { kFull, kSelective };
std::span<const EnumEntry> enum_entries(CheckpointMode);
enum class ContextParallelStyle { kRing, kUlysses };
std::span<const EnumEntry> enum_entries(ContextParallelStyle);
enum class ExpertBackend { kTorch, kDeepEp };
std::span<const EnumEntry> enum_entries(ExpertBackend);
enum class OffloadBackend { kNative, kTorch };
std::span<const EnumEntry> enum_entries(OffloadBackend);

struct VlmConfig {
  std::optional<std::string> vision_encoder_attr;
  std::optional<std::string> language_model_attr;
  bool freeze_vision_encoder = true;
  template <class V>
  void visit(V& v) {
    v.field("vision_encoder_attr", vision_encoder_attr, "Name of the vision tower in the model's Python class",
            {.status = inert("the tower is found by the names that tensors have in files")});
    v.field("language_model_attr", language_model_attr, "Name of the decoder in the model's Python class",
            {.status = inert("the decoder is found by the names that tensors have in files")});
    v.field("freeze_vision_encoder", freeze_vision_encoder, "Do not train the vision tower",
            {.status = not_built("training of a vision tower", "freeze_vision_encoder = true")});
  }
};

/// Activation checkpointing: recompute layers in the backward pass.
struct ActivationCheckpointConfig {
  CheckpointMode mode = CheckpointMode::kFull;
  int freq = 1;
  std::vector<std::string> targets = {"norm"};
  template <class V>
  void visit(V& v) {
    v.field("mode", mode, "full keeps the input of a layer alone, selective all but the parts in targets");
    v.field("freq", freq, "Recompute every freq-th layer; 1 is every layer", {.unit = "layers", .min = 1});
    v.field("targets", targets,
            "Parts that selective recomputes: norm (cheapest), attn_proj, mlp or routed_experts (saves most); see "
            "docs/training-memory.md");
  }
};

struct ActivationOffloadConfig {
  bool pin_memory = true;
  int max_inflight_activations = 5;
  template <class V>
  void visit(V& v) {
    v.field("pin_memory", pin_memory, "Use page-locked host memory; without it copies do not overlap with work");
    v.field("max_inflight_activations", max_inflight_activations,
            "Layers on their way to the host at once; as many and one more are held on the device", {.unit = "layers", .min = 1});
  }
};

struct CompileConfig {
  bool fullgraph = false;
  template <class V>
  void visit(V& v) {
    v.field("fullgraph", fullgraph, "Fail where the model cannot be compiled as a whole");
  }
};

struct FullOffloadConfig {
  OffloadBackend cpu_optimizer_backend = OffloadBackend::kNative;
  bool numa_bind = true;
  template <class V>
  void visit(V& v) {
    v.field("cpu_optimizer_backend", cpu_optimizer_backend, "Implementation of the optimizer on the CPU");
    v.field("numa_bind", numa_bind, "Keep masters on the memory node of the device");
  }
};

struct LoraConfig {
  int rank = 16;
  double alpha = 32.0;
  double dropout = 0.0;
  std::vector<std::string> target_modules = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts"};
  std::vector<std::string> modules_to_save;
  bool use_rslora = false;
  ComputeDType dtype = ComputeDType::kAuto;
  template <class V>
  void visit(V& v) {
    v.field("rank", rank, "Rank of the adapters", {.min = 1, .max = 512});
    v.field("alpha", alpha, "Scale of the adapters; the product is multiplied by alpha / rank", {.min = 0, .is_open_min = true});
    v.field("dropout", dropout, "Part of the inputs of the adapters that is dropped", {.min = 0, .max = 1});
    v.field("target_modules", target_modules, "Modules that get an adapter: names or regular expressions");
    v.field("modules_to_save", modules_to_save, "Modules that stay fully trainable");
    v.field("use_rslora", use_rslora, "Multiply by alpha / sqrt(rank) instead of alpha / rank");
    v.field("dtype", dtype, "Type that adapters compute in: float32, or auto, that of the model; masters are float32");
  }
};

/// Weights of 8 bits (ops/eight_bit.hpp), and perhaps inputs of products with them.
struct Fp8Quantization {
  static constexpr std::string_view kType = "fp8";
  bool activations = false;
  bool enable_grouped_gemm = true;
  std::optional<std::vector<std::string>> ignore_patterns;
  template <class V>
  void visit(V& v) {
    v.field("activations", activations, "Also round the inputs of products to 8 bits, a factor for each row; gradients stay as they are");
    v.field("enable_grouped_gemm", enable_grouped_gemm, "Also quantise the products of experts");
    v.field("ignore_patterns", ignore_patterns, "Modules that stay as they are, as regular expressions",
            {.status = not_built("a choice of modules; routers, the embedding and the head stay as they are")});
  }
};

struct MxFp8Quantization {
  static constexpr std::string_view kType = "mxfp8";
  static constexpr Status kStatus = not_built("products of 8-bit activations", "use fp8, whose weights are of 8 bits");
  std::string recipe = "mxfp8_rceil";
  bool enable_grouped_gemm = true;
  bool enable_a2a = true;
  std::optional<std::vector<std::string>> ignore_patterns;
  template <class V>
  void visit(V& v) {
    v.field("recipe", recipe, "Rounding of the scales");
    v.field("enable_grouped_gemm", enable_grouped_gemm, "Also quantise the products of experts");
    v.field("enable_a2a", enable_a2a, "Send tokens to experts in 8 bits");
    v.field("ignore_patterns", ignore_patterns, "Modules that stay as they are, as regular expressions");
  }
};
using QuantizationConfig = std::variant<Fp8Quantization, MxFp8Quantization>;

/// What inference.model.quantization says of engines that multiply as a trainer with this does.
inline constexpr std::string_view kFp8Weights = "fp8", kFp8Products = "w8a8_fp8";
std::optional<std::string> served_quantization(const std::optional<QuantizationConfig>& trained);

struct IndexCacheConfig {
  int topk_freq = 1;
  std::optional<std::string> topk_pattern;
  template <class V>
  void visit(V& v) {
    v.field("topk_freq", topk_freq, "Layers that share one sparse index", {.unit = "layers", .min = 1});
    v.field("topk_pattern", topk_pattern, "Which layers compute an index of their own");
  }
};

struct ModelDebugConfig {
  std::optional<int> num_layers;
  bool random_init = false;
  bool force_balanced_routing = false;
  template <class V>
  void visit(V& v) {
    v.field("num_layers", num_layers, "Build only this many layers", {.unit = "layers", .min = 1});
    v.field("random_init", random_init, "Do not load weights");
    v.field("force_balanced_routing", force_balanced_routing,
            "Of mixtures of experts: give each expert equally many tokens, in turn, whatever the router says; for benchmarks alone");
  }
};

/// A head for multi-token prediction that is trained beside the policy.
struct MtpTrainingConfig {
  double lr = 1e-4;
  bool init = false;
  template <class V>
  void visit(V& v) {
    v.field("lr", lr, "Learning rate of the head's AdamW, constant, without weight decay", {.min = 0, .is_open_min = true});
    v.field("init", init, "Begin with a new head, of random weights, where the model has none");
  }
};

struct TrainerModelConfig {
  std::string name = "Qwen/Qwen3-0.6B";
  bool trust_remote_code = false;
  int seq_len = 2048;
  ParamDType optimization_dtype = ParamDType::kFloat32;
  ParamDType reduce_dtype = ParamDType::kFloat32;
  GradientReduce reduce = GradientReduce::kExact;
  std::optional<ActivationCheckpointConfig> ac;
  IntOrWord fused_lm_head_token_chunk_size{};
  std::optional<LoraConfig> lora;
  AttentionImpl attn = AttentionImpl::kAuto;
  std::optional<LatentAttention> latent_attention;
  ModelImpl impl = ModelImpl::kAuto;
  std::optional<CompileConfig> compile;
  std::optional<ActivationOffloadConfig> ac_offloading;
  bool fsdp_cpu_offload = false;
  bool optim_cpu_offload = false;
  std::optional<FullOffloadConfig> full_offload;
  bool reshard_after_forward = false;
  int dp_replicate = 1;
  IntOrWord ep{};
  ExpertBackend ep_comm_backend = ExpertBackend::kTorch;
  int deepep_num_sms = 20;
  std::optional<int> deepep_token_chunk_size;
  int cp = 1;
  std::optional<int> leaves_per_row;
  ContextParallelStyle cp_style = ContextParallelStyle::kUlysses;
  int tp = 1;
  ParamDType moe_router_dtype = ParamDType::kFloat32;
  bool moe_use_grouped_mm = true;
  bool moe_fused_kernel = false;
  bool freeze_moe_router = false;
  std::optional<QuantizationConfig> quantization;
  std::optional<IndexCacheConfig> index_cache;
  std::optional<VlmConfig> vlm;
  std::optional<MtpTrainingConfig> mtp;
  std::optional<std::filesystem::path> conversion_dir;
  ModelDebugConfig debug;
  template <class V>
  void visit(V& v) {
    v.field("name", name, "Folder of a Hugging Face model (config.json, safetensors, tokenizer.json), or its id on the hub");
    v.field("trust_remote_code", trust_remote_code, "Run Python code of the model folder",
            {.status = inert("no code of a model folder is ever run")});
    v.field("seq_len", seq_len, "Length of a packed micro batch", {.unit = "tokens", .min = 1, .max = 1 << 24});
    v.field("optimization_dtype", optimization_dtype,
            "Type of the optimizer's state; bfloat16 is rounded stochastically. Masters are float32 always");
    v.field("reduce_dtype", reduce_dtype, "Type in which gradients are summed over devices",
            {.status = inert("gradients are always summed in float32")});
    v.field("reduce", reduce,
            "exact: gradients of rows are added in order, the same bits on any number of ranks; fast: in place, less memory on one device");
    v.field("ac", ac, "Activation checkpointing; off if not set");
    v.field("fused_lm_head_token_chunk_size", fused_lm_head_token_chunk_size,
            "Tokens per block of the fused LM head; logits of [tokens, vocabulary] are never held",
            {.unit = "tokens", .min = 1, .words = "auto|disabled", .status = inert("the LM head is always fused and chooses its blocks")});
    v.field("lora", lora, "Train low-rank adapters instead of the weights");
    v.field("attn", attn, "Implementation of attention", {.status = inert("there is one attention kernel per device")});
    v.field("latent_attention", latent_attention,
            "Of models with latent attention: attend to latents, which caches hold, or heads; by default heads with cp and in sft");
    v.field("impl", impl, "Implementation of the model", {.status = inert("there is one model implementation")});
    v.field("compile", compile, "Compile the model when it starts", {.status = inert("kernels are compiled ahead of time")});
    v.field("ac_offloading", ac_offloading, "Keep saved activations in host memory; switches ac on, with its defaults, if that is not set");
    v.field("fsdp_cpu_offload", fsdp_cpu_offload, "Keep masters and the optimizer's state in host memory; they visit the GPU in pieces");
    v.field("optim_cpu_offload", optim_cpu_offload, "Keep the optimizer state in host memory; it visits the GPU in pieces");
    v.field("full_offload", full_offload, "Step the optimizer on the CPU during the backward pass",
            {.status = not_built("optimizer steps on the host", "optim_cpu_offload keeps the optimizer's state there")});
    v.field("reshard_after_forward", reshard_after_forward,
            "Divide layers' weights among trainer ranks, gather each when it is computed with: for models that do not fit; same bits");
    v.field("dp_replicate", dp_replicate, "Copies of the sharded masters and optimizer state; a divisor of the number of trainer ranks",
            {.unit = "copies", .min = 1});
    v.field("ep", ep, "Trainer ranks that divide the experts of each layer, to which tokens travel: all, or 1 (auto); same bits",
            {.unit = "devices", .min = 1, .words = "auto"});
    v.field("ep_comm_backend", ep_comm_backend, "How tokens travel to experts", {.status = not_built("DeepEP")});
    v.field("deepep_num_sms", deepep_num_sms, "Multiprocessors that DeepEP may use",
            {.min = 1, .status = inert("tokens travel over NCCL or Gloo")});
    v.field("deepep_token_chunk_size", deepep_token_chunk_size, "Tokens per DeepEP message",
            {.unit = "tokens", .min = 1, .status = inert("tokens travel over NCCL or Gloo")});
    v.field("cp", cp, "Trainer ranks that share one row: 1, 2, 4, ..., a divisor of both kinds of heads", {.unit = "devices", .min = 1});
    v.field(
        "leaves_per_row", leaves_per_row,
        "Parts of a row whose gradients are formed apart and added as a tree, a power of two; bits depend on it, not on cp; cp if not set",
        {.unit = "leaves", .min = 1, .max = 64});
    v.field("cp_style", cp_style,
            "How attention is split over the ranks that share a row: ulysses, by heads; ring, by blocks of keys, is not built");
    v.field("tp", tp, "Devices that share one layer", {.unit = "devices", .min = 1, .status = not_built("tensor parallelism")});
    v.field("moe_router_dtype", moe_router_dtype, "Type of the router's products",
            {.status = inert("a router's logits and weights are float32, its matrix has compute.dtype")});
    v.field("moe_use_grouped_mm", moe_use_grouped_mm, "One product over all experts instead of one each",
            {.status = inert("products of experts are grouped where the device has a kernel for that")});
    v.field("moe_fused_kernel", moe_fused_kernel, "Fuse gate, experts and sum", {.status = not_built("a fused kernel of experts")});
    v.field("freeze_moe_router", freeze_moe_router, "Do not train the routers of a mixture of experts");
    v.field("quantization", quantization, "fp8: multiply with weights of 8 bits, a factor for each row, in training and sampling alike");
    v.field("index_cache", index_cache, "Share sparse attention indices between layers", {.status = not_built("sparse attention")});
    v.field("vlm", vlm, "Samples may have images: the frozen vision tower of the model is loaded");
    v.field("mtp", mtp, "Also train the model's head for multi-token prediction, which draws drafts; the policy's bits stay the same");
    v.field("conversion_dir", conversion_dir, "Cache of converted weights",
            {.status = inert("files are read as they are published, and no converted copy is kept")});
    v.field("debug", debug, "Shortcuts for tests");
  }
};

}  // namespace prl::config
