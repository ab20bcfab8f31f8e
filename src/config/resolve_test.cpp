#include "config/resolve.hpp"
#include "base/testing/source_dir.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/detail/test_support.hpp"
#include "config/text_format.hpp"

namespace prl::config {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::is_not_built;
using ::testing::IsEmpty;
using testing::kRlLine;
using testing::load_line;
using ::testing::SizeIs;

TEST(ResolveRl, DefaultsAreOneProcessWithEverythingInMemory) {
  const auto rl = load_line<RlConfig>(kRlLine);
  EXPECT_TRUE(std::holds_alternative<ColocatedDeployment>(*rl.config.deployment));
  EXPECT_TRUE(std::holds_alternative<LocalBroadcast>(rl.config.trainer.weight_broadcast));
  EXPECT_TRUE(std::holds_alternative<LocalBroadcast>(rl.config.inference->weight_broadcast));
  EXPECT_TRUE(std::holds_alternative<LocalRollouts>(rl.config.orchestrator.rollout_transport));
  EXPECT_EQ(rl.config.orchestrator.batch_size, 128);
  EXPECT_EQ(rl.config.orchestrator.max_inflight_rollouts, 128);
  EXPECT_EQ(rl.config.trainer.max_async_level, 1);
  EXPECT_THAT(rl.not_built, IsEmpty());
  EXPECT_THAT(rl.warnings, IsEmpty());
}

TEST(ResolveRl, ShareOfMemoryIsForEnginesAlone) {
  const std::string line = kRlLine + "--inference.gpu-memory-utilization 0.5 ";
  EXPECT_THAT(load_line<RlConfig>(line).warnings, Contains(HasSubstr("inference.gpu_memory_utilization (in one process")));
  EXPECT_THAT(load_line<RlConfig>(line + "--deployment.type single_node").warnings, IsEmpty());
}

TEST(ResolveRl, ProcessesExchangeFiles) {
  const auto rl = load_line<RlConfig>(kRlLine + "--deployment.type single_node");
  EXPECT_TRUE(std::holds_alternative<FilesystemBroadcast>(rl.config.inference->weight_broadcast));
  EXPECT_TRUE(std::holds_alternative<FilesystemRollouts>(rl.config.trainer.rollout_transport));
  Context two = testing::plain_context();
  two.num_devices = 2;
  EXPECT_TRUE(std::holds_alternative<SingleNodeDeployment>(*load_line<RlConfig>(kRlLine, two).config.deployment));
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--deployment.type single_node --weight-broadcast.type local"),
              HasSubstr("weight_broadcast.type: local needs deployment.type colocated"));
  EXPECT_TRUE(std::holds_alternative<ZmqRollouts>(
      load_line<RlConfig>(kRlLine + "--deployment.type single_node --rollout-transport.type zmq").config.orchestrator.rollout_transport));
}

TEST(ResolveRl, SharedKeysReachTheRoles) {
  const auto rl = load_line<RlConfig>(
      kRlLine +
      "--max-steps 7 --seq-len 512 --max-async-level 3 --log.level debug --seed 9 --compute.num-threads 2 --output-dir out/x "
      "--tokenizer.chat-template t.jinja --max-model-len 256 --ckpt.interval 4 --ckpt.weights-only --ckpt.resume-step -1 "
      "--wandb.offline --wandb.project p --env-vars {\"A\":\"1\"} --trainer.env-vars {\"A\":\"2\"}");
  const RlConfig& c = rl.config;
  EXPECT_EQ(c.trainer.model.name, "./m");
  EXPECT_EQ(c.orchestrator.student.model.name, "./m");
  EXPECT_EQ(c.inference->model.name, "./m");
  EXPECT_EQ(c.trainer.max_steps, 7);
  EXPECT_EQ(c.orchestrator.max_steps, 7);
  EXPECT_EQ(c.trainer.model.seq_len, 512);
  EXPECT_EQ(c.orchestrator.seq_len, 512);
  EXPECT_EQ(c.trainer.max_async_level, 3);
  EXPECT_EQ(c.orchestrator.max_async_level, 3);
  EXPECT_EQ(c.inference->log.level, LogLevel::kDebug);
  EXPECT_EQ(c.orchestrator.seed, 9);
  EXPECT_EQ(c.inference->compute.num_threads, 2);
  EXPECT_EQ(c.trainer.output_dir, "out/x");
  EXPECT_EQ(c.inference->model.chat_template, "t.jinja");
  EXPECT_EQ(c.inference->model.max_model_len, 256);
  EXPECT_EQ(c.trainer.ckpt->interval, 4);
  EXPECT_EQ(c.orchestrator.ckpt->interval, 4);
  EXPECT_EQ(c.orchestrator.ckpt->resume_step, -1);
  EXPECT_TRUE(c.trainer.ckpt->weights_only);
  EXPECT_EQ(c.orchestrator.wandb->project, "p");
  EXPECT_EQ(c.trainer.env_vars.at("A"), "2");
  EXPECT_EQ(c.orchestrator.env_vars.at("A"), "1");
}

TEST(ResolveRl, AChatTemplateNamedForOneRoleIsThatOfAllThree) {
  for (const char* key : {"--tokenizer.chat-template", "--trainer.tokenizer.chat-template", "--orchestrator.tokenizer.chat-template",
                          "--inference.model.chat-template"}) {
    const auto rl = load_line<RlConfig>(kRlLine + key + " t.jinja");
    EXPECT_EQ(rl.config.trainer.tokenizer.chat_template, "t.jinja") << key;
    EXPECT_EQ(rl.config.orchestrator.tokenizer.chat_template, "t.jinja") << key;
    EXPECT_EQ(rl.config.inference->model.chat_template, "t.jinja") << key;
  }
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--inference.model.chat-template a.jinja --trainer.tokenizer.chat-template b.jinja"),
              HasSubstr("differs from"));
}

TEST(ResolveRl, DifferentExplicitValuesAreListedInPairs) {
  const std::string error = error_of<RlConfig>(kRlLine + "--max-steps 7 --trainer.max-steps 8 --orchestrator.seed 1 --seed 2");
  EXPECT_THAT(error, HasSubstr("trainer.max_steps: differs from max_steps = \"7\" [flag --max-steps]"));
  EXPECT_THAT(error, HasSubstr("orchestrator.seed: differs from seed"));
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--max-steps 7 --trainer.max-steps 7"), "");
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--trainer.output-dir elsewhere"),
              HasSubstr("trainer.output_dir: must be the folder of the run"));
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--trainer.max-steps 3 --orchestrator.max-steps 4"),
              HasSubstr("must equal orchestrator.max_steps"));
}

TEST(ResolveRl, OneSideSpeaksForBoth) {
  const auto rl = load_line<RlConfig>(kRlLine + "--trainer.ckpt.interval 10 --trainer.ckpt.keep-last 3 --orchestrator.max-steps 5");
  EXPECT_EQ(rl.config.orchestrator.ckpt->interval, 10);
  EXPECT_EQ(rl.config.orchestrator.ckpt->keep_last, 3);
  EXPECT_EQ(rl.config.trainer.max_steps, 5);
}

TEST(ResolveRl, SwitchingOffWinsOverSections) {
  const auto rl = load_line<RlConfig>(kRlLine + "--trainer.wandb.project p --no-wandb --trainer.ckpt --ckpt None");
  EXPECT_FALSE(rl.config.trainer.wandb.has_value());
  EXPECT_FALSE(rl.config.trainer.ckpt.has_value());
  EXPECT_FALSE(rl.config.orchestrator.ckpt.has_value());
}

