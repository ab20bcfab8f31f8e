// Engines: how many, where, how requests are spread over them, and how they rotate positions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/detail/test_support.hpp"
#include "config/resolve.hpp"
#include "config/text_format.hpp"

namespace prl::config {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::is_not_built;
using ::testing::IsEmpty;
using testing::kRlLine;
using testing::load_line;

TEST(ResolveInference, ServersThatAreCountedAreEngines) {
  // vLLM's name for how many processes answer: each of ours is an engine of its own.
  for (const auto& [flags, wanted] :
       {std::pair("", 1), std::pair("--api-server-count 3", 3), std::pair("--api-server-count 2 --parallel.dp 4", 4),
        std::pair("--api-server-count 4 --parallel.dp 2", 4)}) {
    const InferenceConfig config = load_line<InferenceConfig>(std::string("inference --model.name m ") + flags).config;
    EXPECT_EQ(config.parallel.dp, wanted) << flags;
    EXPECT_EQ(config.api_server_count, wanted) << flags;
  }
}

TEST(ResolveInference, CopiesOverSeveralNodesNeedTheAddressOfTheirRouter) {
  const std::string line = "inference --model.name m --parallel.dp 4 ";
  for (const char* flags : {"--parallel.dp-local 2", "--parallel.dp-start-rank 2", "--parallel.headless", "--api-server-count 0"})
    EXPECT_THAT(error_of<InferenceConfig>(line + flags), HasSubstr("needs parallel.dp_address")) << flags;
  EXPECT_THAT(error_of<InferenceConfig>(line + "--parallel.dp-address h --parallel.dp-local 3 --parallel.dp-start-rank 2"),
              HasSubstr("the copies from 2 on are 3, but there are 4"));
  EXPECT_TRUE(load_line<InferenceConfig>(line + "--parallel.dp-address h --api-server-count 0").config.parallel.headless);
  EXPECT_EQ(
      load_line<InferenceConfig>("inference --model.name m --deployment.type multi_node --deployment.gpus-per-node 4").config.parallel.dp,
      8);
}

TEST(ResolveInference, RoutersSpreadRequestsByThePoliciesThatOursHas) {
  const std::string line = "inference --model.name m --parallel.dp 2 --router.type vllm-router ";
  const auto policy_of = [](const InferenceConfig& config) { return std::get<VllmRouterConfig>(config.router.value()).policy; };
  EXPECT_EQ(policy_of(load_line<InferenceConfig>(line).config), RouterPolicy::kConsistentHash);
  const auto turns = load_line<InferenceConfig>(line + "--router.policy round_robin");
  EXPECT_EQ(policy_of(turns.config), RouterPolicy::kRoundRobin);
  EXPECT_THAT(turns.not_built, IsEmpty());
  EXPECT_THAT(load_line<InferenceConfig>("inference --model.name m --router None").not_built, IsEmpty());
  for (const std::string policy : {"random", "cache_aware", "power_of_two"}) {
    EXPECT_THAT(load_line<InferenceConfig>(line + "--router.policy " + policy).not_built, IsEmpty()) << policy;
    EXPECT_THAT(load_line<RouterToolConfig>("router --policy " + policy).not_built, IsEmpty()) << policy;
  }
  const std::string thresholds = "--cache-threshold 0.5 --balance-abs-threshold 8 --balance-rel-threshold 1.1 --max-tree-size 4096";
  const auto aware = load_line<RouterToolConfig>("router --policy cache_aware " + thresholds);
  EXPECT_EQ(aware.config.cache_threshold, 0.5);
  EXPECT_EQ(aware.config.balance_abs_threshold, 8);
  EXPECT_EQ(aware.config.max_tree_size, 4096);
  EXPECT_THAT(aware.warnings, IsEmpty());
  const auto unused = load_line<RouterToolConfig>("router --policy random --cache-threshold 0.5");
  ASSERT_THAT(unused.warnings, ::testing::SizeIs(1));
  EXPECT_THAT(unused.warnings.front(), HasSubstr("policy is random"));
  // As a run writes the configurations of its roles, with every key.
  EXPECT_THAT(load_line<RouterToolConfig>("router --cache-threshold 0.3 --balance-abs-threshold 64 --max-tree-size 67108864").warnings,
              IsEmpty());
  EXPECT_THAT(error_of<RouterToolConfig>("router --policy cache_aware --cache-threshold 1.5"), HasSubstr("cache_threshold"));
  EXPECT_THAT(error_of<InferenceConfig>(line + "--router.policy rendezvous"), HasSubstr("router.policy"));
  EXPECT_TRUE(is_not_built(load_line<InferenceConfig>("inference --model.name m --router.type llm-d").not_built, "a router of llm-d"));
  const std::string run = kRlLine + "--deployment.type single_node --inference.parallel.dp 2 --inference.router.type vllm-router ";
  EXPECT_THAT(load_line<RlConfig>(run).not_built, IsEmpty());
  const auto in_run = load_line<RlConfig>(run + "--inference.router.policy round_robin --inference.router.max-tree-size 128");
  EXPECT_THAT(in_run.not_built, IsEmpty());
  EXPECT_EQ(in_run.config.orchestrator.router.policy, RouterPolicy::kRoundRobin) << "the orchestrator is the router";
  EXPECT_EQ(in_run.config.orchestrator.router.max_tree_size, 128);
  const auto own = load_line<RlConfig>(run + "--inference.router.policy round_robin --orchestrator.router.policy random");
  EXPECT_EQ(own.config.orchestrator.router.policy, RouterPolicy::kRandom);
}

TEST(ResolveInference, RotaryScalingIsOverriddenWhereNothingIsTrained) {
  const std::string rope = R"(rope-scaling {"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":32768})";
  const auto inference = load_line<InferenceConfig>("inference --model.name m --model." + rope);
  EXPECT_THAT(inference.not_built, IsEmpty());
  EXPECT_EQ(to_compact_json(inference.config.model.rope_scaling),
            R"({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})");
  EXPECT_EQ(to_compact_json(load_line<InferenceConfig>("inference --model.name m --vllm." + rope).config.model.rope_scaling),
            to_compact_json(inference.config.model.rope_scaling));
  for (const std::string bad : {"4", R"({"factor":4})"})
    EXPECT_THAT(error_of<InferenceConfig>("inference --model.name m --model.rope-scaling " + bad),
                HasSubstr("model.rope_scaling: wanted a table with a rope_type"));
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--inference.model." + rope),
              HasSubstr("inference.model.rope_scaling: would sample from another model than trainer.model trains"));
}

