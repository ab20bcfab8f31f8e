#include <gtest/gtest.h>

#include <regex>
#include <vector>

#include "base/error.hpp"
#include "grammar/grammar_text.hpp"
#include "grammar/test_support.hpp"

namespace prl::grammar {
namespace {

using test::matches;
using test::regex_automaton;
using test::schema_automaton;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "no error";
}

TEST(Regex, AgreesWithTheStandardLibrary) {
  const std::vector<std::string> patterns = {
      "abc",   "a|b|",  "(ab)*c", "a{2,3}b?", "[a-c]+[^a-c]", "\\d{2}-\\d{2}", "(a|b)*abb", "x.y",       "(?:a|ab)c",   "[\\w.]+@\\w",
      "a{0}b", "a{2,}", "(a*)*b", "\\s\\S",   "[-a]b",        "a?a?a?aaa",     "[\\]a]",    "\\.\\*\\+", "((a|b)|c)d*", "a{1,2}{",
  };
  const std::vector<std::string> texts = {"",     "a",   "b",    "abc",  "aab", "aaab",  "ababc", "c",   "12-34", "1-34",   "abb",
                                          "babb", "xzy", "x\ny", "ac",   "abc", "a.b@c", "bb",    "aa",  "aaaa",  "aaaaaa", " x",
                                          "-b",   "]",   ".*+",  "cddd", "d",   "ad",    "acd",   "aac", "aa{",   "a{",     "aaa"};
  for (const std::string& pattern : patterns) {
    const auto automaton = regex_automaton(pattern);
    // The standard library reads a lone brace as an error.
    std::regex reference(pattern == "a{1,2}{" ? "a{1,2}\\{" : pattern);
    for (const std::string& text : texts)
      EXPECT_EQ(matches(automaton, text), std::regex_match(text, reference)) << pattern << " on " << text;
  }
}

TEST(Regex, ReadsCharactersNotBytes) {
  const auto any = regex_automaton("..");
  EXPECT_TRUE(matches(any, "é🎉"));
  EXPECT_FALSE(matches(any, "é"));
  EXPECT_FALSE(matches(any, "a\xC3"));
  EXPECT_FALSE(matches(any, "\xED\xA0\x80x")) << "a surrogate";
  EXPECT_FALSE(matches(any, "\xC0\x80x")) << "an overlong form";
  const auto range = regex_automaton("[à-ÿ\\u{1F600}-\\u{1F64F}]");
  EXPECT_TRUE(matches(range, "é"));
  EXPECT_TRUE(matches(range, "😀"));
  EXPECT_FALSE(matches(range, "ß"));
  EXPECT_TRUE(matches(regex_automaton("[^a]"), "☃"));
}

TEST(Regex, SaysWhatItCannotDo) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"a(?=b)", "lookaround"},
      {"(a)\\1", "backreferences"},
      {"\\bword", "word boundaries"},
      {"\\p{L}", "Unicode properties"},
      {"(?i)a", "kind of group"},
      {"a++", "possessive"},
      {"a**", "follows a quantifier"},
      {"(a", "not closed"},
      {"a)", "unmatched"},
      {"[a", "not closed"},
      {"*a", "nothing to repeat"},
      {"a{3,2}", "wrong order"},
      {"[z-a]", "wrong order"},
      {"a{99999}", "repeat count"},
      {"\\", "ends too early"},
      {"a^b", "^ and $"},
      {"\\q", "escape"},
      {"\xFF", "UTF-8"},
  };
  for (const auto& [pattern, words] : cases) {
    const std::string error = error_of([&] { regex_automaton(pattern); });
    EXPECT_NE(error.find(words), std::string::npos) << pattern << ": " << error;
  }
  EXPECT_NE(error_of([] { regex_automaton("((a{1000}){1000}){1000}"); }).find("more than"), std::string::npos);
  EXPECT_NE(error_of([] { regex_automaton(std::string(500, '(') + std::string(500, ')')); }).find("too deep"), std::string::npos);
}

TEST(Regex, DoesNotBlowUp) {
  // Backtracking takes exponential time here; a set of places does not.
  const auto automaton = regex_automaton("(a|a)*(a|a)*(a|a)*b");
  EXPECT_TRUE(matches(automaton, std::string(5000, 'a') + "b"));
  EXPECT_FALSE(matches(automaton, std::string(5000, 'a')));
}