TEST(ResolveRl, ContradictionsAreFound) {
  const auto error = [](const std::string& flags) { return error_of<RlConfig>(kRlLine + flags); };
  EXPECT_THAT(error("--orchestrator.batch-size 10 --orchestrator.group-size 4"),
              HasSubstr("orchestrator.group_size: must divide batch_size"));
  EXPECT_THAT(error("--orchestrator.batch-size 8 --orchestrator.token-batch-size 10"), HasSubstr("not both"));
  EXPECT_THAT(error("--seq-len 128 --inference.model.max-model-len 256"),
              HasSubstr("seq_len: must be at least inference.model.max_model_len 256"));
  EXPECT_THAT(error("--trainer.model.seq-len 100 --orchestrator.seq-len 200"), HasSubstr("trainer.model.seq_len: must be at least"));
  EXPECT_THAT(error("--inference.model.served-name x"), HasSubstr("inference.model.name: \"x\" differs from"));
  EXPECT_THAT(error_of<RlConfig>("rl --inference --trainer.model.name ./a --orchestrator.model.name ./b --inference.model.name ./b"),
              HasSubstr("trainer.model.name: \"./a\" differs from orchestrator.student.model.name \"./b\""));
  EXPECT_THAT(error("--inference.server.port 8001 --orchestrator.client.base-url http://localhost:8000/v1"),
              HasSubstr("must name the port of inference.server, which is 8001"));
  EXPECT_THAT(error("--clean-output-dir --ckpt.resume-step 7"), HasSubstr("clean_output_dir: contradicts ckpt.resume_step, which is 7"));
  EXPECT_THAT(error_of<SftConfig>("sft --model.name ./m --clean-output-dir --ckpt.resume-step -1"),
              HasSubstr("clean_output_dir: contradicts"));
  EXPECT_THAT(error("--trainer.scheduler.type linear"), HasSubstr("needs max_steps"));
  EXPECT_THAT(error("--trainer.scheduler.type linear --max-steps 15"), HasSubstr("do not fit into max_steps 15"));
  EXPECT_THAT(error("--trainer.scheduler.type cosine --max-steps 10"), HasSubstr("must be less than max_steps 10"));
  EXPECT_THAT(error("--deterministic --max-async-level 1"), HasSubstr("must be 0 when deterministic is on"));
  EXPECT_THAT(error("--trainer.loss.type rloo --orchestrator.advantage.type grpo"), HasSubstr("contradicts trainer.loss.type rloo"));
  EXPECT_THAT(error("--orchestrator.max-inflight-rollouts 2 --orchestrator.group-size 4"), HasSubstr("must be at least the group size 4"));
  EXPECT_THAT(error("--orchestrator.env [{\"id\":\"reverse-text\"},{\"id\":\"reverse-text\"}]"), HasSubstr("two environments are called"));
  EXPECT_THAT(error("--orchestrator.env.0.name all"), HasSubstr("\"all\" is reserved"));
  EXPECT_THAT(error("--orchestrator.teacher.model.name t"), HasSubstr("training_mode rl uses no teacher"));
  EXPECT_THAT(error("--orchestrator.buffer.easy-threshold 0.2 --orchestrator.buffer.hard-threshold 0.5"),
              HasSubstr("must be below easy_threshold"));
  EXPECT_THAT(error("--env-vars {\"CUDA_VISIBLE_DEVICES\":\"0\"}"), HasSubstr("env_vars.CUDA_VISIBLE_DEVICES: is set by the launcher"));
  EXPECT_THAT(error("--orchestrator.sampling.extra-body {\"temperature\":1}"), HasSubstr("temperature is a key of sampling"));
  EXPECT_THAT(error_of<RlConfig>("rl --model.name ./m --deployment.type colocated"), HasSubstr("add an [inference] section"));
}

TEST(ResolveRl, ATeacherOfItsOwn) {
  const std::string opd = "rl --model.name ./m --inference --orchestrator.training-mode opd --orchestrator.teacher.model.name ./t ";
  EXPECT_THAT(error_of<RlConfig>(opd), HasSubstr("orchestrator.teacher.client.base_url: must name the teacher's server"));
  const auto away = load_line<RlConfig>(opd + "--orchestrator.teacher.client.base-url http://h:9000/v1");
  EXPECT_TRUE(away.not_built.empty());
  EXPECT_FALSE(away.config.teacher_inference.has_value());
  EXPECT_TRUE(std::holds_alternative<ColocatedDeployment>(*away.config.deployment));

  const auto own = load_line<RlConfig>(opd + "--teacher-inference --inference.server.port 9100 --compute.num-threads 3").config;
  EXPECT_TRUE(std::holds_alternative<SingleNodeDeployment>(*own.deployment)) << "a second server is a second process";
  EXPECT_EQ(own.teacher_inference->model.name, "./t");
  EXPECT_EQ(own.teacher_inference->server.port, 9101);
  EXPECT_EQ(own.teacher_inference->compute.num_threads, 3);
  EXPECT_EQ(own.orchestrator.teacher->client.base_url.front(), "http://127.0.0.1:9101/v1");

  const auto gpus = load_line<RlConfig>(opd + "--teacher-gpu-ids [1] --inference.max-num-seqs 7").config;
  EXPECT_EQ(gpus.teacher_inference->max_num_seqs, 7) << "a copy of [inference]";
  EXPECT_EQ(gpus.teacher_inference->model.name, "./t");
  const auto named = load_line<RlConfig>(
                         "rl --model.name ./m --inference --orchestrator.training-mode sft "
                         "--teacher-inference.model.name ./t --teacher-inference.model.served-name big")
                         .config;
  EXPECT_EQ(named.orchestrator.teacher->model.name, "big");

  EXPECT_THAT(error_of<RlConfig>(opd + "--teacher-inference --deployment.type colocated"), HasSubstr("colocated is one process"));
  EXPECT_THAT(error_of<RlConfig>(opd + "--teacher-inference.server.port 8000"),
              HasSubstr("must not be one of inference, whose engines listen at 8000 to 8000"));
  EXPECT_THAT(error_of<RlConfig>(opd + "--teacher-inference.model.name ./other"), HasSubstr("differs from \"./other\""));
  EXPECT_THAT(error_of<RlConfig>("rl --model.name ./m --inference --teacher-inference.model.name ./t"), HasSubstr("uses no teacher"));
  EXPECT_THAT(error_of<RlConfig>("rl --model.name ./m --inference --orchestrator.training-mode opd --teacher-inference"),
              HasSubstr("which model is the teacher?"));
}

TEST(ResolveRl, ATeacherBesideTheReward) {
  const std::string tau = "rl --model.name ./m --inference --trainer.loss.teacher-tau 0.5 ";
  EXPECT_THAT(error_of<RlConfig>(tau), HasSubstr("teacher_tau: needs orchestrator.teacher"));
  const auto line =
      load_line<RlConfig>(tau + "--orchestrator.teacher-model.model.name ./t --orchestrator.teacher-model.client.base-url http://h:9/v1");
  EXPECT_TRUE(line.not_built.empty());
  EXPECT_EQ(line.config.orchestrator.training_mode, TrainingMode::kRl);
  EXPECT_EQ(line.config.orchestrator.teacher->model.name, "./t");
}

TEST(ResolveRl, AllContradictionsComeAtOnce) {
  const std::string error = error_of<RlConfig>(
      kRlLine + "--max-stepz 3 --seq-len x --orchestrator.batch-size 10 --orchestrator.group-size 4 --trainer.scheduler.type linear");
  EXPECT_THAT(error, HasSubstr("4 problems"));
}

TEST(ResolveRl, LossesNamedAfterAdvantagesChooseThem) {
  EXPECT_EQ(load_line<RlConfig>(kRlLine + "--trainer.loss.type rloo").config.orchestrator.advantage.type, AdvantageType::kRloo);
  EXPECT_EQ(load_line<RlConfig>(kRlLine + "--trainer.loss.type opo").config.orchestrator.advantage.type, AdvantageType::kOpo);
  EXPECT_EQ(load_line<RlConfig>(kRlLine + "--trainer.loss.type cispo").config.orchestrator.advantage.type, AdvantageType::kGrpo);
}

