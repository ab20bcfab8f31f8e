#include "text/chat_template.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <boost/json/serialize.hpp>

#include <cmath>
#include <ctime>

#include "base/error.hpp"
#include "text/jinja.hpp"
#include "text/json_python.hpp"
#include "text/test_support.hpp"

namespace prl::text {
namespace {

namespace json = boost::json;
using test::fixture_text;
using test::fnv;
using test::str;
using ::testing::HasSubstr;

// What Python gave, with the local time it saw.
const json::value& cases() {
  static const json::value kCases = parse_json(fixture_text("template_cases.json"));
  return kCases;
}

std::time_t fixture_time() {
  const json::array& clock = cases().at("clock").as_array();
  const auto part = [&](std::size_t i) { return static_cast<int>(clock.at(i).as_int64()); };
  std::tm local = {};
  local.tm_year = part(0) - 1900;
  local.tm_mon = part(1) - 1;
  local.tm_mday = part(2);
  local.tm_hour = part(3);
  local.tm_min = part(4);
  local.tm_sec = part(5);
  local.tm_isdst = -1;
  return std::mktime(&local);
}

// Every filter, test, method and operator on values of every type. A result of 0 is an error, 1 one that has no fixed text.
TEST(JinjaParity, EveryFormWithEveryValue) {
  const json::value fixture = parse_json(fixture_text("jinja_cases.json"));
  const json::object& context = fixture.at("context").as_object();
  const std::string show = str(fixture.at("show"));
  std::size_t num_checked = 0;
  const auto check = [&](const std::string& source, const json::value& expected) {
    if (expected.is_int64() && expected.get_int64() == 1) return;
    ++num_checked;
    try {
      const std::string text = JinjaTemplate(source).render(context, fixture_time);
      if (expected.is_string())
        EXPECT_EQ(text, str(expected)) << source;
      else
        ADD_FAILURE() << source << "\n  gave: " << text << "\n  Python: an error";
    } catch (const Error& error) {
      EXPECT_FALSE(expected.is_string()) << source << "\n  " << error.what() << "\n  Python: " << str(expected);
    }
  };
  for (const json::value& form : fixture.at("forms").as_array()) {
    const json::array& values = fixture.at("lists").at(form.at(1).as_string()).as_array();
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::string source = "{% set r = ";
      for (const char c : form.at(0).as_string()) source += c == 'V' ? str(values[i]) : std::string(1, c);
      check(source + " %}" + show, form.at(2).at(i));
    }
  }
  for (const json::value& entry : fixture.at("templates").as_array()) check(str(entry.at(0)), entry.at(1));
  EXPECT_GT(num_checked, 10'000u);
}

TEST(JinjaParity, Snippets) {
  const json::object& context = cases().at("context").as_object();
  ASSERT_GE(cases().at("snippets").as_array().size(), 500u);
  for (const json::value& snippet : cases().at("snippets").as_array()) {
    const std::string source = str(snippet.at(0));
    const json::value& expected = snippet.at(1);
    try {
      const std::string text = JinjaTemplate(source).render(context, fixture_time);
      if (expected.is_object())
        ADD_FAILURE() << source << "\n  gave: " << text << "\n  Python: " << str(expected.at("error"));
      else
        EXPECT_EQ(text, str(expected)) << source;
    } catch (const Error& error) {
      EXPECT_TRUE(expected.is_object()) << source << "\n  " << error.what() << "\n  Python: " << json::serialize(expected);
      EXPECT_THAT(error.what(), HasSubstr("[chat template]"));
    }
  }
}

class TemplateParity : public ::testing::TestWithParam<const char*> {};

TEST_P(TemplateParity, Conversations) {
  json::object special;
  special["bos_token"] = "<s>";
  special["eos_token"] = "</s>";
  ChatTemplate chat_template(fixture_text(std::string(GetParam()) + ".jinja"), special);
  chat_template.set_clock(fixture_time);
  const json::array& conversations = cases().at("conversations").as_array();
  const json::array& renders = cases().at("renders").at(GetParam()).as_array();
  ASSERT_GE(conversations.size(), 60u);
  ASSERT_EQ(conversations.size(), renders.size());
  for (std::size_t i = 0; i < conversations.size(); ++i) {
    RenderOptions options;
    for (const auto& member : conversations[i].as_object()) {
      if (member.key() == "add_generation_prompt")
        options.add_generation_prompt = member.value().as_bool();
      else if (member.key() == "tools")
        options.tools = member.value().as_array();
      else if (member.key() != "messages")
        options.kwargs[member.key()] = member.value();
    }
    const std::string what = std::to_string(i) + ": " + json::serialize(conversations[i]);
    try {
      const std::string text = chat_template.render_raw(conversations[i].at("messages").as_array(), options);
      if (renders[i].is_object())
        ADD_FAILURE() << what << "\n gave: " << text << "\n Python: " << str(renders[i].at("error"));
      else
        EXPECT_EQ(fnv(text), str(renders[i])) << what << "\n gave: " << text;
    } catch (const Error& error) {
      EXPECT_TRUE(renders[i].is_object()) << what << "\n " << error.what();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Templates, TemplateParity,
                         ::testing::Values("qwen2.5", "qwen3", "llama3.1", "llama3.2", "smollm2", "kitchen_sink", "chatml"),
                         [](const auto& param) {
                           std::string name = param.param;
                           for (char& c : name)
                             if (c == '.') c = '_';
                           return name;
                         });

TEST(ChatTemplate, BuiltInChatMlIsTheOneThatWasCompared) { EXPECT_EQ(chatml_template(), fixture_text("chatml.jinja")); }

TEST(ChatTemplate, NormalizesWhatClientsSend) {
  const json::array messages = parse_json(R"([
    {"role": "user", "name": null, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": null, "reasoning": "why", "refusal": null,
     "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{\"x\": 0.1, \"y\": [1], \"z\": \"\\ud83c\"}"}},
                    {"id": "2", "function": {"name": "g", "arguments": "{broken"}},
                    {"id": "3", "function": {"name": "h", "arguments": ""}}]},
    {"role": "assistant", "content": "x", "tool_calls": []}])")
                                   .as_array();
  const json::array out = normalize_messages(messages);
  EXPECT_EQ(dump_python(out[0]), R"({"role": "user", "content": "a\nb"})");
  EXPECT_EQ(out[1].at("content").as_string(), "");
  EXPECT_EQ(out[1].at("reasoning_content").as_string(), "why");
  EXPECT_FALSE(out[1].as_object().contains("refusal"));
  EXPECT_EQ(dump_python(out[1].at("tool_calls").at(0).at("function").at("arguments")), "{\"x\": 0.1, \"y\": [1], \"z\": \"\xEF\xBF\xBD\"}");
  EXPECT_EQ(out[1].at("tool_calls").at(1).at("function").at("arguments").as_string(), "{broken");
  EXPECT_TRUE(out[1].at("tool_calls").at(2).at("function").at("arguments").as_object().empty());
  EXPECT_FALSE(out[2].as_object().contains("tool_calls"));
}

