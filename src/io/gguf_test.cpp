#include "io/gguf.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/rng.hpp"
#include "base/testing/source_dir.hpp"

namespace prl::io {
namespace {
namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

fs::path gguf_fixture(const char* name) { return test_source_dir() / "tests/fixtures/gguf" / name; }

/// Builds GGUF files by hand, right or wrong.
struct Builder {
  std::string bytes;
  template <typename T>
  Builder& put(T v) {
    bytes.append(reinterpret_cast<const char*>(&v), sizeof v);
    return *this;
  }
  Builder& text(std::string_view s) {
    put<std::uint64_t>(s.size());
    bytes += s;
    return *this;
  }
  static Builder header(std::uint64_t tensors, std::uint64_t values, std::uint32_t version = 3) {
    Builder b;
    b.bytes = "GGUF";
    return b.put(version).put(tensors).put(values);
  }
  Builder& tensor(std::string_view name, std::vector<std::uint64_t> extents, std::uint32_t type, std::uint64_t offset) {
    text(name).put<std::uint32_t>(static_cast<std::uint32_t>(extents.size()));
    for (const std::uint64_t extent : extents) put(extent);
    return put(type).put(offset);
  }
  Builder& data(std::size_t size) {
    bytes.resize((bytes.size() + 31) / 32 * 32);
    bytes.append(size, 'x');
    return *this;
  }
};

class GgufTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = fs::temp_directory_path() /
            ("prl-gguf-" + std::to_string(::getpid()) + "-" + ::testing::UnitTest::GetInstance()->current_test_info()->name() + ".gguf");
  }
  void TearDown() override { fs::remove(path_); }
  const fs::path& write(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary) << bytes;
    return path_;
  }
  void expect_error(const Builder& builder, ErrorCode code, const std::string& part) {
    try {
      GgufFile::open(write(builder.bytes));
      FAIL() << "opened; wanted an error with '" << part << "'";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(part));
      EXPECT_THAT(error.what(), HasSubstr(path_.filename().string()));
    }
  }
  fs::path path_;
};

TEST(GgufFixture, EveryTypeDequantizesToTheReferenceValues) {
  const GgufFile file = GgufFile::open(gguf_fixture("quants.gguf"));
  int num_checked = 0;
  for (const GgufTensor& tensor : file.tensors()) {
    const GgufTensor* expected = file.find(tensor.name + ".expected");
    if (expected == nullptr) continue;
    ++num_checked;
    EXPECT_EQ(tensor.type.name, tensor.name);
    ASSERT_EQ(tensor.shape, expected->shape) << tensor.name;
    std::vector<float> got(static_cast<std::size_t>(tensor.num_elements())), wanted(got.size());
    file.read_f32(tensor, 0, got);
    file.read_f32(*expected, 0, wanted);
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(std::memcmp(&got[i], &wanted[i], 4), 0) << tensor.name << " element " << i << ": " << got[i] << " against " << wanted[i];
    // A later part alone.
    const auto block = static_cast<std::int64_t>(tensor.type.block_elements);
    std::vector<float> part(static_cast<std::size_t>(block));
    file.read_f32(tensor, tensor.num_elements() - block, part);
    EXPECT_EQ(std::memcmp(part.data(), wanted.data() + wanted.size() - part.size(), part.size() * 4), 0) << tensor.name;
  }
  EXPECT_EQ(num_checked, 10);
  EXPECT_EQ(file.find("F32")->shape, (std::vector<std::int64_t>{2, 5}));
}

