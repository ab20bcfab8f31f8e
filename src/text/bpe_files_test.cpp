#include "text/bpe_files.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "base/error.hpp"
#include "text/chat_template.hpp"
#include "text/json_python.hpp"
#include "text/test_support.hpp"
#include "text/tokenizer.hpp"

namespace prl::text {
namespace {
namespace fs = std::filesystem;
namespace json = boost::json;
using test::ids_of;
using test::str;
using ::testing::HasSubstr;

class Folder {
 public:
  explicit Folder(const std::string& name) : path_(fs::temp_directory_path() / ("prl-bpe-" + std::to_string(::getpid()) + "-" + name)) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }
  json::object read(const char* name) const { return parse_json(read_file(path_ / name)).as_object(); }

 private:
  fs::path path_;
};

/// The lists that another format would hold for a published tokenizer.json.
BpeVocabulary vocabulary_of(const json::object& published, const std::string& pre_tokenizer) {
  BpeVocabulary v;
  v.pre_tokenizer = pre_tokenizer;
  const auto set = [&](std::size_t id, std::string text, TokenKind kind) {
    if (v.tokens.size() <= id) {
      v.tokens.resize(id + 1);
      v.kinds.resize(id + 1, TokenKind::kUnused);
    }
    v.tokens[id] = std::move(text);
    v.kinds[id] = kind;
  };
  const json::object& model = published.at("model").as_object();
  for (const auto& entry : model.at("vocab").as_object())
    set(static_cast<std::size_t>(entry.value().as_int64()), std::string(entry.key()), TokenKind::kNormal);
  for (const json::value& token : published.at("added_tokens").as_array())
    set(static_cast<std::size_t>(token.at("id").as_int64()), str(token.at("content")),
        token.at("special").as_bool() ? TokenKind::kSpecial : TokenKind::kAdded);
  for (const json::value& merge : model.at("merges").as_array())
    v.merges.push_back(merge.is_array() ? str(merge.at(0)) + " " + str(merge.at(1)) : str(merge));
  return v;
}

struct Family {
  const char* fixture;
  const char* pre_tokenizer;
};
class BpeFiles : public ::testing::TestWithParam<Family> {};

TEST_P(BpeFiles, WritesWhatTheAuthorsPublish) {
  const json::object published = test::fixture_json(std::string(GetParam().fixture) + ".tokenizer.json").as_object();
  BpeVocabulary v = vocabulary_of(published, GetParam().pre_tokenizer);
  const std::string first_special = str(published.at("added_tokens").at(0).at("content"));
  v.bos_id = static_cast<std::int32_t>(published.at("added_tokens").at(0).at("id").as_int64());
  v.eos_id = v.bos_id;
  v.stop_ids = {*v.eos_id};
  v.add_bos = std::string(GetParam().fixture) == "llama3";
  v.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}";
  const Folder folder(GetParam().fixture);
  write_bpe_tokenizer(folder.path(), v, "test");
  const json::object made = folder.read("tokenizer.json");
  json::object made_post, published_post;
  made_post["it"] = made.at("post_processor");
  published_post["it"] = published.at("post_processor");
  for (json::object* post : {&made_post, &published_post})  // how pairs of texts are joined is of no use here
    if (v.add_bos) post->at("it").at("processors").at(1).as_object().erase("pair");
  EXPECT_EQ(dump_python(made_post), dump_python(published_post));
  for (const char* key : {"added_tokens", "normalizer", "pre_tokenizer", "decoder"})
    EXPECT_EQ(dump_python(made.at(key)), dump_python(published.at(key))) << key;
  EXPECT_EQ(made.at("model").at("vocab"), published.at("model").at("vocab"));
  EXPECT_EQ(made.at("model").at("merges").as_array().size(), published.at("model").at("merges").as_array().size());
  EXPECT_EQ(made.at("model").at("ignore_merges"), published.at("model").at("ignore_merges"));