std::string normalize_error(const char* text, LargeNumbers large_numbers = LargeNumbers::kAsDoubles) {
  try {
    normalize_messages(parse_json(text, 200, large_numbers).as_array());
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(ChatTemplate, IntegersInArgumentsKeepTheirDigits) {
  const std::string wide = "340282366920938463463374607431768211457";  // beyond 128 bits
  const std::string arguments = R"({"a": 18446744073709551616, "b": -123456789012345678901234567890, "c": [)" + wide + R"(], "d": -)" +
                                wide + R"(, "e": 1e400, "f": 7, "g": -2.50e-999})";
  const json::array messages = {
      json::object{{"role", "assistant"},
                   {"tool_calls", json::array{json::object{{"function", json::object{{"name", "f"}, {"arguments", arguments}}}}}}}};
  const auto render = [&](const std::string& expression) {
    return ChatTemplate("{%- set args = messages[0].tool_calls[0].function.arguments %}{{ " + expression + " }}").render(messages, {});
  };
  EXPECT_EQ(render("args | tojson"), R"({"a": 18446744073709551616, "b": -123456789012345678901234567890, "c": [)" + wide + R"(], "d": -)" +
                                         wide + R"(, "e": 1e400, "f": 7, "g": -2.50e-999})");
  EXPECT_EQ(render("(args.e, args.e is float, args.e > 1e300, args.g ~ '', args.g == 0, args.e - args.e == 0)"),
            "(1e400, True, True, '-2.50e-999', True, False)");
  EXPECT_EQ(render("args.a ~ ' ' ~ args.c ~ ' ' ~ args.d"), "18446744073709551616 [" + wide + "] -" + wide);
  EXPECT_EQ(render("args.a + 1 - args.f"), "18446744073709551610");
  EXPECT_EQ(
      render("(-args.d == args.c[0], args.c[0] | abs == -args.d, args.d < args.b, args.c[0] > 1e40, args.c[0] < 1e39, args.c == [1])"),
      "(True, True, True, False, True, False)");
  EXPECT_EQ(render("(args.d is integer, args.d is number, args.d is float, args.d is string, '%d|%s' % (args.d, args.d))"),
            "(True, True, False, False, '-" + wide + "|-" + wide + "')");
  EXPECT_EQ(render("(args.c[0] * 0.5, args.c[0] | float, args.c[0] | int == args.c[0], '" + wide + "' | int == args.c[0])"),
            "(1.7014118346046923e+38, 3.402823669209385e+38, True, True)");
  EXPECT_THROW(render("args.c[0] + 1"), Error);
  // More digits than Python takes: the text is shown as it was.
  const std::string far = R"({"a": )" + std::string(5000, '9') + "}";
  json::array as_text = messages;
  as_text[0].at("tool_calls").at(0).at("function").as_object()["arguments"] = far;
  EXPECT_EQ(ChatTemplate("{{ messages[0].tool_calls[0].function.arguments }}").render(as_text, {}), far);
}

TEST(ChatTemplate, NumbersOfARequestKeepTheirText) {
  const json::value body = parse_json(R"({
      "messages": [{"role": "user", "content": "x", "id": 99999999999999999999},
                   {"role": "assistant", "tool_calls": [{"index": 18446744073709551616, "function": {"name": "f", "arguments":
                       {"a": 18446744073709551616, "b": [1e400, 1.0, 1, -0.10], "c": {"arguments": -99999999999999999999}}}}]}],
      "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"maximum": 123456789012345678901234567890,
          "minimum": 1e-400, "default": 1e400, "multipleOf": 9007199254740993}}}}}],
      "chat_template_kwargs": {"k": 99999999999999999999, "list": [-99999999999999999999]},
      "documents": [{"id": 99999999999999999999}], "n": 99999999999999999999})",
                                      200, LargeNumbers::kKeepInRequest);
  RenderOptions options;
  options.tools = body.at("tools").as_array();
  options.kwargs = body.at("chat_template_kwargs").as_object();
  options.kwargs["documents"] = body.at("documents");
  const auto render = [&](const std::string& expression) {
    return ChatTemplate("{{ " + expression + " }}").render(body.at("messages").as_array(), options);
  };
  EXPECT_EQ(render("messages[1].tool_calls[0].function.arguments | tojson"),
            R"({"a": 18446744073709551616, "b": [1e400, 1.0, 1, -0.1], "c": {"arguments": -99999999999999999999}})");
  EXPECT_EQ(render("(messages[0].id + 1, messages[1].tool_calls[0].index)"), "(100000000000000000000, 18446744073709551616)");
  EXPECT_EQ(render("tools[0].function.parameters.properties.n | tojson"),
            R"({"maximum": 123456789012345678901234567890, "minimum": 1e-400, "default": 1e400, "multipleOf": 9007199254740993})");
  EXPECT_EQ(render("(k is integer, k // 10, list | tojson, documents[0].id)"),
            "(True, 9999999999999999999, '[-99999999999999999999]', 99999999999999999999)");
  EXPECT_TRUE(body.at("n").is_double());
  EXPECT_THAT(normalize_error(R"([{"role": 99999999999999999999}])", LargeNumbers::kKeepText), HasSubstr("messages[0].role"));
  EXPECT_THAT(normalize_error(R"([{"role": "user", "content": 99999999999999999999}])", LargeNumbers::kKeepText),
              HasSubstr("messages[0].content"));
}