TEST(Automaton, RefusesWhatHasNoText) {
  EXPECT_NE(error_of([] { schema_automaton("false"); }).find("no text"), std::string::npos);
  EXPECT_NE(error_of([] { schema_automaton(R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})"); }).find("no text"),
            std::string::npos);
  EXPECT_NE(error_of([] { schema_automaton(R"({"$ref":"#"})"); }).find("refers to itself"), std::string::npos);
  EXPECT_NE(error_of([] { schema_automaton(R"({"anyOf":[{"type":"null"},{"$ref":"#"}]})"); }).find("refers to itself"), std::string::npos);
  std::string deep = "1";
  deep = R"({"type":"null"})";
  for (int i = 0; i < 60; ++i) deep = R"({"type":"object","properties":{"a":)" + deep + R"(},"required":["a"]})";
  EXPECT_NE(error_of([&] { schema_automaton(deep, {.max_depth = 30}); }).find("nests deeper"), std::string::npos);
}

TEST(Automaton, NeedsAreTheLeastOnes) {
  std::string required;
  for (int i = 0; i < 200; ++i) required += fmt::format("{}\"p{}\"", i ? "," : "", i);
  for (const std::string& schema :
       {std::string(R"({"type":"array","items":{"type":"array","items":{"type":"integer"}}})"),
        R"({"type":"object","required":[)" + required + R"(],"additionalProperties":{"type":"array","items":{"type":"string"}}})",
        std::string(
            R"({"$ref":"#/$defs/t","$defs":{"t":{"type":"object","properties":{"l":{"$ref":"#/$defs/t"},"r":{"type":"null"}}}}})")}) {
    const auto automaton = schema_automaton(schema);
    // The smallest fixed point of the definition, by sweeps until nothing changes.
    std::vector<std::int32_t> needs(automaton->num_nodes(), Automaton::kNever);
    for (bool is_changed = true; is_changed;) {
      is_changed = false;
      for (NodeId node = 0; node < static_cast<NodeId>(needs.size()); ++node) {
        std::int32_t need = automaton->is_accept(node) ? 0 : Automaton::kNever;
        for (const Edge& edge : automaton->edges(node)) {
          std::int32_t way = needs[static_cast<std::size_t>(edge.to)];
          if (edge.kind == Edge::Kind::kCall) way = std::max(way, 1 + needs[static_cast<std::size_t>(automaton->rule_start(edge.rule))]);
          need = std::min(need, std::min(way, Automaton::kNever));
        }
        is_changed = is_changed || need != needs[static_cast<std::size_t>(node)];
        needs[static_cast<std::size_t>(node)] = need;
      }
    }
    for (NodeId node = 0; node < static_cast<NodeId>(needs.size()); ++node)
      ASSERT_EQ(automaton->node_need(node), needs[static_cast<std::size_t>(node)]) << schema << ", node " << node;
  }
}

TEST(Automaton, UntilStopsAtTheFirstEnd) {
  const auto automaton = test::make_automaton(
      [](AutomatonBuilder& builder, NodeId from) { return builder.emit_literal(builder.emit_until(from, "abab!"), "x"); });
  EXPECT_TRUE(matches(automaton, "abababab!x"));
  EXPECT_TRUE(matches(automaton, "abab!x"));
  EXPECT_TRUE(matches(automaton, "\xFF\n aabab!x"));
  EXPECT_FALSE(matches(automaton, "abab!abab!x"));
  EXPECT_FALSE(matches(automaton, "abab!"));
}

TEST(Automaton, BytesThatCannotBeSpeltAreLeftOut) {
  ByteSet bytes;
  for (const char c : std::string("ac1")) bytes.set(static_cast<std::uint8_t>(c));
  const auto emit = [](AutomatonBuilder& builder, NodeId from) {
    return emit_regex(builder, from, parse_regex("[a-c]1|b+|ab*1"), Spelling::kPlain, Anchoring::kFull);
  };
  const auto automaton = test::make_automaton(emit, {}, bytes);
  EXPECT_TRUE(matches(automaton, "c1"));
  EXPECT_TRUE(matches(automaton, "a1"));
  Matcher matcher(automaton);
  EXPECT_EQ(matcher.step(matcher.start(), 'b'), Matcher::kDead);
}

TEST(JsonText, AnyValueIsAnyJson) {
  const auto any = schema_automaton("true");
  for (const char* text :
       {"null", "true", "-0.5e+10", "0", "\"\"", "[]", "{}", R"({"a": [1, {"b": "\u00e9\ud83c\udf89\n"}],"c":null})", "[\n  1,\n  [ ]\n]"})
    EXPECT_TRUE(matches(any, text)) << text;
  for (const char* text : {"", "01", "+1", "1.", ".5", "nul", "'a'", "[1,]", "{\"a\"}", "{a:1}", "\"\n\"", R"("\ud83c")", R"("\udc00")",
                           R"("\x41")", "[1 2]", "1e999"})
    EXPECT_FALSE(matches(any, text)) << text;
  EXPECT_FALSE(matches(any, "\"\xC3\"")) << "broken UTF-8";
}

TEST(JsonText, DepthIsBoundedAndNeverADeadEnd) {
  Matcher matcher(schema_automaton("true", {.max_depth = 9}));
  Matcher::StateId state = matcher.start();
  int depth = 0;
  for (Matcher::StateId next; (next = matcher.step(state, '[')) != Matcher::kDead; state = next) ++depth;
  EXPECT_GT(depth, 1);
  EXPECT_LT(depth, 9);
  for (; depth > 0; --depth) state = matcher.step(state, ']');
  EXPECT_TRUE(matcher.is_complete(state));
}

TEST(JsonText, IntegersKeepTheirBounds) {
  for (const auto& [low, high] : std::vector<std::pair<int, int>>{
           {0, 0}, {3, 17}, {-5, 5}, {99, 1001}, {-120, -7}, {0, 255}, {7, 7}, {-1, 0}, {190, 210}, {1, 1000}}) {
    Matcher matcher(schema_automaton(fmt::format(R"({{"type":"integer","minimum":{},"maximum":{}}})", low, high)));
    for (int i = -1300; i <= 1300; ++i)
      EXPECT_EQ(matches(matcher, std::to_string(i)), low <= i && i <= high) << i << " in " << low << ".." << high;
    EXPECT_FALSE(matches(matcher, "-0"));
    EXPECT_FALSE(matches(matcher, "007"));
  }
}

TEST(JsonText, NumbersKeepTheirBounds) {
  struct Bounds {
    const char* schema;
    double low, high;
    bool is_low_open, is_high_open;
  };
  const std::vector<Bounds> cases = {
      {R"({"type":"number","minimum":0,"maximum":1})", 0, 1, false, false},
      {R"({"type":"number","exclusiveMinimum":0,"exclusiveMaximum":1})", 0, 1, true, true},
      {R"({"type":"number","minimum":0.25,"maximum":0.3})", 0.25, 0.3, false, false},
      {R"({"type":"number","minimum":-1.5,"exclusiveMaximum":12.75})", -1.5, 12.75, false, true},
      {R"({"type":"number","exclusiveMinimum":-0.125,"maximum":-0.003})", -0.125, -0.003, true, false},
      {R"({"minimum":99.5})", 99.5, 1e9, false, true},
      {R"({"type":"number","minimum":1e-15})", 1e-15, 1e9, false, true},
      {R"({"type":"number","exclusiveMaximum":-1e-15})", -1e9, -1e-15, true, true},
      {R"({"type":"number","minimum":1e-9,"maximum":0.3})", 1e-9, 0.3, false, false},
  };
  Rng rng(5);
  for (const Bounds& c : cases) {
    Matcher matcher(schema_automaton(c.schema));
    std::vector<std::string> texts = {"0",     "0.0",       "1",    "1.0",    "1.000000",  "0.25",   "0.3",  "0.30",
                                      "12.75", "12.749999", "-1.5", "-0.125", "-0.124999", "-0.003", "99.5", "99.499999"};
    for (int i = 0; i < 3000; ++i) {
      const double scale = i % 3 == 0 ? 1.0 : i % 3 == 1 ? 20.0 : 300.0;
      const int digits = static_cast<int>(rng.next_below(6)) + 1;
      texts.push_back(fmt::format("{:.{}f}", (rng.next_double() * 2 - 1) * scale, digits));
    }
    for (const std::string& text : texts) {
      if (text.starts_with("-0.") && text.find_first_not_of("-0.") == std::string::npos) continue;  // minus zero is not written
      const double value = std::stod(text);
      const bool is_wanted = (c.is_low_open ? value > c.low : value >= c.low) && (c.is_high_open ? value < c.high : value <= c.high);
      EXPECT_EQ(matches(matcher, text), is_wanted) << text << " under " << c.schema;
    }
  }
}

TEST(JsonText, BoundsNearZeroAndBeyondDoublesAreKept) {
  const auto fits = [](const char* schema, const char* text) { return matches(schema_automaton(schema), text); };
  EXPECT_FALSE(fits(R"({"type":"number","minimum":1e-15})", "0"));
  EXPECT_FALSE(fits(R"({"type":"number","minimum":1e-15})", "0.0"));
  EXPECT_TRUE(fits(R"({"type":"number","minimum":1e-15})", "0.000001"));
  EXPECT_FALSE(fits(R"({"type":"number","maximum":-1e-15})", "0"));
  EXPECT_TRUE(fits(R"({"type":"number","exclusiveMinimum":0,"maximum":1e-9})", "0.00000000001"));
  EXPECT_FALSE(fits(R"({"type":"number","exclusiveMinimum":0,"maximum":1e-9})", "0.00000001"));
  EXPECT_FALSE(fits(R"({"type":"integer","minimum":1e-15})", "0"));
  EXPECT_TRUE(fits(R"({"type":"integer","minimum":1e-15})", "1"));
  EXPECT_FALSE(fits(R"({"type":"integer","minimum":9007199254740993})", "9007199254740992"));
  EXPECT_TRUE(fits(R"({"type":"integer","minimum":9007199254740993})", "9007199254740993"));
  EXPECT_FALSE(fits(R"({"type":"integer","exclusiveMaximum":9007199254740993})", "9007199254740993"));
  EXPECT_TRUE(fits(R"({"type":"number","minimum":0.1,"maximum":0.1})", "0.1"));
  EXPECT_FALSE(fits(R"({"type":"number","minimum":0.30000000000000004,"maximum":0.5})", "0.3"));
  EXPECT_NE(error_of([] { schema_automaton(R"({"type":"number","minimum":1e-20,"maximum":2e-20})"); }).find("no number is within"),
            std::string::npos);
}

TEST(JsonSchema, LargeNumbersAreWrittenAsTheSchemaHasThem) {
  const auto fits = [](const char* schema, const char* text) {
    const boost::json::value value = text::parse_json(schema, 100, text::LargeNumbers::kKeepText);
    return matches(
        test::make_automaton([&](AutomatonBuilder& builder, NodeId from) { return emit_json_schema(builder, from, value, "schema"); }),
        text);
  };
  EXPECT_TRUE(fits(R"({"const":123456789012345678901234567890})", "123456789012345678901234567890"));
  EXPECT_FALSE(fits(R"({"const":123456789012345678901234567890})", "1.2345678901234568e+29"));
  EXPECT_TRUE(fits(R"({"type":"integer","enum":["x",18446744073709551616,1.5]})", "18446744073709551616"));
  EXPECT_FALSE(fits(R"({"type":"string","enum":["x",18446744073709551616]})", "18446744073709551616"));
  EXPECT_TRUE(fits(R"({"enum":[1e400]})", "1e400"));
  // Bounds count as doubles, for which they stand.
  EXPECT_TRUE(fits(R"({"type":"integer","maximum":99999999999999999999})", "7"));
  EXPECT_TRUE(fits(R"({"allOf":[{"type":"integer","minimum":-99999999999999999999},{"minimum":5}]})", "5"));
  EXPECT_FALSE(fits(R"({"allOf":[{"type":"integer","minimum":-99999999999999999999},{"minimum":5}]})", "4"));
  EXPECT_NE(error_of([&] { fits(R"({"type":"object","required":[18446744073709551616]})", "{}"); }).find("found [18446744073709551616]"),
            std::string::npos);
  EXPECT_NE(error_of([&] { fits(R"({"pattern":18446744073709551616})", "{}"); }).find("found 18446744073709551616"), std::string::npos);
}

TEST(JsonSchema, TextsThatMatchAndTextsThatDoNot) {
  struct Case {
    const char* schema;
    std::vector<const char*> good, bad;
  };
  const std::vector<Case> cases = {
      {R"({"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"}},"required":["a"]})",
       {R"({"a":1})", R"({"a": 1, "b": "x"})", "{\n  \"a\": 1\n}"},
       {"{}", R"({"b":"x"})", R"({"a":1.5})", R"({"a":1,"c":2})", R"({"a":1,})", R"({"b":"x","a":1})"}},
      {R"({"type":"object","properties":{"a":{},"b":{}}})",
       {"{}", R"({"b":1})", R"({"a":1,"b":[]})", R"({"a":{}})"},
       {R"({"c":1})", "[]", "{,}"}},
      {R"({"type":"object","properties":{"ab":{"type":"null"},"a":{"type":"null"}},"additionalProperties":{"type":"integer"}})",
       {"{}", R"({"ab":null})", R"({"x":1})", R"({"ab":null,"a":null,"abc":1,"b":2})", R"({"":3})", R"({"aé":3})", R"({"ac\n":3})"},
       {R"({"a":1})", R"({"ab":1})", R"({"x":null})", R"({"x":1,"a":null})", R"({"\u0061":1})", R"({"a\u0062":1})"}},
      {R"({"type":"object","additionalProperties":{"type":"boolean"}})", {"{}", R"({"a":true,"b":false})"}, {R"({"a":1})"}},
      {R"({"type":"object"})", {"{}", R"({"a":{"b":[1]}})"}, {"[]"}},
      {R"({"type":"object","properties":{"q\"\\é":{"type":"null"}},"required":["q\"\\é"]})", {R"({"q\"\\é":null})"}, {"{}"}},
      {R"({"required":["z"],"properties":{"a":{"type":"null"}}})", {R"({"z":[1]})", R"({"a":null,"z":"x"})"}, {R"({"a":null})"}},
      {R"({"type":"array","items":{"type":"integer"},"minItems":1,"maxItems":3})", {"[1]", "[1, 2,3]"}, {"[]", "[1,2,3,4]", "[\"a\"]"}},
      {R"({"type":"array","items":{"type":"null"},"minItems":2})", {"[null,null]", "[null,null,null,null]"}, {"[null]", "[]"}},
      {R"({"prefixItems":[{"type":"integer"},{"type":"string"}]})", {"[]", "[1]", "[1,\"a\"]"}, {"[\"a\"]", "[1,\"a\",2]"}},
      {R"({"prefixItems":[{"type":"integer"}],"items":{"type":"null"},"minItems":1})", {"[1]", "[1,null,null]"}, {"[]", "[1,2]"}},
      {R"({"type":"array"})", {"[]", "[1,[\"a\"]]"}, {"{}"}},
      {R"({"enum":["red","gr\"een",3,null,{"a":[1]}]})", {"\"red\"", R"("gr\"een")", "3", "null", R"({"a": [1]})"}, {"\"blue\"", "4"}},
      {R"({"type":"string","enum":["a",3]})", {"\"a\""}, {"3"}},
      {R"({"const":"x"})", {"\"x\""}, {"\"y\""}},
      {R"({"anyOf":[{"type":"integer"},{"type":"null"}]})", {"1", "null"}, {"\"a\""}},
      {R"({"type":["string","null"],"maxLength":2})",
       {"null", "\"\"", "\"ab\"", "\"é🎉\"", R"("\n\u00e9")", R"("\ud83c\udf89x")"},
       {"\"abc\"", "1"}},
      {R"({"type":"string","minLength":2})", {"\"ab\"", "\"abcdef\""}, {"\"a\"", "\"\""}},
      {R"({"type":"string","pattern":"^[a-z]+\\.\"?$"})", {"\"abc.\"", R"("a.\"")"}, {"\"\"", "\"abc\"", R"("a."")"}},
      {R"({"type":"string","pattern":"b"})", {"\"abc\"", "\"b\"", R"("\\b\n")"}, {"\"ac\""}},
      {R"({"type":"string","pattern":"^a|b$"})", {"\"ax\"", "\"xb\""}, {"\"xa\"", "\"bx\""}},
      {R"({"type":"string","format":"date"})", {"\"2024-02-28\"", "\"1999-12-31\""}, {"\"2024-02-30\"", "\"2024-13-01\"", "\"x\""}},
      {R"({"type":"string","format":"uuid"})", {"\"123e4567-e89b-12d3-a456-426614174000\""}, {"\"123\""}},
      {R"({"type":"string","format":"password"})", {"\"anything\""}, {"1"}},
      {R"({"$ref":"#/$defs/n","$defs":{"n":{"type":"object","properties":{"v":{"type":"integer"},"next":{"anyOf":[{"$ref":"#/$defs/n"},{"type":"null"}]}},"required":["v"]}}})",
       {R"({"v":1})", R"({"v":1,"next":{"v":2,"next":null}})"},
       {"{}", R"({"v":1,"next":3})"}},
      {R"({"oneOf":[{"type":"object","properties":{"k":{"const":"a"},"x":{"type":"integer"}},"required":["k","x"]},{"type":"object","properties":{"k":{"const":"b"}},"required":["k"]}]})",
       {R"({"k":"a","x":1})", R"({"k":"b"})"},
       {R"({"k":"a"})", R"({"k":"c"})"}},
      {R"({"allOf":[{"type":"null"}],"description":"d","default":null})", {"null"}, {"1"}},
      {R"({"allOf":[{"type":"integer","minimum":3},{"type":"number","minimum":1,"maximum":5}]})", {"3", "5"}, {"2", "6", "3.5"}},
      {R"({"allOf":[{"$ref":"#/$defs/base"},{"properties":{"b":{"type":"null"},"a":{"minimum":0}},"required":["b"]}],"$defs":{"base":{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}}})",
       {R"({"a":1,"b":null})"},
       {R"({"a":1})", R"({"b":null})", R"({"a":-1,"b":null})", R"({"a":1.5,"b":null})"}},
      {R"({"type":"string","allOf":[{"minLength":2},{"maxLength":3}]})", {"\"ab\"", "\"abc\""}, {"\"a\"", "\"abcd\"", "1"}},
      {R"({"allOf":[{"enum":["a","b"]},{"enum":["b","c"]}]})", {"\"b\""}, {"\"a\"", "\"c\""}},
      {R"({"$ref":"#/$defs/n","$defs":{"n":{"allOf":[{"type":"object","properties":{"v":{"type":"integer"}},"required":["v"]},{"properties":{"next":{"$ref":"#/$defs/n"}}}]}}})",
       {R"({"v":1})", R"({"v":1,"next":{"v":2,"next":{"v":3}}})"},
       {"{}", R"({"v":1,"next":{}})"}},
      {R"({"type":"object","properties":{"a":{"type":"null"},"b":{"type":"null"},"c":{"type":"null"}},"minProperties":1,"maxProperties":2})",
       {R"({"a":null})", R"({"c":null})", R"({"a":null,"c":null})"},
       {"{}", R"({"a":null,"b":null,"c":null})"}},
      {R"({"type":"object","minProperties":1,"maxProperties":2})", {R"({"x":1})", R"({"x":1,"y":[2]})"}, {"{}", R"({"x":1,"y":2,"z":3})"}},
      {R"({"properties":{"a":{"type":"null"}},"additionalProperties":{"type":"integer"},"minProperties":2})",
       {R"({"a":null,"b":1})", R"({"a":null,"b":1,"b":2})"},
       {R"({"b":1,"b":2})", R"({"a":null})", "{}"}},
      {R"({"patternProperties":{"^n_[a-z]$":{"type":"integer"}},"properties":{"id":{"type":"null"}}})",
       {"{}", R"({"id":null,"n_a":1,"n_b":2})", R"({"n_z":0})"},
       {R"({"n_a":"x"})", R"({"m":1})", R"({"n_ab":1})"}},
      {R"({"type":"object","propertyNames":{"enum":["a","b"]},"additionalProperties":{"type":"integer"}})",
       {"{}", R"({"a":1,"b":2})"},
       {R"({"c":1})", R"({"a":null})"}},
      {R"({"type":"object","propertyNames":{"pattern":"^[a-z]{2}$"}})", {R"({"ab":[1]})"}, {R"({"abc":1})"}},
      {R"({"properties":{"a":{"type":"null"},"b":{"type":"null"},"c":{"type":"null"}},"dependentRequired":{"a":["c"],"c":["b"]}})",
       {"{}", R"({"b":null})", R"({"b":null,"c":null})", R"({"a":null,"b":null,"c":null})"},
       {R"({"a":null})", R"({"c":null})", R"({"a":null,"c":null})", R"({"a":null,"b":null})"}},
      {R"({"type":"array","items":{"enum":["a","b",null]},"uniqueItems":true,"minItems":1})",
       {"[\"a\"]", "[\"b\",\"a\"]", "[null, \"a\",\"b\"]"},
       {"[]", "[\"a\",\"a\"]", "[\"c\"]", "[null,\"a\",null]"}},
      {R"({"type":"array","items":{"type":"boolean"},"uniqueItems":true,"maxItems":1})", {"[]", "[true]"}, {"[true,false]"}},
      {R"({"type":"array","uniqueItems":true,"maxItems":1})", {"[]", "[[1]]"}, {"[1,2]"}},
      {R"({"type":"array","contains":{"type":"null"},"minContains":2,"maxItems":4})",
       {"[null,null]", "[1,null,\"x\",null]", "[null,null,null]"},
       {"[]", "[null]", "[1,null,2,3]", "[null,null,1,2,3]"}},
      {R"({"type":"array","contains":{"const":7}})", {"[7]", "[1,7]", "[7,1,2]"}, {"[]", "[1]"}},
      {R"({"type":"integer","multipleOf":7,"minimum":-20,"maximum":100})",
       {"-14", "-7", "0", "7", "98"},
       {"-21", "1", "99", "105", "-0", "07"}},
      {R"({"multipleOf":250})", {"0", "250", "-1000", "123456789012345750"}, {"1", "251", "25", "250.0"}},
      {R"({"multipleOf":86400})", {"0", "86400", "-172800", "86400000000"}, {"1", "8640", "86401", "00", "864000000000001"}},
      {R"({"multipleOf":1000000})", {"0", "1000000", "-999999999999000000"}, {"1", "100000", "1000001", "1000000.0"}},
      {R"({"multipleOf":1000000000000000})", {"0", "1000000000000000", "-999000000000000000"}, {"100000000000000", "1000000000000001"}},
      {R"({"multipleOf":1048576})", {"0", "1048576", "-2097152"}, {"524288", "1048577"}},
      {R"({"multipleOf":65536})", {"0", "65536", "-131072", "4294967296"}, {"65535", "32768", "655360000001"}},
      {R"({"type":"integer","multipleOf":1001})", {"0", "1001", "-2002", "123123"}, {"1", "1002", "123124"}},
      {R"({"multipleOf":99991,"minimum":-99991,"maximum":999999})", {"0", "99991", "-99991", "999910"}, {"99990", "-199982", "1099901"}},
      {R"({"type":"number","multipleOf":12.345})", {"0", "12.345", "-24.690", "-24.69", "12345"}, {"12.34", "12.346", "24.6"}},
      {R"({"type":"number","multipleOf":0.01})",
       {"0", "1", "-3", "0.5", "0.50", "-12.34", "9999999999999.99"},
       {"0.005", "1.234", "1e2", "1.", "-0", "-0.0", "00.5", "99999999999999.99"}},
      {R"({"type":"integer","multipleOf":0.5})", {"3", "-1"}, {"0.5", "1.0"}},
      {R"({"type":"integer","multipleOf":1.5})", {"3", "-6", "0"}, {"1", "4", "1.5"}},
      {R"({"type":["string","null","integer"],"not":{"type":["null","integer"]}})", {"\"\"", "\"a\""}, {"null", "1"}},
      {R"({"enum":["a","b",1],"not":{"enum":["a",1.0]}})", {"\"b\""}, {"\"a\"", "1"}},
      {R"({"type":["string","boolean"],"not":{"enum":["no",false]}})",
       {"\"\"", "\"n\"", "\"nope\"", "true"},
       {"\"no\"", "false", R"("\u006eo")"}},
      {R"({"type":"integer","not":false})", {"1"}, {"\"a\""}},
      {R"({"type":"object","properties":{"k":{"enum":["a","b"]},"x":{"type":"integer"}},"required":["k"],"if":{"properties":{"k":{"const":"a"}}},"then":{"required":["x"]},"else":{"properties":{"y":{"type":"null"}}}})",
       {R"({"k":"a","x":1})", R"({"k":"b"})", R"({"k":"b","x":2,"y":null})"},
       {R"({"k":"a"})", R"({"k":"a","x":1,"y":null})", R"({"k":"c"})", "{}"}},
      {R"({"type":"object","properties":{"k":{"type":"string"},"x":{"type":"null"}},"if":{"properties":{"k":{"enum":["a"]}},"required":["k"]},"then":{"required":["x"]}})",
       {"{}", R"({"k":"b"})", R"({"x":null})", R"({"k":"a","x":null})"},
       {R"({"k":"a"})", R"({"k":1})"}},
      {R"({"properties":{"no":false,"yes":true}})", {"{}", R"({"yes":1})"}, {R"({"no":1})"}},
  };
  for (const Case& c : cases) {
    const auto automaton = schema_automaton(c.schema);
    for (const char* text : c.good) EXPECT_TRUE(matches(automaton, text)) << text << " under " << c.schema;
    for (const char* text : c.bad) EXPECT_FALSE(matches(automaton, text)) << text << " under " << c.schema;
  }
}

TEST(JsonSchema, MultiplesOfFractionsAreDecimal) {
  struct Case {
    const char* divisor;
    int units, low, high;  // in hundredths; bounds included
  };
  for (const Case& c : std::vector<Case>{{"0.01", 1, -250, 250},
                                         {"0.25", 25, -130, 275},
                                         {"0.5", 50, 1, 99},
                                         {"2.5", 250, -251, 1000},
                                         {"1.25", 125, 125, 1100},
                                         {"0.07", 7, -7, 700},
                                         {"0.1", 10, -305, -95},
                                         {"3", 300, -300, 900}}) {
    const std::string schema =
        fmt::format(R"({{"type":"number","multipleOf":{},"minimum":{:.2f},"maximum":{:.2f}}})", c.divisor, c.low / 100.0, c.high / 100.0);
    Matcher matcher(test::schema_automaton(schema));
    const bool is_whole = c.units % 100 == 0;
    for (int value = -1200; value <= 1200; ++value) {
      const bool is_good = value % c.units == 0 && value >= c.low && value <= c.high;
      const std::string sign = value < 0 ? "-" : "";
      const std::string whole = fmt::format("{}{}", sign, std::abs(value) / 100);
      const std::string both = fmt::format("{}.{:02}", whole, std::abs(value) % 100);
      const bool has_two = c.units % 10 != 0;
      EXPECT_EQ(matches(matcher, both), is_good && has_two) << both << " under " << schema;
      if (value % 10 == 0) {
        EXPECT_EQ(matches(matcher, both.substr(0, both.size() - 1)), is_good && !is_whole) << both << " under " << schema;
      }
      if (value % 100 == 0) {
        EXPECT_EQ(matches(matcher, whole), is_good) << whole << " under " << schema;
      }
    }
  }
}

TEST(GrammarText, GbnfAndLarkGiveTheTextsTheyDescribe) {
  struct Case {
    const char* source;
    std::vector<const char*> good, bad;
  };
  const std::vector<Case> cases = {
      {"# an expression\nroot ::= expr\nexpr ::= term ([-+] term)*\nterm ::= num | \"(\" expr \")\"\nnum ::= [0-9]+ (\".\" [0-9]{1,2})?",
       {"1", "1+2-33", "(1+2)-(3)", "((4.25))"},
       {"", "1+", "(1", "1.234", "a"}},
      {"root ::= (\n  \"a\" |\n  \"b\"\n)\n  | \"\\x63\\n\" [^a-z\\]] .?", {"a", "b", "c\nX", "c\n1é"}, {"c\nx", "c\n]", "ab"}},
      {"root ::= item{2,} \"!\"{,2}\nitem ::= \"x\" | \"y\" item", {"xx", "xyx", "xxx!!"}, {"x", "xx!!!", "yx"}},
      {"start: greeting NAME \"!\"?\ngreeting: \"hello\"i | \"hi\" -> short\nNAME: /[A-Z][a-z]+/\n%import common.WS\n%ignore WS\n",
       {"hi Ann", "HELLO Bob !", "hiAnn", " hello\n\tAnn! "},
       {"hi ann", "hey Ann", "hi A nn"}},
      {"?start: value\n?value: object | array | STRING | SIGNED_NUMBER -> number\n     | \"true\" | \"null\"\narray: \"[\" [value (\",\" "
       "value)*] \"]\"\n"
       "object: \"{\" [pair (\",\" pair)*] \"}\"\npair: STRING \":\" value\n%import common.ESCAPED_STRING -> STRING\n"
       "%import common.SIGNED_NUMBER\n%import common.WS\n%ignore WS",
       {"[1, -2.5e3]", R"({"a": [null, {"b" : "x\"y"}]})", "true"},
       {"[1,]", "{1:2}", "tru"}},
      {"start: A~2..3 B~2\nA: \"a\"..\"c\"\nB: \"z\"", {"abzz", "abczz"}, {"azz", "abcazz", "abz"}},
  };
  for (const Case& c : cases) {
    const auto automaton =
        test::make_automaton([&](AutomatonBuilder& builder, NodeId from) { return emit_grammar(builder, from, c.source); });
    for (const char* text : c.good) EXPECT_TRUE(matches(automaton, text)) << text << " under " << c.source;
    for (const char* text : c.bad) EXPECT_FALSE(matches(automaton, text)) << text << " under " << c.source;
  }
  for (const auto& [source, words] :
       std::vector<std::pair<const char*, const char*>>{{"root ::= \"a", "line 1: a literal is not closed"},
                                                        {"root ::= a\nb ::= \"x\"", "the name a is used and not defined"},
                                                        {"top ::= \"a\"", "there is no rule root"},
                                                        {"root ::= root \"x\" | \"y\"", "refers to itself"},
                                                        {"root ::= \"x\"\nroot ::= \"y\"", "defined twice"},
                                                        {"root ::= [a", "a class is not closed"},
                                                        {"root ::= (\"a\"", "a group is not closed"},
                                                        {"root ::= \"a\"{3,2}", "wrong order"},
                                                        {"start: x\nx{y}: y", "templates"},
                                                        {"start: /a(?=b)/", "lookaround"},
                                                        {"start: /a/i", "flags of expressions"},
                                                        {"%declare X\nstart: X", "%declare is not supported"},
                                                        {"%import python.NAME\nstart: NAME", "only terminals of `common`"},
                                                        {"start: \"a\" )", "does not belong here"},
                                                        {"", "there is no rule"}}) {
    const std::string error = error_of(
        [&] { test::make_automaton([&](AutomatonBuilder& builder, NodeId from) { return emit_grammar(builder, from, source); }); });
    EXPECT_NE(error.find(words), std::string::npos) << source << ": " << error;
  }
}