TEST(ResolveInference, SpeculativeDecodingUnderEitherName) {
  const std::string line = "inference --model.name m ";
  const SpeculativeConfig usual = load_line<InferenceConfig>(line).config.speculative;
  EXPECT_EQ(usual.num_tokens, 0) << "off";
  const auto own =
      load_line<InferenceConfig>(line + "--speculative.num-tokens 5 --speculative.min-ngram 3 --speculative.from-completions false");
  EXPECT_THAT(own.not_built, IsEmpty());
  EXPECT_EQ(own.config.speculative.num_tokens, 5);
  EXPECT_EQ(own.config.speculative.min_ngram, 3);
  EXPECT_EQ(own.config.speculative.max_ngram, usual.max_ngram);
  EXPECT_FALSE(own.config.speculative.from_completions);
  const std::string table = R"({"method":"ngram","num_speculative_tokens":6,"prompt_lookup_max":5,"prompt_lookup_min":3})";
  for (const std::string name : {"--speculative-config ", "--speculative_config ", "--vllm.speculative_config "}) {
    const auto given = load_line<InferenceConfig>(line + name + table);
    EXPECT_THAT(given.not_built, IsEmpty()) << name;
    EXPECT_EQ(given.config.speculative.num_tokens, 6) << name;
    EXPECT_EQ(given.config.speculative.max_ngram, 5) << name;
    EXPECT_EQ(given.config.speculative.min_ngram, 3) << name;
  }
  const auto rl = load_line<RlConfig>(kRlLine + "--inference.speculative_config " + table);
  EXPECT_EQ(rl.config.inference->speculative.num_tokens, 6);
  const auto one =
      load_line<InferenceConfig>(line + R"(--speculative-config {"method":"ngram","num_speculative_tokens":2,"prompt_lookup_max":1})");
  EXPECT_EQ(one.config.speculative.min_ngram, 1) << "one bound alone is both";
  EXPECT_EQ(one.config.speculative.max_ngram, 1);
}