TEST(ChatTemplate, NormalizationNamesTheMessage) {
  EXPECT_THAT(normalize_error(R"([{"role": "user", "content": "x"}, 5])"), HasSubstr("messages[1]: expected an object"));
  EXPECT_THAT(normalize_error(R"([{"content": "x"}])"), HasSubstr("messages[0].role"));
  EXPECT_THAT(normalize_error(R"([{"role": "user", "content": 7}])"), HasSubstr("messages[0].content"));
  EXPECT_THAT(normalize_error(R"([{"role": "user", "content": [{"type": "image_url"}]}])"), HasSubstr("'image_url'"));
}

TEST(ChatTemplate, TakesTextFileNamedListsAndJinjaFile) {
  const Tokenizer plain = test::fixture_tokenizer("qwen2", R"({"bos_token": "<s>", "chat_template": [
      {"name": "default", "template": "D{{ bos_token }}"}, {"name": "tool_use", "template": "T"}]})");
  const ChatTemplate named = ChatTemplate::load("/nonexistent-folder", plain);
  EXPECT_EQ(named.render({}), "D<s>");
  EXPECT_EQ(named.render({}, {.tools = json::array{json::object()}}), "T");
  EXPECT_EQ(ChatTemplate::from_text_or_file(test::fixture_path("smollm2.jinja").string(), plain).source(), fixture_text("smollm2.jinja"));
  EXPECT_EQ(ChatTemplate::from_text_or_file("{{ 1 + 1 }}", plain).render({}), "2");
  EXPECT_THROW(ChatTemplate::from_text_or_file("/no/such/file.jinja", plain), Error);
  EXPECT_THROW(ChatTemplate::load("/nonexistent-folder", test::fixture_tokenizer("qwen2")), Error);
  try {
    ChatTemplate::load("/some-folder", test::fixture_tokenizer("qwen2", R"({"chat_template": "{% if"})"));
    ADD_FAILURE() << "a template that is cut short was taken";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("/some-folder/tokenizer_config.json.chat_template: [chat template] line 1"));
  }
}