TEST(GgufFixture, MetadataOfEveryKind) {
  const GgufFile file = GgufFile::open(gguf_fixture("quants.gguf"));
  EXPECT_EQ(file.version(), 3u);
  EXPECT_EQ(file.string("general.architecture"), "test");
  EXPECT_EQ(file.integer("test.u8"), 200);
  EXPECT_EQ(file.integer("test.i16"), -300);
  EXPECT_EQ(file.integer("test.u64"), std::int64_t{1} << 40);
  EXPECT_EQ(file.number("test.f32"), 1.5);
  EXPECT_EQ(file.number("test.f64"), -2.25);
  EXPECT_EQ(file.number("test.u8"), 200.0);
  EXPECT_EQ(file.boolean("test.bool"), true);
  EXPECT_EQ(file.string("test.string"), "Grüße");
  EXPECT_THAT(file.strings("test.strings"), ElementsAre("a", "", "ccc"));
  EXPECT_THAT(file.integers("test.ints"), ElementsAre(3, -1, 2));
  EXPECT_TRUE(file.is_array("test.ints"));
  EXPECT_FALSE(file.is_array("test.u8"));
  EXPECT_FALSE(file.has("absent"));
  EXPECT_EQ(file.integer("absent"), std::nullopt);
  EXPECT_TRUE(file.strings("absent").empty());
  for (const char* key : {"test.string", "test.f32", "test.ints"}) {
    try {
      file.integer(key);
      ADD_FAILURE() << key;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
      EXPECT_THAT(error.what(), HasSubstr(key));
      EXPECT_THAT(error.what(), HasSubstr("quants.gguf"));
    }
  }
  EXPECT_THROW(file.string("test.ints"), Error);
  EXPECT_THROW(file.boolean("test.u8"), Error);
  EXPECT_THROW(file.strings("test.ints"), Error);
  EXPECT_THROW(file.integers("test.strings"), Error);
  EXPECT_TRUE(GgufFile::is_gguf(gguf_fixture("quants.gguf")));
  EXPECT_FALSE(GgufFile::is_gguf(gguf_fixture("tiny_llama.safetensors")));
  EXPECT_FALSE(GgufFile::is_gguf(gguf_fixture("")));
}

TEST_F(GgufTest, ReadsVersionTwoAndHandMadeFiles) {
  Builder good = Builder::header(1, 1, 2).text("general.alignment").put<std::uint32_t>(4).put<std::uint32_t>(64);
  good.tensor("t", {4, 2}, 0, 64);
  good.bytes.resize(192 + 32);
  const GgufFile file = GgufFile::open(write(good.bytes));
  EXPECT_EQ(file.version(), 2u);
  ASSERT_NE(file.find("t"), nullptr);
  EXPECT_EQ(file.find("t")->shape, (std::vector<std::int64_t>{2, 4}));
  EXPECT_EQ(file.find("t")->begin, 192u);
  EXPECT_EQ(file.find("t")->num_bytes, 32u);
}

TEST_F(GgufTest, RefusesHostileHeaders) {
  const auto corrupt = ErrorCode::kCorrupt;
  const auto unbuilt = ErrorCode::kNotImplemented;
  expect_error({""}, corrupt, "GGUF");
  expect_error({"GGML...."}, corrupt, "GGUF");
  expect_error({"GGUF"}, corrupt, "truncated");
  expect_error(Builder::header(0, 0, 1), unbuilt, "version 1");
  expect_error(Builder::header(0, 0, 4), unbuilt, "version 4");
  expect_error(Builder::header(0, 0, 3u << 24), unbuilt, "big-endian");
  expect_error(Builder::header(0, ~0ull), corrupt, "metadata values do not fit");
  expect_error(Builder::header(~0ull, 0), corrupt, "tensors do not fit");
  expect_error(Builder::header(0, 1).put<std::uint64_t>(1 << 20).data(100), corrupt, "limit");
  expect_error(Builder::header(0, 1).text("k").put<std::uint32_t>(77).data(100), corrupt, "key 'k'");
  expect_error(Builder::header(0, 1).text("k").put<std::uint32_t>(8).put<std::uint64_t>(~0ull), corrupt, "key 'k'");
  expect_error(Builder::header(0, 1).text("k").put<std::uint32_t>(9).put<std::uint32_t>(9).put<std::uint64_t>(1).data(50), unbuilt,
               "arrays");
  expect_error(Builder::header(0, 1).text("k").put<std::uint32_t>(9).put<std::uint32_t>(8).put<std::uint64_t>(1ull << 60), corrupt, "fit");
  expect_error(Builder::header(0, 1).text("k").put<std::uint32_t>(9).put<std::uint32_t>(12).put<std::uint64_t>(1ull << 61), corrupt, "fit");
  Builder twice = Builder::header(0, 2);
  for (int i = 0; i < 2; ++i) twice.text("k").put<std::uint32_t>(4).put<std::uint32_t>(1);
  expect_error(twice, corrupt, "twice");
  expect_error(Builder::header(0, 1).text("general.alignment").put<std::uint32_t>(4).put<std::uint32_t>(3), corrupt, "general.alignment");
  expect_error(Builder::header(0, 1).text("general.alignment").put<std::uint32_t>(5).put<std::int32_t>(-32), corrupt, "general.alignment");
}

