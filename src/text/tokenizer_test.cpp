#include "text/tokenizer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <boost/json/serialize.hpp>

#include <chrono>
#include <thread>

#include "base/error.hpp"
#include "text/detail/regex.hpp"
#include "text/detokenizer.hpp"
#include "text/test_support.hpp"
#include "text/utf8.hpp"

namespace prl::text {
namespace {

using test::fixture_json;
using test::fixture_text;
using test::fixture_tokenizer;
using test::fnv;
using test::ids_of;
using test::str;
using ::testing::HasSubstr;
namespace json = boost::json;

std::string bytes_from_hex(const std::string& hex) {
  std::string out;
  for (std::size_t i = 0; i < hex.size(); i += 2) out.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return out;
}

// Replays what the Python package `tokenizers` gave for the same files.
class TokenizerParity : public ::testing::TestWithParam<const char*> {
 protected:
  const json::value cases_ = fixture_json("tokenizer_cases.json");
  const json::object& expected_ = cases_.at("families").at(GetParam()).as_object();
  const Tokenizer tokenizer_ = fixture_tokenizer(GetParam());
};

TEST_P(TokenizerParity, HardStrings) {
  const json::array& texts = cases_.at("hard").as_array();
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const std::string text = str(texts[i]);
    EXPECT_EQ(tokenizer_.encode(text), ids_of(expected_.at("ids").at(i))) << i << ": " << text;
    EXPECT_EQ(fnv(tokenizer_.encode(text, {.add_special_tokens = true})), str(expected_.at("with_special").at(i))) << text;
    EXPECT_EQ(fnv(tokenizer_.encode(text, {.allow_special = false})), str(expected_.at("plain").at(i))) << text;
  }
}

TEST_P(TokenizerParity, InvalidUtf8) {
  const json::array& texts = cases_.at("invalid").as_array();
  for (std::size_t i = 0; i < texts.size(); ++i)
    EXPECT_EQ(tokenizer_.encode(bytes_from_hex(str(texts[i]))), ids_of(expected_.at("invalid").at(i))) << str(texts[i]);
}

TEST_P(TokenizerParity, RandomUnicode) {
  const json::array& texts = cases_.at("random").as_array();
  ASSERT_GE(texts.size(), 500u);
  for (std::size_t i = 0; i < texts.size(); ++i)
    EXPECT_EQ(fnv(tokenizer_.encode(str(texts[i]))), str(expected_.at("random").at(i))) << i << ": " << json::serialize(texts[i]);
}

TEST_P(TokenizerParity, Decode) {
  const json::array& ids = expected_.at("ids").as_array();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(tokenizer_.decode(ids_of(ids[i])), str(expected_.at("decoded").at(i))) << i;
    EXPECT_EQ(fnv(tokenizer_.decode(ids_of(ids[i]), false)), str(expected_.at("decoded_all").at(i))) << i;
  }
  const json::array& sequences = expected_.at("random_ids").as_array();
  for (std::size_t i = 0; i < sequences.size(); ++i)
    EXPECT_EQ(tokenizer_.decode(ids_of(sequences[i])), str(expected_.at("random_decoded").at(i))) << i;
}

TEST_P(TokenizerParity, IncrementalDetokenizerGivesTheSameText) {
  for (const char* key : {"ids", "random_ids"}) {
    for (const json::value& value : expected_.at(key).as_array()) {
      const std::vector<std::int32_t> ids = ids_of(value);
      for (const bool skip_special : {true, false}) {
        IncrementalDetokenizer detokenizer(tokenizer_, skip_special);
        std::string text;
        for (std::int32_t id : ids) {
          const std::string piece = detokenizer.push(id);
          EXPECT_TRUE(is_valid_utf8(piece));
          text += piece;
        }
        text += detokenizer.finish();
        EXPECT_EQ(text, tokenizer_.decode(ids, skip_special));
      }
    }
  }
}