// ---- Templates that mean harm end with an error that names the line.

std::string render_error(const std::string& source) {
  try {
    JinjaTemplate(source).render({});
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

std::string repeated(std::string_view unit, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += unit;
  return out;
}

TEST(JinjaLimits, HostileTemplatesEnd) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "every limit is reached by one thread alone, which under the thread sanitizer takes a quarter of an hour";
#endif
  EXPECT_THAT(render_error("\n{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}"), HasSubstr("nested deeper"));
  EXPECT_THAT(render_error("{% for a in range(100000) %}{{ " + repeated("1 + ", 100) + "1 }}{% endfor %}"), HasSubstr("steps"));
  EXPECT_THAT(render_error("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"), HasSubstr("bytes"));
  EXPECT_THAT(render_error("{{ 'x' * 10000000000 }}"), HasSubstr("bytes"));
  EXPECT_THAT(render_error("{{ [0] * 10000000000 }}"), HasSubstr("too long"));
  EXPECT_THAT(render_error("{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"),
              HasSubstr("bytes"));
  EXPECT_THAT(render_error("{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"),
              HasSubstr("bytes"));
  EXPECT_THAT(
      render_error("{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s.replace('x', 'xxxxxxxx') %}{% endfor %}"),
      HasSubstr("bytes"));
  EXPECT_THAT(render_error("{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}"),
              HasSubstr("nested deeper"));
  EXPECT_THAT(render_error("{% set ns = namespace(x={}) %}{% for i in range(100000) %}{% set ns.x = {'a': ns.x} %}{% endfor %}"),
              HasSubstr("nested deeper"));
  EXPECT_THAT(render_error("{% set ns = namespace(x=1) %}{% for i in range(100000) %}{% set ns.x = [ns.x].index %}{% endfor %}"),
              HasSubstr("nested deeper"));
  EXPECT_THAT(render_error("{{ 9 ** 999999999 }}"), HasSubstr("too large"));
  EXPECT_THAT(render_error("{{ '%999999999d' % 1 }}"), "no error");  // the width is capped
  EXPECT_THAT(render_error("{{ 'a'.center(999999999) }}"), HasSubstr("too large"));
  EXPECT_THAT(render_error("{{ " + repeated("(", 5000) + "1" + repeated(")", 5000) + " }}"), HasSubstr("nested deeper"));
  EXPECT_THAT(render_error("{{ 1" + repeated(" + 1", 100000) + " }}"), HasSubstr("steps"));
  EXPECT_THAT(render_error("{{ x" + repeated(".a", 100000) + " }}"), HasSubstr("steps"));
  EXPECT_THAT(render_error("{{ 1" + repeated(" | abs", 100000) + " }}"), HasSubstr("steps"));
  EXPECT_THAT(render_error("{{ " + repeated("not ", 100000) + "1 }}"), HasSubstr("nested deeper"));
  EXPECT_THAT(render_error("{{ " + repeated("-", 100000) + "1 }}"), HasSubstr("nested deeper"));
  EXPECT_THAT(render_error("{{ 1" + repeated(" if 1 else 1", 50000) + " }}"), HasSubstr("nested deeper"));
  EXPECT_THAT(render_error(repeated("{% if 1 %}", 10000)), HasSubstr("nested deeper"));
  EXPECT_THAT(render_error("{% set " + repeated("(", 10000)), HasSubstr("nested deeper"));
  EXPECT_THAT(render_error(std::string(2 << 20, 'x')), HasSubstr("at most"));
}

TEST(JinjaLimits, RingsAndChainsOfReferencesAreReleased) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "one thread, minutes under the thread sanitizer; the address sanitizer sees what this looks for";
#endif
  // Run under a leak checker these would show; here they must at least not overflow the stack when they go.
  EXPECT_EQ(render_error("{% set ns = namespace(p=none) %}{% set ns.p = ns %}"), "no error");
  EXPECT_EQ(render_error("{% for i in range(3) %}{% macro m() %}{{ m }}{% endmacro %}{% endfor %}"), "no error");
  EXPECT_EQ(
      render_error(
          "{% set ns = namespace(p=none) %}{% for i in range(50000) %}{% set n2 = namespace(p=ns.p) %}{% set ns.p = n2 %}{% endfor %}"),
      "no error");
  EXPECT_EQ(render_error("{% set ns = namespace(p=none) %}{% for i in range(50000) %}{% set q = ns.p %}{% for y in [1] recursive %}{% set "
                         "ns.p = loop %}{% endfor %}{% endfor %}"),
            "no error");
  EXPECT_EQ(render_error("{% set ns = namespace(c=1) %}{% for i in range(50000) %}{% set ns.c = cycler(ns.c) %}{% endfor %}"), "no error");
}

