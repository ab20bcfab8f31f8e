#include "grammar/token_grammar.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <future>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "base/files.hpp"
#include "base/testing/source_dir.hpp"
#include "grammar/rule_cache.hpp"
#include "grammar/schema_view.hpp"
#include "grammar/test_support.hpp"
#include "text/utf8.hpp"

namespace prl::grammar {
namespace {

namespace json = boost::json;

constexpr std::int32_t kEnd = -1;

/// 256 bytes, pieces that cross the borders of JSON's tokens, and random short strings; some spelt alike.
std::shared_ptr<const Vocabulary> test_vocabulary() {
  std::vector<std::string> spellings;
  for (int byte = 0; byte < 256; ++byte) spellings.emplace_back(1, static_cast<char>(byte));
  for (const char* text : {"{\"",  "\":", "\": ", "\", \"", "\"}", "],",       "}]",    "\n  ", "true", "null",  "fal", "12",
                           "123",  ".5",  "e+",   "é",      "🎉",   "\xF0\x9F", "\\u00", "\\\"", "name", "kind",  "na",  "red",
                           "true", "{}",  "[]",   "\"\"",   ",\n", "00",       "-1",    ": [",  "abc",  "\"a\"", "",    "0,"})
    spellings.emplace_back(text);
  Rng rng(9);
  for (int i = 0; i < 500; ++i) {
    std::string text;
    for (std::uint64_t k = rng.next_below(5) + 1; k > 0; --k) text.push_back("{}[]\":,.0123456789 eabctrufalsn\\\n-+"[rng.next_below(36)]);
    spellings.push_back(text);
  }
  return std::make_shared<const Vocabulary>(std::move(spellings));
}

class Walker {
 public:
  Walker(const wire::TokenRule& rule, const Vocabulary& vocabulary, std::uint64_t seed)
      : rule_(rule), vocabulary_(vocabulary), rng_(seed), words_((static_cast<std::size_t>(vocabulary.size()) + 63) / 64) {}

  /// Draws tokens through the masks until the text ends. After `patience` tokens it prefers short ways out: closing bytes.
  std::string walk(std::size_t patience) {
    std::vector<std::int32_t> output;
    std::string text;
    wire::TokenRuleCursor cursor;
    while (output.size() < 20'000) {
      const bool may_end = rule_.allow(output, cursor, words_);
      std::vector<std::int32_t> open;
      for (std::int32_t id = 0; id < vocabulary_.size(); ++id)
        if (words_[static_cast<std::size_t>(id) / 64] >> (id % 64) & 1) open.push_back(id);
      if (may_end && (open.empty() || output.size() > patience || rng_.next_below(4) == 0)) return text;
      if (open.empty()) {
        ADD_FAILURE() << "a dead end after " << text;
        return text;
      }
      std::int32_t token = open[rng_.next_below(open.size())];
      if (output.size() > patience)
        for (const char c : std::string_view("\"}],:"))
          if (std::find(open.begin(), open.end(), static_cast<std::uint8_t>(c)) != open.end() && rng_.next_below(2) == 0)
            token = static_cast<std::uint8_t>(c);
      output.push_back(token);
      text += vocabulary_.spelling(token);
    }
    ADD_FAILURE() << "no end after " << output.size() << " tokens";
    return text;
  }

 private:
  const wire::TokenRule& rule_;
  const Vocabulary& vocabulary_;
  Rng rng_;
  std::vector<std::uint64_t> words_;
};

/// Asks as an engine does, and waits where that would go on with other sequences.
class AskedRule final : public wire::TokenRule {
 public:
  explicit AskedRule(std::shared_ptr<const TokenGrammar> rule) : rule_(std::move(rule)) {}
  bool allow(std::span<const std::int32_t> output, wire::TokenRuleCursor& cursor, std::span<std::uint64_t> words) const override {
    const auto known = std::make_shared<std::promise<void>>();
    const auto answer = rule_->ask(output, cursor, [known] { known->set_value(); });
    if (!answer->is_ready) {
      if (known->get_future().wait_for(std::chrono::seconds(60)) != std::future_status::ready) ADD_FAILURE() << "no answer came";
      ++num_waits;
    }
    std::copy_n(answer->allowed_words.begin(), std::min(answer->allowed_words.size(), words.size()), words.begin());
    cursor = answer->cursor;
    return answer->may_end;
  }
  mutable int num_waits = 0;

