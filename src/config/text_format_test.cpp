#include "config/text_format.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/error.hpp"
#include "config/merge.hpp"

namespace prl::config {
namespace {

using ::testing::HasSubstr;

class Files : public ::testing::Test {
 protected:
  Files() : folder_(std::filesystem::path(::testing::TempDir()) / ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_ / "sub");
  }
  ~Files() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
    return folder_ / name;
  }
  static std::string error_of(const std::filesystem::path& path) {
    try {
      read_config_file(path);
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  }
  std::filesystem::path folder_;
};

TEST_F(Files, TomlKeepsKindsOrderAndLines) {
  const Value value = read_config_file(write("a.toml", "b = 1\na = 2.5\n[t]\nx = [1, \"two\"]\n[[list]]\nid = true\n"));
  ASSERT_EQ(value.members().size(), 4u);
  EXPECT_EQ(value.find("b")->as_int(), 1);
  EXPECT_EQ(value.find("b")->origin().line, 1);
  EXPECT_EQ(as_number(*value.find("a")), 2.5);
  EXPECT_EQ(find_path(value, "t.x.1")->as_string(), "two");
  EXPECT_TRUE(find_path(value, "list.0.id")->as_bool());
  EXPECT_EQ(find_path(value, "list.0.id")->origin().line, 6);
  EXPECT_THAT(find_path(value, "list.0.id")->origin().describe(), HasSubstr("a.toml:6"));
}

TEST_F(Files, ParentsAreReadFirstAndOverridden) {
  write("base.toml", "seq_len = 1\nmax_steps = 1\n[model]\nname = \"base\"\n");
  write("sub/more.toml", "max_steps = 2\ntoml_files = [\"../base.toml\"]\n");
  const Value value = read_config_file(write("own.toml", "toml_files = [\"sub/more.toml\"]\n[model]\nname = \"own\"\n"));
  EXPECT_EQ(value.find("seq_len")->as_int(), 1);
  EXPECT_EQ(value.find("max_steps")->as_int(), 2);
  EXPECT_EQ(find_path(value, "model.name")->as_string(), "own");
  EXPECT_EQ(value.find("toml_files"), nullptr);
}

TEST_F(Files, FilesThatNameEachOtherAreAnError) {
  write("b.toml", "toml_files = [\"a.toml\"]\n");
  EXPECT_THAT(error_of(write("a.toml", "toml_files = [\"b.toml\"]\n")), HasSubstr("name each other"));
}

TEST_F(Files, ErrorsNameTheFileAndTheRemedy) {
  EXPECT_THAT(error_of(folder_ / "none.toml"), HasSubstr("Config file not found"));
  EXPECT_THAT(error_of(write("x.yaml", "a: 1")), HasSubstr("YAML is not supported"));
  EXPECT_THAT(error_of(write("x.ini", "a=1")), HasSubstr("Unsupported file type"));
  EXPECT_THAT(error_of(write("x.toml", "a = 1\nb = \n")), HasSubstr("x.toml:2"));
  EXPECT_THAT(error_of(write("x.json", "{\"a\": ")), HasSubstr("Invalid JSON"));
  EXPECT_THAT(error_of(write("y.json", "[1]")), HasSubstr("not a table"));
  EXPECT_THAT(error_of(folder_ / "sub.toml"), HasSubstr("not found"));
}

TEST(TextFormat, TomlAndJsonReadBackWhatTheyWrote) {
  const Value value = parse_json(
      R"({"a": 1, "b": 1.0, "c": 1e-6, "d": "x\"\\\n\té", "e": null, "t": {"k-1": true, "dot.key": [1, [2, 3]], "empty": {}},
          "list": [{"id": "x", "args": {"n": 1}}, {"id": "y"}], "none": [], "mixed": [1, "a", {"b": 2}]})",
      "test");
  Value from_toml = parse_toml(to_toml(value), "written");
  none_to_null(from_toml);
  EXPECT_TRUE(equals(from_toml, value)) << to_toml(value);
  EXPECT_TRUE(equals(parse_json(to_json(value), "written"), value)) << to_json(value);
  EXPECT_TRUE(equals(parse_json(to_compact_json(value), "written"), value));
  EXPECT_TRUE(from_toml.find("b")->is_float());
}

/// Characters beyond ASCII where a key or white space may stand: toml++ 3.3 takes some of them for impossible.
TEST(TextFormat, OtherAlphabetsInTomlAreTextOrAnError) {
  EXPECT_EQ(parse_toml("\"é\" = \"ü\" # ß\n", "x.toml").find("é")->as_string(), "ü");
  for (const char* text : {"é = 1\n", "[é]\na = 1\n", "a = 1 é\n", "a.é = 2\n", "а = 1\n", "ﷺ = 1\n", "ⴰ = 1\n"}) {
    try {
      parse_toml(text, "x.toml");
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("Invalid TOML in x.toml")) << text;
    }
  }
}

TEST(Merge, TablesMergeAndListsAreReplaced) {
  Value base = parse_toml("xs = [1, 2]\n[t]\na = 1\nb = 2\n", "base");
  merge(base, parse_toml("xs = [3]\n[t]\nb = 4\n", "over"));
  EXPECT_EQ(base.find("xs")->items().size(), 1u);
  EXPECT_EQ(find_path(base, "t.a")->as_int(), 1);
  EXPECT_EQ(find_path(base, "t.b")->as_int(), 4);
  EXPECT_EQ(find_path(base, "t.b")->origin().where, "over");
}

TEST(Merge, NumbersAddressItemsAndAppend) {
  Value base = parse_toml("[[env]]\nid = \"a\"\n", "base");
  merge(base, parse_json(R"({"env": {"0": {"name": "first"}, "1": {"id": "b"}}})", "flags"));
  EXPECT_EQ(find_path(base, "env.0.id")->as_string(), "a");
  EXPECT_EQ(find_path(base, "env.0.name")->as_string(), "first");
  EXPECT_EQ(find_path(base, "env.1.id")->as_string(), "b");
  EXPECT_THROW(merge(base, parse_json(R"({"env": {"5": {"id": "c"}}})", "flags")), Error);
}

TEST(Merge, ASwitchKeepsTheTableAndNoneDropsIt) {
  Value base = parse_toml("[ckpt]\ninterval = 5\n", "base");
  merge(base, parse_json(R"({"ckpt": true})", "flags"));
  EXPECT_EQ(find_path(base, "ckpt.interval")->as_int(), 5);
  Value none = parse_json(R"({"ckpt": "None"})", "flags");
  none_to_null(none);
  merge(base, none);
  EXPECT_TRUE(base.find("ckpt")->is_null());
}

}  // namespace
}  // namespace prl::config
