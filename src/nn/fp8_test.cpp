// Matrices of FP8 with scales: codes, blocks, folders against transformers and of every family, parts of them, and what is refused.
#include "nn/fp8.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <optional>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/testing/temp_folder.hpp"
#include "io/safetensors.hpp"
#include "nn/stored_layout.hpp"
#include "nn/stored_tensor.hpp"
#include "nn/test_support.hpp"

namespace prl::nn {
namespace {
namespace fs = std::filesystem;
using io::StoredType;
using ::testing::HasSubstr;
using testing_support::golden_models;
using testing_support::SmallModel;

const Fp8Format kBlocksOf128{.block_rows = 128, .block_cols = 128, .scale_suffix = "_scale_inv"};
const Fp8Format kByRow{.block_rows = 1, .scale_suffix = "_scale"};
const Fp8Format kByMatrix{.scale_suffix = "_scale"};

/// By the words of the specification.
double number_of_code(unsigned code) {
  const int exponent = static_cast<int>(code >> 3 & 15U), mantissa = static_cast<int>(code & 7U);
  const double size = exponent == 0 ? std::ldexp(mantissa / 8.0, -6) : std::ldexp(1.0 + mantissa / 8.0, exponent - 7);
  return (code & 128U) != 0 ? -size : size;
}

bool is_nan_code(unsigned code) { return (code & 127U) == 127U; }

/// A tensor of a file that is being made.
struct Made {
  StoredType type = StoredType::kF32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
};
using MadeFile = std::map<std::string, Made>;

void write_made(const fs::path& folder, const MadeFile& tensors) {
  fs::create_directories(folder);
  std::vector<io::SafetensorsWriter::Spec> specs;
  for (const auto& [name, tensor] : tensors) specs.push_back({name, tensor.type, tensor.shape});
  io::SafetensorsWriter writer(folder / "model.safetensors", specs, {{"format", "pt"}});
  for (const auto& [name, tensor] : tensors) writer.append(tensor.bytes);
  writer.finish();
}

MadeFile read_made(const fs::path& folder) {
  const io::SafetensorsFile file = io::SafetensorsFile::open(folder / "model.safetensors");
  MadeFile tensors;
  for (const io::SafetensorsEntry& entry : file.entries()) {
    const auto bytes = file.bytes(entry);
    tensors[entry.name] = {entry.type, entry.shape, {bytes.begin(), bytes.end()}};
  }
  return tensors;
}

std::int64_t count_of(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

/// Random codes of a matrix, or of several, with their scales in bfloat16 where they come in blocks, and element by element what they stand
/// for.
struct Quantised {
  Made codes, scales, values;
};
Quantised random_fp8(const std::vector<std::int64_t>& shape, const Fp8Format& format, Rng& rng) {
  const std::int64_t rows = shape[shape.size() - 2], cols = shape.back(), matrices = shape.size() == 3 ? shape[0] : 1;
  const std::int64_t block_rows = format.block_rows > 0 ? format.block_rows : rows,
                     block_cols = format.block_cols > 0 ? format.block_cols : cols;
  const std::int64_t down = (rows + block_rows - 1) / block_rows, across = (cols + block_cols - 1) / block_cols;
  const bool are_short = format == kBlocksOf128;
  Quantised out;
  out.codes = {StoredType::kF8E4M3, shape, {}};
  out.scales = {are_short ? StoredType::kBF16 : StoredType::kF32, {down, across}, {}};
  if (shape.size() == 3) out.scales.shape.insert(out.scales.shape.begin(), matrices);
  out.values = {StoredType::kF32, shape, std::vector<std::byte>(static_cast<std::size_t>(count_of(shape)) * 4)};
  std::vector<float> scales(static_cast<std::size_t>(matrices * down * across));
  for (float& scale : scales) {
    scale = static_cast<float>(std::exp(rng.next_normal()) * 1e-3);
    const BFloat16 low = to_bf16(scale);
    if (are_short) scale = to_f32(low);
    const auto* bytes = are_short ? reinterpret_cast<const std::byte*>(&low.bits) : reinterpret_cast<const std::byte*>(&scale);
    out.scales.bytes.insert(out.scales.bytes.end(), bytes, bytes + (are_short ? 2 : 4));
  }
  auto* values = reinterpret_cast<float*>(out.values.bytes.data());
  for (std::int64_t m = 0; m < matrices; ++m)
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t col = 0; col < cols; ++col) {
        auto code = static_cast<unsigned>(rng.next_below(256));
        if (is_nan_code(code)) code -= 1;
        out.codes.bytes.push_back(static_cast<std::byte>(code));
        static const std::vector<float> kNumbers = [] {
          std::vector<float> numbers;
          for (unsigned any = 0; any < 256; ++any) numbers.push_back(static_cast<float>(number_of_code(any)));
          return numbers;
        }();
        const float scale = scales[static_cast<std::size_t>((m * down + row / block_rows) * across + col / block_cols)];
        *values++ = kNumbers[code] * scale;
      }
  return out;
}

TEST(Fp8, All256CodesAreTheNumbersOfTheSpecificationAndOfTorch) {
  const io::SafetensorsFile file = io::SafetensorsFile::open(golden_models() / "qwen3_fp8" / "expected.safetensors");
  std::vector<float> of_torch(256);
  file.read_f32(file.at("e4m3"), 0, of_torch);
  for (unsigned code = 0; code < 256; ++code) {
    const float found = e4m3_to_f32(static_cast<std::uint8_t>(code));
    EXPECT_EQ(std::isnan(found), is_nan_code(code)) << code;
    EXPECT_EQ(std::isnan(of_torch[code]), is_nan_code(code)) << code;
    if (is_nan_code(code)) continue;
    EXPECT_EQ(std::memcmp(&found, &of_torch[code], 4), 0) << code << ": " << found << ", wanted " << of_torch[code];
    EXPECT_EQ(static_cast<double>(found), number_of_code(code)) << code;
  }
  EXPECT_EQ(e4m3_to_f32(0x7e), 448.0f);
  EXPECT_EQ(e4m3_to_f32(0x81), -0x1.0p-9f);
  EXPECT_TRUE(std::signbit(e4m3_to_f32(0x80)));
}

/// Matrices whose sides are one block, less, a little more, and several; any part of them is that part of the whole.
TEST(Fp8, EveryPartOfAMatrixHasTheScalesOfItsBlocks) {
  Rng rng(3);
  for (const Fp8Format& format : {kBlocksOf128, kByRow, kByMatrix})
    for (const std::vector<std::int64_t>& shape :
         {std::vector<std::int64_t>{1, 1}, {128, 128}, {129, 127}, {127, 257}, {300, 130}, {1, 400}, {260, 1}, {3, 130, 140}}) {
      const Quantised made = random_fp8(shape, format, rng);
      const prl::testing::TempFolder temporary;
      write_made(temporary.path(), {{"w", made.codes}, {"w" + format.scale_suffix, made.scales}});
      const io::SafetensorsFolder files = io::SafetensorsFolder::open(temporary.path());
      const io::SafetensorsRef ref = files.find("w");
      const StoredTensor tensor = StoredTensor(ref).scaled(find_scales(files, ref, format));
      EXPECT_FALSE(tensor.is_plain());
      const std::int64_t count = count_of(shape);
      const auto* wanted = reinterpret_cast<const float*>(made.values.bytes.data());
      std::vector<float> found(static_cast<std::size_t>(count));
      tensor.read_f32(0, found);
      ASSERT_EQ(std::memcmp(found.data(), wanted, found.size() * 4), 0) << ::testing::PrintToString(shape);
      for (int k = 0; k < 200; ++k) {
        const auto first = static_cast<std::int64_t>(rng.next_below(static_cast<std::uint64_t>(count)));
        found.resize(1 + rng.next_below(static_cast<std::uint64_t>(count - first)));
        tensor.read_f32(first, found);
        ASSERT_EQ(std::memcmp(found.data(), wanted + first, found.size() * 4), 0) << first << " of " << ::testing::PrintToString(shape);
      }
      EXPECT_EQ(tensor.find_not_finite(0, count, DType::kF32), -1);
    }
}

class Fp8GoldenTest : public ::testing::TestWithParam<std::string> {};

/// What transformers makes of codes and scales, bit for bit: in masters and weights, in fp32 and bfloat16, and in what is saved.
TEST_P(Fp8GoldenTest, MatricesAreWhatTransformersMakesOfThem) {
  const fs::path source = golden_models() / GetParam();
  const io::SafetensorsFile expected = io::SafetensorsFile::open(source / "expected.safetensors");
  const prl::testing::TempFolder temporary;
  Parameters parameters(make_cpu_runtime(), load_model_config(source));
  load_parameters(parameters, source);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const fs::path folder = temporary.path() / std::string(to_string(dtype));
    save_pretrained(parameters, folder, dtype, {});
    const io::SafetensorsFile saved = io::SafetensorsFile::open(folder / "model.safetensors");
    const std::string prefix = dtype == DType::kF32 ? "dequantised." : "rounded.";
    int compared = 0;
    for (const io::SafetensorsEntry& entry : expected.entries()) {
      if (!entry.name.starts_with(prefix)) continue;
      EXPECT_TRUE(std::ranges::equal(expected.bytes(entry), saved.bytes(saved.at(entry.name.substr(prefix.size()))))) << entry.name;
      ++compared;
    }
    EXPECT_GE(compared, prefix == "rounded." ? 1 : 7);
    for (const io::SafetensorsEntry& entry : saved.entries()) EXPECT_FALSE(entry.name.ends_with("_scale_inv")) << entry.name;
    EXPECT_THAT(read_file(folder / "config.json"), ::testing::Not(HasSubstr("quantization_config")));
    EXPECT_FALSE(load_model_config(folder).fp8);
    SmallModel any("qwen3");
    const auto checksum_of = [&](const fs::path& of) {
      return checksum(*load_weights(any.ctx(), load_model_config(of), of, dtype, {}, nullptr)).combined;
    };
    EXPECT_EQ(checksum_of(source), checksum_of(folder));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Fp8GoldenTest, ::testing::Values("qwen3_fp8", "qwen3_moe_fp8"),
                         [](const auto& test) { return test.param; });

/// A folder of a family with every matrix in FP8, and one of the numbers that these stand for.
struct Fp8Folders {
  Fp8Folders(const std::string& family, const Fp8Format& format) : session(2) {
    InitModelOptions o = testing_support::small_options(family, testing_support::ModelSize::kWide);
    o.vocab_size = 140;
    o.intermediate_size = 272;
    o.num_experts = 3;
    o.expert_size = 144;
    if (o.head_dim != 64) o.head_dim = 96;
    o.tie_word_embeddings = false;
    config = make_model_config(o);
    Parameters any(make_cpu_runtime(), config);
    any.init_random(11);
    save_pretrained(any, plain(), DType::kF32, {});
    MadeFile wanted = read_made(plain()), stored;
    Rng rng(8);
    for (auto& [name, tensor] : wanted) {
      const bool is_transposed = name.ends_with("experts.gate_up_proj") && config.expert_names == ExpertNames::kStacked;
      const bool is_down = name.ends_with("experts.down_proj") && config.expert_names == ExpertNames::kStacked;
      const bool is_stack = tensor.shape.size() == 3 && !name.ends_with("conv1d.weight") && !is_transposed && !is_down;
      if (tensor.shape.size() != 2 && !is_stack) {
        stored[name] = tensor;
        continue;
      }
      Quantised made = random_fp8(tensor.shape, format, rng);
      stored[name] = std::move(made.codes);
      stored[name + format.scale_suffix] = std::move(made.scales);
      tensor = std::move(made.values);
    }
    write_made(plain(), wanted);
    write_made(quantised(), stored);
    config = load_model_config(plain());
    config.fp8 = format;
  }
  fs::path plain() const { return temporary.path() / "plain"; }
  fs::path quantised() const { return temporary.path() / "quantised"; }
  Parameters loaded(const fs::path& folder, const std::optional<ElementRanges>& held = std::nullopt) {
    const TensorTablePtr table = make_tensor_table(config);
    Parameters parameters(make_cpu_runtime(), config, table, held.value_or(ElementRange{0, table->num_master_elements()}));
    load_parameters(parameters, folder);
    return parameters;
  }