TEST(JinjaErrors, NameTheLine) {
  EXPECT_THAT(render_error("a\nb\n{{ missing.x }}"), HasSubstr("line 3: 'missing' is undefined"));
  EXPECT_THAT(render_error("a\n{% for x in [1] %}\n\n{{ x.y.z }}\n{% endfor %}"), HasSubstr("line 4"));
  EXPECT_THAT(render_error("\n\n{% if %}"), HasSubstr("line 3"));
  EXPECT_THAT(render_error("\n{{ raise_exception('roles must alternate') }}"), HasSubstr("line 2: roles must alternate"));
}

// ---- JSON as Python writes it

TEST(JsonPython, DumpsAndParsesExactly) {
  const json::value value =
      parse_json(R"({"b": [1, 2.0, 1e16, 1e-5, 0.1, -0.0, 123456789012345680], "a": {"é": "\u0001\n\"\\/"}, "n": null, "t": true})");
  EXPECT_EQ(dump_python(value),
            R"({"b": [1, 2.0, 1e+16, 1e-05, 0.1, -0.0, 123456789012345680], "a": {"é": "\u0001\n\"\\/"}, "n": null, "t": true})");
  EXPECT_EQ(dump_python(value.at("a"), {.ensure_ascii = true}), R"({"\u00e9": "\u0001\n\"\\/"})");
  EXPECT_EQ(dump_python(json::value("😀\x7f"), {.ensure_ascii = true}), R"("\ud83d\ude00\u007f")");
  EXPECT_EQ(dump_python(parse_json(R"({"b":1,"a":[]})"), {.sort_keys = true, .indent = 2}), "{\n  \"a\": [],\n  \"b\": 1\n}");
  EXPECT_EQ(dump_python(parse_json("[1,[2]]"), {.item_separator = ",", .key_separator = ":"}), "[1,[2]]");
}

TEST(JsonPython, LargeNumbersKeepTheirTextWhereWanted) {
  const std::string text = R"([18446744073709551615, 18446744073709551616, -9223372036854775809, -1e30, {"k": 99999999999999999999}])";
  const json::value kept = parse_json(text, 200, LargeNumbers::kKeepText);
  EXPECT_TRUE(kept.at(0).is_uint64());
  EXPECT_EQ(kept_number(kept.at(1)), "18446744073709551616");
  EXPECT_EQ(kept_number(kept.at(2)), "-9223372036854775809");
  EXPECT_TRUE(kept.at(3).is_double());
  EXPECT_EQ(dump_python(kept),
            R"([18446744073709551615, 18446744073709551616, -9223372036854775809, -1e+30, {"k": 99999999999999999999}])");
  EXPECT_TRUE(parse_json(text).at(1).is_double());
  EXPECT_EQ(kept_number(json::value("\xFF"
                                    "x12")),
            std::nullopt);
  EXPECT_EQ(kept_number(json::value("18446744073709551616")), std::nullopt);
  EXPECT_THROW(parse_json(std::string(5000, '1'), 200, LargeNumbers::kKeepText), Error);
  EXPECT_EQ(dump_python(parse_json("[1e400, -1E+400, 1e-400, 0e-400, 5e-324, 1e308]", 200, LargeNumbers::kKeepText)),
            "[1e400, -1E+400, 1e-400, 0.0, 5e-324, 1e+308]");
}

