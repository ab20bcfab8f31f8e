#include "tools/convert.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/testing/source_dir.hpp"
#include "io/safetensors.hpp"
#include "nn/weights.hpp"
#include "ops/context.hpp"
#include "text/chat_template.hpp"
#include "text/tokenizer.hpp"

namespace prl::tools {
namespace {
namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Convert : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              ("prl-convert-" + std::to_string(::getpid()) + "-" + ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  void expect_error(const ConvertOptions& options, ErrorCode code, const std::string& part) {
    try {
      convert_model(options);
      ADD_FAILURE() << "no error; wanted " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
    EXPECT_FALSE(fs::exists(folder_ / "bad"));
  }
  fs::path tiny() const { return test_source_dir() / "tests/fixtures/gguf/tiny_llama.gguf"; }
  /// The tiny model with one text replaced by another of the same length.
  fs::path changed(const std::string& from, const std::string& to) const {
    std::string bytes = read_file(tiny());
    const std::size_t at = bytes.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    bytes.replace(at, to.size(), to);
    std::ofstream(folder_ / "changed.gguf", std::ios::binary) << bytes;
    return folder_ / "changed.gguf";
  }
  fs::path folder_;
};

TEST_F(Convert, EightBitsAreThoseThatARunRoundsTo) {
  ConvertOptions options;
  options.input = tiny();
  options.output_dir = folder_ / "plain";
  convert_model(options);
  options.input = folder_ / "plain";
  options.output_dir = folder_ / "eight";
  options.has_eight_bits = true;
  EXPECT_EQ(convert_model(options).dtype, DType::kBF16);

  const io::SafetensorsFolder files = io::SafetensorsFolder::open(folder_ / "eight");
  int num_codes = 0;
  for (const auto& [name, ref] : files.tensors()) {
    const bool is_product = name.ends_with("_proj.weight");
    EXPECT_EQ(ref.entry->type == io::StoredType::kF8E4M3, is_product) << name;
    if (!is_product) continue;
    ++num_codes;
    const auto& scales = *files.tensors().at(name + "_scale").entry;
    EXPECT_EQ(scales.type, io::StoredType::kF32);
    EXPECT_EQ(scales.shape, (std::vector<std::int64_t>{ref.entry->shape[0], 1})) << name;
  }
  const nn::ModelConfig config = nn::load_model_config(folder_ / "eight");
  EXPECT_EQ(num_codes, 7 * config.num_layers);
  EXPECT_EQ(config.fp8, (nn::Fp8Format{.block_rows = 1, .scale_suffix = "_scale"}));
  const std::string text = read_file(folder_ / "eight" / "config.json");
  EXPECT_THAT(text, HasSubstr("float-quantized"));
  EXPECT_THAT(text, HasSubstr("\"lm_head\""));

  ops::OpSession session(make_cpu_runtime(), 2);
  const auto checksum_of = [&](const char* name, nn::EightBits eight_bits) {
    const fs::path folder = folder_ / name;
    const nn::ModelConfig as = nn::load_model_config(folder, {.eight_bits = eight_bits});
    return nn::checksum(*nn::load_weights(session.context(), as, folder, DType::kBF16, PolicyVersion{0}, nullptr)).combined;
  };
  const std::uint64_t rounded = checksum_of("plain", nn::EightBits::kWeights);
  EXPECT_EQ(checksum_of("eight", nn::EightBits::kNone), rounded);
  EXPECT_EQ(checksum_of("eight", nn::EightBits::kWeights), rounded);
  EXPECT_NE(checksum_of("plain", nn::EightBits::kNone), rounded);

  // Values come to themselves again, if not with the same exponent of a row.
  options.input = folder_ / "eight";
  options.output_dir = folder_ / "again";
  convert_model(options);
  EXPECT_EQ(checksum_of("again", nn::EightBits::kNone), rounded);
  EXPECT_EQ(read_file(folder_ / "again" / "config.json"), read_file(folder_ / "eight" / "config.json"));
}

TEST_F(Convert, GgufBecomesACompleteFolderAndFoldersConvertOn) {
  ConvertOptions options;
  options.input = tiny();
  options.output_dir = folder_ / "f32";
  options.dtype = DType::kF32;
  const ConvertResult made = convert_model(options);
  EXPECT_TRUE(made.has_chat_template);
  for (const char* name : {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"})
    EXPECT_TRUE(fs::exists(folder_ / "f32" / name)) << name;
  const nn::ModelConfig config = nn::load_model_config(folder_ / "f32");
  EXPECT_EQ(config.vocab_size, 267);
  EXPECT_EQ(config.torch_dtype, "float32");
  const auto tokenizer = text::Tokenizer::load(folder_ / "f32");
  EXPECT_EQ(tokenizer.stop_ids(), std::vector<std::int32_t>{2});
  EXPECT_EQ(tokenizer.vocab_size(), 265) << "the two padding rows are no tokens";
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("the in a 12 <think>é<|im_end|>"), false), "the in a 12 <think>é<|im_end|>");
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("a<think><|im_end|>"), true), "a<think>");
  EXPECT_EQ(tokenizer.encode("<think>").size(), 1u);
  EXPECT_EQ(tokenizer.encode(" the").size(), 1u) << "merges were taken over";
  const auto chat = text::ChatTemplate::load(folder_ / "f32", tokenizer);
  EXPECT_EQ(chat.render({boost::json::object{{"role", "user"}, {"content", "x"}}}, {.add_generation_prompt = true}),
            "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n");