TEST(ResolveRl, DeterministicIsLockStep) {
  const auto rl = load_line<RlConfig>(kRlLine + "--deterministic");
  EXPECT_EQ(rl.config.trainer.max_async_level, 0);
  EXPECT_EQ(rl.config.orchestrator.max_async_level, 0);
  EXPECT_TRUE(rl.config.inference->deterministic);
}

TEST(ResolveRl, TheClientFollowsTheServer) {
  EXPECT_EQ(load_line<RlConfig>(kRlLine + "--inference.server.port 8123").config.orchestrator.student.client.base_url.front(),
            "http://127.0.0.1:8123/v1");
  const auto external = load_line<RlConfig>("rl --model.name ./m --orchestrator.client.base-url http://10.0.0.1:9000/v1");
  EXPECT_FALSE(external.config.inference.has_value());
  EXPECT_TRUE(std::holds_alternative<SingleNodeDeployment>(*external.config.deployment));
  EXPECT_THAT(external.warnings, Contains(HasSubstr("no server is started, the orchestrator connects to http://10.0.0.1:9000/v1")));
}

TEST(ResolveRl, OversamplingAndConcurrencyBoundTheRolloutsInFlight) {
  EXPECT_EQ(load_line<RlConfig>(kRlLine + "--orchestrator.batch-size 8 --orchestrator.oversampling-factor 2.5")
                .config.orchestrator.max_inflight_rollouts,
            20);
  EXPECT_EQ(load_line<RlConfig>(kRlLine + "--orchestrator.concurrency.max-inflight 40").config.orchestrator.max_inflight_rollouts, 40);
  EXPECT_EQ(load_line<RlConfig>(kRlLine + "--orchestrator.max-concurrent 64").config.orchestrator.max_inflight_rollouts, 64);
}

TEST(ResolveRl, BenchModeTrainsOnFakeDataOfTheOrchestratorsSize) {
  const auto tables = load_line<RlConfig>(kRlLine + "--bench.output-json t.json --orchestrator.bench.output-json o.json").config;
  EXPECT_EQ(tables.trainer.bench->output_json, "t.json");
  EXPECT_EQ(tables.orchestrator.bench->output_json, "o.json");
  EXPECT_EQ(load_line<RlConfig>(kRlLine + "--bench.output-json t.json").config.orchestrator.bench->output_json, std::nullopt);
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--bench.output-json t.json --orchestrator.bench.output-json t.json"),
              HasSubstr("the file of the trainer's table"));
  const auto rl = load_line<RlConfig>(kRlLine + "--bench --ckpt --orchestrator.batch-size 64 --orchestrator.eval --wandb.offline");
  EXPECT_EQ(rl.config.trainer.max_steps, 4);
  EXPECT_EQ(rl.config.orchestrator.max_steps, 4);
  EXPECT_EQ(rl.config.trainer.data.fake->batch_size, 64);
  EXPECT_FALSE(rl.config.trainer.ckpt.has_value());
  EXPECT_FALSE(rl.config.orchestrator.eval.has_value());
  EXPECT_EQ(rl.config.trainer.wandb->project, "prime-rl-bench");
}

TEST(ResolveRl, TwoGpusAreTwoProcessesAndOneIsOne) {
  const auto two = load_line<RlConfig>(kRlLine + "--inference-gpu-ids 0 --trainer-gpu-ids 1");
  EXPECT_TRUE(std::holds_alternative<SingleNodeDeployment>(*two.config.deployment));
  EXPECT_THAT(two.not_built, IsEmpty());
  const auto one = load_line<RlConfig>(kRlLine + "--inference-gpu-ids 0 --trainer-gpu-ids 0");
  EXPECT_TRUE(std::holds_alternative<ColocatedDeployment>(*one.config.deployment));
  const auto three = load_line<RlConfig>(kRlLine + "--inference-gpu-ids 0,1 --trainer-gpu-ids 2");
  EXPECT_THAT(three.not_built, IsEmpty());
  EXPECT_EQ(num_engines(*three.config.inference), 2);
  EXPECT_THAT(three.config.orchestrator.student.client.base_url, SizeIs(2));
  const auto ranks = load_line<RlConfig>(kRlLine + "--inference-gpu-ids 0 --trainer-gpu-ids 1,2");
  EXPECT_THAT(ranks.not_built, IsEmpty());
  EXPECT_EQ(std::get<SingleNodeDeployment>(*ranks.config.deployment).num_train_gpus, 2);
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--inference-gpu-ids 0 --trainer-gpu-ids 1 --deployment.type colocated"), HasSubstr("differ"));
}

TEST(ResolveRl, EnginesFollowFromGpusOrCopiesAndHaveAnAddressEach) {
  const std::string node = kRlLine + "--compute.device cpu --deployment.type single_node ";
  const auto copies = load_line<RlConfig>(node + "--inference.parallel.dp 3 --inference.server.port 8100").config;
  EXPECT_THAT(copies.orchestrator.student.client.base_url,
              ElementsAre("http://127.0.0.1:8100/v1", "http://127.0.0.1:8101/v1", "http://127.0.0.1:8102/v1"));
  EXPECT_FALSE(copies.inference_gpu_ids.has_value());
  EXPECT_EQ(num_engines(*load_line<RlConfig>(node + "--deployment.num-infer-gpus 2").config.inference), 2);
  EXPECT_EQ(num_engines(*load_line<RlConfig>(node + "--inference.api-server-count 4").config.inference), 4);
  EXPECT_THAT(error_of<RlConfig>(node + "--deployment.num-infer-gpus 2 --inference.parallel.dp 1"), HasSubstr("inference.parallel.dp"));
  EXPECT_THAT(error_of<RlConfig>(node + "--inference.parallel.dp 3 --inference.server.port 65534"), HasSubstr("inference.server.port"));
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--deployment.type colocated --inference.parallel.dp 2"), HasSubstr("single_node"));
  Context gpus = testing::plain_context();
  gpus.num_devices = 8;
  const auto split = load_line<RlConfig>(kRlLine + "--deployment.type single_node --deployment.num-infer-gpus 3", gpus).config;
  EXPECT_THAT(*split.inference_gpu_ids, ElementsAre(0, 1, 2));
  EXPECT_THAT(*split.trainer_gpu_ids, ElementsAre(3));
  const auto both =
      load_line<RlConfig>(kRlLine + "--deployment.type single_node --deployment.num-infer-gpus 2 --deployment.num-train-gpus 4", gpus)
          .config;
  EXPECT_THAT(*both.trainer_gpu_ids, ElementsAre(2, 3, 4, 5));
}

TEST(ResolveRl, OverSeveralNodesEveryGpuOfInferenceHasAnEngine) {
  const std::string nodes = kRlLine + "--deployment.type multi_node --deployment.gpus-per-node 4 ";
  const auto two = load_line<RlConfig>(nodes + "--deployment.num-infer-nodes 2 --deployment.num-train-nodes 3");
  EXPECT_THAT(two.not_built, IsEmpty());
  EXPECT_EQ(num_engines(*two.config.inference), 8);
  EXPECT_TRUE(std::holds_alternative<FilesystemBroadcast>(two.config.trainer.weight_broadcast));
  EXPECT_EQ(std::get<MultiNodeDeployment>(*load_line<RlConfig>(nodes).config.deployment).num_infer_nodes, 1);
  EXPECT_THAT(error_of<RlConfig>(nodes + "--deployment.num-infer-nodes 0"), HasSubstr("there is an [inference] section"));
  EXPECT_THAT(error_of<RlConfig>(nodes + "--inference.parallel.dp 3"), HasSubstr("1 nodes with 4 GPUs each have 4 engines"));
  EXPECT_THAT(error_of<RlConfig>(nodes + "--inference-gpu-ids 0 --trainer-gpu-ids 1"), HasSubstr("is for one machine"));
}

