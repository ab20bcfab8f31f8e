// Every command line and every configuration snippet of the documents in tests/seeds, and what each resolves to. Commands
// whose feature is not built must parse completely and name the feature.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing/source_dir.hpp"
#include "config/detail/test_support.hpp"

namespace prl::config {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::is_not_built;
using ::testing::IsEmpty;
using testing::load_line;
using testing::parse_line;
using testing::plain_context;

/// The files are named relative to the source tree, as the documents name them.
class Seeds : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::current_path(test_source_dir()); }
};

const std::string kSeedRl = "uv run rl @ examples/reverse_text/rl.toml --model.name ./m ";

std::string command_error(const std::string& line) {
  try {
    parse_line(line);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// --- entrypoints -----------------------------------------------------------------------------------------------------

TEST_F(Seeds, TheRolesStartOnTheirOwn) {
  EXPECT_EQ(load_line<InferenceConfig>("uv run inference").config.model.name, "Qwen/Qwen3-0.6B");
  EXPECT_EQ(load_line<OrchestratorConfig>("uv run orchestrator").config.batch_size, 128);
  EXPECT_EQ(load_line<TrainerConfig>("uv run trainer").config.model.name, "Qwen/Qwen3-0.6B");
  EXPECT_EQ(load_line<InferenceConfig>("uv run inference @ tests/seeds/infer.toml").config.model.name, "./outputs/model");
  EXPECT_EQ(load_line<OrchestratorConfig>("uv run orchestrator @ tests/seeds/orch.toml").config.group_size, 16);
  EXPECT_EQ(std::get<AdamWConfig>(load_line<TrainerConfig>("uv run trainer @ tests/seeds/train.toml").config.optim).lr, 3e-6);
}

TEST_F(Seeds, RlTakesAFilePerRole) {
  const auto rl = load_line<RlConfig>(
      "uv run rl --trainer @ tests/seeds/train.toml --orchestrator @ tests/seeds/orch.toml --inference @ tests/seeds/infer.toml");
  EXPECT_EQ(std::get<AdamWConfig>(rl.config.trainer.optim).lr, 3e-6);
  EXPECT_EQ(rl.config.orchestrator.group_size, 16);
  EXPECT_EQ(rl.config.orchestrator.train.sampling.max_completion_tokens, 128);
  EXPECT_EQ(rl.config.orchestrator.student.model.name, "./outputs/model");
  EXPECT_EQ(rl.config.inference->model.name, "./outputs/model");
  EXPECT_THAT(rl.not_built, IsEmpty());
}

TEST_F(Seeds, HelpOfEveryEntrypoint) {
  EXPECT_TRUE(load_line<RlConfig>("uv run rl --help").help.has_value());
  EXPECT_TRUE(load_line<SftConfig>("uv run sft --help").help.has_value());
  EXPECT_TRUE(load_line<EvalConfig>("uv run eval --help").help.has_value());
  EXPECT_TRUE(load_line<SynthesizeConfig>("uv run synthesize --help").help.has_value());
}

TEST_F(Seeds, TorchrunIsAnsweredWithTheCommandToType) {
  EXPECT_THAT(command_error("uv run torchrun --nproc-per-node 8 src/prime_rl/trainer/sft/train.py @ sft.toml"),
              HasSubstr("Type `prl launch --nproc-per-node 8 sft @ sft.toml` instead"));
  EXPECT_THAT(command_error("uv run torchrun --nproc-per-node 8 --local-rank-filter 0"), HasSubstr("torchrun is not needed"));
  EXPECT_THAT(command_error("uv run torchrun --local-ranks-filter 0 --nproc-per-node 8 src/prime_rl/trainer/rl/train.py @ t.toml"),
              HasSubstr("Type `prl launch --nproc-per-node 8 trainer @ t.toml` instead"));
  EXPECT_THAT(
      command_error("torchrun --nnodes 2 --node-rank=1 --rdzv-endpoint=$HEAD:29500 --rdzv-id job_1 --nproc-per-node 8 "
                    "-m prime_rl.trainer.sft.train @ sft.toml --max-steps 3"),
      HasSubstr("`prl launch --nnodes 2 --node-rank 1 --rdzv-endpoint $HEAD:29500 --rdzv-id job_1 --nproc-per-node 8 sft @ sft.toml "
                "--max-steps 3`"));
  EXPECT_THAT(command_error("torchrun --nproc-per-node 1 src/prime_rl/trainer/sft/train.py @ sft.toml"),
              HasSubstr("Type `prl sft @ sft.toml`"));
  EXPECT_THAT(command_error("uv run torchrun --log-dir outputs/torchrun --redirects 3 --tee 3"), HasSubstr("torchrun is not needed"));
}

TEST_F(Seeds, CommandsOfOtherProgramsAreAnsweredWithAdvice) {
  EXPECT_THAT(command_error("vllm serve Qwen/Qwen2.5-7B-Instruct --port 8007 --data-parallel-size 3"),
              HasSubstr("prl inference --model.name"));
  EXPECT_THAT(command_error("prime eval run vf-musique -m Qwen/Qwen2.5-7B-Instruct -b http://0.0.0.0:8007/v1"),
              HasSubstr("prl eval --env.id"));
  EXPECT_THAT(command_error("prime env install owner/name"), HasSubstr("prl env install"));
  EXPECT_THAT(command_error("uv run vf-eval my-env"), HasSubstr("prl eval"));
  EXPECT_THAT(command_error("uv run wandb login"), HasSubstr("Weights & Biases client itself"));
  EXPECT_THAT(command_error("uv run hf upload user/model-RL outputs/weights/step_100"), HasSubstr("Hugging Face client itself"));
  EXPECT_THAT(command_error("uv pip install -e path/to/env"), HasSubstr("nothing here needs that"));
  EXPECT_THAT(command_error("uv run python -c \"import x\""), HasSubstr("no Python here"));
}

// --- configuration sources -------------------------------------------------------------------------------------------

TEST_F(Seeds, PrecedenceExample) {
  const std::string files = " @ tests/seeds/model_8b.toml @ tests/seeds/model_14b.toml";
  Context context = plain_context();
  context.environment["PRIME_MODEL__NAME"] = "Qwen/Qwen3-4B";
  const auto name = [&](const std::string& line) { return load_line<InferenceConfig>(line, context).config.model.name; };
  EXPECT_EQ(name("uv run inference" + files + " --model.name Qwen/Qwen3-32B"), "Qwen/Qwen3-32B");
  EXPECT_EQ(name("uv run inference" + files), "Qwen/Qwen-14B");
  EXPECT_EQ(name("uv run inference @ tests/seeds/model_8b.toml"), "Qwen/Qwen3-8B");
  EXPECT_EQ(name("uv run inference"), "Qwen/Qwen3-4B");
  context.environment.clear();
  EXPECT_EQ(name("uv run inference"), "Qwen/Qwen3-0.6B");
}

TEST_F(Seeds, TheSpaceAfterTheAtSign) {
  EXPECT_THAT(error_of<RlConfig>("uv run rl @tests/seeds/full_rl.toml"), HasSubstr("write `@ tests/seeds/full_rl.toml`"));
}

// --- checkpoints -----------------------------------------------------------------------------------------------------

TEST_F(Seeds, CheckpointsAreOffUntilAsked) {
  EXPECT_FALSE(load_line<SftConfig>("uv run sft").config.ckpt.has_value());
  EXPECT_FALSE(load_line<RlConfig>("uv run rl @ tests/seeds/model_8b.toml").config.trainer.ckpt.has_value());
}

TEST_F(Seeds, CheckpointFlags) {
  const auto ckpt = [](const std::string& flags) { return load_line<RlConfig>(kSeedRl + flags).config; };
  EXPECT_FALSE(ckpt("--ckpt").trainer.ckpt->interval.has_value());
  EXPECT_EQ(ckpt("--ckpt.interval 25").trainer.ckpt->interval, 25);
  EXPECT_EQ(ckpt("--ckpt.interval 25").orchestrator.ckpt->interval, 25);
  EXPECT_EQ(ckpt("--ckpt.interval 25 --ckpt.keep-last 3").trainer.ckpt->keep_last, 3);
  EXPECT_EQ(ckpt("--ckpt.interval 25 --ckpt.keep-interval 100").orchestrator.ckpt->keep_interval, 100);
  EXPECT_TRUE(ckpt("--ckpt.save-async").trainer.ckpt->save_async);
  EXPECT_TRUE(ckpt("--ckpt.weights-only").trainer.ckpt->weights_only);
  EXPECT_EQ(ckpt("--ckpt.resume-step -1").trainer.ckpt->resume_step, -1);
  EXPECT_TRUE(ckpt("--ckpt.weights.save-adapter-separately").trainer.ckpt->weights->save_adapter_separately);
}

TEST_F(Seeds, ResumingARun) {
  const auto first = load_line<RlConfig>(kSeedRl + "--max-steps 10 --ckpt").config;
  EXPECT_EQ(first.trainer.max_steps, 10);
  EXPECT_TRUE(first.orchestrator.ckpt.has_value());
  const auto second = load_line<RlConfig>(kSeedRl + "--max-steps 20 --ckpt.resume-step 10").config;
  EXPECT_EQ(second.orchestrator.max_steps, 20);
  EXPECT_EQ(second.trainer.ckpt->resume_step, 10);
  EXPECT_EQ(second.orchestrator.ckpt->resume_step, 10);
  EXPECT_EQ(load_line<SftConfig>("uv run sft --max-steps 20 --ckpt").config.max_steps, 20);
  EXPECT_EQ(load_line<SftConfig>("uv run sft --max-steps 40 --ckpt.resume-step 20").config.ckpt->resume_step, 20);
  // Without --inference the server runs elsewhere, as in the two-part run of the documents.
  const auto parts = load_line<RlConfig>(
      "uv run rl --trainer @ tests/seeds/train.toml --orchestrator @ tests/seeds/orch.toml --max-steps 20 --ckpt.resume-step 10");
  EXPECT_FALSE(parts.config.inference.has_value());
  EXPECT_EQ(parts.config.orchestrator.ckpt->resume_step, 10);
  EXPECT_EQ(load_line<RlConfig>(kSeedRl + "--ckpt.resume-step 50 --max-steps 100").config.trainer.ckpt->resume_step, 50);
  EXPECT_EQ(load_line<RlConfig>(kSeedRl + "--ckpt --ckpt.interval 5 --ckpt.keep-last 3").config.trainer.ckpt->keep_last, 3);
}

TEST_F(Seeds, TheTrainersCheckpointSection) {
  const auto rl = load_line<RlConfig>("uv run rl @ tests/seeds/trainer_ckpt.toml --trainer.ckpt.resume-step 50").config;
  EXPECT_EQ(rl.trainer.ckpt->interval, 10);
  EXPECT_EQ(rl.trainer.ckpt->keep_last, 3);
  EXPECT_EQ(rl.trainer.ckpt->keep_interval, 50);
  EXPECT_EQ(rl.orchestrator.ckpt->resume_step, 50);
}

// --- evaluation and synthetic data -----------------------------------------------------------------------------------

TEST_F(Seeds, EvalByDefaultAsksTheOpenAiApi) {
  const auto eval = load_line<EvalConfig>("uv run eval @ configs/debug/eval/single_env.toml");
  EXPECT_EQ(eval.config.model.name, "gpt-4.1-mini");
  EXPECT_THAT(eval.config.client.base_url, ElementsAre("https://api.openai.com/v1"));
  EXPECT_EQ(eval.config.client.api_key_var, "OPENAI_API_KEY");
  EXPECT_THAT(eval.not_built, IsEmpty());
  EXPECT_EQ(load_line<EvalConfig>("uv run eval @ configs/debug/eval/multi_env.toml").config.env.size(), 2u);
}

TEST_F(Seeds, EvalOfLocalModelsAndCheckpoints) {
  const std::string local = " --client.base-url http://localhost:8000/v1 --model.name my-model";
  const auto model = load_line<EvalConfig>("uv run eval @ configs/debug/eval/local_model.toml" + local);
  EXPECT_THAT(model.config.client.base_url, ElementsAre("http://localhost:8000/v1"));
  EXPECT_EQ(model.config.model.name, "my-model");
  EXPECT_THAT(model.not_built, IsEmpty());
  const auto steps = load_line<EvalConfig>("uv run eval @ configs/debug/eval/single_env.toml" + local +
                                           " --weights-dir outputs/weights --steps 10,20,30 --no-eval-base");
  EXPECT_EQ(steps.config.weights_dir, "outputs/weights");
  EXPECT_THAT(*steps.config.steps, ElementsAre(10, 20, 30));
  EXPECT_FALSE(steps.config.eval_base);
  EXPECT_TRUE(load_line<EvalConfig>("uv run eval --weights-dir outputs/weights").config.eval_base);
}

TEST_F(Seeds, EvalByEnvironmentIds) {
  const std::string base = "uv run eval --model.name m --environment-ids math500,aime2025";
  const auto plain = load_line<EvalConfig>(base);
  ASSERT_EQ(plain.config.env.size(), 2u);
  EXPECT_EQ(plain.config.env[0].id, "math500");
  EXPECT_EQ(plain.config.env[1].id, "aime2025");
  EXPECT_THAT(plain.not_built, IsEmpty()) << "whether they are installed is found out at the start";
  const auto steps = load_line<EvalConfig>(base + " --weights-dir outputs/weights --steps 10,20,30,40,50 --no-eval-base");
  EXPECT_THAT(*steps.config.steps, ElementsAre(10, 20, 30, 40, 50));
  const auto api = load_line<EvalConfig>(base + " --client.base-url https://api.openai.com/v1 --client.api-key-var OPENAI_API_KEY");
  EXPECT_EQ(api.config.client.api_key_var, "OPENAI_API_KEY");
}

TEST_F(Seeds, EvalWithOneEnvironmentOnTheCommandLine) {
  const auto eval =
      load_line<EvalConfig>("uv run eval --client.base-url http://localhost:8007/v1 --weights-dir outputs/weights --env.id my-env");
  ASSERT_EQ(eval.config.env.size(), 1u);
  EXPECT_EQ(eval.config.env[0].id, "my-env");
  EXPECT_THAT(*load_line<EvalConfig>("uv run eval --weights-dir outputs/weights --steps 10,50,100 --no-eval-base").config.steps,
              ElementsAre(10, 50, 100));
}

TEST_F(Seeds, Synthesize) {
  for (const char* name : {"single_turn", "multi_env", "multi_turn", "multi_turn_tool_call"}) {
    const auto synthesize = load_line<SynthesizeConfig>(std::string("uv run synthesize @ configs/debug/synthesize/") + name + ".toml");
    EXPECT_EQ(synthesize.config.group_size, 4) << name;
    EXPECT_EQ(synthesize.config.reasoning_field, "reasoning_content");
  }
  EXPECT_EQ(load_line<SynthesizeConfig>("uv run synthesize @ configs/debug/synthesize/single_turn.toml --reasoning-field reasoning")
                .config.reasoning_field,
            "reasoning");
  EXPECT_EQ(load_line<SynthesizeConfig>("uv run synthesize").config.env.size(), 1u);
}

TEST_F(Seeds, BrowsingResults) {
  // The documents' command is `prime eval tui`.
  for (const char* line : {"eval tui", "eval list", "results", "uv run eval show outputs/evals"})
    EXPECT_EQ(testing::parse_line(line).command, Command::kResults) << line;
  EXPECT_EQ(load_line<ResultsConfig>("eval show outputs/evals --show 3").config.path, "outputs/evals");
}

TEST_F(Seeds, ServersForEvaluations) {
  EXPECT_EQ(load_line<InferenceConfig>("uv run inference --model.name ./teacher --server.port 8001").config.server.port, 8001);
  EXPECT_EQ(load_line<InferenceConfig>("uv run inference --model.name ./m --gpu-memory-utilization 0.5").config.gpu_memory_utilization,
            0.5);
  const auto nodes = load_line<InferenceConfig>(
      "uv run inference --data-parallel-size 16 --data-parallel-address 10.0.0.1 "
      "--data-parallel-rpc-port 13345 --data-parallel-size-local 8 --data-parallel-start-rank 8 --headless");
  EXPECT_EQ(nodes.config.parallel.dp_start_rank, 8);
  EXPECT_TRUE(nodes.config.parallel.headless);
  EXPECT_EQ(nodes.config.parallel.dp_address, "10.0.0.1");
  EXPECT_THAT(nodes.not_built, IsEmpty());
}

// --- logging and monitoring ------------------------------------------------------------------------------------------

TEST_F(Seeds, WeightsAndBiases) {
  EXPECT_EQ(load_line<SftConfig>("uv run sft --wandb").config.wandb->project, "prime-rl");
  const auto named = load_line<SftConfig>("uv run sft --wandb.project my-project --wandb.name my-run");
  EXPECT_EQ(named.config.wandb->name, "my-run");
  EXPECT_THAT(named.not_built, IsEmpty());
  const auto rl = load_line<RlConfig>(kSeedRl + "--wandb --wandb.project my-proj --wandb.name run-42").config;
  EXPECT_EQ(rl.trainer.wandb->project, "my-proj");
  EXPECT_EQ(rl.orchestrator.wandb->name, "run-42");
  EXPECT_FALSE(load_line<RlConfig>("uv run rl @ tests/seeds/full_rl.toml --no-wandb").config.trainer.wandb.has_value());
  EXPECT_THAT(load_line<RlConfig>(kSeedRl + "--wandb.offline").not_built, IsEmpty());
}

TEST_F(Seeds, SamplesAndDistributions) {
  const auto rl =
      load_line<RlConfig>(kSeedRl + "--wandb --no-trainer.wandb.log-extras.distributions --orchestrator.wandb.log-extras.interval 50")
          .config;
  EXPECT_FALSE(rl.trainer.wandb->log_extras->distributions);
  EXPECT_TRUE(rl.trainer.wandb->log_extras->samples);
  EXPECT_TRUE(rl.orchestrator.wandb->log_extras->distributions);
  EXPECT_EQ(rl.orchestrator.wandb->log_extras->interval, 50);
  EXPECT_EQ(rl.trainer.wandb->log_extras->interval, 10);
  const auto shared = load_line<RlConfig>(kSeedRl + "--wandb.log-extras.interval 5 --wandb.log-extras.sample-ratio 0.5").config;
  EXPECT_EQ(shared.trainer.wandb->log_extras->interval, 5);
  EXPECT_EQ(shared.orchestrator.wandb->log_extras->sample_ratio, 0.5);
  // Any key below an optional section switches it on.
  EXPECT_TRUE(load_line<RlConfig>(kSeedRl + "--no-trainer.wandb.log-extras.distributions").config.trainer.wandb.has_value());
}

TEST_F(Seeds, PlatformMonitoring) {
  const auto flag = load_line<RlConfig>(kSeedRl + "--orchestrator.prime-monitor");
  EXPECT_TRUE(flag.config.orchestrator.prime_monitor.has_value());
  EXPECT_THAT(flag.not_built, IsEmpty());
  EXPECT_EQ(load_line<RlConfig>("uv run rl @ tests/seeds/prime_monitor.toml").config.orchestrator.prime_monitor->run_name, "my-experiment");
}

TEST_F(Seeds, LogLevels) {
  const auto rl = load_line<RlConfig>(kSeedRl + "--log.level debug --orchestrator.log.vf-level debug").config;
  EXPECT_EQ(rl.trainer.log.level, LogLevel::kDebug);
  EXPECT_EQ(rl.orchestrator.log.level, LogLevel::kDebug);
  EXPECT_EQ(rl.orchestrator.log.vf_level, LogLevel::kDebug);
  EXPECT_EQ(rl.trainer.log.vf_level, LogLevel::kInfo);
  EXPECT_EQ(load_line<RlConfig>(kSeedRl + "--trainer.log.level error").config.trainer.log.level, LogLevel::kError);
  Context context = plain_context();
  context.environment["PRIME_LOG_LEVEL"] = "warning";
  EXPECT_EQ(load_line<RlConfig>(kSeedRl, context).config.trainer.log.level, LogLevel::kWarning);
}

// --- benchmarks ------------------------------------------------------------------------------------------------------

TEST_F(Seeds, Benchmarks) {
  const auto fake = load_line<SftConfig>("uv run sft --data.type fake --bench").config;
  EXPECT_TRUE(std::holds_alternative<FakeDataConfig>(fake.data));
  EXPECT_EQ(fake.max_steps, 4);
  const auto real = load_line<SftConfig>("uv run sft --data.seq-len 4096 --data.batch-size 64 --data.micro-batch-size 2 --bench").config;
  EXPECT_EQ(std::get<SftDataConfig>(real.data).seq_len, 4096);
  EXPECT_EQ(std::get<SftDataConfig>(real.data).batch_size, 64);
  EXPECT_EQ(std::get<SftDataConfig>(real.data).micro_batch_size, 2);
  EXPECT_EQ(std::get<FakeDataConfig>(
                load_line<SftConfig>("uv run sft --data.type fake --data.length variable --data.input-ids random").config.data)
                .length,
            FakeLength::kVariable);
  const auto rl = load_line<RlConfig>(
      "uv run rl --trainer @ tests/seeds/train.toml --orchestrator @ tests/seeds/orch.toml --inference @ tests/seeds/infer.toml --bench");
  EXPECT_EQ(rl.config.trainer.data.fake->batch_size, 128);
  EXPECT_EQ(rl.config.orchestrator.max_steps, 4);
  EXPECT_TRUE(load_line<OrchestratorConfig>("uv run orchestrator --bench").config.bench.has_value());
  EXPECT_TRUE(load_line<TrainerConfig>("uv run trainer --bench").config.data.fake.has_value());
}

// --- devices and memory ----------------------------------------------------------------------------------------------

TEST_F(Seeds, OneGpuHoldsEverything) {
  const auto rl = load_line<RlConfig>("uv run rl @ tests/seeds/single_gpu_rl.toml --ckpt --ckpt.interval 5 --ckpt.keep-last 3");
  EXPECT_TRUE(std::holds_alternative<ColocatedDeployment>(*rl.config.deployment));
  EXPECT_EQ(rl.config.inference->gpu_memory_utilization, 0.5);
  EXPECT_EQ(rl.config.trainer.model.ac->freq, 1);
  EXPECT_EQ(rl.config.orchestrator.batch_size, 8);
  EXPECT_EQ(rl.config.orchestrator.group_size, 2);
  EXPECT_EQ(rl.config.orchestrator.train.sampling.max_completion_tokens, 2000);
  EXPECT_FALSE(is_not_built(rl.not_built, "several GPUs"));
}

TEST_F(Seeds, SeveralGpusAreNotBuilt) {
  const auto rl = load_line<RlConfig>(kSeedRl + "--inference-gpu-ids 0,1,2,3,4,5 --trainer-gpu-ids 6,7");
  EXPECT_THAT(*rl.config.inference_gpu_ids, ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(*rl.config.trainer_gpu_ids, ElementsAre(6, 7));
  EXPECT_EQ(std::get<SingleNodeDeployment>(*rl.config.deployment).num_train_gpus, 2);
  EXPECT_EQ(num_engines(*rl.config.inference), 6);
}

TEST_F(Seeds, MemoryRemedies) {
  EXPECT_TRUE(load_line<SftConfig>("uv run sft --model.ac").config.model.ac.has_value());
  EXPECT_EQ(std::get<SftDataConfig>(load_line<SftConfig>("uv run sft --data.micro-batch-size 1 --data.seq-len 1024").config.data).seq_len,
            1024);
  const auto shared_rows = load_line<SftConfig>("uv run sft --model.cp 2");
  EXPECT_TRUE(shared_rows.not_built.empty());
  EXPECT_EQ(shared_rows.config.model.cp, 2);
  EXPECT_TRUE(load_line<TrainerConfig>("uv run trainer --model.fsdp-cpu-offload").config.model.fsdp_cpu_offload);
}

// --- a complete file -------------------------------------------------------------------------------------------------

TEST_F(Seeds, TheCompleteFileOfTheGuide) {
  const auto rl = load_line<RlConfig>("uv run rl @ tests/seeds/full_rl.toml");
  const RlConfig& c = rl.config;
  EXPECT_EQ(c.trainer.max_steps, 500);
  EXPECT_EQ(c.trainer.model.seq_len, 16384);
  EXPECT_EQ(c.orchestrator.seq_len, 16384);
  EXPECT_EQ(c.trainer.wandb->project, "my-project");
  EXPECT_EQ(c.trainer.model.name, "Qwen/Qwen2.5-7B-Instruct");
  EXPECT_EQ(c.orchestrator.student.model.name, "Qwen/Qwen2.5-7B-Instruct");
  EXPECT_EQ(std::get<AdamWConfig>(c.trainer.optim).lr, 1e-5);
  EXPECT_EQ(std::get<AdamWConfig>(c.trainer.optim).weight_decay, 0.0);
  EXPECT_EQ(c.trainer.model.lora->rank, 32);
  EXPECT_EQ(c.trainer.model.lora->dropout, 0.05);
  EXPECT_EQ(c.trainer.model.lora->target_modules.size(), 7u);
  EXPECT_EQ(c.orchestrator.batch_size, 32);
  EXPECT_EQ(c.orchestrator.group_size, 16);
  EXPECT_EQ(c.orchestrator.max_inflight_rollouts, 64);
  EXPECT_EQ(c.orchestrator.train.sampling.temperature, 0.5);
  EXPECT_EQ(c.orchestrator.train.sampling.max_completion_tokens, 1024);
  EXPECT_TRUE(c.orchestrator.buffer.online_difficulty_filtering);
  ASSERT_EQ(c.orchestrator.train.env.size(), 1u);
  EXPECT_EQ(c.orchestrator.train.env[0].id, "my-env");
  EXPECT_EQ(c.orchestrator.train.env[0].args.find("difficulty")->as_string(), "hard");
  EXPECT_EQ(c.inference->gpu_memory_utilization, 0.6);
  EXPECT_TRUE(c.inference->model.enable_auto_tool_choice);
  EXPECT_EQ(c.inference->model.tool_call_parser, "hermes");
  EXPECT_EQ(c.inference->model.max_model_len, 16384);
  EXPECT_FALSE(is_not_built(rl.not_built, "LoRA"));
  EXPECT_EQ(num_engines(*c.inference), 3);
}

TEST_F(Seeds, TheConstraintsOfTheGuide) {
  EXPECT_THAT(error_of<RlConfig>("uv run rl @ tests/seeds/full_rl.toml --orchestrator.rollouts-per-example 5"),
              HasSubstr("orchestrator.group_size: must divide batch_size: 32 rollouts per step"));
  EXPECT_THAT(error_of<RlConfig>("uv run rl @ tests/seeds/full_rl.toml --seq-len 8192"),
              HasSubstr("seq_len: must be at least inference.model.max_model_len 16384"));
  EXPECT_THAT(error_of<RlConfig>("uv run rl @ tests/seeds/full_rl.toml --model.name ./other"),
              HasSubstr("inference.model.name: differs from model.name"));
  EXPECT_THAT(error_of<RlConfig>("uv run rl @ tests/seeds/ac_string_invalid.toml"),
              AllOf(HasSubstr("trainer.model.ac: expects a table: write its keys under [trainer.model.ac]"), HasSubstr("\"full\""),
                    HasSubstr("ac_string_invalid.toml:3")));
}

TEST_F(Seeds, SingleSections) {
  const auto load_file = [](const std::string& name) { return load_line<RlConfig>("uv run rl @ tests/seeds/" + name + ".toml"); };
  EXPECT_EQ(load_file("reasoning_parser").config.inference->model.reasoning_parser, "qwen3");
  EXPECT_EQ(load_file("activation_checkpointing").config.trainer.model.ac->freq, 1);
  EXPECT_EQ(load_file("trainer_dtype").config.trainer.model.optimization_dtype, ParamDType::kBFloat16);
  EXPECT_EQ(load_file("trainer_dtype").config.trainer.model.reduce_dtype, ParamDType::kBFloat16);
  // In one process the trainer's weights are the engine's.
  EXPECT_THAT(load_file("inference_dtype").not_built, IsEmpty());
  const auto half = load_line<RlConfig>("uv run rl @ tests/seeds/inference_dtype.toml --deployment.type single_node");
  EXPECT_THAT(half.not_built, IsEmpty());
  EXPECT_EQ(half.config.inference->compute.dtype, ComputeDType::kFloat16);
  EXPECT_THAT(half.warnings, Contains(HasSubstr("float16")));
  const auto eval = load_file("online_eval").config.orchestrator.eval;
  EXPECT_EQ(eval->interval, 100);
  EXPECT_EQ(eval->group_size, 1);
  EXPECT_EQ(eval->num_examples, 100);
  EXPECT_EQ(eval->env.at(0).args.find("split")->as_string(), "validation");
  EXPECT_EQ(load_file("env_args").config.orchestrator.train.env.at(0).args.find("difficulty")->as_string(), "hard");
  EXPECT_EQ(load_line<RlConfig>(kSeedRl + "--orchestrator.trajectory-strategy branching").config.orchestrator.trajectory_strategy,
            TrajectoryStrategy::kBranching);
}

// --- the training guide ----------------------------------------------------------------------------------------------

TEST_F(Seeds, TheMinimalRun) {
  const auto rl = load_line<RlConfig>("uv run rl @ examples/reverse_text/rl.toml");
  EXPECT_EQ(rl.config.trainer.max_steps, 20);
  EXPECT_EQ(rl.config.orchestrator.batch_size, 128);
  EXPECT_EQ(rl.config.orchestrator.group_size, 16);
  EXPECT_EQ(rl.config.orchestrator.train.sampling.max_completion_tokens, 128);
  EXPECT_EQ(rl.config.trainer.model.seq_len, 2048);
  EXPECT_TRUE(rl.config.trainer.ckpt.has_value());
  EXPECT_TRUE(rl.config.inference.has_value());
  EXPECT_THAT(load_line<RlConfig>(kSeedRl).not_built, IsEmpty());
  const auto sft = load_line<SftConfig>("uv run sft @ examples/reverse_text/sft.toml --wandb");
  EXPECT_EQ(sft.config.max_steps, 100);
  EXPECT_EQ(std::get<SftDataConfig>(sft.config.data).batch_size, 32);
  EXPECT_TRUE(sft.config.wandb.has_value());
}

TEST_F(Seeds, KnobsOfTheAlgorithm) {
  const auto rl = load_line<RlConfig>("uv run rl @ tests/seeds/train_envs.toml --model.name ./m --inference").config;
  EXPECT_EQ(rl.orchestrator.batch_size, 64);
  EXPECT_EQ(rl.orchestrator.group_size, 8);
  EXPECT_EQ(rl.orchestrator.max_off_policy_steps, 4);
  ASSERT_EQ(rl.orchestrator.train.env.size(), 2u);
  EXPECT_EQ(rl.orchestrator.train.env[0].ratio, 3.0);
  EXPECT_EQ(rl.orchestrator.eval->interval, 25);
  const auto defaults = load_line<OrchestratorConfig>("uv run orchestrator --eval").config;
  EXPECT_EQ(defaults.max_off_policy_steps, 8);
  EXPECT_EQ(defaults.training_mode, TrainingMode::kRl);
  EXPECT_EQ(defaults.eval->interval, 100);
}

TEST_F(Seeds, TrainingModes) {
  const auto opd = load_line<RlConfig>("uv run rl @ tests/seeds/opd.toml --model.name ./m --inference");
  EXPECT_EQ(opd.config.orchestrator.training_mode, TrainingMode::kOpd);
  EXPECT_THAT(opd.config.orchestrator.teacher->client.base_url, ElementsAre("http://localhost:8001/v1"));
  EXPECT_TRUE(opd.not_built.empty());
  EXPECT_THAT(error_of<RlConfig>(kSeedRl + "--orchestrator.training-mode sft"), HasSubstr("training_mode sft needs a teacher"));
  EXPECT_THAT(error_of<RlConfig>("uv run rl @ tests/seeds/opd.toml --orchestrator.training-mode rl"), HasSubstr("uses no teacher"));
}

TEST_F(Seeds, RunManagement) {
  const auto rl = load_line<RlConfig>(kSeedRl + "--clean-output-dir --output-dir outputs/my-run --max-steps 5 --dry-run");
  EXPECT_TRUE(rl.config.clean_output_dir);
  EXPECT_EQ(rl.config.output_dir, "outputs/my-run");
  EXPECT_EQ(rl.config.trainer.output_dir, "outputs/my-run");
  EXPECT_EQ(rl.config.orchestrator.max_steps, 5);
  EXPECT_TRUE(rl.dry_run);
}

TEST_F(Seeds, SftKnobs) {
  const auto sft = load_line<SftConfig>("uv run sft @ tests/seeds/sft_knobs.toml --model.name ./m");
  const SftDataConfig& data = std::get<SftDataConfig>(sft.config.data);
  EXPECT_EQ(data.name, "data/train.jsonl");
  EXPECT_TRUE(data.loss_mask.tool);
  EXPECT_TRUE(data.loss_mask.assistant);
  EXPECT_FALSE(data.loss_mask.user);
  EXPECT_EQ(sft.config.val->interval, 20);
  EXPECT_EQ(std::get<SftDataConfig>(sft.config.val->data).name, "data/val.jsonl");
  EXPECT_EQ(sft.config.renderer.name, "qwen3");
  EXPECT_TRUE(sft.not_built.empty()) << "a family's renderer serves SFT too";
}

TEST_F(Seeds, TheNewestSpelling) {
  const auto rl = load_line<RlConfig>("uv run rl @ tests/seeds/newest_rl.toml");
  const RlConfig& c = rl.config;
  EXPECT_FALSE(c.clean_output_dir);  // it contradicts the resume
  EXPECT_EQ(c.trainer.ckpt->resume_step, 10);
  EXPECT_EQ(c.orchestrator.wandb->project, "reverse-text");
  EXPECT_EQ(c.orchestrator.advantage.type, AdvantageType::kMaxRl);
  EXPECT_EQ(c.orchestrator.train.env.at(0).id, "reverse-text");
  EXPECT_EQ(c.orchestrator.train.env.at(0).args.find("min_words")->as_int(), 3);
  EXPECT_EQ(find_path(c.orchestrator.train.env.at(0).agent, "runtime.type")->as_string(), "subprocess");
  EXPECT_FALSE(c.orchestrator.eval->eval_base_model);
  EXPECT_EQ(c.orchestrator.eval->env.at(0).id, "reverse-text");
  EXPECT_EQ(c.inference->model.max_model_len, 2048);
  EXPECT_THAT(rl.not_built, IsEmpty());
}

}  // namespace
}  // namespace prl::config