 private:
  std::shared_ptr<const TokenGrammar> rule_;
};

/// A validator for the keywords that random_schema writes, on its own and simple: the judge of the property test.
bool is_valid(const json::value& schema, const json::value& value, const json::value& root) {
  if (schema.is_bool()) return schema.get_bool();
  const json::object& s = schema.get_object();
  if (const auto* ref = s.if_contains("$ref")) return is_valid(resolve_ref(root, *ref, "test"), value, root);
  if (const auto* any = s.if_contains("anyOf"))
    return std::any_of(any->get_array().begin(), any->get_array().end(), [&](const auto& branch) { return is_valid(branch, value, root); });
  if (const auto* one = s.if_contains("const")) return *one == value;
  if (const auto* list = s.if_contains("enum"))
    return std::find(list->get_array().begin(), list->get_array().end(), value) != list->get_array().end();
  const std::string type(s.at("type").get_string());
  if (!has_type(value, type)) return false;
  const auto number = [&](const char* name, double fallback) { return s.contains(name) ? s.at(name).to_number<double>() : fallback; };
  if (value.is_number()) {
    const double x = value.to_number<double>();
    return x >= number("minimum", -1e300) && x <= number("maximum", 1e300) && x > number("exclusiveMinimum", -1e300) &&
           x < number("exclusiveMaximum", 1e300);
  }
  if (value.is_string()) {
    const std::string_view text(value.get_string().data(), value.get_string().size());
    const auto length = static_cast<double>(text::count_code_points(text));
    return length >= number("minLength", 0) && length <= number("maxLength", 1e9) && text::is_valid_utf8(text);
  }
  if (value.is_array()) {
    const json::array& items = value.get_array();
    const auto size = static_cast<double>(items.size());
    return size >= number("minItems", 0) && size <= number("maxItems", 1e9) &&
           (!s.contains("items") ||
            std::all_of(items.begin(), items.end(), [&](const auto& item) { return is_valid(s.at("items"), item, root); }));
  }
  if (value.is_object()) {
    const json::object& members = value.get_object();
    const json::object& properties = s.contains("properties") ? s.at("properties").get_object() : json::object();
    if (s.contains("required"))
      for (const auto& name : s.at("required").get_array())
        if (!members.contains(name.get_string())) return false;
    for (const auto& [name, member] : members) {
      const json::value* own = properties.if_contains(name);
      if (own ? !is_valid(*own, member, root) : s.contains("additionalProperties") && !is_valid(s.at("additionalProperties"), member, root))
        return false;
    }
  }
  return true;
}

json::value random_schema(Rng& rng, int depth) {
  const auto pick = [&](int n) { return static_cast<int>(rng.next_below(static_cast<std::uint64_t>(n))); };
  switch (pick(depth > 0 ? 12 : 7)) {
    case 0: return {{"type", "null"}};
    case 1: return {{"type", "boolean"}};
    case 2: {
      const int low = pick(400) - 200;
      return {{"type", "integer"}, {"minimum", low}, {"maximum", low + pick(300)}};
    }
    case 3: {
      const double low = pick(4000) / 16.0 - 100;
      return {{"type", "number"},
              {pick(2) ? "minimum" : "exclusiveMinimum", low},
              {pick(2) ? "maximum" : "exclusiveMaximum", low + (pick(900) + 1) / 8.0}};
    }
    case 4: {
      const int low = pick(4);
      return {{"type", "string"}, {"minLength", low}, {"maxLength", low + pick(5)}};
    }
    case 5: return {{"enum", json::array{"red", "gr\"een\n", 3, nullptr, -2.5, json::array{1, "é"}}}};
    case 6: return pick(2) ? json::value{{"type", "string"}} : json::value{{"const", "kind \\ \U0001F600"}};
    case 7: {
      const int low = pick(3);
      return {{"type", "array"}, {"items", random_schema(rng, depth - 1)}, {"minItems", low}, {"maxItems", low + pick(3)}};
    }
    case 8: return {{"anyOf", json::array{random_schema(rng, depth - 1), random_schema(rng, depth - 1)}}};
    case 9: return {{"$ref", "#/$defs/node"}};
    default: {
      json::object properties;
      json::array required;
      for (const char* name : {"name", "kind", "na", "", "q\"\n", "é"}) {
        if (pick(2)) continue;
        properties[name] = random_schema(rng, depth - 1);
        if (pick(2)) required.emplace_back(name);
      }
      json::object out{{"type", "object"}, {"properties", properties}, {"required", required}};
      if (const int more = pick(3); more < 2) out["additionalProperties"] = more == 0 ? json::value(false) : random_schema(rng, depth - 1);
      return out;
    }
  }
}

TEST(TokenGrammar, RandomWalksThroughTheMasksOfRandomSchemasValidate) {
  const auto vocabulary = test_vocabulary();
  std::size_t num_texts = 0, num_bytes = 0;
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    Rng rng(seed);
    json::object root = random_schema(rng, 3).get_object();
    root["$defs"] = {
        {"node",
         {{"type", "object"},
          {"properties", {{"v", {{"type", "integer"}}}, {"next", {{"anyOf", {{{"$ref", "#/$defs/node"}}, {{"type", "null"}}}}}}}},
          {"required", {"v"}}}}};
    const json::value schema = root;
    const auto automaton =
        test::make_automaton([&](AutomatonBuilder& builder, NodeId from) { return emit_json_schema(builder, from, schema, "schema"); }, {},
                             vocabulary->usable_bytes());
    // Every third rule is so short of memory that it forgets its states again and again.
    const TokenGrammar rule(automaton, vocabulary, seed % 3 == 0 ? 20'000 : TokenGrammar::kMaxBytes);
    Walker walker(rule, *vocabulary, seed);
    for (int i = 0; i < 8; ++i) {
      const std::string text = walker.walk(40);
      ++num_texts;
      num_bytes += text.size();
      json::value value;
      ASSERT_NO_THROW(value = text::parse_json(text)) << text << " under " << json::serialize(schema);
      ASSERT_TRUE(is_valid(schema, value, schema)) << text << " under " << json::serialize(schema);
    }
  }
  EXPECT_GT(num_bytes, 10 * num_texts) << "the walks are too short to say much";
}

TEST(TokenGrammar, AnyJsonObjectParses) {
  const auto vocabulary = test_vocabulary();
  const auto automaton = test::make_automaton([](AutomatonBuilder& builder, NodeId from) { return JsonText(builder).emit_object(from); },
                                              {}, vocabulary->usable_bytes());
  const TokenGrammar rule(automaton, vocabulary);
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const std::string text = Walker(rule, *vocabulary, seed).walk(60);
    json::value value;
    ASSERT_NO_THROW(value = text::parse_json(text)) << text;
    EXPECT_TRUE(value.is_object());
  }
}

TEST(TokenGrammar, AMaskIsWhatTheAutomatonSaysOfEachToken) {
  const auto vocabulary = test_vocabulary();
  const auto automaton =
      test::schema_automaton(R"({"type":"object","properties":{"name":{"type":"string","maxLength":5},"kind":{"enum":["red",12,-1.5]}}})");
  const TokenGrammar rule(automaton, vocabulary);
  Matcher matcher(automaton);
  std::vector<std::uint64_t> words((static_cast<std::size_t>(vocabulary->size()) + 63) / 64);
  const std::string text = R"({"name": "aé", "kind":12})";
  std::vector<std::int32_t> output;
  wire::TokenRuleCursor cursor;
  Matcher::StateId state = matcher.start();
  for (std::size_t i = 0; i <= text.size(); ++i) {
    EXPECT_EQ(rule.allow(output, cursor, words), matcher.is_complete(state));
    for (std::int32_t id = 0; id < vocabulary->size(); ++id) {
      Matcher::StateId at = vocabulary->spelling(id).empty() ? Matcher::kDead : state;
      for (const char c : vocabulary->spelling(id))
        if (at != Matcher::kDead) at = matcher.step(at, static_cast<std::uint8_t>(c));
      EXPECT_EQ(words[static_cast<std::size_t>(id) / 64] >> (id % 64) & 1, at != Matcher::kDead ? 1u : 0u)
          << vocabulary->spelling(id) << " after " << text.substr(0, i);
    }
    if (i == text.size()) break;
    output.push_back(static_cast<std::uint8_t>(text[i]));
    state = matcher.step(state, static_cast<std::uint8_t>(text[i]));
  }
  // A token that the rule forbids leads nowhere, and a cursor of another stream is no harm.
  output = {'{', '}', '}'};
  EXPECT_FALSE(rule.allow(output, cursor, words));
  EXPECT_TRUE(std::all_of(words.begin(), words.end(), [](std::uint64_t word) { return word == 0; }));
  output.pop_back();
  EXPECT_TRUE(rule.allow(output, cursor, words));
}

TEST(TokenGrammar, AWalkThatCostsTooMuchStillHasAWayOn) {
  // The states of this pattern double with each byte: the walk must give up, and the text must still end.
  std::vector<std::string> spellings{"a", "b"};
  for (int i = 0; i < 1 << 15; ++i) {
    std::string text;
    for (int bit = 0; bit < 16; ++bit) text.push_back(i >> bit & 1 ? 'a' : 'b');
    spellings.push_back(text);
  }
  const auto vocabulary = std::make_shared<const Vocabulary>(std::move(spellings));
  const TokenGrammar rule(test::regex_automaton("(a|b)*a((a|b)(a|b)){400}"), vocabulary);
  std::vector<std::int32_t> output;
  wire::TokenRuleCursor cursor;
  std::vector<std::uint64_t> words((static_cast<std::size_t>(vocabulary->size()) + 63) / 64);
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(rule.allow(output, cursor, words));
    EXPECT_EQ(words[0] & 3, 3u);
    output.push_back(i % 2);
  }
}