TEST(JsonSchema, SaysWhatItCannotDo) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {R"({"properties":{"a":{"type":"array","uniqueItems":true}}})", "schema.properties.a.uniqueItems: it is supported only"},
      {R"({"type":"number","multipleOf":0.0000001})", "schema.multipleOf: supported are divisors of at most 15 digits, 6 of them after"},
      {R"({"type":"integer","multipleOf":99991})", "schema.multipleOf: to tell multiples of 99991 apart takes"},
      {R"({"type":"number","multipleOf":99.991})", "set minimum and maximum to numbers of fewer digits"},
      {R"({"multipleOf":10000000000000000})", "schema.multipleOf: supported are divisors of at most 15 digits"},
      {R"({"multipleOf":1e400})", "schema.multipleOf"},
      {R"({"type":"number","multipleOf":-0.5})", "schema.multipleOf: wanted a number above 0, found -0.5"},
      {R"({"type":"number","multipleOf":0.5,"minimum":0.6,"maximum":0.9})", "no text"},
      {R"({"type":"integer","multipleOf":0})", "schema.multipleOf: wanted a number above 0, found 0"},
      {R"({"type":"integer","multipleOf":7,"minimum":1,"maximum":6})", "no text"},
      {R"({"not":{}})", "no text"},
      {R"({"not":true})", "no text"},
      {R"({"type":"integer","not":{"const":3}})", "schema.not: values of type integer"},
      {R"({"not":{"required":["a"]}})", "schema.not: only type, const and enum"},
      {R"({"type":"number","not":{"type":"integer"}})", "schema.not: numbers that are not whole"},
      {R"({"items":{"if":{},"then":{}}})", "schema.items.if: only a condition on the value of one member"},
      {R"({"if":{"properties":{"a":{"type":"null"}}}})", "schema.if.properties.a.const: a condition needs const or enum"},
      {R"({"patternProperties":{"a":{},"b":{}}})", "schema.patternProperties: only one"},
      {R"({"properties":{"xa":{}},"patternProperties":{"a":{}}})", "matches the declared name 'xa'"},
      {R"({"patternProperties":{"a":{}},"additionalProperties":true})", "schema.patternProperties: beside"},
      {R"({"propertyNames":{"type":"integer"}})", "schema.propertyNames"},
      {R"({"properties":{"a":{}},"propertyNames":{"pattern":"a"}})", "schema.propertyNames: beside"},
      {R"({"minProperties":2})", "schema.minProperties: masks cannot"},
      {R"({"properties":{"a":{}},"additionalProperties":false,"minProperties":2})", "only 1 are declared"},
      {R"({"minProperties":3,"maxProperties":2})", "minProperties is above"},
      {R"({"properties":{"a":{}},"dependentRequired":{"a":["b"]}})", "schema.dependentRequired: 'b' is not among"},
      {R"({"type":"array","contains":{"type":"null"},"items":{"type":"integer"}})", "schema.contains: beside items"},
      {R"({"type":"array","contains":{"type":"null"},"maxContains":2})", "schema.maxContains"},
      {R"({"type":"array","contains":{"type":"null"},"maxItems":0})", "contains asks for more"},
      {R"({"dependentSchemas":{}})", "schema.dependentSchemas: this keyword is not supported"},
      {R"({"enum":[1e400]})", "schema.enum: a number beyond doubles"},
      {R"({"type":"text"})", "schema.type"},
      {R"({"type":[]})", "schema.type"},
      {R"({"enum":[]})", "schema.enum"},
      {R"({"enum":"a"})", "schema.enum"},
      {R"({"type":"string","minLength":-1})", "schema.minLength"},
      {R"({"type":"string","minLength":3,"maxLength":2})", "minLength is above maxLength"},
      {R"({"type":"string","pattern":"a","maxLength":2})", "schema.maxLength: together with pattern"},
      {R"x({"type":"string","pattern":"(?=a)"})x", "schema.pattern: pattern '(?=a)': lookaround"},
      {R"({"type":"string","pattern":3})", "schema.pattern"},
      {R"({"type":"number","minimum":1e12})", "schema.minimum"},
      {R"({"type":"integer","minimum":5,"maximum":3})", "no number is within the bounds"},
      {R"({"$ref":"https://example.com/x"})", "schema.$ref"},
      {R"({"$ref":"#/$defs/none"})", "points to nothing"},
      {R"({"anyOf":[{"type":"null"}],"type":"null"})", "schema.type: beside anyOf"},
      {R"({"allOf":[{"pattern":"a"},{"pattern":"b"}]})", "schema.allOf: two schemas have \"a\" and \"b\" for pattern"},
      {R"({"allOf":[{"type":"object"},{"type":"null"}]})", "no text"},
      {R"({"allOf":[{"properties":{"a":{}},"additionalProperties":false},{"properties":{"b":{}}}]})", "forbids the member 'b'"},
      {R"({"$ref":"#/$defs/a","$defs":{"a":{"allOf":[{"$ref":"#/$defs/a"},{"type":"null"}]}}})", "in a ring"},
      {R"({"oneOf":[{"type":"integer"},{"type":"number"}]})", "could match the branches 0 and 1"},
      {R"({"oneOf":[{"const":1},{"const":1.0}]})", "could match the branches 0 and 1"},
      {R"({"required":"a"})", "schema.required"},
      {R"({"properties":[]})", "schema.properties"},
      {R"({"properties":{"a":5}})", "schema.properties.a: wanted a schema"},
      {"5", "schema: wanted a schema"},
  };
  for (const auto& [schema, words] : cases) {
    const std::string error = error_of([&] { schema_automaton(schema); });
    EXPECT_NE(error.find(words), std::string::npos) << schema << ": " << error;
  }
  std::string deep = "true";
  for (int i = 0; i < 120; ++i) deep = R"({"items":)" + deep + "}";
  EXPECT_NE(error_of([&] { schema_automaton(deep); }).find("nest deeper"), std::string::npos);
}

}  // namespace
}  // namespace prl::grammar
