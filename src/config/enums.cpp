// The names of every enum value, as configuration files write them.
#include "config/eval_config.hpp"
#include "config/inference_config.hpp"
#include "config/kubernetes_config.hpp"
#include "config/orchestrator_config.hpp"
#include "config/sft_config.hpp"
#include "config/tool_config.hpp"
#include "config/trainer_config.hpp"

namespace prl::config {
namespace {

template <class E>
constexpr EnumEntry entry(E value, std::string_view name) {
  return EnumEntry{static_cast<int>(value), name};
}

constexpr EnumEntry kDevices[] = {entry(DeviceKind::kAuto, "auto"), entry(DeviceKind::kCpu, "cpu"), entry(DeviceKind::kCuda, "cuda"),
                                  entry(DeviceKind::kCuda, "gpu")};
constexpr EnumEntry kComputeDTypes[] = {entry(ComputeDType::kAuto, "auto"), entry(ComputeDType::kBFloat16, "bfloat16"),
                                        entry(ComputeDType::kFloat32, "float32"), entry(ComputeDType::kFloat16, "float16")};
constexpr EnumEntry kLogLevels[] = {entry(LogLevel::kDebug, "debug"), entry(LogLevel::kInfo, "info"), entry(LogLevel::kWarning, "warning"),
                                    entry(LogLevel::kError, "error")};
constexpr EnumEntry kGradientReduces[] = {entry(GradientReduce::kExact, "exact"), entry(GradientReduce::kFast, "fast")};
constexpr EnumEntry kLatentAttentions[] = {entry(LatentAttention::kLatents, "latents"), entry(LatentAttention::kHeads, "heads")};
constexpr EnumEntry kParamDTypes[] = {entry(ParamDType::kFloat32, "float32"), entry(ParamDType::kBFloat16, "bfloat16")};
constexpr EnumEntry kAttention[] = {entry(AttentionImpl::kAuto, "auto"),
                                    entry(AttentionImpl::kSdpa, "sdpa"),
                                    entry(AttentionImpl::kEager, "eager"),
                                    entry(AttentionImpl::kFlash2, "flash_attention_2"),
                                    entry(AttentionImpl::kFlash3, "flash_attention_3"),
                                    entry(AttentionImpl::kFlash4, "flash_attention_4")};
constexpr EnumEntry kModelImpls[] = {entry(ModelImpl::kAuto, "auto"), entry(ModelImpl::kHf, "hf"), entry(ModelImpl::kCustom, "custom"),
                                     entry(ModelImpl::kLiger, "liger_kernel")};
constexpr EnumEntry kCheckpointModes[] = {entry(CheckpointMode::kFull, "full"), entry(CheckpointMode::kSelective, "selective")};
constexpr EnumEntry kCpStyles[] = {entry(ContextParallelStyle::kRing, "ring"), entry(ContextParallelStyle::kUlysses, "ulysses")};
constexpr EnumEntry kExpertBackends[] = {entry(ExpertBackend::kTorch, "torch"), entry(ExpertBackend::kDeepEp, "deepep")};
constexpr EnumEntry kRouterPolicies[] = {entry(RouterPolicy::kConsistentHash, "consistent_hash"),
                                         entry(RouterPolicy::kRoundRobin, "round_robin"), entry(RouterPolicy::kRandom, "random"),
                                         entry(RouterPolicy::kCacheAware, "cache_aware"), entry(RouterPolicy::kPowerOfTwo, "power_of_two")};
constexpr EnumEntry kOffloadBackends[] = {entry(OffloadBackend::kNative, "native"), entry(OffloadBackend::kTorch, "torch")};
constexpr EnumEntry kDraftMethods[] = {entry(DraftMethod::kNgram, "ngram"), entry(DraftMethod::kDraftModel, "draft_model"),
                                       entry(DraftMethod::kMtp, "mtp")};
constexpr EnumEntry kRatioLevels[] = {entry(RatioLevel::kToken, "token"), entry(RatioLevel::kSequence, "sequence")};
constexpr EnumEntry kPrecisions[] = {entry(MatmulPrecision::kHighest, "highest"), entry(MatmulPrecision::kHigh, "high"),
                                     entry(MatmulPrecision::kMedium, "medium")};
constexpr EnumEntry kEfforts[] = {entry(ReasoningEffort::kMinimal, "minimal"), entry(ReasoningEffort::kLow, "low"),
                                  entry(ReasoningEffort::kMedium, "medium"), entry(ReasoningEffort::kHigh, "high")};
constexpr EnumEntry kEnvKinds[] = {entry(EnvKind::kAuto, "auto"), entry(EnvKind::kLegacy, "legacy"), entry(EnvKind::kV1, "v1"),
                                   entry(EnvKind::kFake, "fake")};
constexpr EnumEntry kSandboxModes[] = {entry(SandboxMode::kAuto, "auto"), entry(SandboxMode::kOff, "off")};
constexpr EnumEntry kWorkerStarts[] = {entry(WorkerStart::kFork, "fork"), entry(WorkerStart::kSpawn, "spawn")};
constexpr EnumEntry kTrainingModes[] = {entry(TrainingMode::kRl, "rl"), entry(TrainingMode::kOpd, "opd"),
                                        entry(TrainingMode::kOpsd, "opsd"), entry(TrainingMode::kSft, "sft")};
constexpr EnumEntry kAdvantages[] = {entry(AdvantageType::kGrpo, "grpo"),     entry(AdvantageType::kRloo, "rloo"),
                                     entry(AdvantageType::kOpo, "opo"),       entry(AdvantageType::kMaxRl, "max_rl"),
                                     entry(AdvantageType::kReward, "reward"), entry(AdvantageType::kRae, "rae"),
                                     entry(AdvantageType::kEcho, "echo"),     entry(AdvantageType::kHierarchicalGrpo, "hierarchical_grpo"),
                                     entry(AdvantageType::kCustom, "custom")};
constexpr EnumEntry kStrategies[] = {entry(TrajectoryStrategy::kInterleaved, "interleaved"),
                                     entry(TrajectoryStrategy::kBranching, "branching")};
constexpr EnumEntry kPackFunctions[] = {entry(PackFunction::kCat, "cat"), entry(PackFunction::kStack, "stack")};
constexpr EnumEntry kStopping[] = {entry(StoppingStrategy::kAllExhausted, "all_exhausted"),
                                   entry(StoppingStrategy::kFirstExhausted, "first_exhausted")};
constexpr EnumEntry kFakeLengths[] = {entry(FakeLength::kFixed, "fixed"), entry(FakeLength::kVariable, "variable")};
constexpr EnumEntry kFakeIds[] = {entry(FakeInputIds::kIncreasing, "increasing"), entry(FakeInputIds::kRandom, "random")};
constexpr EnumEntry kSftLosses[] = {entry(SftLossImpl::kTorch, "torch"), entry(SftLossImpl::kLiger, "liger"),
                                    entry(SftLossImpl::kLigerFused, "liger_fused"), entry(SftLossImpl::kQuackFused, "quack_fused")};
constexpr EnumEntry kFamilies[] = {entry(ModelFamily::kQwen3, "qwen3"),
                                   entry(ModelFamily::kQwen3Moe, "qwen3_moe"),
                                   entry(ModelFamily::kGlm4Moe, "glm4_moe"),
                                   entry(ModelFamily::kQwen2, "qwen2"),
                                   entry(ModelFamily::kLlama, "llama"),
                                   entry(ModelFamily::kMistral, "mistral"),
                                   entry(ModelFamily::kSmolLm3, "smollm3"),
                                   entry(ModelFamily::kMixtral, "mixtral"),
                                   entry(ModelFamily::kOlmo2, "olmo2"),
                                   entry(ModelFamily::kOlmo3, "olmo3"),
                                   entry(ModelFamily::kPhi3, "phi3"),
                                   entry(ModelFamily::kQwen35, "qwen3_5"),
                                   entry(ModelFamily::kGptOss, "gpt_oss"),
                                   entry(ModelFamily::kQwen35Moe, "qwen3_5_moe"),
                                   entry(ModelFamily::kQwen3Next, "qwen3_next"),
                                   entry(ModelFamily::kMiniMaxM2, "minimax_m2"),
                                   entry(ModelFamily::kAfmoe, "afmoe"),
                                   entry(ModelFamily::kDeepseekV3, "deepseek_v3"),
                                   entry(ModelFamily::kGlm4MoeLite, "glm4_moe_lite"),
                                   entry(ModelFamily::kGemma3, "gemma3"),
                                   entry(ModelFamily::kNemotronH, "nemotron_h")};
constexpr EnumEntry kPlanWorks[] = {entry(PlanWork::kSft, "sft"), entry(PlanWork::kRl, "rl")};
constexpr EnumEntry kEnvActions[] = {entry(EnvAction::kInstall, "install"), entry(EnvAction::kUpdate, "update"),
                                     entry(EnvAction::kList, "list"),       entry(EnvAction::kShow, "show"),
                                     entry(EnvAction::kRemove, "remove"),   entry(EnvAction::kInit, "init")};
constexpr EnumEntry kK8sActions[] = {entry(K8sAction::kRender, "render")};
constexpr EnumEntry kRunsActions[] = {entry(RunsAction::kList, "list"),    entry(RunsAction::kAdd, "add"),
                                      entry(RunsAction::kPause, "pause"),  entry(RunsAction::kResume, "resume"),
                                      entry(RunsAction::kDrain, "drain"),  entry(RunsAction::kStop, "stop"),
                                      entry(RunsAction::kRemove, "remove")};
constexpr EnumEntry kEnvTemplates[] = {entry(EnvTemplate::kLegacy, "legacy"), entry(EnvTemplate::kV1, "v1"),
                                       entry(EnvTemplate::kNative, "native")};
constexpr EnumEntry kSuites[] = {
    entry(BenchSuite::kAll, "all"),     entry(BenchSuite::kDecode, "decode"),      entry(BenchSuite::kPrefill, "prefill"),
    entry(BenchSuite::kTrain, "train"), entry(BenchSuite::kSync, "sync"),          entry(BenchSuite::kRl, "rl"),
    entry(BenchSuite::kStart, "start"), entry(BenchSuite::kKernels, "kernels"),    entry(BenchSuite::kEnv, "env"),
    entry(BenchSuite::kLora, "lora"),   entry(BenchSuite::kDashboard, "dashboard")};
constexpr EnumEntry kResultsOrders[] = {entry(ResultsOrder::kFile, "file"), entry(ResultsOrder::kRewardUp, "lowest_first"),
                                        entry(ResultsOrder::kRewardDown, "highest_first")};

}  // namespace

std::span<const EnumEntry> enum_entries(DeviceKind) { return kDevices; }
std::span<const EnumEntry> enum_entries(ComputeDType) { return kComputeDTypes; }
std::span<const EnumEntry> enum_entries(LogLevel) { return kLogLevels; }
std::span<const EnumEntry> enum_entries(GradientReduce) { return kGradientReduces; }
std::span<const EnumEntry> enum_entries(LatentAttention) { return kLatentAttentions; }
std::span<const EnumEntry> enum_entries(ParamDType) { return kParamDTypes; }
std::span<const EnumEntry> enum_entries(AttentionImpl) { return kAttention; }
std::span<const EnumEntry> enum_entries(ModelImpl) { return kModelImpls; }
std::span<const EnumEntry> enum_entries(CheckpointMode) { return kCheckpointModes; }
std::span<const EnumEntry> enum_entries(ContextParallelStyle) { return kCpStyles; }
std::span<const EnumEntry> enum_entries(ExpertBackend) { return kExpertBackends; }
std::span<const EnumEntry> enum_entries(RouterPolicy) { return kRouterPolicies; }
std::span<const EnumEntry> enum_entries(OffloadBackend) { return kOffloadBackends; }
std::span<const EnumEntry> enum_entries(DraftMethod) { return kDraftMethods; }
std::span<const EnumEntry> enum_entries(RatioLevel) { return kRatioLevels; }
std::span<const EnumEntry> enum_entries(MatmulPrecision) { return kPrecisions; }
std::span<const EnumEntry> enum_entries(ReasoningEffort) { return kEfforts; }
std::span<const EnumEntry> enum_entries(EnvKind) { return kEnvKinds; }
std::span<const EnumEntry> enum_entries(SandboxMode) { return kSandboxModes; }
std::span<const EnumEntry> enum_entries(WorkerStart) { return kWorkerStarts; }
std::span<const EnumEntry> enum_entries(TrainingMode) { return kTrainingModes; }
std::span<const EnumEntry> enum_entries(AdvantageType) { return kAdvantages; }
std::span<const EnumEntry> enum_entries(TrajectoryStrategy) { return kStrategies; }
std::span<const EnumEntry> enum_entries(PackFunction) { return kPackFunctions; }
std::span<const EnumEntry> enum_entries(StoppingStrategy) { return kStopping; }
std::span<const EnumEntry> enum_entries(FakeLength) { return kFakeLengths; }
std::span<const EnumEntry> enum_entries(FakeInputIds) { return kFakeIds; }
std::span<const EnumEntry> enum_entries(SftLossImpl) { return kSftLosses; }
std::span<const EnumEntry> enum_entries(ModelFamily) { return kFamilies; }
std::span<const EnumEntry> enum_entries(BenchSuite) { return kSuites; }
std::span<const EnumEntry> enum_entries(PlanWork) { return kPlanWorks; }
std::span<const EnumEntry> enum_entries(EnvAction) { return kEnvActions; }
std::span<const EnumEntry> enum_entries(K8sAction) { return kK8sActions; }
std::span<const EnumEntry> enum_entries(RunsAction) { return kRunsActions; }
std::span<const EnumEntry> enum_entries(EnvTemplate) { return kEnvTemplates; }
std::span<const EnumEntry> enum_entries(ResultsOrder) { return kResultsOrders; }

}  // namespace prl::config