TEST(RuleCache, SharesRulesAndReadsMarkersAsTokens) {
  const auto folder = test_source_dir() / "tests/fixtures/text";
  json::value file = text::parse_json(read_file(folder / "qwen2.tokenizer.json"));
  json::array& added = file.at("added_tokens").get_array();
  json::object marker = added.back().get_object();
  marker["id"] = marker.at("id").get_int64() + 1;
  marker["content"] = "</think>";
  marker["special"] = false;
  added.push_back(marker);
  const auto tokenizer = std::make_shared<const text::Tokenizer>(text::Tokenizer::parse(json::serialize(file)));
  RuleCache cache(tokenizer, 2);
  const auto emit = [](AutomatonBuilder& builder, NodeId from, const Vocabulary& vocabulary) {
    return builder.emit_literal(builder.emit_until(from, vocabulary.marker("</think>")), "ok");
  };
  const auto rule = cache.get("a", emit);
  EXPECT_EQ(cache.get("a", emit), rule);
  cache.get("b", emit);
  EXPECT_EQ(cache.get("a", emit), rule);
  cache.get("c", emit);
  EXPECT_EQ(cache.get("a", emit), rule) << "the least recently used goes first";

  const std::int32_t close = *tokenizer->id_of("</think>");
  std::vector<std::uint64_t> words((static_cast<std::size_t>(tokenizer->vocab_size()) + 63) / 64);
  const auto is_open = [&](std::int32_t id) { return (words[static_cast<std::size_t>(id) / 64] >> (id % 64) & 1) != 0; };
  wire::TokenRuleCursor cursor;
  // The text "</think>" in pieces is not the marker.
  std::vector<std::int32_t> output;
  for (const char c : std::string_view("</think>ok")) output.push_back(*tokenizer->id_of(std::string_view(&c, 1)));
  EXPECT_FALSE(rule->allow(output, cursor, words));
  EXPECT_TRUE(is_open(close));
  output.push_back(close);
  EXPECT_FALSE(rule->allow(output, cursor, words));
  EXPECT_FALSE(is_open(close));
  EXPECT_FALSE(is_open(*tokenizer->id_of("!")));
  const auto ok = tokenizer->encode("ok");
  EXPECT_TRUE(is_open(ok[0]));
  output.insert(output.end(), ok.begin(), ok.end());
  EXPECT_TRUE(rule->allow(output, cursor, words));
}

