#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/detail/test_support.hpp"

namespace prl::config {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kRlLine;
using testing::load_line;
using ::testing::Not;

TEST(OneProcess, KeysOfServersAndTransportsAreReportedAsWithoutEffect) {
  const std::pair<const char*, const char*> lines[] = {
      {"--inference.server.port 8123", "inference.server.port"},
      {"--inference.server.api-key k", "inference.server.api_key"},
      {"--inference.server.request-timeout 3", "inference.server.request_timeout"},
      {"--inference.log.level debug", "inference.log.level"},
      {"--orchestrator.log.json-logging", "orchestrator.log.json_logging"},
      {"--orchestrator.client.timeout 3", "orchestrator.student.client.timeout"},
      {"--orchestrator.client.base-url http://localhost:8000/v1", "orchestrator.student.client.base_url"},
      {"--weight-broadcast.type filesystem", "weight_broadcast.type"},
      {"--rollout-transport.type zmq", "rollout_transport.type"},
      {"--inference.model.dtype bfloat16", "inference.model.dtype"},
      {"--inference.compute.dtype float32", "inference.compute.dtype"},
  };
  for (const auto& [flags, key] : lines) {
    EXPECT_THAT(load_line<RlConfig>(kRlLine + flags).warnings,
                Contains(AllOf(HasSubstr("without effect"), HasSubstr(std::string(key) + " (in one process"))))
        << flags;
    const auto several = load_line<RlConfig>(kRlLine + "--deployment.type single_node " + flags);
    EXPECT_THAT(several.warnings, Not(Contains(HasSubstr("in one process")))) << flags;
  }
}

TEST(OneProcess, SharedKeysAndTheOnesThatWorkAreNotReported) {
  EXPECT_THAT(load_line<RlConfig>(kRlLine +
                                  "--log.level debug --log.json-logging --compute.dtype float32 --compute.device cpu --inference.seed 3 "
                                  "--inference.compute.num-threads 1 --inference.kv.block-size 8 --inference.server.max-queued-requests 3 "
                                  "--orchestrator.client.wait-for-ready-timeout 3 --orchestrator.log.interval 3 --log.interval 3")
                  .warnings,
              IsEmpty());
}

TEST(OneProcess, TrainerAndEngineShareDeviceAndType) {
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--inference.compute.device cuda"),
              HasSubstr("inference.compute.device: differs from trainer.compute.device, which is auto"));
  EXPECT_EQ(error_of<RlConfig>(kRlLine + "--inference.compute.device cuda --deployment.type single_node"), "");
  EXPECT_EQ(error_of<RlConfig>(kRlLine + "--compute.device cpu --inference.compute.device cpu"), "");
  const RlConfig config = load_line<RlConfig>(kRlLine + "--trainer.compute.dtype bfloat16 --trainer.compute.device cpu").config;
  EXPECT_EQ(config.inference->compute.dtype, ComputeDType::kBFloat16);
  EXPECT_EQ(config.inference->model.dtype, ComputeDType::kBFloat16);
  EXPECT_EQ(config.inference->compute.device, DeviceKind::kCpu);
}

TEST(OneProcess, EverythingStaysInMemoryWhateverIsWritten) {
  const RlConfig config = load_line<RlConfig>(kRlLine + "--weight-broadcast.type filesystem --rollout-transport.type zmq").config;
  EXPECT_TRUE(std::holds_alternative<LocalBroadcast>(config.trainer.weight_broadcast));
  EXPECT_TRUE(std::holds_alternative<LocalBroadcast>(config.orchestrator.weight_broadcast));
  EXPECT_TRUE(std::holds_alternative<LocalRollouts>(config.trainer.rollout_transport));
  EXPECT_TRUE(std::holds_alternative<LocalRollouts>(config.orchestrator.rollout_transport));
}

TEST(OneProcess, TheEngineTakesNoMoreContextThanSamplesAndPositionsHave) {
  Context context = testing::plain_context();
  context.num_positions = [](const std::string& model) { return model == "./m" ? std::optional<int>(512) : std::nullopt; };
  for (const std::string shape : {"", "--deployment.type single_node "}) {
    const auto length = [&](const std::string& flags) {
      return load_line<RlConfig>(kRlLine + shape + flags, context).config.inference->model.max_model_len;
    };
    EXPECT_EQ(length(""), 512);
    EXPECT_EQ(length("--seq-len 100"), 100);
    EXPECT_EQ(length("--max-model-len 64"), 64);
    EXPECT_EQ(load_line<RlConfig>("rl --model.name hub/id --inference " + shape, context).config.inference->model.max_model_len, 2048);
  }
}

}  // namespace
}  // namespace prl::config
