// Tokenizers made from SentencePiece: BPE over characters, with bytes for those that the vocabulary lacks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <boost/json/serialize.hpp>

#include <chrono>

#include "base/error.hpp"
#include "text/detokenizer.hpp"
#include "text/stop_tracker.hpp"
#include "text/test_support.hpp"
#include "text/tokenizer.hpp"
#include "text/utf8.hpp"

namespace prl::text {
namespace {

using test::fixture_json;
using test::ids_of;
using test::str;
using ::testing::HasSubstr;
namespace json = boost::json;

const char* const kFamilies[] = {"llama2", "llama2_old", "mistral3", "phi3", "gemma", "metaspace", "odd"};

std::string fixture_of(const std::string& family) { return test::fixture_text("characters/" + family + ".tokenizer.json"); }
Tokenizer tokenizer_of(const std::string& family) { return Tokenizer::parse(fixture_of(family)); }
std::string hash_of(std::string_view text) { return test::fnv(text).substr(0, 8); }
std::string hash_of(const std::vector<std::int32_t>& ids) { return test::fnv(ids).substr(0, 8); }

std::string stream(const Tokenizer& tokenizer, const std::vector<std::int32_t>& ids, bool skip_special) {
  IncrementalDetokenizer detokenizer(tokenizer, skip_special);
  std::string text;
  for (const std::int32_t id : ids) {
    const std::string piece = detokenizer.push(id);
    EXPECT_TRUE(is_valid_utf8(piece));
    text += piece;
  }
  return text + detokenizer.finish();
}

// Replays what the Python package `tokenizers` gave for the same files.
class CharacterParity : public ::testing::TestWithParam<const char*> {
 protected:
  CharacterParity() {
    const json::value other = fixture_json("tokenizer_cases.json");
    for (const json::value& text : other.at("hard").as_array())
      if (hard_.size() < expected_.at("hard").as_array().size()) hard_.push_back(str(text));
    num_hashed_ = hard_.size();
    for (const json::value& text : cases_.at("hard").as_array()) hard_.push_back(str(text));
  }
  // `want` is a hash of the text without special tokens and with them; null where the other side gave no answer.
  void expect_text(const std::vector<std::int32_t>& ids, const json::value& want) {
    const std::string text = tokenizer_.decode(ids), all = tokenizer_.decode(ids, false);
    if (!want.is_null()) {
      EXPECT_EQ(hash_of(text + '\0' + all), str(want)) << text << "\n" << all;
    }
    EXPECT_EQ(stream(tokenizer_, ids, true), text);
    EXPECT_EQ(stream(tokenizer_, ids, false), all);
  }