TEST_P(TokenizerParity, OffsetsRiseAndNameTheBytes) {
  for (const char* key : {"hard", "random"}) {
    for (const json::value& value : cases_.at(key).as_array()) {
      const std::string text = str(value);
      test::expect_rising_offsets(tokenizer_, text);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, TokenizerParity, ::testing::Values("gpt2", "qwen2", "llama3", "smollm2", "o200k", "bytes", "odd"),
                         [](const auto& family) { return std::string(family.param); });

TEST(Tokenizer, OffsetsAreExactWithoutNormalization) {
  const Tokenizer tokenizer = fixture_tokenizer("llama3");
  const std::string text = "Hi<|eot_id|> wörld 😀\n";
  const Encoding encoding = tokenizer.encode_with_offsets(text, {.add_special_tokens = true});
  std::string joined;
  for (std::size_t i = 1; i < encoding.ids.size(); ++i) {
    const auto [begin, end] = encoding.offsets[i];
    EXPECT_EQ(text.substr(begin, end - begin), tokenizer.bytes_of(encoding.ids[i]));
    joined += text.substr(begin, end - begin);
  }
  EXPECT_EQ(joined, text);
  EXPECT_EQ(encoding.ids[0], tokenizer.id_of("<|begin_of_text|>"));
  EXPECT_EQ(encoding.offsets[0], std::pair(0u, 0u));
}

TEST(Tokenizer, ReadsNamedTokensAndStopIds) {
  const Tokenizer tokenizer = Tokenizer::parse(fixture_text("qwen2.tokenizer.json"),
                                               R"({"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, "bos_token": null,
          "added_tokens_decoder": {"5000": {"content": "<extra>", "special": true}}})",
                                               R"({"eos_token_id": [900, 902, 900]})", R"({"bos_token": "<|im_start|>"})");
  EXPECT_EQ(tokenizer.eos_id(), 902);
  EXPECT_EQ(tokenizer.pad_id(), 900);
  EXPECT_EQ(tokenizer.bos_id(), 901);
  EXPECT_EQ(tokenizer.stop_ids(), (std::vector<std::int32_t>{900, 902}));
  EXPECT_EQ(tokenizer.vocab_size(), 5001);
  EXPECT_EQ(tokenizer.encode("<extra>"), std::vector<std::int32_t>{5000});
  EXPECT_TRUE(tokenizer.is_special(5000));
  EXPECT_TRUE(tokenizer.is_added(903));
  EXPECT_FALSE(tokenizer.is_special(903));
  EXPECT_EQ(tokenizer.token_of(4000), "");
  EXPECT_EQ(tokenizer.decode(std::vector<std::int32_t>{-5, 4000, 999999}), "");
  EXPECT_EQ(str(tokenizer.special_tokens().at("eos_token")), "<|im_end|>");
}

