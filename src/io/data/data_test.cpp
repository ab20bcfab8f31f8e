#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <boost/json.hpp>
#include <fstream>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/testing/source_dir.hpp"
#include "io/data/dataset_card.hpp"
#include "io/data/dataset_layout.hpp"
#include "io/data/find_dataset.hpp"
#include "io/data/json_rows.hpp"
#include "io/data/row_table.hpp"
#include "io/hub/test_support.hpp"

namespace prl::io {
namespace {
namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

void expect_error(const std::function<void()>& body, ErrorCode code, const std::vector<std::string>& parts) {
  try {
    body();
    ADD_FAILURE() << "no error; wanted " << parts.front();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const std::string& part : parts) EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

class DataTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              ("prl-data-" + std::to_string(::getpid()) + "-" + ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path write(const std::string& name, const std::string& bytes) {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return folder_ / name;
  }
  std::vector<std::string> rows(const std::string& name, const std::string& bytes, std::vector<std::string> columns = {}) {
    RowTable table(std::move(columns));
    table.add_file(write(name, bytes));
    std::vector<std::string> all;
    for (std::size_t i = 0; i < table.size(); ++i) all.emplace_back(table.row(i));
    return all;
  }
  fs::path folder_;
};

std::string gzip(const std::string& text) {
  std::string out(compressBound(text.size()) + 64, '\0');
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}
std::string zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

TEST_F(DataTest, AFileThatIsCutShortWhileItIsReadIsAnError) {
  std::string lines;
  for (int i = 0; i < 5000; ++i)
    lines += R"({"a": "0123456789"})"
             "\n";
  RowTable table;
  table.add_file(write("a.jsonl", lines));
  EXPECT_EQ(table.row(4999), R"({"a": "0123456789"})");
  fs::resize_file(folder_ / "a.jsonl", 1000);
  EXPECT_EQ(table.row(3), R"({"a": "0123456789"})");
  expect_error([&] { static_cast<void>(table.row(4999)); }, ErrorCode::kCorrupt, {"a.jsonl", "cut short"});
}

TEST_F(DataTest, JsonInItsThreeForms) {
  const auto two = ElementsAre(R"({"a": 1})", R"({"a": "x,]\"}"})");
  EXPECT_THAT(rows("a.jsonl", "{\"a\": 1}\n\n{\"a\": \"x,]\\\"}\"}\n"), two);
  EXPECT_THAT(rows("a.ndjson", "\xef\xbb\xbf{\"a\": 1}\n  \n{\"a\": \"x,]\\\"}\"}"), two);
  EXPECT_THAT(rows("b.json", " [ {\"a\": 1} ,\n {\"a\": \"x,]\\\"}\"}\n]\n"), two);
  EXPECT_THAT(rows("c.json", "{\"a\": 1}\n{\"a\": \"x,]\\\"}\"}\n"), two);
  EXPECT_THAT(rows("d.json", "{\n \"a\": [1, null],\n \"b\": [[2], {\"c\": 3}]\n}"),
              ElementsAre(R"({"a":1,"b":[2]})", R"({"a":null,"b":{"c": 3}})"));
  EXPECT_THAT(rows("n.json", "{\n \"a\\\"b\" : [123456789012345678901234567890, 1e400],\n \"c\": [0.1, \"x]\"]\n}"),
              ElementsAre(R"({"a\"b":123456789012345678901234567890,"c":0.1})", R"({"a\"b":1e400,"c":"x]"})"))
      << "numbers of any size as they are written";
  EXPECT_THAT(rows("t.json", "{\n\"a\": [1],\n\"a\": [2]\n}"), ElementsAre(R"({"a":1,"a":2})")) << "who reads it takes the last";
  EXPECT_THAT(rows("o.json", "{\n}"), IsEmpty());
  EXPECT_THAT(rows("e.json", "[]"), IsEmpty());
  EXPECT_THAT(rows("f.json", ""), IsEmpty());
  EXPECT_THAT(rows("g.jsonl.gz", gzip("{\"a\": 1}\n") + gzip("{\"a\": 2}\n")), ElementsAre(R"({"a": 1})", R"({"a": 2})"));
  std::string lines;
  for (int i = 0; i < 100'000; ++i) lines += "{\"row\": " + std::to_string(i) + "}\n";
  const auto many = rows("h.jsonl.zst", zstd(lines));
  ASSERT_EQ(many.size(), 100'000u);
  EXPECT_EQ(many[99'999], "{\"row\": 99999}");
  EXPECT_THAT(rows("i.json.gz", gzip("[{}]")), ElementsAre("{}"));
}

TEST_F(DataTest, RowsKnowWhereTheyAre) {
  RowTable table;
  table.add_file(write("a.jsonl", "{}\n\n{}\n"));
  table.add_file(write("b.json", "[{},{}]"));
  table.add_file(write("c.csv", "x,y\n\"a\nb\",1\nc,2\n"));
  table.add_file(test_source_dir() / "tests/fixtures/parquet/chat.parquet");
  ASSERT_EQ(table.size(), 6u + 120u);
  EXPECT_THAT(table.where(1), HasSubstr("a.jsonl:3"));
  EXPECT_THAT(table.where(3), HasSubstr("b.json, element 2"));
  EXPECT_THAT(table.where(5), HasSubstr("c.csv, line 4"));
  EXPECT_THAT(table.where(6), HasSubstr("chat.parquet, row 1"));
  EXPECT_THAT(std::string(table.row(6)), HasSubstr("question 0"));
  EXPECT_EQ(table.row(4), R"({"x":"a\nb","y":"1"})");
}

TEST_F(DataTest, CsvWithQuotesNullsAndColumns) {
  EXPECT_THAT(rows("a.csv", "prompt,completion,other\r\n\"say \"\"hi\"\"\",\"a,b\",1\r\n,\"\",2\r\nplain\r\n\r\n"),
              ElementsAre(R"({"prompt":"say \"hi\"","completion":"a,b","other":"1"})", R"({"prompt":null,"completion":"","other":"2"})",
                          R"({"prompt":"plain"})"));
  EXPECT_THAT(rows("b.tsv", "prompt\tx\na,b\t1\n", {"prompt"}), ElementsAre(R"({"prompt":"a,b"})"));
  EXPECT_THAT(rows("c.csv", "x,y\n1,2\n", {"prompt"}), ElementsAre(R"({"x":"1","y":"2"})")) << "none of the wanted columns: all are shown";
  EXPECT_THAT(rows("d.csv", "x,y"), IsEmpty());
  EXPECT_THAT(rows("e.csv.gz", gzip("x\n5")), ElementsAre(R"({"x":"5"})"));
  expect_error([&] { rows("f.csv", "x,y\n1,2,3\n"); }, ErrorCode::kCorrupt, {"f.csv:2", "3 cells, the header has 2"});
  expect_error([&] { rows("g.csv", "x\n\"open\n\n"); }, ErrorCode::kCorrupt, {"g.csv", "line 2", "never closed"});
  expect_error([&] { rows("h.csv", "x,x\n1,2\n"); }, ErrorCode::kCorrupt, {"two columns are called 'x'"});
}

TEST_F(DataTest, DamagedFilesAreNamed) {
  expect_error([&] { rows("a.json", "[{}, {}"); }, ErrorCode::kCorrupt, {"a.json", "byte 7", "truncated"});
  expect_error([&] { rows("b.json", "[{},,{}]"); }, ErrorCode::kCorrupt, {"byte 4", "an element is missing"});
  expect_error([&] { rows("c.json", "[{}] x"); }, ErrorCode::kCorrupt, {"follows the list"});
  expect_error([&] { rows("d.json", "[{}}"); }, ErrorCode::kCorrupt, {"brackets"});
  expect_error([&] { rows("e.json", "{\n\"a\": 1\n}"); }, ErrorCode::kCorrupt, {"member 'a' is no column"});
  expect_error([&] { rows("f.json", "{\n\"a\": \n"); }, ErrorCode::kCorrupt, {"f.json", "neither"});
  expect_error([&] { rows("g.jsonl.gz", gzip("{}").substr(0, 12)); }, ErrorCode::kCorrupt, {"g.jsonl.gz", "gzip"});
  expect_error([&] { rows("h.jsonl.zst", zstd(std::string(5000, 'x')).substr(0, 15)); }, ErrorCode::kCorrupt, {"h.jsonl.zst", "Zstandard"});
  expect_error([&] { rows("i.jsonl.zst", "nonsense"); }, ErrorCode::kCorrupt, {"Zstandard"});
  expect_error([&] { rows("j.arrow", "x"); }, ErrorCode::kNotImplemented, {"j.arrow", ".parquet"});
  expect_error([&] { RowTable().add_file(folder_ / "absent.jsonl"); }, ErrorCode::kNotFound, {"absent.jsonl"});
  EXPECT_FALSE(is_data_file("x.parquet.gz"));
  EXPECT_TRUE(is_data_file("x.jsonl.zst"));
}

TEST(Globs, MatchAsFilesystemsDo) {
  for (const auto& [pattern, path, wanted] : std::vector<std::tuple<const char*, const char*, bool>>{
           {"data/*.parquet", "data/a.parquet", true},
           {"data/*.parquet", "data/x/a.parquet", false},
           {"data/**", "data/x/a.parquet", true},
           {"**/a.jsonl", "a.jsonl", true},
           {"**/a.jsonl", "x/y/a.jsonl", true},
           {"**/a.jsonl", "xa.jsonl", false},
           {"x/**/a", "x/a", true},
           {"train-*", "train-00000-of-00001.parquet", true},
           {"data/train-[0-9]*.json", "data/train-7x.json", true},
           {"data/train-[!0-9]*.json", "data/train-7x.json", false},
           {"?.json", "ab.json", false},
           {"a*b*c*d*e*f*g*h*i*j*k*", "abcdefghijk/", false},
           {"", "", true},
           {"*", "", true},
       })
    EXPECT_EQ(matches_glob(pattern, path), wanted) << pattern << " " << path;
  std::string stars, text(500, 'a');
  for (int i = 0; i < 200; ++i) stars += "*a";
  EXPECT_FALSE(matches_glob(stars + "b", text)) << "and quickly";
}

TEST(DatasetCards, HoldConfigsInEveryForm) {
  const auto configs = read_dataset_card(
      "---\nlicense: mit\nconfigs:\n- config_name: a\n  default: true\n  data_files:\n  - split: train\n    path: a/train-*\n  - split: "
      "test\n"
      "    path:\n    - a/t1.json\n    - a/t2.json\n- config_name: b\n  data_files: b/*.csv\n- config_name: c\n  data_dir: c\n"
      "- config_name: d\n  data_files:\n    train: d1\n    dev: [d2, d3]\n- config_name: e\n  data_files: [e1, e2]\n---\n# Text\n",
      "README.md");
  ASSERT_EQ(configs.size(), 5u);
  EXPECT_TRUE(configs[0].is_default);
  EXPECT_EQ(configs[0].splits[1].name, "test");
  EXPECT_THAT(configs[0].splits[1].patterns, ElementsAre("a/t1.json", "a/t2.json"));
  EXPECT_EQ(configs[1].splits[0].name, "train");
  EXPECT_EQ(configs[2].data_dir, "c");
  EXPECT_THAT(configs[2].splits, IsEmpty());
  EXPECT_THAT(configs[3].splits[1].patterns, ElementsAre("d2", "d3"));
  EXPECT_THAT(configs[4].splits[0].patterns, ElementsAre("e1", "e2"));
  EXPECT_THAT(read_dataset_card("# no front matter\n---\nconfigs: 3\n---\n", "r"), IsEmpty());
  EXPECT_THAT(read_dataset_card("---\nlicense: mit\n---\n", "r"), IsEmpty());
  EXPECT_THAT(read_dataset_card("", "r"), IsEmpty());
  const auto card_error = [](const std::string& yaml, const std::string& part) {
    expect_error([&] { read_dataset_card("---\n" + yaml + "\n---\n", "x/README.md"); }, ErrorCode::kCorrupt, {"x/README.md", part});
  };
  card_error("configs: 3", "'configs'");
  card_error("configs:\n- x: 1", "configs[0]");
  card_error("configs:\n- config_name: a\n  data_files:\n  - split: train", "configs[0].data_files");
  card_error("a: [1, 2", "no YAML");
  card_error("a: &x [1]\nb: *x", "aliases");
  card_error("a: " + std::string(100, '[') + std::string(100, ']'), "nested too deeply");
}

TEST(DatasetLayout, FollowsTheRulesOfHuggingFace) {
  const auto select = [](std::vector<std::string> files, DatasetPart part = {}, std::vector<CardConfig> card = {}) {
    return select_data_files(files, card, part, "set");
  };
  // Shards in data/.
  const std::vector<std::string> sharded{"README.md",
                                         ".gitattributes",
                                         "data/train-00001-of-00002.parquet",
                                         "data/train-00000-of-00002.parquet",
                                         "data/test-00000-of-00001-ab12.parquet",
                                         "extra.jsonl"};
  EXPECT_THAT(select(sharded), ElementsAre("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"));
  EXPECT_THAT(select(sharded, {.subset = {}, .split = "test"}), ElementsAre("data/test-00000-of-00001-ab12.parquet"));
  expect_error([&] { select(sharded, {.subset = {}, .split = "dev"}); }, ErrorCode::kNotFound,
               {"set has no split 'dev'; it has test, train"});
  // Folders before file names, and synonyms.
  EXPECT_THAT(select({"training/a.jsonl", "x/valid-1/b.jsonl", "test.jsonl"}), ElementsAre("training/a.jsonl"));
  EXPECT_THAT(select({"training/a.jsonl", "x/valid-1/b.jsonl", "test.jsonl"}, {.subset = {}, .split = "validation"}),
              ElementsAre("x/valid-1/b.jsonl"));
  EXPECT_THAT(select({"my_train_part1.csv", "contest.csv", "eval.csv"}), ElementsAre("my_train_part1.csv"));
  EXPECT_THAT(select({"my_train_part1.csv", "contest.csv", "eval.csv"}, {.subset = {}, .split = "test"}), ElementsAre("eval.csv"))
      << "contest is no test";
  // Nothing speaks of splits.
  EXPECT_THAT(select({"b.jsonl", "a.jsonl", "notes.txt", "dataset_info.json", ".hidden.jsonl", "__pycache__/x.json"}),
              ElementsAre("a.jsonl", "b.jsonl"));
  EXPECT_THAT(select({"metadata.json", "results.jsonl"}), ElementsAre("results.jsonl")) << "of prl synthesize";
  EXPECT_THAT(select({"a.jsonl", "b.parquet", "c.parquet"}), ElementsAre("b.parquet", "c.parquet")) << "the most frequent format";
  expect_error([&] { select({"load.py", "x.arrow"}); }, ErrorCode::kNotFound, {"no data file", "load.py, x.arrow"});
  // Subsets without a card are folders.
  EXPECT_THAT(select({"math/train.jsonl", "math/test.jsonl", "code/all.jsonl"}, {.subset = "math", .split = "test"}),
              ElementsAre("math/test.jsonl"));
  EXPECT_THAT(select({"math/train.jsonl", "code/all.jsonl"}, {.subset = "code", .split = "train"}), ElementsAre("code/all.jsonl"));
  expect_error([&] { select({"math/train.jsonl"}, {.subset = "law", .split = "train"}); }, ErrorCode::kNotFound,
               {"no subset 'law'", "math"});
  // The card decides.
  const std::vector<CardConfig> card{{"math", false, "", {{"train", {"m/*.jsonl"}}, {"test", {"m_test.jsonl"}}}}, {"code", false, "c", {}}};
  const std::vector<std::string> files{"m/2.jsonl", "m/1.jsonl", "m_test.jsonl", "c/train/x.jsonl", "c/dev/y.jsonl"};
  EXPECT_THAT(select(files, {.subset = "math", .split = "train"}, card), ElementsAre("m/1.jsonl", "m/2.jsonl"));
  EXPECT_THAT(select(files, {.subset = "code", .split = "validation"}, card), ElementsAre("c/dev/y.jsonl"));
  expect_error([&] { select(files, {}, card); }, ErrorCode::kNotFound, {"several subsets", "math, code"});
  expect_error([&] { select(files, {.subset = "law", .split = "train"}, card); }, ErrorCode::kNotFound,
               {"no subset 'law'; it has math, code"});
  expect_error([&] { select(files, {.subset = "math", .split = "dev"}, card); }, ErrorCode::kNotFound,
               {"subset 'math', has no split 'dev'; it has test, train"});
  const std::vector<CardConfig> far{{"x", false, "", {{"train", {"https://elsewhere/x.jsonl"}}}}};
  expect_error([&] { select(files, {}, far); }, ErrorCode::kNotImplemented, {"elsewhere"});
}

TEST(DatasetLayout, SplitsMayNameRangesOfRows) {
  const auto rows = [](const char* text, std::int64_t count) { return parse_split(text).rows(count); };
  using Range = std::pair<std::int64_t, std::int64_t>;
  EXPECT_EQ(parse_split("train[:10]").name, "train");
  EXPECT_EQ(rows("train", 7), Range(0, 7));
  EXPECT_EQ(rows("train[:3]", 7), Range(0, 3));
  EXPECT_EQ(rows("train[5:]", 7), Range(5, 7));
  EXPECT_EQ(rows("train[-2:]", 7), Range(5, 7));
  EXPECT_EQ(rows("train[2:-2]", 7), Range(2, 5));
  EXPECT_EQ(rows("train[:100]", 7), Range(0, 7));
  EXPECT_EQ(rows("train[5:2]", 7), Range(5, 5));
  EXPECT_EQ(rows("train[10%:20%]", 1000), Range(100, 200));
  EXPECT_EQ(rows("train[-10%:]", 1000), Range(900, 1000));
  EXPECT_EQ(rows("train[:33%]", 10), Range(0, 3));
  for (const char* bad : {"", "[:3]", "train[", "train[3]", "train[a:]", "train[:200%]", "train[1:2", "train[1:2:3]"})
    EXPECT_THROW(parse_split(bad), Error) << bad;
}

TEST_F(DataTest, FilesFoldersAndTheHub) {
  HubSettings settings;
  settings.cache_dir = folder_ / "hub";
  settings.first_pause = std::chrono::milliseconds(1);
  settings.is_offline = true;
  const fs::path file = write("local/one.jsonl", "{}\n");
  write("local/README.md", "---\nconfigs:\n- config_name: default\n  data_files: one.jsonl\n---\n");
  EXPECT_THAT(find_data_files(file.string(), {}, settings), ElementsAre(file));
  EXPECT_THAT(find_data_files((folder_ / "local").string(), {}, settings), ElementsAre(folder_ / "local" / "one.jsonl"));
  expect_error([&] { find_data_files(file.string(), {.subset = {}, .split = "test"}, settings); }, ErrorCode::kNotFound,
               {"only split is train"});
  expect_error([&] { find_data_files("no/such/thing", {}, settings); }, ErrorCode::kNotFound, {"no such file or folder"});
  expect_error([&] { find_data_files("org/set", {}, settings); }, ErrorCode::kNotFound, {"org/set", "HF_HUB_OFFLINE"});

  testing_support::FakeHub hub;
  hub.set_prefix("/datasets/org/set");
  hub.add("README.md",
          "---\nconfigs:\n- config_name: a\n  data_files:\n  - split: train\n    path: a-*.jsonl\n- config_name: b\n  data_files: "
          "b.jsonl\n---\n");
  hub.add("a-1.jsonl", "{\"n\":1}\n", true);
  hub.add("a-2.jsonl", "{\"n\":2}\n", true);
  hub.add("b.jsonl", "{\"n\":3}\n", true);
  hub.start("org/set", "datasets");
  settings.endpoint = hub.endpoint();
  settings.is_offline = false;
  const auto found = find_data_files("org/set", {.subset = "a", .split = "train"}, settings);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(read_file(found[1]), "{\"n\":2}\n");
  EXPECT_EQ(hub.count("GET", "b.jsonl"), 0u) << "files of other parts are left alone";
  expect_error([&] { find_data_files("org/set", {.subset = "c", .split = "train"}, settings); }, ErrorCode::kNotFound,
               {"no subset 'c'", "a, b"});
  expect_error([&] { find_data_files("org/absent", {}, settings); }, ErrorCode::kNotFound, {"no such file or folder", "org/absent"});
  // Without the hub the cache serves what it has.
  settings.endpoint = "http://127.0.0.1:1";
  EXPECT_EQ(find_data_files("org/set", {.subset = "a", .split = "train"}, settings), found);
  settings.is_offline = true;
  EXPECT_EQ(find_data_files("org/set", {.subset = "a", .split = "train"}, settings), found);
  expect_error([&] { find_data_files("org/set", {.subset = "b", .split = "train"}, settings); }, ErrorCode::kNotFound,
               {"no split 'train'"});
}

}  // namespace
}  // namespace prl::io
