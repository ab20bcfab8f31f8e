// A checkpoint of a build in which each rank owned one run of all masters: tools/make_old_checkpoint.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "base/files.hpp"
#include "base/testing/source_dir.hpp"
#include "comm/testing/ranks.hpp"
#include "io/checkpoint_dir.hpp"
#include "trainer/checkpoint.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/test_support.hpp"

namespace prl::trainer {
namespace {

using namespace testing_support;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr std::int64_t kStep = 2;

class OldCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    nn::InitModelOptions options = tiny_model();
    options.vocab_size = 16;
    options.hidden_size = options.intermediate_size = 8;
    options.num_layers = options.num_heads = options.num_kv_heads = 1;
    nn::init_model(options, model());
  }
  fs::path model() const { return scratch_.path / "model"; }
  fs::path checkpoints() const { return scratch_.path / "checkpoints"; }

  /// As that build left it, after `change` had a look at its layout.
  void put(const std::function<std::string(std::string)>& change = {}) {
    fs::remove_all(checkpoints());
    io::CheckpointWriter writer(checkpoints(), kStep, kTrainerUnit);
    for (const auto& file : fs::directory_iterator(test_source_dir() / "tests/fixtures/old_checkpoint"))
      fs::copy_file(file.path(), writer.folder() / file.path().filename());
    const fs::path layout = writer.folder() / kLayoutFile;
    if (change) {
      const std::string text = change(read_file(layout));
      fs::remove(layout);
      write_file_atomic(layout, text);
    }
    writer.commit();
  }

  /// Resumes on so many ranks and calls `look` on each.
  void resume(int size, bool gathers_layers, const std::function<void(Policy&, GradientStep&, const TrainProgress&)>& look) {
    comm::testing::run_threads("threads", size, [&](comm::Communicator& group) {
      std::vector<int> all(static_cast<std::size_t>(size));
      std::iota(all.begin(), all.end(), 0);
      comm::Mesh mesh(group.subgroup(all, "train", 0));
      PolicyOptions of_policy;
      of_policy.model = model();
      of_policy.num_threads = 1;
      of_policy.gathers_layers = gathers_layers;
      Policy policy(make_cpu_runtime(), of_policy);
      GradientStepOptions options;
      options.optim = config::AdamWConfig{};
      options.mesh = &mesh;
      GradientStep step(policy, options);
      const TrainProgress progress = restore(checkpoints(), kStep, {}, policy, step);
      look(policy, step, progress);
    });
  }

 private:
  Scratch scratch_{"old-checkpoint"};
};

TEST_F(OldCheckpoint, IsResumedByAnyNumberOfRanks) {
  put();
  const StateLayout layout = parse_layout(read_file(checkpoints() / "step_2/trainer/layout.json"), "layout");
  ASSERT_EQ(layout.parts.size(), 3u);
  std::map<std::string, std::int64_t> offsets;
  for (const StateLayout::Entry& entry : layout.tensors) offsets[entry.name] = entry.offset;
  for (const int size : {1, 2, 3, 4})
    for (const bool gathers_layers : {false, true})
      resume(size, gathers_layers, [&](Policy& policy, GradientStep& step, const TrainProgress& progress) {
        EXPECT_EQ(progress.step, kStep);
        EXPECT_EQ(progress.data_position, 20);
        EXPECT_EQ(step.optimizer().num_steps(), 2);
        const std::vector<std::vector<float>> found = masters(policy, step);
        const std::span<const nn::NamedParameter> named = policy.parameters().named();
        ASSERT_EQ(found.size(), named.size());
        ASSERT_EQ(found.size(), offsets.size());
        for (std::size_t t = 0; t < found.size(); ++t)
          for (std::size_t i = 0; i < found[t].size(); ++i)
            ASSERT_EQ(found[t][i], static_cast<float>(offsets.at(named[t].name) + static_cast<std::int64_t>(i)) / 64) << named[t].name;
        for (const Optimizer::StatePart& part : step.optimizer().state_parts()) {
          const std::string name = part.name.substr(0, part.name.rfind('.')), state = part.name.substr(part.name.rfind('.') + 1);
          const std::int64_t begin = offsets.at(name) + part.range.begin - policy.parameters().at(name).offset;
          const float factor = state == "exp_avg" ? -1.0f / 128 : 1.0f / 256;
          for (std::int64_t i = 0; i < part.tensor.num_elements(); ++i)
            ASSERT_EQ(part.tensor.as<float>()[i], static_cast<float>(begin + i) * factor) << part.name;
        }
      });
}

TEST_F(OldCheckpoint, AnotherVersionIsRefusedByName) {
  const auto with = [](const std::string& from, const std::string& to) {
    return [from, to](std::string text) {
      EXPECT_NE(text.find(from), std::string::npos) << text.substr(0, 200);
      return text.replace(text.find(from), from.size(), to);
    };
  };
  for (const auto& [from, to, wanted] : {std::tuple("\"version\": 1", "\"version\": 7", "layout.json: not a layout of version 1"),
                                         std::tuple("rank_1.safetensors", "rank_9.safetensors", "rank_9.safetensors"),
                                         std::tuple("model.norm.weight", "model.norm.bias", "model.norm.bias")}) {
    put(with(from, to));
    try {
      const auto policy = make_tiny_policy(model());
      GradientStep step(*policy, {.optim = config::AdamWConfig{}});
      (void)restore(checkpoints(), kStep, {}, *policy, step);
      ADD_FAILURE() << to << " was read";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(wanted));
    }
  }
}

}  // namespace
}  // namespace prl::trainer