// Ids are those of the Python package `tokenizers` 0.23.
TEST(Tokenizer, StepsBehindByteLevelSeeItsSpelling) {
  struct Case {
    const char* steps;
    std::vector<std::int32_t> first, second;
  };
  const Case cases[] = {
      {R"([{"type": "ByteLevel", "add_prefix_space": false, "use_regex": true}, {"type": "Digits", "individual_digits": true}, {"type": "Split", "pattern": {"Regex": "\\p{Lu}"}, "behavior": "Isolated", "invert": false}, {"type": "Punctuation", "behavior": "Isolated"}])",
       {127, 226, 65, 220, 16,  17, 220, 127, 102, 30,  127, 120, 220, 83, 280, 198,
        158, 222, 99, 162, 245, 98, 162, 250, 105, 220, 264, 313, 220, 18, 87},
       {220, 220, 83, 86, 78, 220, 220, 667, 64, 309, 82}},
      {R"([{"type": "ByteLevel", "add_prefix_space": true, "use_regex": false}, {"type": "Split", "pattern": {"String": "\u0120"}, "behavior": "MergedWithNext", "invert": false}])",
       {220, 127, 226, 65, 370, 17, 220, 127, 102, 30, 127, 120, 295, 198, 158, 222, 99, 162, 245, 98, 162, 250, 105, 321, 220, 18, 87},
       {220, 266, 86, 78, 220, 307, 79, 64, 309, 82}},
      {R"([{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}, {"type": "WhitespaceSplit"}, {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": false}])",
       {127, 226, 65, 370, 17, 220, 127, 102, 30, 127, 120, 295, 198, 158, 222, 99, 162, 245, 98, 162, 250, 105, 321, 220, 18, 87},
       {256, 83, 86, 78, 256, 667, 64, 309, 82}},
  };
  for (const Case& c : cases) {
    json::value root = fixture_json("gpt2.tokenizer.json");
    root.as_object()["pre_tokenizer"] = json::object{{"type", "Sequence"}, {"pretokenizers", json::parse(c.steps)}};
    const Tokenizer tokenizer = Tokenizer::parse(json::serialize(root));
    const std::string text = "\u00C4b 12 \u00E9?\u00FC the\n\u2026\u65E5\u672C return 3x";
    EXPECT_EQ(tokenizer.encode(text), c.first) << c.steps;
    EXPECT_EQ(tokenizer.encode("  two  spaces"), c.second) << c.steps;
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)).substr(tokenizer.decode(tokenizer.encode(text)).find("\u00C4")), text);
  }
}

// What transformers 5.23 makes of the same files.
TEST(Tokenizer, SpecialTokensThatOnlyTheConfigurationNames) {
  const std::string text = "a<NEW>b<X1>c<X2> <PAD> Hello<|endoftext|>";
  const auto load = [&](std::string_view config, std::string_view map = {}) {
    return Tokenizer::parse(fixture_text("gpt2.tokenizer.json"), config, {}, map);
  };
  const Tokenizer named = load(R"({"pad_token": "<PAD>", "eos_token": "<NEW>"})");
  EXPECT_EQ(named.encode(text),
            (std::vector<std::int32_t>{64, 701, 65, 27, 55, 16, 29, 66, 27, 55, 17, 29, 220, 702, 220, 39, 68, 75, 362, 700}));
  EXPECT_EQ(named.eos_id(), 701);
  EXPECT_EQ(named.pad_id(), 702);
  EXPECT_EQ(named.vocab_size(), 703);
  EXPECT_TRUE(named.is_special(701));
  EXPECT_EQ(named.decode(named.encode(text)), "ab<X1>c<X2>  Hello");
  EXPECT_THAT(named.stop_ids(), ::testing::Contains(701));

  const Tokenizer listed = load(R"({"eos_token": "<|endoftext|>", "additional_special_tokens": ["<X1>", {"content": "Hello"}]})");
  EXPECT_EQ(listed.encode(text),
            (std::vector<std::int32_t>{64, 27, 45, 36, 54, 29, 65, 701, 66, 27, 55, 17, 29, 481, 47, 32, 35, 29, 220, 702, 700}));
  const Tokenizer extra = load(R"({"extra_special_tokens": {"image_token": "<X1>"}})");
  EXPECT_EQ(extra.id_of("<X1>"), 701);
  EXPECT_EQ(str(extra.special_tokens().at("image_token")), "<X1>") << "templates see it under this name";
  const Tokenizer mapped = load(R"({"eos_token": "<|endoftext|>"})", R"({"pad_token": "<PAD>", "additional_special_tokens": ["<X2>"]})");
  EXPECT_EQ(mapped.pad_id(), 701);
  EXPECT_EQ(mapped.id_of("<X2>"), 702);
  const Tokenizer known = load(R"({"pad_token": "a"})");
  EXPECT_EQ(known.pad_id(), 64) << "a token of the vocabulary keeps its id";
  EXPECT_EQ(known.vocab_size(), 701);
}