  const Tokenizer tokenizer = Tokenizer::load(folder.path());
  const json::object cases = test::fixture_json("tokenizer_cases.json").as_object();
  const json::object& expected = cases.at("families").at(GetParam().fixture).as_object();
  const json::array& hard = cases.at("hard").as_array();
  for (std::size_t i = 0; i < hard.size(); ++i) {
    EXPECT_EQ(tokenizer.encode(str(hard[i])), ids_of(expected.at("ids").at(i))) << i;
    EXPECT_EQ(test::fnv(tokenizer.encode(str(hard[i]), {.add_special_tokens = true})), str(expected.at("with_special").at(i))) << i;
    EXPECT_EQ(test::fnv(tokenizer.encode(str(hard[i]), {.allow_special = false})), str(expected.at("plain").at(i))) << i;
  }
  const json::array& random = cases.at("random").as_array();
  for (std::size_t i = 0; i < random.size(); ++i)
    EXPECT_EQ(test::fnv(tokenizer.encode(str(random[i]))), str(expected.at("random").at(i))) << i;
  EXPECT_EQ(tokenizer.stop_ids(), v.stop_ids);
  EXPECT_EQ(ChatTemplate::load(folder.path(), tokenizer).render({json::object{{"role", "user"}, {"content", "hi"}}}), first_special + "hi");
}
INSTANTIATE_TEST_SUITE_P(Families, BpeFiles,
                         ::testing::Values(Family{"smollm2", "smollm"}, Family{"qwen2", "qwen2"}, Family{"llama3", "llama-bpe"},
                                           Family{"gpt2", "gpt-2"}),
                         [](const auto& test) { return std::string(test.param.fixture); });

TEST(BpeFilesErrors, NameSourceAndEntry) {
  const Folder folder("errors");
  const auto good = [] { return vocabulary_of(test::fixture_json("smollm2.tokenizer.json").as_object(), "smollm"); };
  const auto expect_error = [&](const BpeVocabulary& v, ErrorCode code, const std::string& part) {
    try {
      write_bpe_tokenizer(folder.path(), v, "some.gguf");
      ADD_FAILURE() << "no error; wanted " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("some.gguf"));
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
  };
  EXPECT_NO_THROW(write_bpe_tokenizer(folder.path(), good(), "some.gguf"));
  BpeVocabulary v = good();
  v.pre_tokenizer = "tekken";
  expect_error(v, ErrorCode::kNotImplemented, "'tekken'; this build knows gpt-2");
  v = good();
  v.kinds.pop_back();
  expect_error(v, ErrorCode::kCorrupt, "kinds of");
  v = good();
  v.tokens[40] = v.tokens[41];
  expect_error(v, ErrorCode::kCorrupt, "tokens 40 and 41");
  v = good();
  v.tokens[300] = "\xff";
  expect_error(v, ErrorCode::kCorrupt, "token 300");
  v = good();
  v.tokens[300] = "";
  expect_error(v, ErrorCode::kCorrupt, "token 300 is empty");
  v.kinds[300] = TokenKind::kUnused;
  v.merges.clear();
  EXPECT_NO_THROW(write_bpe_tokenizer(folder.path(), v, "some.gguf"));
  v = good();
  v.merges[5] = "ab";
  expect_error(v, ErrorCode::kCorrupt, "merge 5");
  v.merges[5] = "a b c";
  expect_error(v, ErrorCode::kCorrupt, "merge 5");
  v.merges[5] = "zzzz a";
  expect_error(v, ErrorCode::kCorrupt, "'zzzz' is no token");
  v = good();
  v.eos_id = 100000;
  expect_error(v, ErrorCode::kCorrupt, "the eos token is 100000");
  v = good();
  v.stop_ids = {-4};
  expect_error(v, ErrorCode::kCorrupt, "the stop token is -4");
  v = good();
  v.add_bos = true;
  expect_error(v, ErrorCode::kCorrupt, "no bos token");
}

}  // namespace
}  // namespace prl::text
