#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <boost/json.hpp>
#include <fstream>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/rng.hpp"
#include "base/testing/source_dir.hpp"
#include "io/parquet/parquet_encoding.hpp"
#include "io/parquet/parquet_file.hpp"

namespace prl::io {
namespace {
namespace fs = std::filesystem;
namespace json = boost::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

fs::path parquet_fixture(const std::string& name) { return test_source_dir() / "tests/fixtures/parquet" / name; }
constexpr auto kAll = [](std::string_view) { return true; };

std::vector<std::string> rows_of(const fs::path& path, const std::function<bool(std::string_view)>& wanted = kAll) {
  std::vector<std::string> rows;
  ParquetFile::open(path)->for_each_row(wanted, [&](std::string_view row) { rows.emplace_back(row); });
  return rows;
}
std::vector<json::value> lines_of(const fs::path& path) {
  std::vector<json::value> values;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) values.push_back(json::parse(line));
  return values;
}
/// Equal but for the form of numbers.
bool same(const json::value& a, const json::value& b) {
  if (a.is_number() && b.is_number()) {
    if (a.is_double() || b.is_double()) {
      const double x = a.to_number<double>(), y = b.to_number<double>();
      return x == y || static_cast<float>(x) == static_cast<float>(y);
    }
    return a == b || (a.is_uint64() && b.is_uint64() && a.get_uint64() == b.get_uint64());
  }
  if (a.is_object() && b.is_object()) {
    if (a.get_object().size() != b.get_object().size()) return false;
    for (const auto& member : a.get_object()) {
      const json::value* other = b.get_object().if_contains(member.key());
      if (other == nullptr || !same(member.value(), *other)) return false;
    }
    return true;
  }
  if (a.is_array() && b.is_array()) {
    if (a.get_array().size() != b.get_array().size()) return false;
    for (std::size_t i = 0; i < a.get_array().size(); ++i)
      if (!same(a.get_array()[i], b.get_array()[i])) return false;
    return true;
  }
  return a == b;
}

struct Pair {
  const char* parquet;
  const char* expected;
};
class ParquetFixture : public ::testing::TestWithParam<Pair> {};

TEST_P(ParquetFixture, RowsEqualThoseOfPyarrow) {
  const auto rows = rows_of(parquet_fixture(GetParam().parquet));
  const auto expected = lines_of(parquet_fixture(GetParam().expected));
  ASSERT_EQ(rows.size(), expected.size());
  EXPECT_EQ(ParquetFile::open(parquet_fixture(GetParam().parquet))->num_rows(), static_cast<std::int64_t>(rows.size()));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const json::value row = json::parse(rows[i]);
    for (const auto& member : expected[i].get_object()) {
      const json::value* value = row.get_object().if_contains(member.key());
      ASSERT_NE(value, nullptr) << member.key();
      ASSERT_TRUE(same(*value, member.value())) << "row " << i << ", " << member.key() << ": " << *value << " against " << member.value();
    }
    ASSERT_EQ(row.get_object().size(), expected[i].get_object().size());
  }
}
INSTANTIATE_TEST_SUITE_P(Files, ParquetFixture,
                         ::testing::Values(Pair{"types_snappy_dictionary.parquet", "rows.jsonl"},
                                           Pair{"types_none_plain.parquet", "rows.jsonl"}, Pair{"types_zstd_v2.parquet", "rows.jsonl"},
                                           Pair{"types_gzip_delta.parquet", "rows.jsonl"}, Pair{"legacy.parquet", "legacy.jsonl"},
                                           Pair{"chat.parquet", "chat.jsonl"}),
                         [](const auto& test) {
                           return std::string(test.param.parquet).substr(0, std::string(test.param.parquet).find('.'));
                         });

TEST(Parquet, ReadsOnlyTheColumnsThatAreWanted) {
  const auto file = ParquetFile::open(parquet_fixture("chat.parquet"));
  EXPECT_THAT(file->columns(), ElementsAre("id", "messages", "source"));
  const auto rows = rows_of(parquet_fixture("chat.parquet"), [](std::string_view name) { return name == "source"; });
  ASSERT_EQ(rows.size(), 120u);
  EXPECT_THAT(rows[0], ::testing::AnyOf(R"({"source":"web"})", R"({"source":"book"})"));
  EXPECT_EQ(rows_of(parquet_fixture("chat.parquet"), [](std::string_view) { return false; })[119], "{}");
}