TEST(Tokenizer, LongRunsStayFast) {
#if defined(__SANITIZE_THREAD__)
  constexpr std::size_t kShorter = 32;  // one thread, a hundred times slower
#else
  constexpr std::size_t kShorter = 1;
#endif
  for (const char* family : {"gpt2", "qwen2", "llama3", "smollm2", "o200k"}) {
    const Tokenizer tokenizer = fixture_tokenizer(family);
    const auto start = std::chrono::steady_clock::now();
    for (const std::string& unit : {std::string(" "), std::string("a"), std::string("\n"), std::string("7"), std::string("e\u0301"),
                                    std::string("-"), std::string("ab"), std::string(" \n"), std::string("word ")}) {
      std::string text;
      while (text.size() < (unit == " " || unit == "a" ? 1u << 20 : 1u << 17) / kShorter) text += unit;
      const std::vector<std::int32_t> ids = tokenizer.encode(text + "x");
      EXPECT_FALSE(ids.empty());
    }
    // Quadratic work would need hours; the bound is loose for slow, sanitized and emulated machines.
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(10)) << family;
  }
}

TEST(Tokenizer, ManyThreadsGetTheSameIds) {
  const Tokenizer tokenizer = fixture_tokenizer("qwen2");
  const std::string text = str(fixture_json("tokenizer_cases.json").at("hard").at(6)) + " the quick brown fox, it's 12 o'clock";
  const std::vector<std::int32_t> expected = tokenizer.encode(text);
  std::vector<int> wrong(4);
  {
    std::vector<std::jthread> threads;
    for (int& count : wrong)
      threads.emplace_back([&] {
        for (int i = 0; i < 200; ++i) count += tokenizer.encode(text) != expected;
      });
  }
  EXPECT_THAT(wrong, ::testing::Each(0));
}

// ---- Damaged files: an Error that names the file and the key, never a crash.