  // float32 to bfloat16 in shards equals bfloat16 from the start.
  ConvertOptions direct = options;
  direct.output_dir = folder_ / "direct";
  direct.dtype.reset();
  EXPECT_EQ(convert_model(direct).dtype, DType::kBF16);
  ConvertOptions again;
  again.input = folder_ / "f32";
  again.output_dir = folder_ / "again";
  again.dtype = DType::kBF16;
  again.max_shard_bytes = 20000;
  convert_model(again);
  EXPECT_TRUE(fs::exists(folder_ / "again/model.safetensors.index.json"));
  EXPECT_EQ(read_file(folder_ / "again/tokenizer.json"), read_file(folder_ / "direct/tokenizer.json"));
  const auto one = io::SafetensorsFolder::open(folder_ / "direct"), two = io::SafetensorsFolder::open(folder_ / "again");
  ASSERT_EQ(one.tensors().size(), two.tensors().size());
  for (const auto& [name, ref] : one.tensors()) {
    const auto other = two.find(name);
    EXPECT_TRUE(std::ranges::equal(ref.file->bytes(*ref.entry), other.file->bytes(*other.entry))) << name;
  }

  EXPECT_THROW(convert_model(options), Error) << "the folder exists";
  options.overwrite = true;
  options.dtype = DType::kF16;
  convert_model(options);
  EXPECT_EQ(nn::load_model_config(folder_ / "f32").torch_dtype, "float16");
}

/// What transformers makes of matrices in FP8, rounded once; the folder is an ordinary one.
TEST_F(Convert, MatricesInFp8BecomeBfloat16) {
  const fs::path source = test_source_dir() / "tests/golden/models/qwen3_fp8";
  ConvertOptions options;
  options.input = source;
  options.output_dir = folder_ / "out";
  EXPECT_EQ(convert_model(options).dtype, DType::kBF16);
  const auto expected = io::SafetensorsFile::open(source / "expected.safetensors"),
             found = io::SafetensorsFile::open(folder_ / "out" / "model.safetensors");
  const std::string name = "model.layers.0.mlp.down_proj.weight";
  EXPECT_TRUE(std::ranges::equal(found.bytes(found.at(name)), expected.bytes(expected.at("rounded." + name))));
  for (const io::SafetensorsEntry& entry : found.entries()) EXPECT_EQ(entry.type, io::StoredType::kBF16) << entry.name;
  EXPECT_THAT(read_file(folder_ / "out" / "config.json"), ::testing::Not(HasSubstr("quantization_config")));
  // A code that is no number.
  fs::create_directories(folder_ / "spoilt");
  fs::copy_file(source / "config.json", folder_ / "spoilt" / "config.json");
  std::string bytes = read_file(source / "model.safetensors");
  const auto file = io::SafetensorsFile::open(source / "model.safetensors");
  const auto at = file.bytes(file.at(name)).data() - file.bytes(file.entries().front()).data();
  bytes[bytes.size() - file.entries().back().end + static_cast<std::size_t>(at)] = '\x7f';
  std::ofstream(folder_ / "spoilt" / "model.safetensors", std::ios::binary) << bytes;
  options.input = folder_ / "spoilt";
  options.output_dir = folder_ / "bad";
  expect_error(options, ErrorCode::kCorrupt, "'" + name + "' holds nan at element 0, F8_E4M3 times a scale of '" + name + "_scale_inv'");
}

TEST_F(Convert, NamesWhatIsWrongAndLeavesNothingBehind) {
  ConvertOptions options;
  options.output_dir = folder_ / "bad";
  options.input = folder_ / "nothing";
  expect_error(options, ErrorCode::kNotFound, "does not exist");
  options.input = folder_;
  expect_error(options, ErrorCode::kNotFound, "no config.json");
  std::ofstream(folder_ / "x.bin") << "xx";
  options.input = folder_ / "x.bin";
  expect_error(options, ErrorCode::kInvalidArgument, "no GGUF file");
  options.input = changed("tokenizer.ggml.pre", "tokenizer.ggml.prx");
  expect_error(options, ErrorCode::kCorrupt, "--pre-tokenizer");
  options.pre_tokenizer = "tekken";
  expect_error(options, ErrorCode::kNotImplemented, "'tekken'");
  options.pre_tokenizer.reset();
  options.input = folder_;
  expect_error(options, ErrorCode::kInvalidArgument, "changed.gguf");
  options.input = changed("gpt2", "bert");
  expect_error(options, ErrorCode::kNotImplemented, "'bert'");
  options.input = changed("tokenizer.ggml.tokens", "tokenizer.ggml.tokenx");
  expect_error(options, ErrorCode::kCorrupt, "'tokenizer.ggml.tokens' is missing");
  options.input = changed("blk.1.ffn_gate.weight", "blk.1.ffn_gatx.weight");
  expect_error(options, ErrorCode::kCorrupt, "blk.1.ffn_gate.weight");
  std::ofstream(folder_ / "notes.txt") << "mine";
  options.input = tiny();
  options.output_dir = folder_;
  options.overwrite = true;
  EXPECT_THROW(convert_model(options), Error);
  EXPECT_TRUE(fs::exists(folder_ / "notes.txt")) << "a folder that is no model is never overwritten";
}

TEST_F(Convert, RefusesAnOutputThatHoldsItsInput) {
  fs::create_directories(folder_ / "x/inner");
  fs::copy_file(tiny(), folder_ / "x/inner/x.gguf");
  std::ofstream(folder_ / "x/config.json") << "{}";
  std::ofstream(folder_ / "x/inner/config.json") << "{}";
  fs::create_directory_symlink(folder_ / "x", folder_ / "link");
  ConvertOptions options;
  options.input = folder_ / "x/inner/x.gguf";
  options.overwrite = true;
  for (const char* output : {"x/inner", "x", "x/", "link", "link/inner", "x/inner/../inner/."}) {
    options.output_dir = folder_ / output;
    expect_error(options, ErrorCode::kInvalidArgument, "x.gguf, which is read");
  }
  ConvertOptions good;
  good.input = tiny();
  good.output_dir = folder_ / "model";
  convert_model(good);
  options.input = folder_ / "model";
  options.output_dir = folder_ / "model";
  expect_error(options, ErrorCode::kInvalidArgument, "which is read");
  for (const fs::path& here : {fs::path("."), fs::path(""), fs::current_path().parent_path()}) {
    options.output_dir = here.empty() ? fs::current_path() : here;
    expect_error(options, ErrorCode::kInvalidArgument, "was started in");
  }
  EXPECT_EQ(read_file(folder_ / "x/inner/x.gguf"), read_file(tiny()));
  EXPECT_TRUE(fs::exists(folder_ / "model/model.safetensors"));
}

TEST_F(Convert, OverwritingKeepsWhatIsNoPartOfTheModel) {
  ConvertOptions options;
  options.input = tiny();
  options.output_dir = folder_ / "m";
  options.max_shard_bytes = 20000;
  convert_model(options);
  fs::create_directories(folder_ / "m/.git");
  std::ofstream(folder_ / "m/.git/HEAD") << "ref";
  std::ofstream(folder_ / "m/README.md") << "mine";
  std::ofstream(folder_ / "m/model.gguf") << "another";
  options.max_shard_bytes = 1 << 30;
  options.overwrite = true;
  convert_model(options);
  EXPECT_EQ(read_file(folder_ / "m/.git/HEAD"), "ref");
  EXPECT_EQ(read_file(folder_ / "m/README.md"), "mine");
  EXPECT_EQ(read_file(folder_ / "m/model.gguf"), "another");
  EXPECT_TRUE(fs::exists(folder_ / "m/model.safetensors"));
  EXPECT_FALSE(fs::exists(folder_ / "m/model.safetensors.index.json")) << "shards of the former model";
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1) << "nothing is left beside it";

  // What cannot be converted leaves the former model as it was.
  const std::string before = read_file(folder_ / "m/model.safetensors");
  options.input = changed("tokenizer.ggml.tokens", "tokenizer.ggml.tokenx");
  EXPECT_THROW(convert_model(options), Error);
  EXPECT_EQ(read_file(folder_ / "m/model.safetensors"), before);
  EXPECT_EQ(read_file(folder_ / "m/README.md"), "mine");
}

}  // namespace
}  // namespace prl::tools