TEST(Parquet, ARowGroupWithoutRowsHasNone) {
  EXPECT_EQ(ParquetFile::open(parquet_fixture("no_rows.parquet"))->num_rows(), 0);
  EXPECT_TRUE(rows_of(parquet_fixture("no_rows.parquet")).empty());
}

TEST(Parquet, NamesCodecsAndFilesItCannotRead) {
  const auto expect_error = [](const std::function<void()>& body, ErrorCode code, const std::string& part) {
    try {
      body();
      ADD_FAILURE() << "no error; wanted " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
  };
  expect_error([] { rows_of(parquet_fixture("brotli.parquet")); }, ErrorCode::kNotImplemented,
               "column 'text': its pages are compressed with Brotli");
  EXPECT_EQ(rows_of(parquet_fixture("brotli.parquet"), [](std::string_view) { return false; }).size(), 40u);
  expect_error([] { rows_of(parquet_fixture("rows.jsonl")); }, ErrorCode::kCorrupt, "no Parquet file");
  expect_error([] { rows_of(parquet_fixture("absent.parquet")); }, ErrorCode::kNotFound, "absent.parquet");
}

TEST(Parquet, SurvivesTruncationAndRandomDamage) {
  const fs::path path = fs::temp_directory_path() / ("prl-parquet-" + std::to_string(::getpid()) + ".parquet");
  const auto touch = [&](const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
    try {
      for (const std::string& row : rows_of(path)) EXPECT_TRUE(row.starts_with('{'));
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::kCorrupt || error.code() == ErrorCode::kNotImplemented) << error.what();
    }
  };
  Rng rng(11);
  for (const char* name : {"chat.parquet", "types_none_plain.parquet", "types_zstd_v2.parquet", "types_gzip_delta.parquet"}) {
    const std::string whole = read_file(parquet_fixture(name));
    for (int i = 0; i < 20; ++i) touch(whole.substr(0, rng.next_below(whole.size())));
    for (int i = 0; i < 150; ++i) {
      std::string bytes = whole;
      const std::size_t first = i % 2 == 0 ? 0 : whole.size() - std::min<std::size_t>(whole.size(), 6000);  // pages, then the footer
      for (int n = 0; n < 3; ++n) bytes[first + rng.next_below(whole.size() - first)] = static_cast<char>(rng.next_u32());
      touch(bytes);
    }
  }
  fs::remove(path);
}

TEST(ParquetEncodings, HybridRunsAndDeltas) {
  const auto bytes = [](std::initializer_list<int> list) {
    std::vector<std::byte> out;
    for (const int b : list) out.push_back(static_cast<std::byte>(b));
    return out;
  };
  std::vector<std::uint32_t> values;
  // A run of 5 times 3, then a group of 8 three-bit values 0..7 (the example of the format's specification).
  const auto runs = bytes({5 << 1, 3, (1 << 1) | 1, 0x88, 0xc6, 0xfa});
  ParquetBytes in(runs, "test");
  decode_rle(in, 3, 13, values);
  EXPECT_THAT(values, ElementsAre(3, 3, 3, 3, 3, 0, 1, 2, 3, 4, 5, 6, 7));
  values.clear();
  const auto zero = bytes({100 << 1 & 0xff, 0x01});
  ParquetBytes wide(zero, "test");
  EXPECT_THROW(decode_rle(wide, 33, 1, values), Error);
  const auto empty_run = bytes({0});
  ParquetBytes nothing(empty_run, "test");
  EXPECT_THROW(decode_rle(nothing, 1, 1, values), Error);
  // Block of 128 in 4 parts, 5 values from 7: 7 5 3 1 2 (the format's own example of differences -2 -2 -2 1).
  auto delta = bytes({0x80, 0x01, 4, 5, 14, 3, 2, 0, 0, 0, 0xc0, 0, 0, 0, 0, 0, 0, 0});
  ParquetBytes deltas(delta, "test");
  EXPECT_THAT(decode_delta_integers(deltas, 10), ElementsAre(7, 5, 3, 1, 2));
  ParquetBytes few(delta, "test");
  EXPECT_THROW(decode_delta_integers(few, 4), Error);
}

}  // namespace
}  // namespace prl::io