TEST(ResolveRl, DevicesThatShareLayersAreOneEngine) {
  const std::string node = kRlLine + "--deployment.type single_node --inference.parallel.tp 2 ";
  Context gpus;
  gpus.num_devices = 8;
  const auto one = load_line<RlConfig>(node, gpus).config;
  EXPECT_EQ(num_engines(*one.inference), 1);
  EXPECT_EQ(std::get<SingleNodeDeployment>(*one.deployment).num_infer_gpus, 2);
  EXPECT_THAT(*one.inference_gpu_ids, ElementsAre(0, 1));
  EXPECT_THAT(*one.trainer_gpu_ids, ElementsAre(2));
  const auto two = load_line<RlConfig>(node + "--deployment.num-infer-gpus 4 --deployment.num-train-gpus 2", gpus).config;
  EXPECT_EQ(num_engines(*two.inference), 2);
  EXPECT_THAT(two.orchestrator.student.client.base_url, SizeIs(2));
  EXPECT_THAT(*two.inference_gpu_ids, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(*two.trainer_gpu_ids, ElementsAre(4, 5));
  EXPECT_EQ(num_engines(*load_line<RlConfig>(node + "--inference.parallel.dp 3").config.inference), 3);
  EXPECT_EQ(num_engines(*load_line<RlConfig>(node + "--inference-gpu-ids 0,1,2,3 --trainer-gpu-ids 4").config.inference), 2);
  EXPECT_THAT(error_of<RlConfig>(node + "--deployment.num-infer-gpus 3"),
              HasSubstr("does not divide deployment.num_infer_gpus, which is 3"));
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--deployment.type colocated --inference.parallel.tp 2"),
              HasSubstr("use deployment.type single_node"));
  EXPECT_TRUE(std::holds_alternative<SingleNodeDeployment>(*load_line<RlConfig>(kRlLine + "--inference.parallel.tp 2").config.deployment));
  const std::string nodes = kRlLine + "--deployment.type multi_node --deployment.num-infer-nodes 2 --deployment.gpus-per-node ";
  EXPECT_EQ(num_engines(*load_line<RlConfig>(nodes + "4 --inference.parallel.tp 2").config.inference), 4);
  EXPECT_THAT(error_of<RlConfig>(nodes + "3 --inference.parallel.tp 2"), HasSubstr("does not divide the 3 GPUs of a node"));
  EXPECT_EQ(load_line<InferenceConfig>("inference --model.name ./m --vllm.tensor-parallel-size 2").config.parallel.tp, 2);
}

TEST(ResolveRl, NodesInGroupsHoldACopyOfTheStateEach) {
  const std::string nodes = kRlLine + "--deployment.type multi_node --deployment.num-train-nodes 4 ";
  EXPECT_EQ(load_line<RlConfig>(nodes + "--deployment.nodes-per-fsdp-group 2").config.trainer.model.dp_replicate, 2);
  EXPECT_EQ(
      load_line<RlConfig>(nodes + "--deployment.nodes-per-fsdp-group 1 --trainer.model.dp-replicate 4").config.trainer.model.dp_replicate,
      4);
  EXPECT_THAT(error_of<RlConfig>(nodes + "--deployment.nodes-per-fsdp-group 3"), HasSubstr("must divide the 4 nodes"));
  EXPECT_THAT(error_of<RlConfig>(nodes + "--deployment.nodes-per-fsdp-group 2 --trainer.model.dp-replicate 4"),
              HasSubstr("hold 2 copies of the state, and trainer.model.dp_replicate is 4"));
  const std::string sft = "sft --model.name ./m --data.name ./d.jsonl --deployment.type multi_node --deployment.num-nodes 6 ";
  EXPECT_EQ(load_line<SftConfig>(sft + "--deployment.nodes-per-fsdp-group 3").config.model.dp_replicate, 2);
}

TEST(ResolveRl, RanksToARowAndCopiesDivideTheRanksThereAre) {
  constexpr const char* kOne = "is 2, but must divide the number of trainer ranks, which is 1 in this deployment";
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--trainer.model.cp 2"), AllOf(HasSubstr("trainer.model.cp"), HasSubstr(kOne)));
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--trainer.model.dp-replicate 2"),
              AllOf(HasSubstr("trainer.model.dp_replicate"), HasSubstr(kOne)));
  const std::string processes = kRlLine + "--trainer.model.cp 2 --deployment.type single_node --deployment.num-train-gpus ";
  EXPECT_THAT(load_line<RlConfig>(processes + "4").not_built, IsEmpty());
  EXPECT_THAT(error_of<RlConfig>(processes + "3"), HasSubstr("which is 3 in this deployment"));
  const std::string nodes = " --deployment.type multi_node --deployment.gpus-per-node 1 ";
  EXPECT_THAT(error_of<RlConfig>(kRlLine + nodes + "--deployment.num-train-nodes 3 --trainer.model.cp 2"), HasSubstr("which is 3"));
  const std::string sft = "sft --model.name ./m --data.name ./d.jsonl --model.cp 2 ";
  EXPECT_THAT(error_of<SftConfig>(sft + nodes + "--deployment.num-nodes 5"), AllOf(HasSubstr("model.cp"), HasSubstr("which is 5")));
  EXPECT_THAT(error_of<SftConfig>(sft + "--slurm"), HasSubstr(kOne));
  // Ranks of one node may be started by hand.
  EXPECT_THAT(load_line<SftConfig>(sft).not_built, IsEmpty());
}

TEST(ResolveRl, ATeacherHasAnEngineOnEachOfItsGpus) {
  const std::string opd = kRlLine + "--orchestrator.training-mode opd --teacher-inference.model.name some/teacher ";
  const auto two = load_line<RlConfig>(opd + "--inference-gpu-ids 0,1 --trainer-gpu-ids 2 --teacher-gpu-ids 3,4");
  EXPECT_THAT(two.not_built, IsEmpty());
  EXPECT_EQ(num_engines(*two.config.teacher_inference), 2);
  EXPECT_EQ(two.config.teacher_inference->server.port, two.config.inference->server.port + 2) << "after the engines' ports";
  EXPECT_THAT(two.config.orchestrator.teacher->client.base_url, SizeIs(1)) << "the router's";
  EXPECT_THAT(error_of<RlConfig>(opd + "--teacher-gpu-ids 3,4 --teacher-inference.parallel.dp 3"),
              HasSubstr("is 3, but the 2 GPUs that teacher_gpu_ids names are 2 engines"));
  const std::string shared = opd + "--inference-gpu-ids 0 --trainer-gpu-ids 1 --teacher-inference.parallel.tp 2 --teacher-gpu-ids ";
  EXPECT_EQ(num_engines(*load_line<RlConfig>(shared + "2,3,4,5").config.teacher_inference), 2);
  EXPECT_EQ(num_engines(*load_line<RlConfig>(shared + "2,3").config.teacher_inference), 1);
  for (const char* ids : {"2", "2,3,4"}) EXPECT_THAT(error_of<RlConfig>(shared + ids), HasSubstr("which does not divide the")) << ids;
}