std::string error_of(std::string_view tokenizer_json, std::string_view config = {}, std::string_view generation = {}) {
  try {
    Tokenizer::parse(tokenizer_json, config, generation, {}, "model");
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

std::string with_model(const std::string& model) {
  return R"({"added_tokens":[{"id":9,"content":"<e>","special":true}],"normalizer":null,)"
         R"("pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"decoder":{"type":"ByteLevel"},"model":)" +
         model + "}";
}

TEST(TokenizerErrors, NameFileAndKey) {
  EXPECT_THAT(error_of(""), HasSubstr("model/tokenizer.json"));
  EXPECT_THAT(error_of("{\"model\": {"), HasSubstr("truncated"));
  EXPECT_THAT(error_of("[]"), HasSubstr("expected an object, found array"));
  EXPECT_THAT(error_of("{}"), HasSubstr("tokenizer.json.model: missing"));
  EXPECT_THAT(error_of(std::string(100000, '[')), HasSubstr("tokenizer.json"));
  EXPECT_THAT(error_of(with_model(R"({"type":"Unigram","vocab":[]})")), HasSubstr("model 'Unigram' is not supported"));
  EXPECT_THAT(error_of(with_model(R"({"type":"BPE","vocab":{"a":0}})")), HasSubstr("model.merges: missing"));
  EXPECT_THAT(error_of(with_model(R"({"vocab":{"a":0,"b":0},"merges":[]})")), HasSubstr("vocab['b']: id 0 belongs to another"));
  EXPECT_THAT(error_of(with_model(R"({"vocab":{"a":-1},"merges":[]})")), HasSubstr("outside"));
  EXPECT_THAT(error_of(with_model(R"({"vocab":{"a":99999999999},"merges":[]})")), HasSubstr("outside"));
  EXPECT_THAT(error_of(with_model(R"({"vocab":{"a":"x"},"merges":[]})")), HasSubstr("vocab['a']: expected an integer"));
  EXPECT_THAT(error_of(with_model(R"({"vocab":{"a":0},"merges":["ab"]})")), HasSubstr("merges[0]: expected two tokens"));
  EXPECT_THAT(error_of(with_model(R"({"vocab":{"a":0},"merges":["a b c"]})")), HasSubstr("merges[0]"));
  EXPECT_THAT(error_of(with_model(R"({"vocab":{"a":0},"merges":[["a"]]})")), HasSubstr("expected a pair"));
  EXPECT_THAT(error_of(with_model(R"({"vocab":{"a":0,"b":1},"merges":["a b"]})")), HasSubstr("merged token 'ab' is not"));
  EXPECT_THAT(error_of(with_model(R"({"vocab":{"a":0,"ab":1},"merges":["a b"]})")), HasSubstr("right token 'b'"));
  EXPECT_THAT(error_of(with_model(R"({"vocab":{"a":0},"merges":[],"byte_fallback":true})")), HasSubstr("byte_fallback"));
  EXPECT_THAT(error_of(with_model(R"({"vocab":{"a":0},"merges":[],"ignore_merges":3})")), HasSubstr("expected true or false"));
  const std::string good = with_model(R"({"vocab":{"a":0},"merges":[]})");
  EXPECT_EQ(error_of(good), "no error");
  EXPECT_THAT(error_of(good, "{\"eos_token\": 7}"), HasSubstr("tokenizer_config.json.eos_token: expected a string"));
  EXPECT_THAT(error_of(good, "nonsense"), HasSubstr("tokenizer_config.json"));
  EXPECT_THAT(error_of(good, "{\"added_tokens_decoder\": {\"x\": {}}}"), HasSubstr("['x']"));
  EXPECT_THAT(error_of(good, "{\"added_tokens_decoder\": {\"9\": {\"content\": \"<f>\"}}}"), HasSubstr("gives this id to '<e>'"));
  EXPECT_THAT(error_of(good, {}, "{\"eos_token_id\": \"x\"}"), HasSubstr("generation_config.json.eos_token_id"));
}

TEST(TokenizerErrors, PipelinePartsThatAreNotSupportedAreNamed) {
  const auto with = [](std::string_view pre, std::string_view rest = "") {
    return fmt::format(R"({{"model":{{"vocab":{{"a":0}},"merges":[]}},"decoder":{{"type":"ByteLevel"}},"pre_tokenizer":{}{}}})", pre, rest);
  };
  EXPECT_THAT(error_of(with("null")), HasSubstr("no ByteLevel step"));
  EXPECT_THAT(error_of(with(R"({"type":"Metaspace","replacement":"_"})")), HasSubstr("no ByteLevel step"));
  EXPECT_THAT(error_of(with(R"({"type":"Split","pattern":{"Regex":"(a"},"behavior":"Isolated"})")), HasSubstr("no valid pattern"));
  EXPECT_THAT(error_of(with(R"({"type":"Split","pattern":{"Regex":"a"},"behavior":"Odd"})")), HasSubstr("unknown behavior 'Odd'"));
  EXPECT_THAT(error_of(with(R"({"type":"ByteLevel"})", R"(,"normalizer":{"type":"NFKC"})")), HasSubstr("'NFKC' is not supported"));
  EXPECT_THAT(
      error_of(with(R"({"type":"ByteLevel"})",
                    R"(,"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"x"}}],"special_tokens":{}})")),
      HasSubstr("special_tokens.x: missing"));
  std::string nested = R"({"type":"ByteLevel"})";
  for (int i = 0; i < 12; ++i) nested = R"({"type":"Sequence","pretokenizers":[)" + nested + "]}";
  EXPECT_THAT(error_of(with(nested)), HasSubstr("nested deeper"));
  EXPECT_THROW(Tokenizer::load("/nonexistent-folder"), Error);
}

TEST(TokenizerErrors, EveryTruncationOfARealFileIsAnError) {
  const std::string text = fixture_text("odd.tokenizer.json");
  for (std::size_t size = 0; size + 1 < text.size(); size += 97) EXPECT_THROW(Tokenizer::parse(text.substr(0, size)), Error);
}

