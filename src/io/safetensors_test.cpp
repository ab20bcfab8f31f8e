#include "io/safetensors.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <memory>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/rng.hpp"
#include "io/chunked_hash.hpp"
#include "io/safetensors_checksum.hpp"
#include "io/tensor_file.hpp"

namespace prl::io {
namespace {
namespace fs = std::filesystem;
using ::testing::HasSubstr;

class SafetensorsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              ("prl-safetensors-" + std::to_string(::getpid()) + "-" + ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  /// A file with this header text and `data_size` bytes of data. `claimed` overrides the header length.
  fs::path make(const std::string& header, std::size_t data_size, std::int64_t claimed = -1) {
    const std::uint64_t length = claimed >= 0 ? static_cast<std::uint64_t>(claimed) : header.size();
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(length >> (8 * i)));
    bytes += header;
    bytes.append(data_size, 'x');
    const fs::path path = folder_ / "model.safetensors";
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  void expect_corrupt(const fs::path& path, const std::string& part) {
    try {
      SafetensorsFile::open(path);
      FAIL() << "opened; wanted an error with '" << part << "'";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(part));
      EXPECT_THAT(error.what(), HasSubstr(path.filename().string()));
    }
  }
  fs::path folder_;
};

TEST_F(SafetensorsTest, AFileThatIsCutShortWhileItIsMappedIsAnError) {
  const std::string header = R"({"w":{"dtype":"F32","shape":[65536],"data_offsets":[0,262144]}})";
  const fs::path path = make(header, 262144);
  const SafetensorsFile file = SafetensorsFile::open(path);
  std::vector<float> values(65536);
  file.read_f32(file.at("w"), 0, values);
  EXPECT_NO_THROW(file.check_whole());
  fs::resize_file(path, 100000);
  try {
    file.read_f32(file.at("w"), 0, values);
    FAIL() << "read a file that is not there any more";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr(path.string()), HasSubstr("cut short")));
  }
  fs::resize_file(path, header.size() + 262144 + 8);
  EXPECT_THROW(file.check_whole(), Error) << "what was read as zeros stays in doubt";
}

TEST_F(SafetensorsTest, OtherBusErrorsStillEndTheProcess) {
  const fs::path path = make(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4);
  const SafetensorsFile file = SafetensorsFile::open(path);
  EXPECT_EXIT(::raise(SIGBUS), ::testing::KilledBySignal(SIGBUS), "");
}

TEST_F(SafetensorsTest, AFileInMemoryHasTheBytesOfOneOnDisk) {
  const std::vector<float> values{1.0f, 2.0f, 3.0f, 4.0f};
  const std::vector<SafetensorsWriter::Spec> specs{{"w", StoredType::kF32, {2, 2}}};
  SafetensorsWriter on_disk(folder_ / "model.safetensors", specs, {{"format", "pt"}});
  auto memory = std::make_shared<std::vector<std::byte>>(3);  // what is there stays in front
  SafetensorsWriter in_memory(*memory, specs, {{"format", "pt"}});
  for (SafetensorsWriter* writer : {&on_disk, &in_memory}) {
    writer->append(std::as_bytes(std::span(values)));
    writer->finish();
  }
  const std::span<const std::byte> bytes = std::span(*memory).subspan(3);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), read_file(folder_ / "model.safetensors"));
  const std::weak_ptr<std::vector<std::byte>> held = memory;
  {
    const SafetensorsFile file = SafetensorsFile::read("somewhere", bytes, std::exchange(memory, nullptr));
    std::vector<float> read(4);
    file.read_f32(file.at("w"), 0, read);
    file.check_whole();
    EXPECT_EQ(read, values);
    EXPECT_EQ(file.metadata().at("format"), "pt");
    try {
      SafetensorsFile::read("somewhere", bytes.first(bytes.size() - 1), held.lock());
      ADD_FAILURE() << "a truncated file was read";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("somewhere"), HasSubstr("truncated")));
    }
  }
  EXPECT_TRUE(held.expired());
}