TEST(ResolveRl, RolesOfSeveralGpusHaveOneEach) {
  Context gpus = testing::plain_context();
  gpus.num_devices = 2;
  for (const char* flags : {"", "--deployment.type single_node"}) {
    const auto two = load_line<RlConfig>(kRlLine + flags, gpus).config;
    ASSERT_TRUE(two.inference_gpu_ids && two.trainer_gpu_ids) << flags;
    EXPECT_THAT(*two.inference_gpu_ids, ElementsAre(0));
    EXPECT_THAT(*two.trainer_gpu_ids, ElementsAre(1));
  }
  EXPECT_THAT(*load_line<RlConfig>(kRlLine + "--inference.compute.device cpu", gpus).config.trainer_gpu_ids, ElementsAre(0));
  const auto cpu = load_line<RlConfig>(kRlLine + "--compute.device cpu", gpus).config;
  EXPECT_TRUE(std::holds_alternative<ColocatedDeployment>(*cpu.deployment)) << "GPUs that nobody computes on";
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--deployment.type single_node --deployment.num-train-gpus 2", gpus),
              HasSubstr("they need GPUs 0 to 2, but there are 2"));
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--inference-gpu-ids 0,5 --trainer-gpu-ids 1", gpus),
              HasSubstr("inference_gpu_ids: names 5, but this machine has 2 GPUs"));
  // One GPU is shared, and the node of a batch job may have others than this machine.
  const auto one = load_line<RlConfig>(kRlLine + "--deployment.type single_node").config;
  EXPECT_FALSE(one.inference_gpu_ids || one.trainer_gpu_ids);
  EXPECT_FALSE(load_line<RlConfig>(kRlLine + "--deployment.type single_node --slurm.partition gpu", gpus).config.trainer_gpu_ids);
}

TEST(ResolveRl, SeveralRunsShareWhatIsNotTheirs) {
  const std::string line = "rl --inference --model.name ./m --seq-len 640 --trainer.model.lora.rank 32 --trainer.max-concurrent-runs 12 ";
  const auto rl = load_line<RlConfig>(line);
  EXPECT_TRUE(rl.not_built.empty());
  EXPECT_TRUE(std::holds_alternative<SingleNodeDeployment>(*rl.config.deployment));
  EXPECT_TRUE(rl.config.inference->enable_lora);
  EXPECT_EQ(rl.config.inference->max_loras, 12);
  EXPECT_EQ(rl.config.inference->max_lora_rank, 32);
  EXPECT_EQ(rl.config.inference->model.max_model_len, 640);
  const auto error = [&](const std::string& flags) { return error_of<RlConfig>(line + flags); };
  EXPECT_THAT(error("--orchestrator.batch-size 8"), HasSubstr("orchestrator: is set, but each of several runs"));
  EXPECT_THAT(error("--deployment.type colocated"), HasSubstr("deployment.type: must be single_node"));
  EXPECT_THAT(error("--inference.enable-lora false"), HasSubstr("inference.enable_lora: must be on"));
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--runs one.toml"), HasSubstr("runs: needs trainer.max_concurrent_runs above 1"));
  EXPECT_THAT(error_of<RlConfig>("rl --inference --model.name ./m --trainer.max-concurrent-runs 2"), HasSubstr("needs model.lora"));
}

TEST(ResolveRl, ALossInPythonNeedsItsFunction) {
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--trainer.loss.type custom"), HasSubstr("loss.import_path"));
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--trainer.loss.type custom --trainer.loss.import-path credit"), HasSubstr("module.name"));
  const auto rl =
      load_line<RlConfig>(kRlLine + "--trainer.loss.type custom --trainer.loss.import-path credit.loss --trainer.loss.path here");
  EXPECT_TRUE(rl.not_built.empty());
  EXPECT_EQ(std::get<CustomLossConfig>(rl.config.trainer.loss).path, "here");
}

TEST(ResolveRl, HeadersFromTheRolloutsStateNameAFieldThatThereIs) {
  const std::string flag = "--orchestrator.client.extra-headers-from-state ";
  EXPECT_TRUE(load_line<RlConfig>(kRlLine + flag + R"({"X-Task":"task","X-Row":"example_id"})").not_built.empty());
  EXPECT_THAT(
      error_of<RlConfig>(kRlLine + flag + R"({"X-Task":"name"})"),
      HasSubstr("extra_headers_from_state.X-Task: there is no field 'name'; there are trajectory_id, example_id, rollout_idx, task"));
}

TEST(ResolveRl, WhatIsNotBuiltIsNamedWithItsKey) {
  const auto expect = [](const std::string& flags, std::string_view feature) {
    const auto rl = load_line<RlConfig>(kRlLine + flags);
    EXPECT_TRUE(is_not_built(rl.not_built, feature)) << flags;
    EXPECT_THROW(require_built(rl.not_built), Error) << flags;
  };
  expect("--trainer.model.lora.modules-to-save lm_head --deployment.type single_node", "whole modules");
  expect("--weight-broadcast.type nixl --deployment.type single_node", "NIXL");
  expect("--weight-broadcast.type nccl --trainer.model.lora.modules-to-save lm_head --deployment.type single_node", "whole modules");
  expect("--trainer.model.tp 2", "tensor parallelism");
  expect("--trainer.model.vlm.freeze-vision-encoder false", "vision tower");
  expect("--model.vlm --orchestrator.training-mode opsd", "images where a teacher is asked");
  EXPECT_THAT(load_line<RlConfig>(kRlLine + "--model.vlm --model.vlm.vision-encoder-attr visual").not_built, IsEmpty());
  expect("--trainer.model.quantization.type mxfp8", "8-bit");
  expect("--trainer.model.fp8 --trainer.model.reshard-after-forward", "8-bit weights whose layers");
  expect("--trainer.model.full-offload", "on the host");
  expect("--inference.vllm.swap_space 4", "a setting of vLLM");
  EXPECT_EQ(load_line<RlConfig>(kRlLine + "--inference.vllm.swap_space 4").not_built.front().key, "inference.vllm.swap_space");
  expect("--inference.kv-cache-offload.type mooncake", "a Mooncake store");
  const auto disk = load_line<RlConfig>(kRlLine + "--inference.kv-cache-offload.type native --inference.kv-cache-offload.disk.path /tmp");
  EXPECT_THAT(disk.not_built, IsEmpty());
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--inference.kv-cache-offload.type native --inference.kv-cache-offload.disk.num-bytes 1000000"),
              HasSubstr("inference.kv_cache_offload.disk.path: is needed"));
  EXPECT_THAT(load_line<RlConfig>(kRlLine + "--inference.kv-cache-offload.type native").not_built, IsEmpty());
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--inference.kv-cache-offload.type native --inference.enable-prefix-caching false"),
              HasSubstr("inference.kv_cache_offload: needs enable_prefix_caching"));
  const auto hub = load_line<RlConfig>("rl --inference --model.name Qwen/Qwen3-0.6B");
  EXPECT_THAT(hub.not_built, IsEmpty());
}

TEST(ResolveRl, AlgorithmsOfTheNewestSpelling) {
  const auto orchestrator = [](const std::string& flags) {
    const auto rl = load_line<RlConfig>(kRlLine + flags);
    EXPECT_THAT(rl.not_built, IsEmpty()) << flags;
    return rl.config.orchestrator;
  };
  const AdvantageConfig rae = orchestrator("--orchestrator.algo.type rae --orchestrator.algo.decay 0.5").advantage;
  EXPECT_EQ(rae.type, AdvantageType::kRae);
  EXPECT_EQ(rae.decay, 0.5);
  const AdvantageConfig echo = orchestrator("--orchestrator.algo.type echo --orchestrator.algo.roles.user.alpha 0.3").advantage;
  EXPECT_EQ(echo.type, AdvantageType::kEcho);
  ASSERT_TRUE(echo.roles && echo.roles->user);
  EXPECT_EQ(echo.roles->user->alpha, 0.3);
  EXPECT_FALSE(echo.roles->tool) << "naming a role replaces the table";
  const AdvantageConfig agents =
      orchestrator(R"(--orchestrator.algo.type hierarchical_grpo --orchestrator.algo.episode_agents ["solver"])").advantage;
  EXPECT_EQ(agents.type, AdvantageType::kHierarchicalGrpo);
  EXPECT_THAT(agents.episode_agents, ElementsAre("solver"));
  const OrchestratorConfig opsd = orchestrator("--orchestrator.algo.type opsd --orchestrator.algo.demo_key answer");
  EXPECT_EQ(opsd.training_mode, TrainingMode::kOpsd);
  EXPECT_EQ(opsd.opsd.demo_key, "answer");
}