  ops::OpContext& ctx() { return session.context(); }

  testing_support::TestSession session;
  prl::testing::TempFolder temporary;
  ModelConfig config;
};

void expect_same_values(const Tensor& a, const Tensor& b) {
  ASSERT_EQ(a.shape(), b.shape());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.num_bytes()), 0);
}

class Fp8FamilyTest : public ::testing::TestWithParam<std::string> {};

TEST_P(Fp8FamilyTest, FoldersAreReadAsTheNumbersThatTheyStandFor) {
  Fp8Folders folders(GetParam(), kBlocksOf128);
  expect_same_values(folders.loaded(folders.quantised()).all_values(), folders.loaded(folders.plain()).all_values());
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const auto checksum_of = [&](const fs::path& folder) {
      return checksum(*load_weights(folders.ctx(), folders.config, folder, compute, {}, nullptr)).tensors;
    };
    EXPECT_EQ(checksum_of(folders.quantised()), checksum_of(folders.plain()));
  }
}

INSTANTIATE_TEST_SUITE_P(Families, Fp8FamilyTest,
                         ::testing::Values("llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "mistral", "smollm3", "mixtral", "olmo2",
                                           "phi3", "olmo3", "qwen3_5_text", "gpt_oss", "qwen3_5_moe_text", "qwen3_next", "minimax_m2",
                                           "afmoe", "nemotron_h"),
                         [](const auto& test) { return test.param; });

