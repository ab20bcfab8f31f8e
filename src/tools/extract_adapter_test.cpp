#include "tools/extract_adapter.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "base/testing/source_dir.hpp"
#include "io/safetensors.hpp"
#include "nn/peft.hpp"
#include "nn/weights.hpp"
#include "tools/convert.hpp"
#include "tools/low_rank.hpp"

namespace prl::tools {
namespace {
namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<float> product(const LowRank& part, std::int64_t rows, std::int64_t cols) {
  std::vector<float> out(static_cast<std::size_t>(rows * cols));
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t r = 0; r < part.rank; ++r)
      for (std::int64_t k = 0; k < cols; ++k)
        out[static_cast<std::size_t>(i * cols + k)] +=
            part.b[static_cast<std::size_t>(i * part.rank + r)] * part.a[static_cast<std::size_t>(r * cols + k)];
  return out;
}

double distance2(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    sum += (static_cast<double>(a[i]) - static_cast<double>(b[i])) * (static_cast<double>(a[i]) - static_cast<double>(b[i]));
  return sum;
}

TEST(LowRankTest, AMatrixOfThatRankComesBackAndTheResidualIsWhatIsLeft) {
  ThreadPool pool(2);
  Rng random(1);
  const std::int64_t rows = 90, cols = 70;
  LowRank made{.rank = 5, .b = {}, .a = {}};
  for (std::int64_t i = 0; i < rows * made.rank; ++i) made.b.push_back(static_cast<float>(random.next_normal()));
  for (std::int64_t i = 0; i < made.rank * cols; ++i) made.a.push_back(static_cast<float>(random.next_normal()));
  const std::vector<float> matrix = product(made, rows, cols);
  for (const std::int64_t rank : {5, 8, 200}) {
    const LowRank found = best_low_rank(matrix, rows, cols, rank, pool);
    EXPECT_EQ(found.rank, std::min<std::int64_t>(rank, 70));
    EXPECT_LT(found.residual2, 1e-10 * found.norm2);
    EXPECT_LT(distance2(product(found, rows, cols), matrix), 1e-10 * found.norm2);
  }
  const LowRank less = best_low_rank(matrix, rows, cols, 3, pool);
  EXPECT_GT(less.residual2, 0.05 * less.norm2);
  EXPECT_NEAR(distance2(product(less, rows, cols), matrix), less.residual2, 1e-5 * less.norm2);
}

/// The singular values of a diagonal matrix are its entries: the two largest are kept.
TEST(LowRankTest, TheLargestSingularValuesAreKept) {
  ThreadPool pool(1);
  std::vector<float> matrix(16 * 16);
  for (std::size_t i = 0; i < 16; ++i) matrix[i * 17] = i == 3 ? 5.0f : i == 11 ? -4.0f : 0.5f;
  const LowRank found = best_low_rank(matrix, 16, 16, 2, pool);
  EXPECT_NEAR(found.residual2, 14 * 0.25, 1e-6);
  const std::vector<float> kept = product(found, 16, 16);
  EXPECT_NEAR(kept[3 * 17], 5.0f, 1e-4f);
  EXPECT_NEAR(kept[11 * 17], -4.0f, 1e-4f);
}

class ExtractAdapter : public ::testing::Test {
 protected:
  ExtractAdapter()
      : folder_(fs::temp_directory_path() /
                ("prl-extract-" + std::to_string(::getpid()) + "-" + ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~ExtractAdapter() override { fs::remove_all(folder_); }
  fs::path merge(const fs::path& adapter, const std::string& name) {
    ConvertOptions options;
    options.input = base_;
    options.adapter = adapter;
    options.dtype = DType::kF32;
    options.output_dir = folder_ / name;
    convert_model(options);
    return options.output_dir;
  }
  static std::vector<float> all_values(const fs::path& folder) {
    const auto file = io::SafetensorsFile::open(folder / "model.safetensors");
    std::vector<float> out;
    for (const auto& entry : file.entries()) {
      std::vector<float> one(static_cast<std::size_t>(entry.num_elements()));
      file.read_f32(entry, 0, one);
      out.insert(out.end(), one.begin(), one.end());
    }
    return out;
  }
  std::string error_of(const ExtractOptions& options) {
    try {
      extract_adapter(options);
    } catch (const Error& error) {
      EXPECT_FALSE(fs::exists(options.output_dir));
      return error.what();
    }
    ADD_FAILURE() << "no error";
    return {};
  }
  const fs::path base_ = test_source_dir() / "tests/golden/models/llama_tied";
  const fs::path adapter_ = test_source_dir() / "tests/golden/peft/llama_all";  ///< of rank 4
  fs::path folder_;
};

TEST_F(ExtractAdapter, AMergedAdapterComesBack) {
  const fs::path merged = merge(adapter_, "merged");
  const ExtractResult result = extract_adapter({.merged = merged, .base = base_, .output_dir = folder_ / "out", .rank = 4});
  EXPECT_EQ(result.num_modules, 14);  // seven matrices of two layers
  EXPECT_LT(result.residual, 1e-4);
  const nn::AdapterConfig config = nn::load_peft_config(folder_ / "out");
  EXPECT_EQ(config.rank, 4);
  EXPECT_EQ(config.alpha, 4);
  const std::vector<float> wanted = all_values(merged), found = all_values(merge(folder_ / "out", "again"));
  const std::vector<float> before = all_values(base_);
  ASSERT_EQ(wanted.size(), found.size());
  EXPECT_LT(distance2(found, wanted), 1e-8 * distance2(before, wanted));
  // A rank that is too low says what it leaves.
  EXPECT_GT(extract_adapter({.merged = merged, .base = base_, .output_dir = folder_ / "less", .rank = 1}).residual, 0.1);
}

/// The golden adapter, which says that it was trained on weights of `base`; without it, of whatever its configuration names.
class MergeAdapter : public ExtractAdapter {
 protected:
  fs::path adapter_of(const std::optional<nn::BaseIdentity>& base, const std::string& named = "llama_tied") {
    const fs::path folder = folder_ / "adapter";
    fs::create_directories(folder);
    const auto file = std::make_shared<const io::SafetensorsFile>(io::SafetensorsFile::open(adapter_ / nn::kPeftTensors));
    std::vector<nn::WeightSource> sources;
    for (const io::SafetensorsEntry& entry : file->entries()) {
      sources.push_back({entry.name, {entry.shape[0], entry.shape[1]}, [file, &entry](std::int64_t first, std::span<float> out) {
                           file->read_f32(entry, first, out);
                         }});
    }
    nn::AdapterConfig config = nn::load_peft_config(adapter_);
    config.base_model = named;
    nn::save_peft_files(config, sources, DType::kF32, folder, base);
    return folder;
  }
  std::uint64_t checksum_of_base(DType dtype) {
    ops::OpSession session(make_cpu_runtime(), 1);
    return nn::checksum(*nn::load_weights(session.context(), nn::load_model_config(base_), base_, dtype, PolicyVersion{0}, nullptr))
        .combined;
  }
  std::string why_not(const fs::path& adapter, bool takes_any_base = false) {
    ConvertOptions options;
    options.input = base_;
    options.output_dir = folder_ / "merged";
    options.adapter = adapter;
    options.takes_any_base = takes_any_base;
    options.overwrite = true;
    try {
      convert_model(options);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
};

TEST_F(MergeAdapter, OnlyIntoTheWeightsThatItWasTrainedOn) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::uint64_t here = checksum_of_base(dtype);
    EXPECT_EQ(why_not(adapter_of(nn::BaseIdentity{dtype, here})), "") << to_string(dtype);
    const fs::path other = adapter_of(nn::BaseIdentity{dtype, here + 1}, "someone/else");
    EXPECT_THAT(why_not(other),
                AllOf(HasSubstr("another base model"), HasSubstr("someone/else"), HasSubstr(base_.string()), HasSubstr("--any-base")));
    EXPECT_EQ(why_not(other, true), "") << "it was asked for";
  }
}

TEST_F(MergeAdapter, OneWithoutAChecksumIsDoubtedByTheNameAndShapesOfItsBase) {
  const nn::ModelConfig model = nn::load_model_config(base_);
  const auto doubt = [&](const std::string& named) {
    nn::AdapterConfig adapter;
    adapter.base_model = named;
    return nn::doubt_of_base(adapter, model, base_, base_.string());
  };
  EXPECT_EQ(doubt(""), "");
  EXPECT_EQ(doubt("hub/llama_tied"), "");
  EXPECT_EQ(doubt(base_.string() + "/"), "");
  EXPECT_THAT(doubt("hub/llama_other"), AllOf(HasSubstr("hub/llama_other"), HasSubstr(base_.string())));
  fs::create_directories(folder_ / "llama_tied");
  fs::copy_file(test_source_dir() / "tests/golden/models/qwen2_tied/config.json", folder_ / "llama_tied/config.json");
  EXPECT_THAT(doubt((folder_ / "llama_tied").string()), HasSubstr("another model")) << "the same name, other shapes";
  EXPECT_EQ(why_not(adapter_of({}, "hub/llama_other")), "") << "a doubt is a warning";
}

TEST_F(ExtractAdapter, WhatNoAdapterCanHoldIsRefusedByName) {
  const ExtractOptions same{.merged = base_, .base = base_, .output_dir = folder_ / "out", .rank = 4};
  EXPECT_THAT(error_of(same), HasSubstr("the same weights"));
  const fs::path other = test_source_dir() / "tests/golden/models/qwen3_tied";
  EXPECT_THAT(error_of({.merged = base_, .base = other, .output_dir = folder_ / "out", .rank = 4}), HasSubstr("qwen3_tied"));
}

}  // namespace
}  // namespace prl::tools