TEST(ResolveRl, AlgorithmsRefuseWhatTheyDoNotTake) {
  const auto expect = [](const std::string& flags, const char* problem) {
    try {
      load_line<RlConfig>(kRlLine + flags);
      FAIL() << flags;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(problem)) << flags;
    }
  };
  expect("--orchestrator.algo.type hierarchical_grpo", "episode_agents");
  expect("--orchestrator.advantage.roles.tool.alpha 0.3", "belongs to type echo");
  expect("--orchestrator.algo.type opsd --orchestrator.opsd.template plain", "no {demonstration}");
  expect("--orchestrator.train.sampling.extra_body.top_p 0.5", "another distribution");
  expect("--orchestrator.train.env.curriculum.sampler.type difficulty_pool --orchestrator.train.env.curriculum.sampler.pools.a.weight 1",
         "pools.a.threshold is missing");
  expect("--orchestrator.train.env.curriculum.gates.g.reject_min 1", "above its reject_max");
}

TEST(ResolveRl, CurriculaKeepTheirPoolsInOrder) {
  const auto rl = load_line<RlConfig>(
      kRlLine +
      "--orchestrator.train.env.curriculum.sampler.type difficulty_pool --orchestrator.train.env.curriculum.sampler.pools.b.threshold 0.9 "
      "--orchestrator.train.env.curriculum.sampler.pools.a.threshold 0.1 --orchestrator.train.env.curriculum.gates.g.reject_max 0.5");
  const CurriculumConfig& curriculum = *rl.config.orchestrator.train.env[0].curriculum;
  std::vector<std::string> problems;
  const auto pools = difficulty_pools(std::get<DifficultyPoolSampler>(curriculum.sampler).pools, problems);
  ASSERT_EQ(pools.size(), 2u);
  EXPECT_EQ(pools[0].name, "a");
  EXPECT_EQ(pools[1].threshold, 0.9);
  EXPECT_EQ(difficulty_pools(Value::table(), problems).size(), 3u);
  const auto gates = advantage_gates(curriculum.gates, problems);
  ASSERT_EQ(gates.size(), 1u);
  EXPECT_EQ(gates[0].reject_max, 0.5);
  EXPECT_THAT(problems, IsEmpty());
}

TEST(ResolveRl, WandbModeIsHeard) {
  Context context = testing::plain_context();
  context.environment["WANDB_MODE"] = "disabled";
  EXPECT_THAT(load_line<RlConfig>(kRlLine + "--wandb", context).not_built, IsEmpty());
  context.environment["WANDB_MODE"] = "offline";
  const auto rl = load_line<RlConfig>(kRlLine + "--wandb", context);
  EXPECT_THAT(rl.not_built, IsEmpty());
  EXPECT_TRUE(rl.config.trainer.wandb->offline);
}

TEST(ResolveRl, TheErrorOfMissingFeaturesListsEachOnce) {
  const auto rl = load_line<RlConfig>(kRlLine + "--model.vlm.freeze-vision-encoder false --trainer.model.quantization.type mxfp8");
  try {
    require_built(rl.not_built);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotImplemented);
    const std::string text = error.what();
    EXPECT_EQ(text.find("training of a vision tower"), text.rfind("training of a vision tower"));
    EXPECT_THAT(text, HasSubstr("products of 8-bit activations"));
  }
}

TEST(ResolveRl, EnginesHaveTheTrainersWeightsOfEightBits) {
  const auto rl = load_line<RlConfig>(kRlLine + "--trainer.model.fp8");
  EXPECT_THAT(rl.not_built, IsEmpty());
  EXPECT_TRUE(std::holds_alternative<Fp8Quantization>(rl.config.trainer.model.quantization.value()));
  EXPECT_EQ(rl.config.inference->model.quantization, "fp8");
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--inference.model.quantization fp8"), HasSubstr("trainer.model.quantization"));
  const std::string both = kRlLine + "--trainer.model.quantization.type fp8 --trainer.model.quantization.activations ";
  EXPECT_EQ(load_line<RlConfig>(both).config.inference->model.quantization, "w8a8_fp8");
  EXPECT_THAT(error_of<RlConfig>(both + "--inference.model.quantization fp8"), HasSubstr("wanted w8a8_fp8, found fp8"));
  EXPECT_TRUE(is_not_built(load_line<InferenceConfig>("inference --model.name m --quantization awq").not_built, "quantised as \"awq\""));
  EXPECT_EQ(load_line<SftConfig>("sft --model.name m --data.name d.jsonl --model.fp8 --eval.env.0.id reverse-text")
                .config.inference->model.quantization,
            "fp8");
}

TEST(ResolveTrainer, LocalTransportsNeedOneProcess) {
  EXPECT_THAT(error_of<TrainerConfig>("trainer --rollout-transport.type local"), HasSubstr("works only inside `prl rl`"));
  EXPECT_TRUE(std::holds_alternative<FilesystemRollouts>(load_line<TrainerConfig>("trainer").config.rollout_transport));
}

TEST(ResolveTrainer, LayersAreGatheredIfThatIsAskedFor) {
  const std::string line = "trainer --model.name ./m ";
  EXPECT_FALSE(load_line<TrainerConfig>(line).config.model.reshard_after_forward);
  EXPECT_THAT(load_line<TrainerConfig>(line + "--model.reshard-after-forward").warnings, IsEmpty());
  EXPECT_THAT(load_line<TrainerConfig>(line + "--model.reshard-after-forward --model.lora").warnings, IsEmpty());
  EXPECT_TRUE(is_not_built(
      load_line<TrainerConfig>(line + R"(--model.reshard-after-forward --model.lora --model.lora.modules-to-save ["lm_head"])").not_built,
      "modules_to_save"));
}

TEST(ResolveTrainer, RowsAreSharedByUlyssesUnlessRingIsAskedFor) {
  const std::string line = "trainer --model.name ./m --model.cp 2 ";
  const auto plain = load_line<TrainerConfig>(line);
  EXPECT_EQ(plain.config.model.cp_style, ContextParallelStyle::kUlysses);
  EXPECT_THAT(plain.not_built, IsEmpty());
  EXPECT_THAT(load_line<TrainerConfig>(line + "--model.lora").not_built, IsEmpty());
  EXPECT_TRUE(is_not_built(load_line<TrainerConfig>(line + "--model.cp-style ring").not_built, "ring attention"));
  const auto whole_rows = load_line<TrainerConfig>("trainer --model.name ./m --model.cp-style ring");
  EXPECT_THAT(whole_rows.not_built, IsEmpty());
  EXPECT_THAT(whole_rows.warnings, Contains(HasSubstr("model.cp_style")));
}

TEST(ResolveTrainer, OlderLossKnobsNameTheirLoss) {
  EXPECT_TRUE(std::holds_alternative<MaskedLossConfig>(load_line<TrainerConfig>("trainer --loss.token-mask-high 4").config.loss));
  EXPECT_TRUE(std::holds_alternative<GrpoLossConfig>(load_line<TrainerConfig>("trainer --loss.clip-ratio 4").config.loss));
  EXPECT_TRUE(std::holds_alternative<GspoLossConfig>(load_line<TrainerConfig>("trainer --loss.type gspo --loss.clip-ratio 4").config.loss));
  EXPECT_TRUE(std::holds_alternative<DefaultLossConfig>(load_line<TrainerConfig>("trainer --loss.type dppo").config.loss));
}