TEST_F(SafetensorsTest, EveryFlippedBitOfAFileOfOursIsFound) {
  const fs::path path = folder_ / "model.safetensors";
  const std::vector<float> values{1.0f, 2.0f, 3.0f, 4.0f};
  SafetensorsWriter writer(path, {{"w", StoredType::kF32, {4}}}, {{"format", "pt"}});
  writer.append(std::as_bytes(std::span(values)));
  writer.finish();
  const std::string whole = read_file(path);
  ASSERT_NO_THROW(SafetensorsFile::open(path));
  EXPECT_FALSE(SafetensorsFile::open(path).metadata().contains(kChecksumKey));
  const std::size_t key = whole.find(kChecksumKey), key_end = key + std::string_view(kChecksumKey).size();
  int num_found = 0;
  for (std::size_t at = 0; at < whole.size(); ++at) {
    if (at >= key && at < key_end) continue;  // a file without the key has no checksum; nothing else of it changed
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x04);
    std::ofstream(path, std::ios::binary | std::ios::trunc) << damaged;
    try {
      SafetensorsFile::open(path);
      ADD_FAILURE() << "byte " << at << " of " << whole.size() << " was changed unnoticed";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt) << error.what();
      ++num_found;
    }
  }
  EXPECT_GT(num_found, 64);
}

TEST_F(SafetensorsTest, ChecksumsOfFormerVersionsHold) {
  std::string header = fmt::format(
      R"({{"__metadata__":{{"{}":"0000000000000000"}},"w":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}})", kPlainChecksumKey);
  const std::uint64_t hash = hash_bytes(read_file(make(header, 8)));
  header.replace(header.find("0000000000000000"), 16, fmt::format("{:016x}", hash));
  const fs::path path = make(header, 8);
  EXPECT_FALSE(SafetensorsFile::open(path).metadata().contains(kPlainChecksumKey));
  std::string damaged = read_file(path);
  damaged.back() = 'y';
  std::ofstream(path, std::ios::binary | std::ios::trunc) << damaged;
  expect_corrupt(path, "checksum");
}

TEST(ChunkedHash, IsThatOfThePiecesHoweverTheyCome) {
  const std::size_t size = 2 * kHashPiece + 12345;
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 2654435761u >> 13);
  const auto of_pieces = [&] {
    std::string hashes;
    for (std::size_t at = 0; at < size; at += kHashPiece) {
      const std::uint64_t hash = hash_bytes(std::span(bytes).subspan(at, std::min(kHashPiece, size - at)));
      for (int i = 0; i < 8; ++i) hashes += static_cast<char>(hash >> (8 * i));
    }
    return hash_bytes(hashes);
  };
  EXPECT_EQ(chunked_hash_with_zeros(bytes, 0, 0), of_pieces());
  for (const std::size_t step : {std::size_t{1} << 20, kHashPiece, kHashPiece + 1, size}) {
    ChunkedHash hash;
    for (std::size_t at = 0; at < size; at += step) hash.update(std::span(bytes).subspan(at, std::min(step, size - at)));
    EXPECT_EQ(hash.digest(), of_pieces()) << step;
  }
  // The place of the checksum may lie in two pieces.
  for (const std::size_t begin : {std::size_t{8}, kHashPiece - 5, kHashPiece, size - 16}) {
    const std::vector<std::byte> kept(bytes.begin() + static_cast<std::ptrdiff_t>(begin),
                                      bytes.begin() + static_cast<std::ptrdiff_t>(begin + 16));
    const std::uint64_t found = chunked_hash_with_zeros(bytes, begin, 16);
    std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(begin), 16, std::byte{'0'});
    EXPECT_EQ(found, of_pieces()) << begin;
    std::ranges::copy(kept, bytes.begin() + static_cast<std::ptrdiff_t>(begin));
  }
}

