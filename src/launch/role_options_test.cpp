// One process and a process per role: the same command line must give the same options to the same roles.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <sstream>

#include "config/cli.hpp"
#include "config/rl_config.hpp"
#include "config/sft_config.hpp"
#include "config/text_format.hpp"
#include "device/device.hpp"
#include "launch/engine_host.hpp"
#include "launch/orchestrator_setup.hpp"
#include "launch/sft_role.hpp"
#include "launch/trainer_role.hpp"
#include "nn/init_model.hpp"
#include "text/renderer.hpp"
#include "text/tokenizer_builder.hpp"

namespace prl::launch {
namespace {
namespace fs = std::filesystem;

/// "name=value" lines.
class Listing {
 public:
  template <typename T>
  Listing& add(std::string_view name, const T& value) {
    text_ += fmt::format("{}={}\n", name, value);
    return *this;
  }
  template <typename T>
  Listing& add(std::string_view name, const std::optional<T>& value) {
    text_ += value ? fmt::format("{}={}\n", name, *value) : fmt::format("{} is not set\n", name);
    return *this;
  }
  Listing& add(std::string_view name, const fs::path& value) { return add(name, value.string()); }
  Listing& add(std::string_view name, std::chrono::milliseconds value) { return add(name, value.count()); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

void list_text(Listing& out, const std::string& name, const TextOptions& text) {
  out.add(name, fmt::format("{} tools {} reasoning {}", text.renderer, text.tool_parser, text.reasoning_parser));
  out.add(name + ".chat_template", text.chat_template);
}

void list_sampling(Listing& out, const std::string& name, const wire::SamplingParams& s) {
  out.add(name, fmt::format("temperature {} top_p {} top_k {} min_p {} repetition {} min_tokens {}", s.temperature, s.top_p, s.top_k,
                            s.min_p, s.repetition_penalty, s.min_tokens));
  out.add(name + ".max_tokens", s.max_tokens).add(name + ".seed", s.seed);
}

std::string trainer_listing(const config::TrainerConfig& config) {
  const auto runtime = make_runtime(config.compute);
  const trainer::PolicyOptions policy = policy_options(config, runtime);
  const trainer::RlRunOptions run = rl_run_options(config, step_options(config, runtime), 0);
  Listing out;
  out.add("device", static_cast<int>(runtime->device().kind)).add("model", policy.model).add("compute", static_cast<int>(policy.compute));
  out.add("threads", policy.num_threads).add("random_init", policy.random_init).add("num_layers", policy.num_layers);
  out.add("routes", policy.balances_routes).add("replays", policy.replays_routes);
  out.add("seed", policy.seed).add("checkpointing", policy.checkpointing.freq).add("offload", policy.offload.link != nullptr);
  out.add("loss", run.step.loss.index()).add("optim", run.step.optim.index()).add("lr", trainer::base_lr(run.step.optim));
  out.add("scheduler", run.step.scheduler.index()).add("max_steps", run.step.max_steps).add("seq_len", run.seq_len);
  out.add("checkpoint", run.checkpoint.has_value()).add("resume", run.resume.has_value());
  if (run.checkpoint) {
    const trainer::CheckpointOptions& c = *run.checkpoint;
    out.add("checkpoints", c.checkpoints)
        .add("weights", c.weights)
        .add("companions", c.companions.folder)
        .add("template", c.companions.chat_template.value_or("-"))
        .add("interval", c.interval);
    out.add("keep_last", c.keep_last).add("keep_interval", c.keep_interval).add("save_weights", c.save_weights);
    out.add("weights_only", c.weights_only).add("save_async", c.save_async);
  }
  if (run.resume) out.add("resume.step", run.resume->step).add("resume.units", fmt::format("{}", fmt::join(run.resume->units, "+")));
  out.add("steps_after_stop", run.max_steps_after_stop).add("bench", run.is_bench).add("sink", config.file_monitor.path);
  return out.text();
}

std::string orchestrator_listing(const config::OrchestratorConfig& config) {
  const orchestrator::OrchestratorOptions o = orchestrator_options(config, 320, 0);
  Listing out;
  out.add("text", policy_text_name(config));
  list_text(out, "text", policy_text_options(config));
  const orchestrator::DispatcherOptions& d = o.dispatch;
  out.add("batch_size", d.batch_size).add("group_sizes", fmt::format("{}", fmt::join(d.group_sizes, "+"))).add("inflight", d.max_inflight);
  out.add("oversampling", d.oversampling_factor).add("async", d.max_async_level).add("off_policy", d.max_off_policy_steps);
  out.add("ordered", d.ordered).add("max_steps", d.max_steps).add("tasks_per_minute", d.tasks_per_minute);
  const orchestrator::CollectorOptions& c = o.collect;
  out.add("tokens", c.token_batch_size).add("advantage", c.advantage.algorithm).add("strategy", static_cast<int>(c.strategy));
  out.add("loss", static_cast<int>(c.loss)).add("zero", c.filter_zero_advantages).add("skip_verification", c.skip_verification);
  for (const auto& filter : c.filters) out.add(orchestrator::to_string(filter.kind), filter.enforce);
  out.add("sampler.seed", o.sampler.seed).add("ratios", fmt::format("{}", fmt::join(o.sampler.env_ratios, "+")));
  out.add("pack", o.pack.seq_len).add("seed", o.seed).add("deterministic", o.deterministic).add("output_dir", o.output_dir);
  out.add("status", o.status_interval).add("inference_timeout", o.inference_timeout).add("policy_timeout", o.policy_timeout);
  for (const orchestrator::OnlineEval& e : o.evals) {
    out.add("eval", e.task.environment->name()).add("interval", e.interval).add("examples", e.task.num_examples);
    out.add("attempts", e.task.retry.max_attempts).add("timeout", e.task.rollout_timeout).add("group", e.task.rollouts_per_example);
    list_sampling(out, "eval.sampling", e.task.sampling);
  }
  if (o.validation) out.add("val", o.validation->num_examples).add("val.interval", o.validation->interval);
  for (const orchestrator::TrainEnv& e : train_environments(config)) {
    out.add("env", e.environment->name()).add("retries", e.max_retries).add("timeout", e.rollout_timeout);
    list_sampling(out, "sampling", e.sampling);
  }
  out.add("checkpoints", checkpoints_folder(config)).add("sink", config.file_monitor.path);
  return out.text();
}

std::string engine_listing(const config::InferenceConfig& config) {
  const auto runtime = make_runtime(config.compute);
  const engine::EngineOptions o = engine_options(config, nn::load_model_config(model_folder(config.model.name)), *runtime);
  Listing out;
  out.add("model", model_folder(config.model.name)).add("device", static_cast<int>(runtime->device().kind));
  out.add("dtype", static_cast<int>(compute_dtype(config.model.dtype, runtime->device().kind)));
  out.add("max_model_len", o.max_model_len).add("block_size", o.block_size).add("num_seqs", o.max_num_seqs);
  out.add("batched", o.max_num_batched_tokens).add("queued", o.max_queued_requests).add("prefix", o.enable_prefix_caching);
  out.add("host", o.num_host_blocks)
      .add("chunked", o.enable_chunked_prefill)
      .add("record", o.record_steps)
      .add("seed", o.seed)
      .add("threads", o.num_threads);
  list_text(out, "text", engine_text_options(config));
  return out.text();
}

class RoleOptions : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / fmt::format("prl-role-options-{}", ::getpid());
    fs::remove_all(folder_);
    nn::InitModelOptions tiny;
    tiny.family = "qwen3";
    tiny.vocab_size = 320;
    tiny.hidden_size = 32;
    tiny.intermediate_size = 32;
    tiny.num_layers = 1;
    tiny.num_heads = 2;
    tiny.num_kv_heads = 1;
    tiny.head_dim = 16;
    tiny.max_position = 512;
    nn::init_model(tiny, folder_ / "model");
    text::write_byte_level_tokenizer(folder_ / "model", {});
    fs::create_directories(folder_ / "other");
    text::write_byte_level_tokenizer(folder_ / "other", {});
  }
  void TearDown() override { fs::remove_all(folder_); }

