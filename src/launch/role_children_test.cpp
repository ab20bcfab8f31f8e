#include "launch/role_children.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>

#include "config/cli.hpp"
#include "launch/batch_job.hpp"

namespace prl::launch {
namespace {

config::RlConfig load(const std::string& flags, int num_devices) {
  std::vector<std::string> words;
  std::istringstream in("--model.name some/model --inference --output-dir out --deployment.type single_node " + flags);
  for (std::string word; in >> word;) words.push_back(word);
  config::Context context = config::Context::from_process();
  context.num_devices = num_devices;
  return config::load<config::RlConfig>(config::Command::kRl, words, context).config;
}

TEST(RoleChildren, HaveGpusOfTheirOwnAmongThoseThatAreVisible) {
  ::setenv("CUDA_VISIBLE_DEVICES", "4,5,7", 1);
  const config::RlConfig two = load("--trainer.env-vars.KEY value", 3);
  const RoleChildren roles(two, {{"PRL_RUN_ID", "abc"}});
  const ChildSpec engine = roles.engine({.host = {}, .log_file = {}}), trainer = roles.trainer(), orchestrator = roles.orchestrator();
  EXPECT_EQ(engine.env.at("CUDA_VISIBLE_DEVICES"), "4");
  EXPECT_EQ(trainer.env.at("CUDA_VISIBLE_DEVICES"), "5");
  EXPECT_FALSE(orchestrator.env.contains("CUDA_VISIBLE_DEVICES")) << "it computes nothing";
  EXPECT_EQ(trainer.env.at("KEY"), "value");
  EXPECT_EQ(engine.env.at("PRL_RUN_ID"), "abc");
  const config::RlConfig named = load("--inference-gpu-ids 2,0 --trainer-gpu-ids 1", 3);
  const RoleChildren others(named, {});
  EXPECT_EQ(others.engine({.number = 0, .host = {}, .log_file = {}}).env.at("CUDA_VISIBLE_DEVICES"), "7");
  EXPECT_EQ(others.engine({.number = 1, .host = {}, .log_file = {}}).env.at("CUDA_VISIBLE_DEVICES"), "4");
  EXPECT_EQ(others.trainer().env.at("CUDA_VISIBLE_DEVICES"), "5");
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(roles.trainer().env.at("CUDA_VISIBLE_DEVICES"), "1");
}

TEST(RoleChildren, ABatchJobAsksForAGpuPerEngineAndRank) {
  const std::string slurm = "--slurm.partition gpu ";
  EXPECT_EQ(batch_job(load(slurm, 1)).num_gpus, 2);
  EXPECT_EQ(batch_job(load(slurm + "--deployment.num-infer-gpus 3 --deployment.num-train-gpus 4", 1)).num_gpus, 7);
  EXPECT_EQ(batch_job(load(slurm + "--inference.parallel.dp 2 --inference.compute.device cpu", 1)).num_gpus, 1);
  EXPECT_EQ(batch_job(load(slurm + "--inference-gpu-ids 0,1 --trainer-gpu-ids 2,3", 1)).num_gpus, 4);
  EXPECT_EQ(batch_job(load(slurm + "--inference-gpu-ids 0,1 --trainer-gpu-ids 0", 1)).num_gpus, 2) << "a GPU of both is one";
  EXPECT_EQ(batch_job(load(slurm + "--compute.device cpu", 1)).num_gpus, 0);
  config::InferenceConfig inference;
  inference.slurm.emplace();
  inference.parallel.dp = 4;
  EXPECT_EQ(batch_job(inference).num_gpus, 4);
}

}  // namespace
}  // namespace prl::launch