TEST(ResolveTrainer, KeysWithoutEffectAreNamedWhenTheyAreSet) {
  EXPECT_THAT(load_line<TrainerConfig>("trainer --model.name ./m --model.attn sdpa --gc").warnings,
              ::testing::ElementsAre("2 keys are set without effect here: model.attn (there is one attention kernel per device); "
                                     "gc (there is no garbage collector)"));
  EXPECT_THAT(load_line<TrainerConfig>("trainer --model.name ./m --model.attn auto").warnings, IsEmpty());
  EXPECT_THAT(load_line<TrainerConfig>("trainer --model.name ./m --ckpt.weights.save-sharded").warnings, IsEmpty());
  EXPECT_THAT(load_line<TrainerConfig>("trainer --model.name ./m --no-ckpt.weights.save-sharded").warnings,
              ::testing::ElementsAre(HasSubstr("a key is set without effect here: ckpt.weights.save_sharded (")));
}

TEST(ResolveTrainer, OffloadsExcludeEachOther) {
  EXPECT_THAT(error_of<TrainerConfig>("trainer --model.fsdp-cpu-offload --model.optim-cpu-offload"), HasSubstr("exclude each other"));
  EXPECT_THAT(error_of<TrainerConfig>("trainer --model.full-offload --optim.type sgd"), HasSubstr("adamw and sign_sgd only"));
  EXPECT_THAT(load_line<TrainerConfig>("trainer --model.optim-cpu-offload --optim.type muon").not_built, IsEmpty());
}

TEST(ResolveTrainer, OffloadedActivationsAreCheckpointedOnes) {
  const auto alone = load_line<TrainerConfig>("trainer --model.ac-offloading");
  EXPECT_THAT(alone.not_built, IsEmpty());
  ASSERT_TRUE(alone.config.model.ac.has_value());
  EXPECT_EQ(alone.config.model.ac->freq, 1);
  EXPECT_EQ(alone.config.model.ac->mode, CheckpointMode::kFull);
  const auto chosen = load_line<SftConfig>("sft --model.ac-offloading --model.ac.mode selective --model.ac.freq 3");
  EXPECT_EQ(chosen.config.model.ac->mode, CheckpointMode::kSelective);
  EXPECT_EQ(chosen.config.model.ac->freq, 3);
}

TEST(ResolveTrainer, StateInBfloat16IsForOptimizersThatCanHaveIt) {
  const std::string line = "trainer --model.optimization-dtype bfloat16 --optim.type ";
  for (const char* type : {"adamw", "sign_sgd"}) EXPECT_THAT(load_line<TrainerConfig>(line + type).not_built, IsEmpty());
  for (const char* type : {"sgd", "muon"}) EXPECT_THAT(error_of<TrainerConfig>(line + type), HasSubstr("adamw and sign_sgd only"));
}

TEST(ResolveInference, KeysOfTheEngineHaveTheirOwnNames) {
  const auto loaded = load_line<InferenceConfig>(
      "inference --model ./m --port 8007 --max-model-len 512 --tool-call-parser hermes --enable-auto-tool-choice --enforce-eager "
      "--reasoning-parser qwen3 --gpu-memory-utilization 0.7 --data-parallel-size 3 --kv.block-size 32 --dtype float32");
  EXPECT_EQ(loaded.config.model.name, "./m");
  EXPECT_EQ(loaded.config.server.port, 8007);
  EXPECT_EQ(loaded.config.model.max_model_len, 512);
  EXPECT_EQ(loaded.config.model.reasoning_parser, "qwen3");
  EXPECT_EQ(loaded.config.parallel.dp, 3);
  EXPECT_EQ(loaded.config.compute.dtype, ComputeDType::kFloat32);
  EXPECT_THAT(loaded.not_built, IsEmpty());
  EXPECT_TRUE(loaded.config.model.enforce_eager);
  EXPECT_EQ(loaded.config.gpu_memory_utilization, 0.7);
  EXPECT_THAT(loaded.warnings, IsEmpty());
  EXPECT_EQ(load_line<InferenceConfig>("inference").config.server.host, "127.0.0.1");
  EXPECT_THAT(load_line<InferenceConfig>("inference --host 0.0.0.0").warnings, Contains(HasSubstr("asks for no api_key")));
}

TEST(ResolveSft, DataAndModelAgreeOnLengths) {
  const auto sft = load_line<SftConfig>("sft --model.name ./m --data.name x.jsonl --data.seq-len 4096");
  EXPECT_EQ(sft.config.model.seq_len, 4096);
  EXPECT_THAT(sft.not_built, IsEmpty());
  EXPECT_THAT(error_of<SftConfig>("sft --data.batch-size 5 --data.micro-batch-size 2"), HasSubstr("must divide batch_size, which is 5"));
  EXPECT_THAT(load_line<SftConfig>("sft --data.name org/set --data.subsets a,b --data.probabilities 0.5,0.5").not_built, IsEmpty());
  EXPECT_THAT(error_of<SftConfig>("sft --data.subsets a,b --data.splits x,y,z"), HasSubstr("3 splits for 2 subsets"));
  EXPECT_THAT(error_of<SftConfig>("sft --data.splits x,y --data.probabilities 0.1,0.2,0.7"), HasSubstr("3 values for 2 parts"));
  EXPECT_THAT(error_of<SftConfig>("sft --data.probabilities 0.1,0.9"), HasSubstr("2 values for 1 parts"));
  EXPECT_THAT(load_line<SftConfig>("sft --deployment.num-gpus 8").not_built, IsEmpty());
}

TEST(ResolveSft, EvaluationsHaveAnEngineAndAPlaceOfTheirOwn) {
  const std::string line = "sft --model.name ./m --data.name x.jsonl --output-dir out --max-steps 9 ";
  const std::string with =
      line + "--eval.env.0.id gsm8k --eval.interval 4 --eval.sampling.temperature 0.5 --eval.env.0.sampling.top-p 0.9 ";
  const auto sft = load_line<SftConfig>(
      with + "--inference.max-num-seqs 8 --inference.model.max-model-len 512 --inference.kv-cache-offload.type native --env-vars.A 1");
  EXPECT_THAT(sft.not_built, IsEmpty());
  EXPECT_EQ(sft.config.eval->env.at(0).sampling->temperature, 0.5);
  const EvalsConfig evals = evals_of(sft.config);
  EXPECT_EQ(evals.model, "./m");
  EXPECT_EQ(evals.output_dir, "out");
  EXPECT_EQ(evals.inference->model.name, "./m");
  EXPECT_EQ(evals.inference->max_num_seqs, 8);
  EXPECT_TRUE(evals.inference->kv_cache_offload);
  EXPECT_EQ(evals.inference->model.max_model_len, 512);
  EXPECT_EQ(evals.inference->env_vars.at("A"), "1");
  EXPECT_EQ(evals.online->broadcasts_dir, "out/broadcasts");
  EXPECT_EQ(evals.online->max_steps, 9);
  EXPECT_EQ(evals.online->resume_step, std::nullopt);
  EXPECT_TRUE(evals.online->every_step && evals.online->remove_evaluated);
  EXPECT_EQ(evals_of(load_line<SftConfig>(with + "--ckpt.resume-step 4").config).online->resume_step, 4);

  const auto engine_device = [](const SftConfig& config) { return config.inference->compute.device; };
  EXPECT_EQ(engine_device(sft.config), DeviceKind::kAuto);
  EXPECT_EQ(engine_device(load_line<SftConfig>(with + "--compute.device cpu").config), DeviceKind::kCpu);
  EXPECT_EQ(engine_device(load_line<SftConfig>(with + "--deployment.num-infer-gpus 0").config), DeviceKind::kCpu);
  EXPECT_EQ(engine_device(load_line<SftConfig>(with + "--compute.device cpu --inference.compute.device cuda").config), DeviceKind::kCuda);
  EXPECT_THAT(error_of<SftConfig>(with + "--deployment.num-infer-gpus 0 --inference.compute.device cuda"),
              HasSubstr("inference.compute.device: is cuda, but deployment.num_infer_gpus is 0"));
  EXPECT_THAT(load_line<SftConfig>(with + "--deployment.num-infer-gpus 2").not_built, Not(IsEmpty()));
  EXPECT_THAT(error_of<SftConfig>(with + "--inference.model.name ./other"),
              HasSubstr("inference.model.name: is another model than model.name, which is ./m"));
  EXPECT_THAT(error_of<SftConfig>(with + "--model.debug.random-init"), HasSubstr("model.debug.random_init: makes another model"));
  EXPECT_THAT(error_of<SftConfig>(with + R"(--eval.sampling.extra-body {"temperature":1})"),
              HasSubstr("is also set as eval.sampling.temp"));
  EXPECT_THAT(load_line<SftConfig>(with + "--inference.server.port 9").warnings, Contains(HasSubstr("inference.server.port")));
  // Nothing is evaluated without the section.
  EXPECT_THAT(load_line<SftConfig>(line + "--inference.max-num-seqs 8").warnings, Contains(HasSubstr("no evaluations without [eval]")));
  EXPECT_THAT(load_line<SftConfig>(line + "--deployment.num-infer-gpus 3").warnings, Contains(HasSubstr("deployment.num_infer_gpus")));
  EXPECT_THAT(load_line<SftConfig>(line + "--deployment.num-infer-gpus 1").warnings, IsEmpty());
  EXPECT_FALSE(load_line<SftConfig>(with + "--bench").config.eval) << "speed is measured";
}