  template <class C>
  C load(config::Command command, const std::string& line) const {
    std::vector<std::string> words;
    std::istringstream in(line);
    for (std::string word; in >> word;) words.push_back(word);
    config::Context context = config::Context::from_process();
    context.num_devices = 1;
    auto loaded = config::load<C>(command, words, context);
    warnings_ = std::move(loaded.warnings);
    return std::move(loaded.config);
  }
  config::RlConfig load_rl(const std::string& flags) const {
    return load<config::RlConfig>(config::Command::kRl, fmt::format("--model.name {} --inference --output-dir {} --compute.device cpu {}",
                                                                    (folder_ / "model").string(), (folder_ / "out").string(), flags));
  }

  fs::path folder_;
  mutable std::vector<std::string> warnings_;
};

TEST_F(RoleOptions, AreTheSameInOneProcessAndInSeveral) {
  const std::string other = (folder_ / "other").string();
  const std::string table[] = {
      "",
      "--max-steps 7 --seq-len 256 --max-async-level 2 --seed 9 --compute.num-threads 2",
      "--seq-len 4096",  // more than the model's positions
      "--compute.dtype float32",
      "--compute.dtype bfloat16",
      "--orchestrator.tokenizer.name " + other,
      "--tokenizer.name " + other + " --ckpt.interval 2 --ckpt.keep-last 3",
      "--tokenizer.chat-template {{messages}}",
      "--inference.model.chat-template {{messages}}",
      "--inference.model.reasoning-parser qwen3",
      "--inference.model.reasoning-parser auto --inference.model.tool-call-parser None",
      "--orchestrator.renderer.name default",
      "--ckpt.resume-step -1",
      "--ckpt.resume-step 4 --trainer.ckpt.skip-progress --orchestrator.ckpt.skip-progress",
      "--ckpt.weights-only --ckpt.save-async",
      "--deterministic",
      "--log.interval 3",
      "--orchestrator.batch-size 16 --orchestrator.group-size 4 --orchestrator.env "
      "[{\"id\":\"reverse-text\",\"group_size\":8,\"max_retries\":1},{\"id\":\"alphabet-sort\",\"timeout\":5,\"ratio\":2}]",
      "--orchestrator.train.max-retries 7 --orchestrator.sampling.temperature 0.8 --orchestrator.env "
      "[{\"id\":\"reverse-text\",\"sampling\":{\"max_completion_tokens\":9}}]",
      "--orchestrator.eval.interval 5 --orchestrator.eval.sampling.top-p 0.9 --orchestrator.eval.env "
      "[{\"id\":\"reverse-text\",\"max_retries\":1,\"timeout\":4,\"sampling\":{\"temperature\":0}}]",
      "--orchestrator.val.num-examples 4 --orchestrator.val.interval 2",
      "--inference.max-num-seqs 8 --inference.model.max-model-len 128 --inference.kv.block-size 8 --inference.seed 3 "
      "--inference.enable-prefix-caching false --inference.server.max-queued-requests 5",
      "--inference.max-num-seqs 4 --inference.kv.num-blocks 99 --inference.compute.num-threads 1",
      "--inference.kv-cache-offload.type native --inference.kv-cache-offload.cpu.num-bytes 1000000",
      "--trainer.optim.lr 1e-4 --trainer.model.debug.random-init --trainer.loss.type cispo",
      "--orchestrator.filters [{\"type\":\"gibberish\",\"enforce\":true},{\"type\":\"repetition\",\"window\":9}]",
  };
  for (const std::string& flags : table) {
    const config::RlConfig one = load_rl(flags + " --deployment.type colocated");
    const config::RlConfig several = load_rl(flags + " --deployment.type single_node");
    EXPECT_EQ(trainer_listing(one.trainer), trainer_listing(several.trainer)) << flags;
    EXPECT_EQ(orchestrator_listing(one.orchestrator), orchestrator_listing(several.orchestrator)) << flags;
    EXPECT_EQ(engine_listing(*one.inference), engine_listing(*several.inference)) << flags;
    EXPECT_TRUE(rl_run_options(one.trainer, {}, 0).broadcasts.empty());
    EXPECT_EQ(rl_run_options(several.trainer, {}, 0).broadcasts, folder_ / "out/broadcasts");
  }
}

TEST_F(RoleOptions, HostMemoryHoldsAsManyBlocksAsFit) {
  const auto num_blocks = [&](const std::string& flags) {
    config::RlConfig config = load_rl("--compute.dtype float32 --inference.kv.block-size 8 " + flags);
    const auto runtime = make_runtime(config.inference->compute);
    return engine_options(*config.inference, nn::load_model_config(folder_ / "model"), *runtime).num_host_blocks;
  };
  constexpr int kBlock = 2 * 8 * 16 * 4;  // keys and values of 8 tokens, one head of 16, one layer
  const std::string native = "--inference.kv-cache-offload.type native ";
  EXPECT_EQ(num_blocks(""), 0);
  EXPECT_EQ(num_blocks(native), (std::int64_t{4} << 30) / kBlock);
  EXPECT_EQ(num_blocks(fmt::format("{}--inference.kv-cache-offload.cpu.num-bytes {}", native, 3 * kBlock - 1)), 2);
  try {
    (void)num_blocks(fmt::format("{}--inference.kv-cache-offload.cpu.num-bytes {}", native, kBlock - 1));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr("kv_cache_offload.cpu.num_bytes"),
                                               ::testing::HasSubstr(std::to_string(kBlock)), ::testing::HasSubstr("found 1023")));
  }
}