TEST(Fp8, ScalesOfRowsAndOfMatricesAreRead) {
  for (const char* family : {"qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "phi3"})
    for (const Fp8Format& format : {kByRow, kByMatrix}) {
      Fp8Folders folders(family, format);
      expect_same_values(folders.loaded(folders.quantised()).all_values(), folders.loaded(folders.plain()).all_values());
    }
}

/// Ranks that hold a part of the masters each, cut anywhere.
TEST(Fp8, ARankReadsItsPartOfTheWhole) {
  for (const char* family : {"qwen3", "qwen3_next", "qwen3_5_moe_text"}) {
    Fp8Folders folders(family, kBlocksOf128);
    const Tensor whole = folders.loaded(folders.plain()).all_values();
    const std::int64_t count = whole.num_elements();
    constexpr std::int64_t kRanks = 3;
    for (std::int64_t rank = 0; rank < kRanks; ++rank) {
      const ElementRange range{rank * count / kRanks, (rank + 1) * count / kRanks};
      const Parameters part = folders.loaded(folders.quantised(), ElementRanges(range));
      expect_same_values(part.held_values(), whole.slice(range.begin, range.count()));
    }
  }
}

/// Devices that share the layers hold rows of each matrix.
TEST(Fp8, DevicesThatShareLayersReadTheirRows) {
  for (const char* family : {"qwen3", "qwen3_moe", "glm4_moe"}) {
    Fp8Folders folders(family, kBlocksOf128);
    testing_support::TestSession other(2);
    const std::vector<ops::OpContext*> devices{&folders.ctx(), &other.context()};
    for (const DType compute : {DType::kF32, DType::kBF16}) {
      const WeightsPtr shared = load_shared_weights(devices, folders.config, folders.quantised(), compute, PolicyVersion{1}, nullptr);
      const WeightsPtr whole = load_weights(folders.ctx(), folders.config, folders.plain(), compute, PolicyVersion{1}, nullptr);
      EXPECT_EQ(checksum(*shared).tensors, checksum(*whole).tensors) << family;
    }
  }
}

/// A rank looks at what it holds: a bad number elsewhere is found by the rank that has it.
TEST(Fp8, ARankLooksAtItsOwnPartAlone) {
  Fp8Folders folders("qwen3", kBlocksOf128);
  MadeFile stored = read_made(folders.quantised());
  stored["model.layers.1.mlp.down_proj.weight"].bytes.back() = std::byte{0xff};
  write_made(folders.quantised(), stored);
  const TensorTablePtr table = make_tensor_table(folders.config);
  const TensorSpec& spec = *std::ranges::find(table->tensors(), "model.layers.1.mlp.down_proj.weight", &TensorSpec::name);
  const std::int64_t end = table->num_master_elements();
  EXPECT_NO_THROW(folders.loaded(folders.quantised(), ElementRanges(ElementRange{0, spec.offset})));
  EXPECT_NO_THROW(folders.loaded(folders.quantised(), ElementRanges(ElementRange{spec.range().end, end})));
  EXPECT_THROW(folders.loaded(folders.quantised(), ElementRanges(ElementRange{spec.range().end - 1, end})), Error);
}

TEST(Fp8, WhatIsNotAsItShouldBeIsRefusedByName) {
  Fp8Folders folders("qwen3", kBlocksOf128);
  const MadeFile good = read_made(folders.quantised());
  const std::string matrix = "model.layers.0.mlp.up_proj.weight", scales = matrix + "_scale_inv";
  const auto refused = [&](const std::function<void(MadeFile&)>& change, const std::string& said) {
    MadeFile stored = good;
    change(stored);
    write_made(folders.quantised(), stored);
    const auto load_both = {std::function<void()>([&] { folders.loaded(folders.quantised()); }), std::function<void()>([&] {
                              load_weights(folders.ctx(), folders.config, folders.quantised(), DType::kBF16, {}, nullptr);
                            })};
    for (const auto& load : load_both) try {
        load();
        ADD_FAILURE() << "no error; wanted " << said;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kCorrupt) << error.what();
        EXPECT_THAT(error.what(), HasSubstr(said));
        EXPECT_THAT(error.what(), HasSubstr("model.safetensors: "));
      }
  };
  refused([&](MadeFile& m) { m.erase(scales); },
          "'" + matrix + "' is stored as F8_E4M3, but its scales, tensor '" + scales + "', are missing");
  refused(
      [&](MadeFile& m) {
        m[scales].shape = {1, 9};
      },
      "'" + scales + "' has shape [1, 9], wanted [3, 3]: a scale for each 128 x 128 numbers of '" + matrix + "' [272, 304]");
  refused([&](MadeFile& m) { m[scales].type = StoredType::kI16; }, "'" + scales + "' is stored as I16, wanted F32, BF16 or F16");
  refused([&](MadeFile& m) { m[matrix].type = StoredType::kF8E5M2; },
          "'" + matrix + "' is stored as F8_E5M2, wanted F8_E4M3, F32, BF16 or F16");
  refused([&](MadeFile& m) { m[matrix].type = StoredType::kI8; }, "'" + matrix + "' is stored as I8, wanted F8_E4M3, F32, BF16 or F16");
  refused([&](MadeFile& m) { m[matrix].bytes[700] = std::byte{0x7f}; },
          "'" + matrix + "' holds nan at element 700, F8_E4M3 times a scale of '" + scales + "'");
  refused([&](MadeFile& m) { m[matrix].bytes[82687] = std::byte{0xff}; }, "at element 82687");
  refused(
      [&](MadeFile& m) {
        m[matrix].bytes[130] = std::byte{0x38};
        const std::uint16_t infinite = 0x7f80;
        std::memcpy(m[scales].bytes.data() + 2, &infinite, 2);
      },
      "'" + matrix + "' holds ");
  refused([&](MadeFile& m) { m["model.layers.0.input_layernorm.weight_scale_inv"] = m[scales]; },
          "'model.layers.0.input_layernorm.weight_scale_inv' is no part of a qwen3 model");
  refused(
      [&](MadeFile& m) {
        Made& norm = m["model.norm.weight"];
        norm = {StoredType::kF8E4M3, norm.shape, std::vector<std::byte>(304)};
      },
      "'model.norm.weight' is stored as F8_E4M3, wanted F32, BF16 or F16");
  write_made(folders.quantised(), good);
  folders.config.fp8 = kByRow;
  refused([](MadeFile&) {}, "its scales, tensor 'model.embed_tokens.weight_scale', are missing");
  folders.config.fp8.reset();
  refused([](MadeFile&) {}, "is stored as F8_E4M3, wanted F32, BF16 or F16: the model's config.json has no 'quantization_config'");
}

/// Scales of activations, which a product of 8-bit numbers would want, are no part of the model.
TEST(Fp8, ScalesOfActivationsAreLeftOut) {
  Fp8Folders folders("qwen3", kByMatrix);
  MadeFile stored = read_made(folders.quantised());
  stored["model.layers.0.mlp.up_proj.input_scale"] = {StoredType::kF32, {1}, std::vector<std::byte>(4)};
  write_made(folders.quantised(), stored);
  expect_same_values(folders.loaded(folders.quantised()).all_values(), folders.loaded(folders.plain()).all_values());
}

/// The experts of GPT-OSS, whose stacks hold transposes, are read in MXFP4 and in floats.
TEST(Fp8, StacksOfTransposesAreRefusedByName) {
  Fp8Folders folders("gpt_oss", kBlocksOf128);
  MadeFile stored = read_made(folders.quantised());
  Made& stack = stored["model.layers.0.mlp.experts.down_proj"];
  stack = {StoredType::kF8E4M3, stack.shape, std::vector<std::byte>(stack.bytes.size() / 4)};
  write_made(folders.quantised(), stored);
  try {
    folders.loaded(folders.quantised());
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("'model.layers.0.mlp.experts.down_proj' is stored as F8_E4M3, wanted F32, BF16 or F16"));
  }
}

}  // namespace
}  // namespace prl::nn