TEST(ResolveInference, DraftsOfAModelUnderEitherName) {
  const std::string line = "inference --model.name m ";
  for (const std::string given : {R"(--speculative-config {"method":"draft_model","model":"small","num_speculative_tokens":2})",
                                  R"(--speculative-config {"model":"small","num_speculative_tokens":2})",
                                  "--speculative.draft-model small --speculative.num-tokens 2"}) {
    const auto loaded = load_line<InferenceConfig>(line + given);
    EXPECT_THAT(loaded.not_built, IsEmpty()) << given;
    EXPECT_EQ(loaded.config.speculative.draft_model, "small") << given;
    EXPECT_EQ(loaded.config.speculative.num_tokens, 2) << given;
    EXPECT_TRUE(loaded.config.speculative.adaptive);
  }
  EXPECT_THAT(
      load_line<InferenceConfig>(line + "--speculative.draft-model small --speculative.num-tokens 2 --speculative.max-ngram 5").warnings,
      ElementsAre(HasSubstr("speculative.max_ngram: has no effect")));
  EXPECT_THAT(load_line<InferenceConfig>(line + "--speculative.num-tokens 2 --speculative.adaptive false").warnings,
              ElementsAre(HasSubstr("speculative.adaptive: has no effect")));
  const auto looked_up = load_line<InferenceConfig>(line + R"(--speculative-config {"model":"[ngram]","num_speculative_tokens":2})");
  EXPECT_EQ(looked_up.config.speculative.method, DraftMethod::kNgram);
  EXPECT_EQ(looked_up.config.speculative.draft_model, std::nullopt);
}

TEST(ResolveInference, DraftsOfTheModelsOwnHeadAreReadInBothSpellings) {
  const std::string line = "inference --model.name m ";
  for (const std::string given : {R"(--speculative-config {"method":"mtp","num_speculative_tokens":2})",
                                  R"(--speculative-config {"method":"qwen3_5_mtp","num_speculative_tokens":2})",
                                  R"(--speculative-config {"method":"deepseek_mtp","num_speculative_tokens":2})",
                                  R"(--speculative-config {"method":"glm4_moe_mtp","num_speculative_tokens":2})",
                                  "--speculative.method mtp --speculative.num-tokens 2"}) {
    const auto loaded = load_line<InferenceConfig>(line + given);
    EXPECT_THAT(loaded.not_built, IsEmpty()) << given;
    EXPECT_THAT(loaded.warnings, IsEmpty()) << given;
    EXPECT_EQ(loaded.config.speculative.method, DraftMethod::kMtp) << given;
    EXPECT_EQ(loaded.config.speculative.num_tokens, 2) << given;
  }
  EXPECT_THAT(error_of<InferenceConfig>(line + "--speculative.method mtp"),
              HasSubstr("speculative.num_tokens: must be at least 1 with method mtp"));
  EXPECT_THAT(
      load_line<InferenceConfig>(line + "--speculative.method mtp --speculative.num-tokens 2 --speculative.draft-model small").warnings,
      ElementsAre(HasSubstr("speculative.draft_model: has no effect")));
  EXPECT_THAT(load_line<InferenceConfig>(line + "--speculative.method mtp --speculative.num-tokens 2 --parallel.tp 2").not_built,
              IsEmpty());
}

TEST(ResolveInference, SpeculativeDecodingIsChecked) {
  const std::string line = "inference --model.name m ";
  EXPECT_THAT(error_of<InferenceConfig>(line + R"(--speculative-config {"method":"eagle","model":"e","num_speculative_tokens":2})"),
              HasSubstr("ngram"));
  EXPECT_THAT(error_of<InferenceConfig>(line + "--speculative.method draft_model --speculative.num-tokens 2"),
              HasSubstr("speculative.draft_model: is needed"));
  EXPECT_THAT(error_of<InferenceConfig>(line + "--speculative.draft-model small"), HasSubstr("speculative.num_tokens: must be at least 1"));
  EXPECT_THAT(
      load_line<InferenceConfig>(line + "--speculative.draft-model small --speculative.num-tokens 2 --speculative.method ngram").warnings,
      ElementsAre(HasSubstr("speculative.draft_model: has no effect")));
  EXPECT_THAT(error_of<InferenceConfig>(line + "--speculative.min-ngram 5"), HasSubstr("speculative.min_ngram"));
  EXPECT_THAT(error_of<InferenceConfig>(line + "--speculative.num-tokens 16"), HasSubstr("speculative.num_tokens"));
  EXPECT_THAT(error_of<InferenceConfig>(line + R"(--speculative-config {"num_speculative_tokens":2,"disable_by_batch_size":8})"),
              HasSubstr("disable_by_batch_size"));
}