TEST_F(RoleOptions, FilesHoldAsManyBlocksAsFit) {
  const auto options_of = [&](const std::string& flags) {
    config::RlConfig config =
        load_rl("--compute.dtype float32 --inference.kv.block-size 8 --inference.kv-cache-offload.type native " + flags);
    const auto runtime = make_runtime(config.inference->compute);
    return engine_options(*config.inference, nn::load_model_config(folder_ / "model"), *runtime);
  };
  constexpr int kBlock = 2 * 8 * 16 * 4;
  EXPECT_EQ(options_of("").num_disk_blocks, 0);
  const std::string disk = "--inference.kv-cache-offload.disk.path /somewhere --inference.kv-cache-offload.disk.read-timeout 0.2 ";
  const engine::EngineOptions options = options_of(fmt::format("{}--inference.kv-cache-offload.disk.num-bytes {}", disk, 7 * kBlock + 1));
  EXPECT_EQ(options.num_disk_blocks, 7);
  EXPECT_EQ(options.disk_folder, "/somewhere");
  EXPECT_EQ(options.disk_read_timeout, std::chrono::milliseconds(200));
  EXPECT_EQ(options_of(disk).num_disk_blocks, 1 << 22) << "what is known of them takes memory";
  try {
    (void)options_of(fmt::format("{}--inference.kv-cache-offload.disk.num-bytes {}", disk, kBlock - 1));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("kv_cache_offload.disk.num_bytes"));
  }
}