TEST(TokenGrammar, AnswersFromItsThreadsAreTheSame) {
  const auto vocabulary = test_vocabulary();
  const auto automaton = test::schema_automaton(
      R"({"type":"object","properties":{"name":{"type":"string"},"kind":{"enum":["red","abc",12]}},"required":["name","kind"]})");
  const TokenGrammar direct(automaton, vocabulary);
  // Little memory, so that states are forgotten between questions.
  const auto rule = std::make_shared<const TokenGrammar>(automaton, vocabulary, 20'000, std::make_shared<RuleWorker>(2));
  const AskedRule asked(rule);
  for (std::uint64_t seed = 0; seed < 20; ++seed)
    EXPECT_EQ(Walker(asked, *vocabulary, seed).walk(40), Walker(direct, *vocabulary, seed).walk(40)) << seed;
  EXPECT_GT(asked.num_waits, 0);
  EXPECT_EQ(rule->failure(), "");
}

TEST(TokenGrammar, APatternThatRemembersTooMuchGivesUp) {
  std::vector<std::string> spellings;
  for (int byte = 0; byte < 256; ++byte) spellings.emplace_back(1, static_cast<char>(byte));
  for (std::size_t length = 2; length <= 7; ++length)
    for (std::size_t bits = 0; bits < std::size_t{1} << length; ++bits) {
      std::string text;
      for (std::size_t i = 0; i < length; ++i) text.push_back(bits >> i & 1 ? 'a' : 'b');
      spellings.push_back(text);
    }
  const auto vocabulary = std::make_shared<const Vocabulary>(spellings);
  const auto rule = std::make_shared<const TokenGrammar>(test::regex_automaton("(a|b)*a(a|b){1000}"), vocabulary, TokenGrammar::kMaxBytes,
                                                         std::make_shared<RuleWorker>(1));
  const AskedRule asked(rule);
  std::vector<std::int32_t> output;
  wire::TokenRuleCursor cursor;
  std::vector<std::uint64_t> words((static_cast<std::size_t>(vocabulary->size()) + 63) / 64);
  Rng rng(5);
  for (int i = 0; i < 2000 && rule->failure().empty(); ++i) {
    asked.allow(output, cursor, words);
    output.push_back(static_cast<std::int32_t>(256 + rng.next_below(spellings.size() - 256)));
  }
  EXPECT_NE(rule->failure().find("too much work"), std::string::npos) << "after " << output.size() << " tokens";
}

TEST(TokenGrammar, TokensOfSingleBytesSpellNoMarker) {
  const text::Tokenizer tokenizer = text::Tokenizer::parse(read_file(test_source_dir() / "tests/fixtures/text/harmony.tokenizer.json"));
  const auto vocabulary = std::make_shared<const Vocabulary>(tokenizer);
  const std::int32_t marker = tokenizer.id_of("<|channel|>").value();
  EXPECT_EQ(vocabulary->marker("<|channel|>"), vocabulary->spelling(marker));
  for (std::int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    if (id == marker || vocabulary->spelling(id).empty()) continue;
    EXPECT_FALSE(vocabulary->marker("<|channel|>").starts_with(vocabulary->spelling(id))) << id;
  }
}

// Tokens of one byte each stand for that byte, and a word for its space too.
TEST(TokenGrammar, VocabulariesMadeFromSentencePieceWriteWhatIsAllowed) {
  const text::Tokenizer tokenizer =
      text::Tokenizer::parse(read_file(test_source_dir() / "tests/fixtures/text/characters/llama2.tokenizer.json"));
  const Vocabulary vocabulary(tokenizer);
  EXPECT_EQ(vocabulary.spelling(tokenizer.id_of("<0xE4>").value()), "\xE4");
  EXPECT_EQ(vocabulary.spelling(tokenizer.id_of("\u2581the").value()), " the");
  const auto automaton = test::regex_automaton("(\u9f98|\u00f6| the){4}\\n");
  Matcher matcher(automaton);
  std::vector<std::int32_t> ids = tokenizer.encode("the\u9f98\u00f6 the\n");
  Matcher::StateId state = matcher.start();
  for (const std::int32_t id : ids)
    for (const char c : vocabulary.spelling(id)) state = matcher.step(state, static_cast<std::uint8_t>(c));
  EXPECT_TRUE(matcher.is_complete(state));
}

}  // namespace
}  // namespace prl::grammar