  const json::value cases_ = fixture_json("characters/cases.json");
  const json::object& expected_ = cases_.at("families").at(GetParam()).as_object();
  const Tokenizer tokenizer_ = tokenizer_of(GetParam());
  std::vector<std::string> hard_;
  std::size_t num_hashed_ = 0;  // of the first of them there are only hashes
};

TEST_P(CharacterParity, Encode) {
  ASSERT_GE(hard_.size(), 150u);
  ASSERT_EQ(expected_.at("special_and_plain").as_array().size(), hard_.size());
  for (std::size_t i = 0; i < hard_.size(); ++i) {
    const std::vector<std::int32_t> ids = tokenizer_.encode(hard_[i]);
    if (i < num_hashed_) {
      EXPECT_EQ(hash_of(ids), str(expected_.at("hard").at(i))) << i << ": " << hard_[i];
    } else {
      EXPECT_EQ(ids, ids_of(expected_.at("ids").at(i - num_hashed_))) << i << ": " << hard_[i];
    }
    std::vector<std::int32_t> both = tokenizer_.encode(hard_[i], {.add_special_tokens = true});
    for (const std::int32_t id : tokenizer_.encode(hard_[i], {.allow_special = false})) both.push_back(id);
    EXPECT_EQ(hash_of(both), str(expected_.at("special_and_plain").at(i))) << hard_[i];
  }
  const json::array& randoms = cases_.at("random").as_array();
  for (std::size_t i = 0; i < randoms.size(); ++i)
    EXPECT_EQ(hash_of(tokenizer_.encode(str(randoms[i]))), str(expected_.at("random").at(i))) << i << ": " << json::serialize(randoms[i]);
  const json::array& invalid = cases_.at("invalid").as_array();
  for (std::size_t i = 0; i < invalid.size(); ++i) {
    std::string bytes;
    const std::string hex = str(invalid[i]);
    for (std::size_t k = 0; k < hex.size(); k += 2) bytes.push_back(static_cast<char>(std::stoi(hex.substr(k, 2), nullptr, 16)));
    EXPECT_EQ(hash_of(tokenizer_.encode(bytes)), str(expected_.at("invalid").at(i))) << hex;
  }
}

TEST_P(CharacterParity, DecodeAsAWholeAndOneByOne) {
  for (std::size_t i = 0; i < hard_.size(); ++i) {
    const std::vector<std::int32_t> ids = tokenizer_.encode(hard_[i]);
    expect_text(ids, expected_.at("decoded").at(i));
  }
  const json::array& sequences = expected_.at("random_ids").as_array();
  ASSERT_GE(sequences.size(), 100u);
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const std::vector<std::int32_t> ids = ids_of(sequences[i]);
    const json::value& want = expected_.at("random_decoded").at(i);
    if (!want.is_null()) {
      EXPECT_EQ(tokenizer_.decode(ids), str(want)) << json::serialize(sequences[i]);
    }
    expect_text(ids, expected_.at("random_decoded_all").at(i));
  }
}

TEST_P(CharacterParity, OffsetsRiseAndCoverTheText) {
  for (const std::string& text : hard_) {
    test::expect_rising_offsets(tokenizer_, text);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, CharacterParity, ::testing::ValuesIn(kFamilies),
                         [](const auto& family) { return std::string(family.param); });

TEST(CharacterTokenizer, OffsetsNameTheBytesOfEachToken) {
  for (const char* family : {"llama2", "mistral3", "gemma"}) {
    const Tokenizer tokenizer = tokenizer_of(family);
    const std::string text = "Hi  the end, \U0001F600 \u9f98x\n";
    const Encoding encoding = tokenizer.encode_with_offsets(text);
    std::string joined;
    for (std::size_t i = 0; i < encoding.ids.size(); ++i) {
      const auto [begin, end] = encoding.offsets[i];
      const std::string covered = text.substr(begin, end - begin);
      std::string bytes(tokenizer.bytes_of(encoding.ids[i]));
      if (i == 0 && bytes.starts_with(' ')) bytes.erase(0, 1);  // the space that was put in front
      EXPECT_EQ(covered, bytes) << family << " token " << i;
      joined += covered;
    }
    EXPECT_EQ(joined, text) << family;
  }
}

TEST(CharacterTokenizer, BytesOfATokenAreThoseItStandsForInsideAText) {
  for (const char* family : {"llama2", "mistral3", "phi3", "gemma"}) {
    const Tokenizer tokenizer = tokenizer_of(family);
    for (int byte = 0; byte < 256; ++byte) {
      const auto id = tokenizer.id_of(fmt::format("<0x{:02X}>", byte));
      ASSERT_TRUE(id) << family << " " << byte;
      EXPECT_EQ(tokenizer.bytes_of(*id), std::string(1, static_cast<char>(static_cast<unsigned char>(byte))));
    }
    EXPECT_EQ(tokenizer.bytes_of(tokenizer.id_of("\u2581th").value()), " th");
    EXPECT_EQ(tokenizer.bytes_of(tokenizer.id_of("\u2581\u2581").value()), "  ");
    EXPECT_EQ(tokenizer.bytes_of(tokenizer.id_of("<unk>").value()), "<unk>");
  }
  const Tokenizer metaspace = tokenizer_of("metaspace");
  EXPECT_EQ(metaspace.bytes_of(metaspace.id_of("\u2581the").value()), " the");
}

TEST(CharacterTokenizer, TextThatGoesOnKeepsItsSpace) {
  const Tokenizer tokenizer = tokenizer_of("llama2");
  const std::vector<std::int32_t> ids = tokenizer.encode("the answer");
  IncrementalDetokenizer whole(tokenizer), tail(tokenizer, true, false);
  std::string first, second;
  for (const std::int32_t id : ids) {
    whole.push(id, first);
    tail.push(id, second);
  }
  EXPECT_EQ(first, "the answer");
  EXPECT_EQ(second, " the answer");
  // Mistral's first word gets a mark where the text begins and nowhere else.
  const Tokenizer mistral = tokenizer_of("mistral3");
  EXPECT_EQ(mistral.decode(mistral.encode("the"), false), "the");
  EXPECT_EQ(mistral.encode("the").front(), mistral.id_of("\u2581the"));
  std::string spelt;
  for (const std::int32_t id : mistral.encode("the", {.begins_text = false})) spelt += mistral.token_of(id);
  EXPECT_EQ(spelt, "the");
}

// "\n" is the byte token <0x0A>, which is held back until it is known that no other byte spoils it.
TEST(CharacterTokenizer, StopStringsOfByteTokensStopAtOnce) {
  const Tokenizer tokenizer = tokenizer_of("llama2");
  const std::int32_t newline = tokenizer.id_of("<0x0A>").value(), the = tokenizer.id_of("\u2581the").value();
  StopTracker stops(tokenizer, {.stop = {"\n\n"}});
  EXPECT_EQ(stops.push(the), " the");
  EXPECT_EQ(stops.push(newline), "");
  EXPECT_FALSE(stops.has_stopped());
  EXPECT_EQ(stops.push(newline), "");
  EXPECT_TRUE(stops.has_stopped());
  EXPECT_EQ(stops.stop_string(), "\n\n");

  StopTracker open(tokenizer, {.stop = {"x"}});
  std::string text;
  for (const std::int32_t id : {newline, newline, the}) text += open.push(id);
  text += open.finish();
  EXPECT_EQ(text, "\n\n the");
  // A later byte makes the whole row ill-formed: no character of it was shown before.
  StopTracker spoilt(tokenizer, {.stop = {"x"}});
  text = spoilt.push(newline);
  text += spoilt.push(tokenizer.id_of("<0xFF>").value());
  text += spoilt.finish();
  EXPECT_EQ(text, "\uFFFD\uFFFD");
}

TEST(CharacterTokenizer, MinTokensKeepTheirTextOutOfStopStrings) {
  const Tokenizer tokenizer = tokenizer_of("llama2");
  const std::int32_t newline = tokenizer.id_of("<0x0A>").value();
  StopTracker stops(tokenizer, {.stop = {"\n\n"}, .min_tokens = 2});
  std::string text;
  for (int i = 0; i < 3; ++i) text += stops.push(newline);
  EXPECT_FALSE(stops.has_stopped()) << "only one newline came behind the first two tokens";
  text += stops.push(newline);
  EXPECT_TRUE(stops.has_stopped());
  EXPECT_EQ(text, "\n\n");
}

// A text without a pre-tokenizer is one word. Quadratic work would need hours here; the bound is loose for sanitized machines.
TEST(CharacterTokenizer, AMillionCharactersAreFast) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr std::size_t kNumCharacters = 30'000;
#else
  constexpr std::size_t kNumCharacters = 1'000'000;
#endif
  for (const char* family : {"llama2", "mistral3"}) {
    const Tokenizer tokenizer = tokenizer_of(family);
    for (const std::string& unit : {std::string("the quick brown fox, 12 times; "), std::string("a"), std::string(" "), std::string("te"),
                                    std::string("\u4f60"), std::string("\u9f98"), std::string("\n")}) {
      std::string text;
      for (std::size_t n = 0; n < kNumCharacters; n += count_code_points(unit)) text += unit;
      const auto start = std::chrono::steady_clock::now();
      const std::vector<std::int32_t> ids = tokenizer.encode(text);
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      RecordProperty(fmt::format("{}_{}_seconds", family, hash_of(unit)), fmt::format("{:.3f}", taken.count()));
      EXPECT_LT(taken.count(), 60.0) << family << " " << unit;
      const std::string decoded = tokenizer.decode(ids);
      EXPECT_EQ(decoded, text.substr(text.size() - decoded.size())) << family << " " << unit;
      EXPECT_LE(text.size() - decoded.size(), 1u) << "only a space that the text begins with";
    }
  }
}

// ---- Files that cannot be read: an Error that names the file and the key.

std::string refusal_of(const json::value& root) {
  try {
    Tokenizer::parse(json::serialize(root), {}, {}, {}, "model");
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// llama2 with one member replaced.
json::value with(std::string_view member, std::string_view value) {
  json::value root = json::parse(fixture_of("llama2"));
  root.as_object()[json::string_view(member)] = json::parse(json::string_view(value));
  return root;
}

TEST(CharacterTokenizerErrors, WhatIsNotSupportedIsNamed) {
  EXPECT_EQ(refusal_of(with("normalizer", "null")), "no error");
  EXPECT_THAT(refusal_of(with("normalizer", R"({"type":"Lowercase"})")),
              HasSubstr("model/tokenizer.json.normalizer.type: normalizer 'Lowercase'"));
  EXPECT_THAT(refusal_of(with("normalizer", R"({"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Prepend"}]})")),
              HasSubstr("normalizer.normalizers[1].prepend: missing"));
  EXPECT_THAT(refusal_of(with("normalizer", R"({"type":"Replace","pattern":{"String":""},"content":"x"})")), HasSubstr("empty pattern"));
  EXPECT_THAT(refusal_of(with("normalizer", R"({"type":"Replace","pattern":{"Regex":"(a"},"content":"x"})")),
              HasSubstr("no valid pattern"));
  EXPECT_THAT(refusal_of(with("decoder", "null")), HasSubstr("tokenizer.json.decoder: missing"));
  EXPECT_THAT(refusal_of(with("decoder", R"({"type":"ByteLevel"})")), HasSubstr("no ByteLevel step, but the decoder is ByteLevel"));
  EXPECT_THAT(refusal_of(with("decoder", R"({"type":"WordPiece"})")), HasSubstr("decoder 'WordPiece' is not supported"));
  EXPECT_THAT(refusal_of(with("decoder", R"({"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"ByteFallback"}]})")),
              HasSubstr("decoder.decoders[1].type: decoder 'ByteFallback' is not supported behind Fuse"));
  EXPECT_THAT(refusal_of(with("decoder", R"({"type":"Strip","content":" ","start":-1,"stop":0})")),
              HasSubstr("decoder.start: expected a count, found -1"));
  EXPECT_THAT(refusal_of(with("decoder", R"({"type":"Strip","content":"ab","start":1,"stop":0})")),
              HasSubstr("expected one character, found 'ab'"));
  const auto metaspace = [&](std::string_view members) {
    return refusal_of(with("pre_tokenizer", fmt::format(R"({{"type":"Metaspace",{}}})", members)));
  };
  EXPECT_EQ(metaspace(R"("replacement":"\u2581","add_prefix_space":true)"), "no error");
  EXPECT_EQ(metaspace(R"("replacement":"\u2581","add_prefix_space":false,"prepend_scheme":"never")"), "no error");
  EXPECT_THAT(metaspace(R"("replacement":"\u2581","add_prefix_space":false)"), HasSubstr("pre_tokenizer.add_prefix_space: false needs"));
  EXPECT_THAT(metaspace(R"("replacement":"__")"), HasSubstr("replacement: expected one character, found '__'"));
  EXPECT_THAT(metaspace(R"("replacement":"_","prepend_scheme":"odd")"),
              HasSubstr("prepend_scheme: expected first, always or never, found 'odd'"));
  EXPECT_THAT(refusal_of(with("pre_tokenizer",
                              R"({"type":"Sequence","pretokenizers":[{"type":"Metaspace","replacement":"_"},{"type":"ByteLevel"}]})")),
              HasSubstr("Metaspace and ByteLevel together"));
  EXPECT_THAT(refusal_of(with("pre_tokenizer", R"({"type":"UnicodeScripts"})")), HasSubstr("'UnicodeScripts' is not supported"));

  json::value root = json::parse(fixture_of("llama2"));
  json::object& model = root.at("model").as_object();
  model["dropout"] = 0.1;
  EXPECT_THAT(refusal_of(root), HasSubstr("model.dropout: 1E-1 is not supported"));
  model["dropout"] = nullptr;
  model["unk_token"] = "<none>";
  EXPECT_EQ(refusal_of(root), "no error") << "with all bytes there, nothing is unknown";
  model["vocab"].as_object().erase("<0x80>");
  EXPECT_THAT(refusal_of(root), HasSubstr("model.unk_token: '<none>' is not in the vocabulary"));
}

// Strip in front of Fuse works on each token, and upstream on none that is empty.
TEST(CharacterTokenizer, StripInFrontOfFuseIsOfEachToken) {
  const Tokenizer tokenizer = Tokenizer::parse(json::serialize(
      with("decoder", R"({"type":"Sequence","decoders":[{"type":"Strip","content":"e","start":0,"stop":1},{"type":"ByteFallback"}]})")));
  const std::int32_t the = tokenizer.id_of("\u2581the").value();
  EXPECT_EQ(tokenizer.decode(std::vector{the, the}), "\u2581th\u2581th");
  EXPECT_EQ(tokenizer.bytes_of(the), "\u2581th");
}

}  // namespace
}  // namespace prl::text