TEST(ResolveEval, ChecksWhatIsEvaluated) {
  EXPECT_THAT(error_of<EvalConfig>("eval --no-eval-base"), HasSubstr("there is nothing else to evaluate"));
  EXPECT_THAT(error_of<EvalConfig>("eval --client.base-url localhost:8000"), HasSubstr("must start with http://"));
  EXPECT_THAT(error_of<EvalConfig>(R"(eval --sampling.top-p 0.5 --sampling.extra-body {"top_p":0.9})"),
              HasSubstr("sampling.extra_body.top_p"));
  EXPECT_THAT(error_of<EvalConfig>(R"(eval --sampling.extra-body {"stream":true})"), HasSubstr("is set by the program"));
  EXPECT_THAT(load_line<EvalConfig>(R"(eval --model.name m --client.base-url http://h/v1 --sampling.extra-body {"top_p":0.9} )"
                                    "--sampling.reasoning-effort low --per-rollout --save.disk.path x")
                  .not_built,
              IsEmpty());
  EXPECT_THAT(error_of<EvalConfig>(R"(eval --client.headers-from-env {"X":"NOT_THERE"})"), HasSubstr("NOT_THERE, which is not set"));
  EXPECT_THAT(load_line<EvalConfig>("eval --steps 10").warnings, Contains(HasSubstr("no effect without weights_dir")));
}

TEST(ResolveTools, InitModelTakesAFolderAndChecksTheShape) {
  EXPECT_EQ(load_line<InitModelConfig>("init-model out/m --hidden-size 64").config.output_dir, "out/m");
  EXPECT_THAT(error_of<InitModelConfig>("init-model"), HasSubstr("`prl init-model DIR`"));
  EXPECT_THAT(error_of<InitModelConfig>("init-model m --num-heads 6 --num-kv-heads 4"), HasSubstr("must divide num_heads"));
  EXPECT_THAT(error_of<InitModelConfig>("init-model m n"), HasSubstr("unexpected argument `n`"));
  EXPECT_EQ(load_line<ConvertConfig>("convert a.gguf b").config.input, "a.gguf");
  EXPECT_EQ(load_line<ConvertConfig>("convert a b").config.output_dir, "b");
  const auto chat = load_line<ChatConfig>("chat --model.name m --sampling.temperature 0 --sampling.max-tokens 9");
  EXPECT_EQ(chat.config.sampling.temperature, 0.0);
  EXPECT_EQ(chat.config.sampling.max_completion_tokens, 9);
  EXPECT_EQ(load_line<ChatConfig>("chat --model.name m").config.sampling.temperature, 0.7);
  EXPECT_FALSE(load_line<ChatConfig>("chat --model.name m --client.base-url http://h/v1").config.sampling.temperature)
      << "the server's own";
  const auto evals = load_line<EvalsConfig>(
      "evals --model m --eval.sampling.temperature 0.5 --eval.env.0.sampling.top-p 0.9 --online.broadcasts-dir out/weights");
  EXPECT_EQ(evals.config.eval.env.at(0).sampling->temperature, 0.5);
  EXPECT_THAT(error_of<EvalsConfig>("evals --model m --online.max-steps 4"), HasSubstr("online.broadcasts_dir: is needed"));
  EXPECT_THAT(error_of<EvalsConfig>("evals --model m --client.base-url localhost"), HasSubstr("must start with http://"));
  const auto own = load_line<EvalsConfig>("evals --model m --inference.model.dtype float32");
  EXPECT_EQ(own.config.inference->compute.dtype, ComputeDType::kFloat32);
  EXPECT_EQ(own.config.inference->model.name, "m");
  EXPECT_EQ(load_line<EnvServerConfig>("env-server --env.id some-env --address 0.0.0.0:7000").config.address, "0.0.0.0:7000");
  EXPECT_EQ(load_line<EnvCommandConfig>("env show some-env").config.target, "some-env");
  EXPECT_THAT(error_of<EnvCommandConfig>("env install"), HasSubstr("target: is needed"));
}

TEST(Aliases, BothSpellingsInOneFileMustAgree) {
  EXPECT_THAT(error_of<OrchestratorConfig>("orchestrator --rollouts-per-example 4 --group-size 8"),
              HasSubstr("group_size: is also set as rollouts_per_example = \"4\"; set only one of them"));
  EXPECT_EQ(load_line<OrchestratorConfig>("orchestrator --rollouts-per-example 8 --group-size 8").config.group_size, 8);
}

TEST(Aliases, AnOldNameInAFileMeetsTheNewOneOnTheCommandLine) {
  std::filesystem::current_path(test_source_dir());
  const auto rl = load_line<RlConfig>(
      "rl @ tests/seeds/single_gpu_rl.toml --model.name ./m --orchestrator.group-size 4 "
      "--orchestrator.train.sampling.max-completion-tokens 64 --orchestrator.train.env.0.id alphabet-sort");
  EXPECT_EQ(rl.config.orchestrator.group_size, 4);
  EXPECT_EQ(rl.config.orchestrator.train.sampling.max_completion_tokens, 64);
}

TEST(Aliases, RetiredKeysSayWhatToUse) {
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--run.name x"), HasSubstr("set output_dir to the folder of the run"));
  EXPECT_THAT(error_of<TrainerConfig>("trainer --resume.dir x"), HasSubstr("set ckpt.resume_step"));
}

TEST(Aliases, AdvantagesOfOtherVersions) {
  const auto type = [](const std::string& flags) { return load_line<OrchestratorConfig>("orchestrator " + flags).config.advantage.type; };
  EXPECT_EQ(type("--advantage None"), AdvantageType::kReward);
  EXPECT_EQ(type("--advantage.type default"), AdvantageType::kGrpo);
  EXPECT_EQ(type("--advantage.length-weighted-mean"), AdvantageType::kOpo);
  EXPECT_EQ(type("--algo.type max_rl"), AdvantageType::kMaxRl);
  const auto opd = load_line<OrchestratorConfig>(R"(orchestrator --algo {"type":"opd","teacher":{"name":"t","base_url":"http://h:1/v1"}})");
  EXPECT_EQ(opd.config.training_mode, TrainingMode::kOpd);
  EXPECT_EQ(opd.config.teacher->model.name, "t");
  EXPECT_EQ(opd.config.teacher->client.base_url.front(), "http://h:1/v1");
}

}  // namespace
}  // namespace prl::config