TEST_F(SafetensorsTest, WritesWhatItReads) {
  const fs::path path = folder_ / "a.safetensors";
  const std::vector<float> a{1.5f, -2.0f, 3.25f, 0.0f, 1e-30f, 7.0f};
  const std::vector<std::uint16_t> b{0x3f80, 0xc000};  // bf16 1, -2
  SafetensorsWriter writer(path,
                           {{"a", StoredType::kF32, {2, 3}}, {"b.weight", StoredType::kBF16, {2}}, {"none", StoredType::kI64, {0, 4}}},
                           {{"format", "pt"}});
  writer.append(std::as_bytes(std::span(a)).first(10));
  writer.append(std::as_bytes(std::span(a)).subspan(10));
  writer.append(std::as_bytes(std::span(b)));
  writer.finish();
  EXPECT_THAT(read_file(path), ::testing::HasSubstr(fmt::format("\"{}\":\"", kChecksumKey)));
  EXPECT_EQ(writer.num_bytes(), fs::file_size(path));

  const SafetensorsFile file = SafetensorsFile::open(path);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  ASSERT_EQ(file.entries().size(), 3u);
  EXPECT_EQ(file.at("a").shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(file.bytes(file.at("a")).size(), 24u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(file.bytes(file.at("a")).data()) % 64, 0u);
  std::vector<float> got(6);
  file.read_f32(file.at("a"), 0, got);
  EXPECT_EQ(got, a);
  got.resize(1);
  file.read_f32(file.at("b.weight"), 1, got);
  EXPECT_EQ(got[0], -2.0f);
  EXPECT_EQ(file.at("none").num_elements(), 0);
  EXPECT_EQ(file.find("missing"), nullptr);
  EXPECT_THROW(file.at("missing"), Error);
  EXPECT_THROW(file.read_f32(file.at("none"), 0, {}), Error) << "I64 is no float";
}

TEST_F(SafetensorsTest, RefusesHostileHeaders) {
  const std::string good = R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  EXPECT_NO_THROW(SafetensorsFile::open(make(good, 8)));
  EXPECT_NO_THROW(SafetensorsFile::open(make(good + "    ", 8)));
  expect_corrupt(make(good, 7), "truncated");
  expect_corrupt(make(good, 9), "follow the last tensor");
  expect_corrupt(make(good, 0, 1 << 30), "limit");
  expect_corrupt(make(good, 0, 5000), "truncated");
  expect_corrupt(make("", 0), "does not start with");
  expect_corrupt(make("[1,2]", 0), "does not start with");
  expect_corrupt(make("{\"t\":", 0), "not valid JSON");
  expect_corrupt(make("{\"t\":" + std::string(100, '[') + std::string(100, ']') + "}", 0), "not valid JSON");
  expect_corrupt(make(R"({"t":5})", 0), "tensor 't'");
  expect_corrupt(make(R"({"t":{"dtype":"Q4","shape":[2],"data_offsets":[0,8]}})", 8), "unknown dtype 'Q4'");
  expect_corrupt(make(R"({"t":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8), "extent");
  expect_corrupt(make(R"({"t":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}})", 8), "extent");
  expect_corrupt(make(R"({"t":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]}})", 8), "overflows");
  expect_corrupt(make(R"({"t":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}})", 8), "elements");
  expect_corrupt(make(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8), "increasing");
  expect_corrupt(make(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8), "pair");
  expect_corrupt(make(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", 8), "data_offsets");
  expect_corrupt(make(R"({"t":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8), "3 elements");
  expect_corrupt(
      make(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"u":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12),
      "overlap");
  expect_corrupt(make(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})", 16), "hole");
  expect_corrupt(
      make(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"t":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})", 12), "hole");
  expect_corrupt(make(R"({"__metadata__":3})", 0), "__metadata__");
  expect_corrupt(make(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[18446744073709551608,18446744073709551615]}})", 8), "tensor 't'");
}

TEST_F(SafetensorsTest, SurvivesEveryTruncationAndRandomDamage) {
  const fs::path path = folder_ / "a.safetensors";
  const std::vector<float> a(32, 1.0f);
  SafetensorsWriter writer(path, {{"a", StoredType::kF32, {4, 4}}, {"b", StoredType::kF32, {16}}}, {{"format", "pt"}});
  writer.append(std::as_bytes(std::span(a)));
  writer.finish();
  const std::string whole = read_file(path);
  const fs::path damaged = folder_ / "b.safetensors";
  for (std::size_t size = 0; size < whole.size(); ++size) {
    std::ofstream(damaged, std::ios::binary | std::ios::trunc) << whole.substr(0, size);
    EXPECT_THROW(SafetensorsFile::open(damaged), Error) << size;
  }
  Rng rng(7);
  for (int i = 0; i < 300; ++i) {
    std::string bytes = whole;
    const std::size_t header_end = bytes.size() - a.size() * 4;
    for (int k = 0; k < 3; ++k) bytes[rng.next_below(header_end)] = static_cast<char>(rng.next_below(256));
    std::ofstream(damaged, std::ios::binary | std::ios::trunc) << bytes;
    try {  // either refused, or every tensor it shows can be read whole
      const SafetensorsFile file = SafetensorsFile::open(damaged);
      for (const SafetensorsEntry& entry : file.entries()) {
        unsigned sum = 0;
        for (const std::byte value : file.bytes(entry)) sum += static_cast<unsigned>(value);
        EXPECT_GE(sum, 0u);
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    }
  }
}

TEST_F(SafetensorsTest, FoldersMayBeSharded) {
  const float one = 1, two = 2;
  const auto shard = [&](const char* file, const char* name, float value) {
    SafetensorsWriter writer(folder_ / file, {{name, StoredType::kF32, {1}}}, {});
    writer.append(std::as_bytes(std::span(&value, 1)));
    writer.finish();
  };
  EXPECT_THROW(SafetensorsFolder::open(folder_), Error);
  shard("s1.safetensors", "a", one);
  shard("s2.safetensors", "b", two);
  const fs::path index = folder_ / "model.safetensors.index.json";
  std::ofstream(index) << R"({"metadata":{},"weight_map":{"a":"s1.safetensors","b":"s2.safetensors"}})";
  const SafetensorsFolder files = SafetensorsFolder::open(folder_);
  ASSERT_EQ(files.tensors().size(), 2u);
  std::vector<float> got(1);
  files.find("b").file->read_f32(*files.find("b").entry, 0, got);
  EXPECT_EQ(got[0], 2.0f);

  const auto expect_bad = [&](const char* text, const char* part) {
    std::ofstream(index, std::ios::trunc) << text;
    try {
      SafetensorsFolder::open(folder_);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
  };
  expect_bad("{", "JSON");
  expect_bad("{}", "weight_map");
  expect_bad(R"({"weight_map":{"a":"../s1.safetensors"}})", "not a file of this folder");
  expect_bad(R"({"weight_map":{"a":"s3.safetensors"}})", "missing");
  expect_bad(R"({"weight_map":{"c":"s1.safetensors"}})", "not there");
  shard("s2.safetensors", "a", two);
  expect_bad(R"({"weight_map":{"a":"s2.safetensors","b":"s1.safetensors"}})", "not there");
  SafetensorsWriter both(folder_ / "s4.safetensors", {{"a", StoredType::kF32, {0}}, {"c", StoredType::kF32, {0}}}, {});
  both.finish();
  expect_bad(R"({"weight_map":{"a":"s1.safetensors","c":"s4.safetensors"}})", "more than one shard");
}

TEST_F(SafetensorsTest, TensorFilesComeBackExactly) {
  const auto runtime = make_cpu_runtime();
  const Tensor m = Tensor::empty(runtime, {3, 5}, DType::kF32);
  const Tensor n = Tensor::empty(runtime, {2}, DType::kI64);
  for (int i = 0; i < 15; ++i) m.as<float>()[i] = static_cast<float>(i) * 0.1f;
  n.as<std::int64_t>()[0] = -5;
  n.as<std::int64_t>()[1] = std::int64_t{1} << 60;
  const fs::path path = folder_ / "optimizer.safetensors";
  const std::vector<NamedTensor> saved{{"m", m}, {"n", n}};
  save_tensors(path, saved, {{"step", "3"}});
  const std::vector<NamedTensor> loaded{{"n", Tensor::zeros(runtime, {2}, DType::kI64)},
                                        {"m", Tensor::zeros(runtime, {3, 5}, DType::kF32)}};
  load_tensors(path, loaded);
  EXPECT_EQ(std::memcmp(loaded[1].tensor.data(), m.data(), m.num_bytes()), 0);
  EXPECT_EQ(std::memcmp(loaded[0].tensor.data(), n.data(), n.num_bytes()), 0);
  const std::vector<NamedTensor> wrong_shape{{"m", Tensor::zeros(runtime, {5, 3}, DType::kF32)}, {"n", n}};
  EXPECT_THROW(load_tensors(path, wrong_shape), Error);
  const std::vector<NamedTensor> too_few{{"m", m}};
  EXPECT_THROW(load_tensors(path, too_few), Error);
}

TEST(HalfPrecision, RoundTripsEveryValueAndRoundsToEven) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = f16_to_f32(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) continue;
    ASSERT_EQ(f32_to_f16(value), bits) << value;
  }
  EXPECT_EQ(f16_to_f32(0x3c01), 1.0f + 0x1p-10f);
  EXPECT_EQ(f32_to_f16(1.0f + 0x1p-11f), 0x3c00) << "a tie goes to the even mantissa";
  EXPECT_EQ(f32_to_f16(1.0f + 3 * 0x1p-11f), 0x3c02);
  EXPECT_EQ(f32_to_f16(65519.9f), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(f32_to_f16(0x1p-25f), 0) << "half of the smallest subnormal, a tie";
  EXPECT_EQ(f32_to_f16(0x1.8p-25f), 1);
  EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(NAN))));
}

}  // namespace
}  // namespace prl::io