TEST_F(RoleOptions, FollowTheSectionOfTheRole) {
  const auto orchestrator = [&](const std::string& flags) { return load_rl(flags).orchestrator; };
  EXPECT_EQ(policy_text_name(orchestrator("--orchestrator.tokenizer.name elsewhere")), "elsewhere");
  EXPECT_EQ(policy_text_name(orchestrator("")), (folder_ / "model").string());
  EXPECT_EQ(policy_text_options(orchestrator("--inference.model.reasoning-parser qwen3")).reasoning_parser, "qwen3");
  EXPECT_EQ(policy_text_options(orchestrator("--inference.model.reasoning-parser qwen3 --orchestrator.renderer.reasoning-parser None"))
                .reasoning_parser,
            "");
  EXPECT_EQ(policy_text_options(orchestrator("--orchestrator.tokenizer.chat-template T")).chat_template, "T");
  for (const std::string& name : text::renderer_names())
    EXPECT_EQ(policy_text_options(orchestrator("--orchestrator.renderer.name " + name)).renderer, name);
  for (const std::string kept : {"template", "tool_cycle", "all"})
    EXPECT_EQ(policy_text_options(orchestrator("--orchestrator.renderer.thinking-retention " + kept)).thinking_retention, kept);
  const auto kwargs =
      policy_text_options(orchestrator("--orchestrator.renderer.chat-template-kwargs.reasoning_effort high")).template_kwargs;
  EXPECT_EQ(config::to_compact_json(kwargs), R"({"reasoning_effort": "high"})");
  const auto saved = [&](const std::string& flags) {
    return rl_run_options(load_rl("--ckpt.interval 2 " + flags).trainer, {}, 0).checkpoint->companions.chat_template;
  };
  EXPECT_EQ(saved("--tokenizer.chat-template x{{y}}"), "x{{y}}") << "beside the weights that are saved";
  EXPECT_EQ(saved(""), std::nullopt);
  const auto served = [&](const std::string& flags) {
    const auto config = load<config::InferenceConfig>(config::Command::kInference, "--model.name x --compute.device cpu " + flags);
    return compute_dtype(config.model.dtype, DeviceKind::kCpu);
  };
  EXPECT_EQ(served("--compute.dtype bfloat16"), DType::kBF16);
  EXPECT_EQ(served("--model.dtype bfloat16"), DType::kBF16);
  EXPECT_EQ(served("--model.dtype float32"), DType::kF32);
  EXPECT_EQ(load_rl("--seq-len 256").inference->model.max_model_len, 256);
  EXPECT_EQ(load_rl("--seq-len 4096").inference->model.max_model_len, 512) << "positions of the model";
}