TEST(TokenizerErrors, HostilePatternEndsWithAnError) {
  const detail::Regex regex("(a+)+(b+)+(c+)+(a+)+$x", "test");
  const std::string text(64, 'a');
  detail::Regex::Scan scan(regex, text);
  std::size_t begin = 0, end = 0;
  try {
    while (scan.next(begin, end)) {
    }
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("gave up"));
  }
}

// ---- UTF-8 and Unicode

TEST(Utf8, ReplacementDoesNotDependOnChunks) {
  const std::string bytes = "a\xE2\x82\x28\xF0\x9F\x98\x80\xC3\xFF\xED\xA0\x80z\xF0\x9F";
  const std::string whole = replace_invalid_utf8(bytes);
  EXPECT_EQ(whole, "a\uFFFD(\U0001F600\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDz\uFFFD");
  for (std::size_t chunk = 1; chunk < bytes.size(); ++chunk) {
    Utf8Decoder decoder;
    std::string out;
    for (std::size_t i = 0; i < bytes.size(); i += chunk) decoder.push(std::string_view(bytes).substr(i, chunk), out);
    decoder.finish(out);
    EXPECT_EQ(out, whole) << chunk;
  }
}

TEST(Utf8, NormalizationAndCase) {
  EXPECT_EQ(to_nfc("e\u0301 q\u0307\u0323 \u1100\u1161\u11a8 \u212b \u0958"), "\u00e9 q\u0323\u0307 \uac01 \u00c5 \u0915\u093c");
  EXPECT_EQ(to_upper("straße ŉ ﬁ ά"), "STRASSE ʼN FI Ά");
  EXPECT_EQ(to_lower("ΟΔΟΣ ΣΑΣ İ"), "οδος σας i̇");
  EXPECT_EQ(to_title("hello wORLD they're ǆ"), "Hello World They'Re ǅ");
  EXPECT_EQ(capitalize("éTÉ"), "Été");
}

// ---- Stop strings

TEST(StopChecker, HoldsBackPrefixesAndCutsAtTheMatch) {
  StopChecker checker({"</s>", "END"});
  EXPECT_EQ(checker.push("hello <").text, "hello ");
  EXPECT_EQ(checker.push("/x E").text, "</x ");
  const StopChecker::Step step = checker.push("ND tail");
  EXPECT_EQ(step.text, "");
  EXPECT_EQ(step.stop, "END");
}

TEST(StopChecker, ResultDoesNotDependOnChunks) {
  const std::string text = "aabaabaaaabab</s>zz";
  for (const bool include : {false, true}) {
    StopChecker all({"abab", "aabaaab", "bab"}, include);
    const StopChecker::Step whole = all.push(text);
    EXPECT_EQ(whole.stop, "abab");
    for (std::size_t chunk = 1; chunk < text.size(); ++chunk) {
      StopChecker checker({"abab", "aabaaab", "bab"}, include);
      std::string out;
      std::optional<std::string> stop;
      for (std::size_t i = 0; i < text.size() && !stop; i += chunk) {
        StopChecker::Step step = checker.push(text.substr(i, chunk));
        out += step.text;
        stop = step.stop;
      }
      EXPECT_EQ(out, whole.text) << chunk;
      EXPECT_EQ(stop, whole.stop);
    }
  }
}

TEST(StopChecker, NothingIsLostWithoutAMatch) {
  StopChecker checker({"\n\nUser:"});
  std::string out;
  for (char c : std::string("a\n\nUse\n\nUser")) out += checker.push({&c, 1}).text;
  EXPECT_EQ(out, "a\n\nUse");
  EXPECT_EQ(checker.finish(), "\n\nUser");
  StopChecker none({""});
  EXPECT_EQ(none.push("x").text, "x");
}

}  // namespace
}  // namespace prl::text
