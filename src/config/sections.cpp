#include "config/detail/type_ops.hpp"
#include "config/eval_config.hpp"
#include "config/kubernetes_config.hpp"
#include "config/rl_config.hpp"
#include "config/sft_config.hpp"
#include "config/tool_config.hpp"

/// The operations of every section that is bound, dumped or listed on its own; those of the sections inside them come along.
namespace prl::config {

template const TypeOps& ops_of<RlConfig>();
template const TypeOps& ops_of<TrainerConfig>();
template const TypeOps& ops_of<TrainerModelConfig>();
template const TypeOps& ops_of<OrchestratorConfig>();
template const TypeOps& ops_of<EnvConfig>();
template const TypeOps& ops_of<EvalEnvConfig>();
template const TypeOps& ops_of<InferenceConfig>();
template const TypeOps& ops_of<SftConfig>();
template const TypeOps& ops_of<EvalConfig>();
template const TypeOps& ops_of<SynthesizeConfig>();
template const TypeOps& ops_of<InitModelConfig>();
template const TypeOps& ops_of<MakeDataConfig>();
template const TypeOps& ops_of<ResultsConfig>();
template const TypeOps& ops_of<ConvertConfig>();
template const TypeOps& ops_of<ChatConfig>();
template const TypeOps& ops_of<BenchConfig>();
template const TypeOps& ops_of<PlanConfig>();
template const TypeOps& ops_of<DoctorConfig>();
template const TypeOps& ops_of<EnvCommandConfig>();
template const TypeOps& ops_of<DashboardToolConfig>();
template const TypeOps& ops_of<RouterToolConfig>();
template const TypeOps& ops_of<K8sConfig>();
template const TypeOps& ops_of<RunsToolConfig>();
template const TypeOps& ops_of<ReplayConfig>();
template const TypeOps& ops_of<PlotConfig>();
template const TypeOps& ops_of<ReportConfig>();
template const TypeOps& ops_of<TopConfig>();
template const TypeOps& ops_of<EvalsConfig>();
template const TypeOps& ops_of<EnvServerConfig>();
template const TypeOps& ops_of<LaunchConfig>();

}  // namespace prl::config