TEST(JsonPython, LargeNumbersOfARequestThatNobodyPassesOnAreDoubles) {
  const json::value value = parse_json(
      R"({"n": 1e400, "seed": [99999999999999999999], "stop": {"messages": 1e400}, "messages": [{"x": 1e400}],
          "extra_body": {"n": -1e400, "tools": [99999999999999999999], "deep": {"tools": 1e400}}})",
      200, LargeNumbers::kKeepInRequest);
  EXPECT_TRUE(value.at("n").is_double());
  EXPECT_TRUE(value.at("seed").at(0).is_double());
  EXPECT_TRUE(value.at("stop").at("messages").is_double());
  EXPECT_EQ(kept_number(value.at("messages").at(0).at("x")), "1e400");
  EXPECT_TRUE(value.at("extra_body").at("n").is_double());
  EXPECT_EQ(kept_number(value.at("extra_body").at("tools").at(0)), "99999999999999999999");
  EXPECT_TRUE(value.at("extra_body").at("deep").at("tools").is_double());
}

TEST(JsonPython, KeptNumbersAreNumbersToWhoAsks) {
  const json::value value =
      parse_json(R"({"a": [18446744073709551616, -1e400, "7", 1.0, null, true], "k\"": 1e-400})", 200, LargeNumbers::kKeepText);
  const json::array& items = value.at("a").as_array();
  EXPECT_FALSE(is_text(items[0]));
  EXPECT_TRUE(is_text(items[2]));
  EXPECT_FALSE(is_text(items[3]));
  EXPECT_EQ(as_double(items[0]), 18446744073709551616.0);
  EXPECT_EQ(as_double(items[1]), -HUGE_VAL);
  EXPECT_EQ(as_double(items[3]), 1.0);
  EXPECT_EQ(as_double(json::value(std::uint64_t{1} << 63)), 9223372036854775808.0);
  EXPECT_EQ(as_double(items[2]), std::nullopt);
  EXPECT_EQ(as_double(items[4]), std::nullopt);
  EXPECT_EQ(as_double(items[5]), std::nullopt);
  EXPECT_EQ(to_json_text(value), R"({"a":[18446744073709551616,-1e400,"7",1E0,null,true],"k\"":1e-400})");
  EXPECT_EQ(to_json_text(items[3]), json::serialize(items[3]));
  json::value plain = value;
  make_doubles(plain, {"a"});
  EXPECT_EQ(kept_number(plain.at("a").at(0)), "18446744073709551616");
  EXPECT_EQ(plain.at("k\""), json::value(0.0));
  make_doubles(plain);
  EXPECT_EQ(plain.at("a").at(0), json::value(18446744073709551616.0));
}

TEST(JsonPython, DoublesReadBackToTheLastBit) {
  for (const char* text : {"3.14159265358979", "2.2250738585072014e-308", "9007199254740993.0", "1.7976931348623157e308", "5e-324",
                           "0.30000000000000004", "123456789.123456789", "8.41e21", "1e23", "4.35", "179769313486231570000000000000.5"})
    EXPECT_EQ(parse_json(text).as_double(), std::strtod(text, nullptr)) << text;
  EXPECT_EQ(python_float_repr(1e22), "1e+22");
  EXPECT_EQ(python_float_repr(123456789012345680.0), "1.2345678901234568e+17");
  EXPECT_EQ(python_float_repr(0.0001), "0.0001");
  EXPECT_EQ(python_float_repr(5e-324), "5e-324");
  EXPECT_EQ(python_float_repr(-1.5), "-1.5");
}

TEST(JsonPython, BadInputIsAnError) {
  for (const std::string& text : {std::string("{"), std::string("[1,]"), std::string("1 2"), std::string("nul"), std::string(""),
                                  repeated("[", 300), std::string("\"\xff\"")})
    EXPECT_THROW(parse_json(text), Error) << text;
}

}  // namespace
}  // namespace prl::text
