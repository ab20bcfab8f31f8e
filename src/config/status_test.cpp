#include "config/status.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "config/bind.hpp"
#include "config/detail/test_support.hpp"
#include "config/detail/type_ops.hpp"
#include "config/merge.hpp"
#include "config/text_format.hpp"

namespace prl::config {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::load_line;

struct PlainChoice {
  static constexpr std::string_view kType = "plain";
  int width = 1;
  template <class V>
  void visit(V& v) {
    v.field("width", width, "Width");
  }
};
struct FutureChoice {
  static constexpr std::string_view kType = "future";
  static constexpr Status kStatus = not_built("the future", "use plain");
  int width = 1;
  template <class V>
  void visit(V& v) {
    v.field("width", width, "Width");
  }
};
struct Part {
  int used = 1;
  int idle = 1;
  std::variant<PlainChoice, FutureChoice> choice;
  template <class V>
  void visit(V& v) {
    v.field("used", used, "Used");
    v.field("idle", idle, "Idle", {.min = 0, .status = inert("nothing turns")});
    v.field("choice", choice, "Choice");
  }
};
struct Whole {
  Part here;
  Part there;
  std::vector<Part> parts;
  std::optional<Part> absent;
  Value extras = Value::table();
  static constexpr StatusBelow kStatusBelow[] = {
      {"there.used", inert("not there")}, {"there.idle", built()}, {"parts[].used", not_built("use in parts")}};
  template <class V>
  void visit(V& v) {
    v.field("here", here, "Here");
    v.field("there", there, "There");
    v.field("parts", parts, "Parts");
    v.field("absent", absent, "Absent", {.status = inert("nobody comes")});
    v.field("extras", extras, "Extras", {.status = not_built("extras")});
  }
};

Report checked(const std::string& toml) {
  Report report;
  Whole whole;
  const Value raw = parse_toml(toml, "test.toml");
  bind(raw, ops_of<Whole>(), &whole, report);
  check_status(raw, ops_of<Whole>(), &whole, report);
  EXPECT_THAT(report.problems, IsEmpty());
  return report;
}
std::vector<std::string> inert_keys(const Report& report) {
  std::vector<std::string> keys;
  for (const InertKey& key : report.inert) keys.push_back(key.key);
  return keys;
}
std::vector<std::string> unbuilt_keys(const Report& report) {
  std::vector<std::string> keys;
  for (const NotBuilt& key : report.not_built) keys.push_back(key.key);
  return keys;
}

TEST(Status, OfAKeyIsItsOwnUnlessTheStructAroundItSaysOtherwise) {
  EXPECT_THAT(inert_keys(checked("[here]\nused = 2\nidle = 2\n[there]\nused = 2\nidle = 2")), ElementsAre("here.idle", "there.used"));
  EXPECT_THAT(unbuilt_keys(checked("[[parts]]\nused = 1\n[[parts]]\nused = 2")), ElementsAre("parts.1.used"));
  EXPECT_THAT(inert_keys(checked("[[parts]]\nidle = 3")), ElementsAre("parts.0.idle"));
}

TEST(Status, KeysAtTheirDefaultAreNotReported) {
  const Report report = checked("[here]\nidle = 1\n[there]\nused = 1\n[extras]");
  EXPECT_THAT(inert_keys(report), IsEmpty());
  EXPECT_THAT(unbuilt_keys(report), IsEmpty());
}

TEST(Status, OfASectionHoldsForAllInIt) {
  EXPECT_THAT(inert_keys(checked("[absent]\nused = 5")), ElementsAre("absent"));
  EXPECT_THAT(unbuilt_keys(checked("extras = {a = 1, b = {c = 2}}")), ElementsAre("extras.a", "extras.b"));
}

TEST(Status, AVariantThatIsNotBuiltIsNamedByItsType) {
  const Report report = checked("[here.choice]\ntype = \"future\"");
  EXPECT_THAT(unbuilt_keys(report), ElementsAre("here.choice.type"));
  EXPECT_EQ(report.not_built.front().feature, "the future; use plain");
  EXPECT_EQ(report.not_built.front().origin.line, 2);
  EXPECT_THAT(unbuilt_keys(checked("[here.choice]\ntype = \"plain\"\nwidth = 3")), IsEmpty());
}

TEST(Status, TheListOfKeysKnowsIt) {
  const auto status_of = [](std::string_view wanted) {
    for (const KeyInfo& info : list_keys(ops_of<Whole>()))
      if (info.key == wanted) return std::string(status_name(info.status));
    return std::string("no such key");
  };
  EXPECT_EQ(status_of("here.used"), "built");
  EXPECT_EQ(status_of("here.idle"), "inert");
  EXPECT_EQ(status_of("there.used"), "inert");
  EXPECT_EQ(status_of("there.idle"), "built");
  EXPECT_EQ(status_of("parts[].used"), "not built");
  EXPECT_EQ(status_of("here.choice<future>.width"), "not built");
  EXPECT_EQ(status_of("here.choice<plain>.width"), "built");
  EXPECT_EQ(status_of("absent.used"), "inert");
}

TEST(Status, OneLineNamesAllKeysWithoutEffectAndCopiesOnce) {
  const auto rl = load_line<RlConfig>("rl --inference --model.name ./m --tokenizer.trust-remote-code --trainer.gc");
  ASSERT_EQ(rl.warnings.size(), 1u);
  EXPECT_EQ(rl.warnings.front(),
            "2 keys are set without effect here: tokenizer.trust_remote_code (no code of a model folder is ever run); "
            "trainer.gc (there is no garbage collector)");
}

/// Other values than the default, as a user writes them; none for types that no passed-on key has.
std::vector<std::string> samples_of(const KeyInfo& info) {
  const std::string type = info.type.ends_with("?") ? info.type.substr(0, info.type.size() - 1) : info.type;
  if (type == "int" || type.starts_with("int|")) return {"7"};
  if (type == "float") return {"3.5"};
  if (type == "bool") return {"true", "false"};
  if (type == "str" || type == "path") return {"./elsewhere"};
  if (type == "section") return {"true"};
  for (std::size_t begin = 0; begin < type.size();) {
    const std::size_t bar = std::min(type.find('|', begin), type.size());
    const std::string word = type.substr(begin, bar - begin);
    if (info.default_text.find(word) == std::string::npos && word != "auto") return {word};
    begin = bar + 1;
  }
  return {};
}

/// A key as it is written: the first item of a list, and no type of a section.
std::string with_items(std::string key) {
  if (const std::size_t at = key.find('<'); at != std::string::npos) key.erase(at, key.find('>') + 1 - at);
  for (std::size_t at = key.find("[]"); at != std::string::npos; at = key.find("[]")) key.replace(at, 2, ".0");
  return key;
}

Value resolved_with(const std::string& key, const std::string& value) {
  Report report;
  std::vector<std::string> words = {"--model.name", "./m", "--inference", "--orchestrator.train.env.0.id", "reverse-text"};
  if (const std::size_t at = key.find('<'); at != std::string::npos)
    words.insert(words.end(), {"--" + key.substr(0, at) + ".type", key.substr(at + 1, key.find('>') - at - 1)});
  if (!key.empty()) words.insert(words.end(), {"--" + with_items(key), value});
  const Loaded<RlConfig> loaded = load<RlConfig>(Command::kRl, words, testing::plain_context());
  return dump(ops_of<RlConfig>(), &loaded.config, NullStyle::kAlways);
}

/// True if one of the resolved configurations differs at `target`, which is written from the root or from a section around `key`.
bool changes(const Value& before, const std::vector<Value>& after, const std::string& key, const std::string& target) {
  for (std::size_t end = 0; end != std::string::npos; end = key.find('.', end + 1)) {
    const std::string path = with_items(end == 0 ? target : key.substr(0, end) + "." + target);
    const Value* then = find_path(before, path);
    for (const Value& changed : after)
      if (const Value* now = find_path(changed, path); now && (!then || !equals(*then, *now))) return true;
  }
  return false;
}

/// A key is passed on if setting it changes each key that its status names; those are written from the root or from a section around it.
TEST(Status, EveryKeyThatIsPassedOnChangesTheKeysItNames) {
  int num_keys = 0;
  std::set<std::string> optional_sections;
  for (const KeyInfo& info : list_keys(ops_of<RlConfig>()))
    if (info.is_section && info.type == "section?") optional_sections.insert(info.key);
  for (const KeyInfo& info : list_keys(ops_of<RlConfig>())) {
    if (info.status.kind != Status::Kind::kPassedOn) continue;
    if (info.key.ends_with(".nodes_per_fsdp_group")) continue;  // a divisor of another key: ResolveRl.NodesInGroupsHoldACopyOfTheStateEach
    if (info.key.starts_with("teacher_inference.")) continue;   // the keys of [inference], in a section that other training modes have
    SCOPED_TRACE(info.key);
    ++num_keys;
    const std::vector<std::string> samples = samples_of(info);
    ASSERT_FALSE(samples.empty());
    // What turns the optional sections around the key on is not the key's own doing.
    const std::string around = info.key.substr(0, std::min(info.key.rfind('.'), info.key.size()));
    const Value before =
        optional_sections.contains(around) && around != "inference" ? resolved_with(around, "true") : resolved_with({}, {});
    std::vector<Value> after;
    for (const std::string& sample : samples) after.push_back(resolved_with(info.key, sample));
    for (const std::string& target : testing::split(std::string(info.status.text)))
      EXPECT_TRUE(changes(before, after, info.key, target)) << target << " stays as it is, or is no key";
  }
  EXPECT_GE(num_keys, 20);
}

}  // namespace
}  // namespace prl::config