TEST_F(GgufTest, RefusesHostileTensors) {
  const auto corrupt = ErrorCode::kCorrupt;
  expect_error(Builder::header(1, 0).tensor("t", {}, 0, 0).data(64), corrupt, "dimensions");
  expect_error(Builder::header(1, 0).tensor("t", {1, 1, 1, 1, 1}, 0, 0).data(64), corrupt, "dimensions");
  expect_error(Builder::header(1, 0).tensor("t", {0}, 0, 0).data(64), corrupt, "extent 0");
  expect_error(Builder::header(1, 0).tensor("t", {1ull << 32, 1ull << 32}, 0, 0).data(64), corrupt, "overflows");
  expect_error(Builder::header(1, 0).tensor("t", {1ull << 62}, 0, 0).data(64), corrupt, "overflows");
  expect_error(Builder::header(1, 0).tensor("t", {33}, 2, 0).data(64), corrupt, "blocks of 32");
  expect_error(Builder::header(1, 0).tensor("t", {128}, 14, 0).data(64), corrupt, "blocks of 256");
  expect_error(Builder::header(1, 0).tensor("t", {256}, 10, 0).data(64), ErrorCode::kNotImplemented, "Q2_K");
  expect_error(Builder::header(1, 0).tensor("t", {256}, 12345, 0).data(64), ErrorCode::kNotImplemented, "unknown type");
  expect_error(Builder::header(1, 0).tensor("t", {4}, 0, 8).data(64), corrupt, "multiple of 32");
  expect_error(Builder::header(1, 0).tensor("t", {4}, 0, 64).data(64), corrupt, "truncated");
  expect_error(Builder::header(1, 0).tensor("t", {4}, 0, ~0ull - 31).data(64), corrupt, "overflows");
  expect_error(Builder::header(1, 0).tensor("t", {1ull << 40}, 0, 0).data(64), corrupt, "truncated");
  expect_error(Builder::header(2, 0).tensor("t", {4}, 0, 0).tensor("t", {4}, 0, 32).data(64), corrupt, "twice");
  expect_error(Builder::header(2, 0).tensor("t", {16}, 0, 0).tensor("u", {4}, 0, 32).data(64), corrupt, "inside that of 't'");
}

TEST_F(GgufTest, SurvivesTruncationAndRandomDamage) {
  const std::string whole = read_file(gguf_fixture("quants.gguf"));
  const auto touch = [&](const std::string& bytes) {
    try {
      const GgufFile file = GgufFile::open(write(bytes));
      std::vector<float> values;
      for (const GgufTensor& tensor : file.tensors()) {
        values.resize(static_cast<std::size_t>(tensor.num_elements()));
        file.read_f32(tensor, 0, values);
      }
      for (const std::string& key : file.keys()) {
        try {
          file.is_array(key) ? static_cast<void>(file.strings(key)) : static_cast<void>(file.integer(key));
        } catch (const Error&) {
        }
      }
      return true;
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::kCorrupt || error.code() == ErrorCode::kNotImplemented) << error.what();
      return false;
    }
  };
  ASSERT_TRUE(touch(whole));
  for (std::size_t size = 0; size < whole.size(); size += size < 3000 ? 7 : 997) EXPECT_FALSE(touch(whole.substr(0, size))) << size;
  Rng rng(5);
  for (int round = 0; round < 500; ++round) {
    std::string bytes = whole;
    for (int n = 0; n < 3; ++n) bytes[rng.next_below(2500)] = static_cast<char>(rng.next_u32());
    touch(bytes);
  }
}

}  // namespace
}  // namespace prl::io
