#include "tools/init_model.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "base/error.hpp"
#include "base/files.hpp"
#include "nn/model_config.hpp"
#include "text/tokenizer.hpp"

namespace prl::tools {
namespace {
namespace fs = std::filesystem;

class InitModelTool : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("prl-init-model-" + std::to_string(::getpid()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    config_.output_dir = folder_ / "m";
    config_.hidden_size = 64;
    config_.num_layers = 1;
    config_.num_heads = 2;
    config_.num_kv_heads = 1;
    config_.head_dim = 32;
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_;
  config::InitModelConfig config_;
};

TEST_F(InitModelTool, AFailureLeavesTheFormerModelAndForeignFoldersAlone) {
  init_model(config_);
  const std::string before = read_file(folder_ / "m/model.safetensors");
  EXPECT_THAT(nn::load_model_config(folder_ / "m").eos_ids,
              ::testing::UnorderedElementsAreArray(text::Tokenizer::load(folder_ / "m").stop_ids()));
  EXPECT_THROW(init_model(config_), Error) << "it exists";

  std::ofstream(folder_ / "m/notes.txt") << "mine";
  fs::create_directories(folder_ / "m.tokenizer");
  std::ofstream(folder_ / "m.tokenizer/other.txt") << "not ours";
  config_.overwrite = true;
  config_.num_kv_heads = 5;  // does not divide the heads
  EXPECT_THROW(init_model(config_), Error);
  EXPECT_EQ(read_file(folder_ / "m/model.safetensors"), before);

  config_.num_kv_heads = 1;
  config_.seed = 7;
  init_model(config_);
  EXPECT_NE(read_file(folder_ / "m/model.safetensors"), before);
  EXPECT_EQ(read_file(folder_ / "m/notes.txt"), "mine");
  EXPECT_EQ(read_file(folder_ / "m.tokenizer/other.txt"), "not ours");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 2);
}

}  // namespace
}  // namespace prl::tools