TEST_F(RoleOptions, TrainEnvironmentsHaveTheirOwnGroupsRetriesAndSampling) {
  const config::RlConfig config = load_rl(
      "--orchestrator.batch-size 16 --orchestrator.group-size 4 --orchestrator.train.max-retries 7 --orchestrator.sampling.temperature 0.8 "
      "--orchestrator.sampling.max-completion-tokens 40 --orchestrator.env "
      "[{\"id\":\"reverse-text\",\"group_size\":8,\"max_retries\":1,\"sampling\":{\"max_completion_tokens\":9}},{\"id\":\"alphabet-sort\"}"
      "]");
  const auto envs = train_environments(config.orchestrator);
  ASSERT_EQ(envs.size(), 2u);
  EXPECT_EQ(envs[0].max_retries, 1);
  EXPECT_EQ(envs[1].max_retries, 7);
  EXPECT_FLOAT_EQ(envs[0].sampling.temperature, 0.8f) << "what an environment leaves out is the section's";
  EXPECT_EQ(envs[0].sampling.max_tokens, 9);
  EXPECT_EQ(envs[1].sampling.max_tokens, 40);
  EXPECT_EQ(orchestrator_options(config.orchestrator, 320, 0).dispatch.group_sizes, (std::vector<std::int64_t>{8, 4}));
}

TEST_F(RoleOptions, PythonWorkersAreForkedUnlessTheyAreToBeSpawned) {
  const config::RlConfig config = load_rl("--orchestrator.env [{\"id\":\"a\"},{\"id\":\"b\",\"worker_start\":\"spawn\"}]");
  EXPECT_TRUE(env_spec(config.orchestrator.train.env[0]).python.forks);
  EXPECT_FALSE(env_spec(config.orchestrator.train.env[1]).python.forks);
}

TEST_F(RoleOptions, OnlineEvaluationsHaveTheirOwnRetriesTimesAndSampling) {
  const config::RlConfig config = load_rl(
      "--orchestrator.eval.sampling.top-p 0.5 --log.interval 3 --orchestrator.val.interval 4 --orchestrator.eval.env "
      "[{\"id\":\"reverse-text\",\"max_retries\":0,\"timeout\":4,\"sampling\":{\"temperature\":0}}]");
  const orchestrator::OrchestratorOptions options = orchestrator_options(config.orchestrator, 320, 0);
  ASSERT_EQ(options.evals.size(), 1u);
  EXPECT_EQ(options.evals[0].task.retry.max_attempts, 1);
  EXPECT_EQ(options.evals[0].task.rollout_timeout, std::chrono::seconds(4));
  EXPECT_FLOAT_EQ(options.evals[0].task.sampling.top_p, 0.5f);
  EXPECT_EQ(options.evals[0].task.sampling.temperature, 0);
  EXPECT_EQ(options.status_interval, std::chrono::seconds(3));
  ASSERT_TRUE(options.validation.has_value());
  EXPECT_EQ(options.validation->interval, 4);
}

TEST_F(RoleOptions, APlanOfSftCountsTheRowsOfAPass) {
  const auto config =
      load<config::SftConfig>(config::Command::kSft, "--model.name x --data.seq-len 96 --data.batch-size 8 --data.micro-batch-size 4");
  EXPECT_EQ(sft_row_tokens(config.data), 4 * 96);
}

}  // namespace
}  // namespace prl::launch
