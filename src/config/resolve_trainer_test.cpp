// Adapters, several runs and experts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/detail/test_support.hpp"
#include "config/resolve.hpp"

namespace prl::config {
namespace {

using ::testing::Contains;
using testing::error_of;
using ::testing::HasSubstr;
using testing::is_not_built;
using ::testing::IsEmpty;
using testing::kRlLine;
using testing::load_line;

TEST(ResolveTrainer, AnAdapterTravelsFromMemoryToMemory) {
  const std::string line = "trainer --model.name ./m --model.lora --weight-broadcast.type nccl ";
  EXPECT_THAT(load_line<TrainerConfig>(line).not_built, IsEmpty());
  EXPECT_THAT(load_line<TrainerConfig>(line).warnings, IsEmpty());
  EXPECT_THAT(load_line<TrainerConfig>(line + "--weight-broadcast.num-senders 2").warnings, Contains(HasSubstr("num_senders")));
  EXPECT_THAT(load_line<RlConfig>(kRlLine + "--weight-broadcast.type nccl --deployment.type single_node --trainer.model.lora").not_built,
              IsEmpty());
  EXPECT_THAT(load_line<RlConfig>(kRlLine + "--weight-broadcast.type nccl --deployment.type single_node --trainer.model.lora "
                                            "--orchestrator.student.model.lora.name alpha")
                  .not_built,
              IsEmpty());
}

TEST(ResolveTrainer, SeveralRunsAreRefusedWhatBelongsToOne) {
  const std::string line = "trainer --model.name ./m --max-concurrent-runs 2 ";
  EXPECT_THAT(error_of<TrainerConfig>(line), HasSubstr("needs model.lora"));
  EXPECT_THAT(load_line<TrainerConfig>(line + "--model.lora").not_built, IsEmpty());
  EXPECT_THAT(error_of<TrainerConfig>(line + "--model.lora --rollout-transport.type zmq"), HasSubstr("rollout_transport.type"));
  EXPECT_THAT(error_of<TrainerConfig>(line + "--model.lora --ckpt.resume-step 3"), HasSubstr("ckpt.resume_step"));
  EXPECT_THAT(error_of<TrainerConfig>(line + "--model.lora --data.fake"), HasSubstr("data.fake"));
  EXPECT_TRUE(is_not_built(load_line<TrainerConfig>(line + "--model.lora --healing").not_built, "several ranks"));
  EXPECT_THAT(load_line<TrainerConfig>(line + "--model.lora --weight-broadcast.type nccl").not_built, IsEmpty());
  EXPECT_TRUE(is_not_built(load_line<TrainerConfig>(line + "--model.lora --weight-broadcast.type nixl").not_built, "several runs over"));
}

TEST(ResolveTrainer, AFolderForConvertedWeightsHasNoEffect) {
  const auto trainer = load_line<TrainerConfig>("trainer --model.name ./m --model.conversion-dir /tmp/converted");
  EXPECT_THAT(trainer.not_built, IsEmpty());
  EXPECT_THAT(trainer.warnings, Contains(HasSubstr("model.conversion_dir (files are read as they are published")));
}

TEST(ResolveTrainer, BalancedRoutingIsWarnedOfAndIsNoReplay) {
  const std::string line = "trainer --model.name ./m --model.debug.force-balanced-routing ";
  const auto trainer = load_line<TrainerConfig>(line);
  EXPECT_THAT(trainer.not_built, IsEmpty());
  EXPECT_THAT(trainer.warnings, Contains(HasSubstr("mean nothing")));
  EXPECT_THAT(load_line<SftConfig>("sft --model.name ./m --data.name d --model.debug.force-balanced-routing").warnings,
              Contains(HasSubstr("model.debug.force_balanced_routing")));
  EXPECT_THAT(error_of<TrainerConfig>(line + "--enable-router-replay"),
              HasSubstr("model.debug.force_balanced_routing: gives tokens other"));
}

TEST(ResolveSft, StackedRowsAreMultiplesOfTheShortestBucket) {
  const std::string line = "sft --model.name m --data.name d --data.pack-function stack --data.seq-len 512 ";
  const auto loaded = load_line<SftConfig>(line);
  EXPECT_THAT(loaded.not_built, IsEmpty());
  EXPECT_EQ(std::get<SftDataConfig>(loaded.config.data).pack_function, PackFunction::kStack);
  EXPECT_THAT(
      load_line<SftConfig>("sft --model.name m --data.type fake --data.pack-function stack --data.seq-len 64 --data.micro-batch-size 4")
          .not_built,
      IsEmpty());
  EXPECT_THAT(error_of<SftConfig>(line + "--data.seq-len 300"),
              HasSubstr("data.pack_function: stack needs rows of a multiple of 256 tokens; seq_len * micro_batch_size is 300"));
}

TEST(ResolveTrainer, RouterReplayHasServersTellWhichExpertsTokensHad) {
  EXPECT_FALSE(load_line<RlConfig>(kRlLine).config.inference->enable_return_routed_experts);
  for (const char* shape : {"", "--deployment.type single_node "})
    EXPECT_TRUE(load_line<RlConfig>(kRlLine + shape + "--trainer.enable-router-replay").config.inference->enable_return_routed_experts);
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--trainer.enable-router-replay --no-inference.enable-return-routed-experts"),
              HasSubstr("inference.enable_return_routed_experts"));
  // Blocks that come back from host memory tell their experts, too.
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--trainer.enable-router-replay --inference.kv-cache-offload.type native"), IsEmpty());
}

TEST(ResolveTrainer, SelectiveRecomputationNamesPartsOfDecoders) {
  const auto good = load_line<TrainerConfig>("trainer --model.ac.mode selective --model.ac.targets norm,attn_proj,mlp --model.ac.freq 2");
  EXPECT_THAT(good.not_built, IsEmpty());
  EXPECT_EQ(good.config.model.ac->targets.size(), 3u);
  const auto error = [](const std::string& targets) {
    return error_of<TrainerConfig>("trainer --model.ac.mode selective --model.ac.targets " + targets);
  };
  EXPECT_EQ(load_line<TrainerConfig>("trainer --model.ac.mode selective --model.ac.targets routed_experts").config.model.ac->targets.size(),
            1u);
  const auto named = load_line<TrainerConfig>("trainer --model.ac.mode selective --model.ac.targets norm,mla_up_proj,linear_attn");
  EXPECT_THAT(named.warnings, Contains(HasSubstr("'mla_up_proj' has no effect")));
  EXPECT_THAT(named.warnings, Contains(HasSubstr("'linear_attn' has no effect")));
  EXPECT_THAT(error("norms"), HasSubstr("there is no part 'norms'"));
  EXPECT_THAT(error("[]"), HasSubstr("at least one part"));
  EXPECT_THAT(error_of<TrainerConfig>("trainer --model.ac.targets mlp"), HasSubstr("belongs to mode selective"));
}

TEST(ResolveRl, EngineAndTrainerAttendToLatentsAlike) {
  const auto of = [](const std::string& more) {
    const auto rl = load_line<RlConfig>(kRlLine + more);
    EXPECT_EQ(rl.config.trainer.model.latent_attention, rl.config.inference->model.latent_attention) << more;
    return rl.config.trainer.model.latent_attention.value();
  };
  EXPECT_EQ(of(""), LatentAttention::kLatents);
  EXPECT_EQ(of("--trainer.model.lora.rank 8"), LatentAttention::kLatents);
  const std::string kKvUp = "--model.lora.target-modules q_a_proj,kv_b_proj";
  EXPECT_EQ(load_line<TrainerConfig>("trainer " + kKvUp).config.model.latent_attention, LatentAttention::kHeads);
  EXPECT_EQ(of("--trainer.model.latent-attention heads"), LatentAttention::kHeads);
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--inference.model.latent-attention heads"),
              HasSubstr("trainer.model.latent_attention, which is latents"));
  EXPECT_THAT(error_of<TrainerConfig>("trainer --model.latent-attention latents " + kKvUp), HasSubstr("with an adapter of kv_b_proj"));
  EXPECT_THAT(error_of<TrainerConfig>("trainer --model.cp 2 --model.latent-attention latents"), HasSubstr("must be heads with model.cp"));
  EXPECT_THAT(error_of<TrainerConfig>("trainer --model.latent-attention none"), HasSubstr("latents"));
  EXPECT_EQ(load_line<InferenceConfig>("inference").config.model.latent_attention, LatentAttention::kLatents);
  EXPECT_EQ(load_line<SftConfig>("sft").config.model.latent_attention, LatentAttention::kHeads);
}

}  // namespace
}  // namespace prl::config