TEST(ResolveInference, PrefillAndDecodeEnginesAreCountedAndSetUp) {
  const std::string line = "inference --model.name m --deployment.type disaggregated ";
  const auto loaded = load_line<InferenceConfig>(line + "--deployment.num-prefill-replicas 2 --deployment.decode-nodes-per-replica 3");
  EXPECT_THAT(loaded.not_built, IsEmpty());
  EXPECT_EQ(loaded.config.parallel.dp, 5);
  EXPECT_TRUE(loaded.config.use_pd_kv_transfer);
  const auto& nodes = std::get<InferenceDisaggregated>(loaded.config.deployment);
  EXPECT_EQ(nodes.non_cached_tokens, 16);
  const auto set = load_line<InferenceConfig>(line +
                                              "--deployment.prefill-vllm-overrides.max_num_seqs 8 "
                                              "--deployment.prefill-vllm-overrides.enforce_eager true")
                       .config;
  const auto flags = engine_flags_of(std::get<InferenceDisaggregated>(set.deployment).prefill_vllm_overrides);
  EXPECT_EQ(flags, (std::vector<std::pair<std::string, std::string>>{{"--max-num-seqs", "8"}, {"--model.enforce-eager", "true"}}));
  EXPECT_THAT(error_of<InferenceConfig>(line + "--deployment.decode-vllm-overrides.block_size 8"),
              HasSubstr("deployment.decode_vllm_overrides: \"block_size\" cannot differ"));
  EXPECT_THAT(error_of<InferenceConfig>(line + "--deployment.decode-vllm-overrides.all2all_backend x"),
              HasSubstr("\"all2all_backend\" cannot differ"));
  EXPECT_THAT(error_of<InferenceConfig>(line + "--deployment.num-prefill-replicas 2 --deployment.prefill-port 8199"),
              HasSubstr("share ports"));
  EXPECT_THAT(error_of<InferenceConfig>(line + "--parallel.headless"), HasSubstr("places its engines itself"));
  EXPECT_THAT(error_of<InferenceConfig>(line + "--no-enable-prefix-caching"), HasSubstr("needs enable_prefix_caching"));
}

TEST(ResolveInference, ARunTellsItsOrchestratorWhichEnginesAreForPrompts) {
  const std::string line =
      kRlLine + "--deployment.type single_node --inference.server.port 9000 --inference.deployment.type disaggregated ";
  const RlConfig run =
      load_line<RlConfig>(line + "--inference.deployment.num-decode-replicas 2 --inference.deployment.non-cached-tokens 4").config;
  EXPECT_THAT(run.orchestrator.prefill.base_url, ElementsAre("http://127.0.0.1:9000/v1"));
  EXPECT_THAT(run.orchestrator.student.client.base_url, ElementsAre("http://127.0.0.1:9001/v1", "http://127.0.0.1:9002/v1"));
  EXPECT_EQ(run.orchestrator.prefill.non_cached_tokens, 4);
  EXPECT_EQ(std::get<SingleNodeDeployment>(*run.deployment).num_infer_gpus, 3);
  const std::string colocated = kRlLine + "--deployment.type colocated --inference.deployment.type disaggregated ";
  EXPECT_THAT(error_of<RlConfig>(colocated), HasSubstr("colocated has one engine"));
  const std::string nodes = kRlLine + "--deployment.type multi_node --inference.deployment.type disaggregated ";
  EXPECT_THAT(error_of<RlConfig>(nodes), HasSubstr("inference.kv_transfer.api_key: is needed"));
  EXPECT_THAT(error_of<RlConfig>(nodes + "--inference.kv-transfer.api-key k --deployment.num-infer-nodes 3"),
              HasSubstr("is 3, but inference.deployment has 1 prefill and 1 decode nodes"));
}

}  // namespace
}  // namespace prl::config
