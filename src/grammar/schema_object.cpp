#include <fmt/core.h>

#include <algorithm>
#include <compare>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "grammar/matcher.hpp"
#include "grammar/regex.hpp"
#include "grammar/schema_parts.hpp"
#include "text/json_python.hpp"

namespace prl::grammar {
namespace {

namespace json = boost::json;

constexpr std::size_t kMaxDependencyNames = 10;

/// What is known of an object's members so far, as far as it decides what may follow.
struct Track {
  bool has_any = false;     ///< a comma comes before the next member
  std::int64_t least = 0;   ///< different names for certain, up to minProperties
  std::int64_t most = 0;    ///< members, up to one more than maxProperties
  bool has_other = false;   ///< a member of no declared name
  std::uint32_t names = 0;  ///< which of the names that dependentRequired speaks of are there
  auto operator<=>(const Track&) const = default;
};

class ObjectCompiler {
 public:
  ObjectCompiler(AutomatonBuilder& builder, JsonText& text, const SchemaView& view, const EmitSchema& emit)
      : builder_(builder), text_(text), view_(view), emit_(emit), members_(view) {
    min_ = view.count("minProperties", kMaxSchemaCount).value_or(0);
    max_ = view.count("maxProperties", kMaxSchemaCount);
    if (max_ && min_ > *max_) fail(ErrorCode::kInvalidArgument, "{}: minProperties is above maxProperties", view.place());
    read_pattern();
    read_names();
    read_dependencies();
    check_min();
  }

  bool is_any_object() const {
    return members_.properties.empty() && !members_.has_additional_keyword && !pattern_ && !names_ && min_ == 0 && !max_;
  }

  NodeId emit(NodeId from) {
    std::map<Track, NodeId> tracks{{Track{}, text_.emit_space(builder_.emit_literal(from, "{"))}};
    for (const auto& [name, schema] : members_.properties) tracks = add_property(tracks, name, *schema);
    const NodeId close = builder_.add_node();
    std::map<Track, NodeId> open = tracks;
    if (has_others()) open = add_others(std::move(tracks));
    for (const auto& [track, node] : open)
      if (may_end(track)) builder_.add_empty(track.has_any ? text_.emit_space(node) : node, close);
    return builder_.emit_literal(close, "}");
  }

 private:
  bool has_others() const { return members_.additional || pattern_ || is_free(); }
  /// Any names and values: nothing is declared, and nothing is said about other members.
  bool is_free() const { return members_.properties.empty() && !members_.has_additional_keyword && !pattern_; }

  void read_pattern() {
    const json::object* patterns = view_.object("patternProperties");
    if (!patterns || patterns->empty()) return;
    if (patterns->size() > 1) view_.refuse("patternProperties", fmt::format("only one pattern is supported, found {}", patterns->size()));
    if (members_.additional) view_.refuse("patternProperties", "beside additionalProperties it is supported only if that is false");
    const std::string pattern(patterns->begin()->key());
    pattern_schema_ = &patterns->begin()->value();
    try {
      pattern_ = parse_regex(pattern);
    } catch (const Error& error) {
      throw error.with_context(view_.place("patternProperties"));
    }
    // A declared name that the pattern matches would have to satisfy both schemas.
    AutomatonBuilder builder;
    const RuleId root = builder.add_rule();
    builder.add_empty(emit_regex(builder, builder.rule_start(root), *pattern_, Spelling::kPlain, Anchoring::kSearch),
                      builder.rule_accept(root));
    Matcher matcher(std::make_shared<const Automaton>(std::move(builder).finish(root, ByteSet().set())));
    for (const auto& [name, schema] : members_.properties) {
      Matcher::StateId state = matcher.start();
      for (std::size_t i = 0; i < name.size() && state != Matcher::kDead; ++i)
        state = matcher.step(state, static_cast<std::uint8_t>(name[i]));
      if (state != Matcher::kDead && matcher.is_complete(state))
        view_.refuse("patternProperties", fmt::format("the pattern matches the declared name '{}', which is not supported", name));
    }
  }

  void read_names() {
    names_ = view_.find("propertyNames");
    if (!names_ || (names_->is_bool() && names_->get_bool()) || (names_->is_object() && names_->get_object().empty())) {
      names_ = nullptr;
      return;
    }
    if (!members_.properties.empty() || pattern_)
      view_.refuse("propertyNames", "beside properties, required and patternProperties it is not supported");
    const SchemaView names(*names_, view_.place("propertyNames"));
    if (const json::value* listed = names.find("enum") ? names.find("enum") : names.find("const")) {
      const json::array values = listed->is_array() ? listed->get_array() : json::array{*listed};
      if (!std::all_of(values.begin(), values.end(), text::is_text))
        view_.refuse("propertyNames", "wanted names, which are strings, found " + text::dump_python(*listed));
    } else if (names.types() != std::vector<std::string>{"string"}) {
      view_.refuse("propertyNames", "wanted a schema of strings (type, pattern, format, lengths, enum or const)");
    }
    if (names.find("not")) view_.refuse("propertyNames", "not is not supported in it");
  }

  void read_dependencies() {
    const json::object* dependencies = view_.object("dependentRequired");
    if (!dependencies) return;
    const auto index_of = [&](std::string_view name) -> std::uint32_t {
      const auto found = std::find(dependent_names_.begin(), dependent_names_.end(), name);
      if (found == dependent_names_.end()) {
        const bool is_declared =
            std::any_of(members_.properties.begin(), members_.properties.end(), [&](const auto& entry) { return entry.first == name; });
        if (!is_declared) view_.refuse("dependentRequired", fmt::format("'{}' is not among the properties, which is not supported", name));
        if (dependent_names_.size() >= kMaxDependencyNames)
          view_.refuse("dependentRequired", fmt::format("more than {} names are not supported", kMaxDependencyNames));
        dependent_names_.emplace_back(name);
        return static_cast<std::uint32_t>(dependent_names_.size()) - 1;
      }
      return static_cast<std::uint32_t>(found - dependent_names_.begin());
    };
    for (const auto& [name, wanted] : *dependencies) {
      if (!wanted.is_array()) view_.refuse("dependentRequired", "wanted lists of names, found " + text::dump_python(wanted));
      std::uint32_t needed = 0;
      for (const json::value& other : wanted.get_array()) {
        if (!text::is_text(other)) view_.refuse("dependentRequired", "wanted lists of names, found " + text::dump_python(wanted));
        needed |= 1u << index_of({other.get_string().data(), other.get_string().size()});
      }
      if (needed != 0) dependencies_.emplace_back(1u << index_of({name.data(), name.size()}), needed);
    }
  }

  /// Names of other members may repeat, so all of them together count as one different name.
  void check_min() const {
    const auto num_declared = static_cast<std::int64_t>(members_.properties.size());
    if (min_ > num_declared + (has_others() ? 1 : 0))
      view_.refuse("minProperties", has_others()
                                        ? "masks cannot make sure that names which are not declared differ; declare more properties"
                                        : fmt::format("wanted {} members, and only {} are declared", min_, num_declared));
  }

  bool may_end(const Track& track) const {
    if (track.least < min_ || (max_ && track.most > *max_)) return false;
    return std::all_of(dependencies_.begin(), dependencies_.end(),
                       [&](const auto& entry) { return !(track.names & entry.first) || (track.names & entry.second) == entry.second; });
  }

  Track with_member(Track track, const std::string* name) const {
    track.has_any = true;
    if (max_) track.most = std::min(track.most + 1, *max_ + 1);
    if (name) {
      const auto found = std::find(dependent_names_.begin(), dependent_names_.end(), *name);
      if (found != dependent_names_.end()) track.names |= 1u << (found - dependent_names_.begin());
    }
    const bool is_new = name || !track.has_other;
    if (is_new) track.least = std::min(track.least + 1, min_);
    track.has_other = track.has_other || (!name && min_ > 0);
    return track;
  }

  NodeId node_of(std::map<Track, NodeId>& tracks, const Track& track) {
    const auto [found, is_new] = tracks.try_emplace(track, -1);
    if (is_new) found->second = builder_.add_node();
    return found->second;
  }

  NodeId begin_member(const Track& track, NodeId node) { return track.has_any ? text_.emit_space(builder_.emit_literal(node, ",")) : node; }

  std::map<Track, NodeId> add_property(const std::map<Track, NodeId>& tracks, const std::string& name, const json::value& schema) {
    std::map<Track, NodeId> out;
    std::string key;
    text::append_json_string(key, name, false);
    const bool is_required = members_.required.count(name) > 0;
    for (const auto& [track, node] : tracks) {
      if (!is_required) builder_.add_empty(node, node_of(out, track));
      const Track next = with_member(track, &name);
      if (max_ && next.most > *max_) continue;
      const NodeId value = text_.emit_space(builder_.emit_literal(begin_member(track, node), key + ":"));
      builder_.add_empty(emit_(value, schema, view_.place("properties") + "." + name), node_of(out, next));
    }
    return out;
  }

  /// Members of other names, any number of them.
  std::map<Track, NodeId> add_others(std::map<Track, NodeId> tracks) {
    std::vector<Track> todo;
    for (const auto& [track, node] : tracks) todo.push_back(track);
    std::map<Track, NodeId> out;
    for (const auto& [track, node] : tracks) {
      const NodeId loop = builder_.add_node();  // may be entered again
      builder_.add_empty(node, loop);
      out.emplace(track, loop);
    }
    while (!todo.empty()) {
      const Track track = todo.back();
      todo.pop_back();
      const Track next = with_member(track, nullptr);
      if (max_ && next.most > *max_) continue;
      if (!out.count(next)) todo.push_back(next);
      const NodeId colon = builder_.emit_literal(emit_name(begin_member(track, out.at(track))), ":");
      builder_.add_empty(emit_value(text_.emit_space(colon)), node_of(out, next));
    }
    return out;
  }

  NodeId emit_value(NodeId from) {
    if (pattern_) return emit_(from, *pattern_schema_, view_.place("patternProperties"));
    if (members_.additional) return emit_(from, *members_.additional, view_.place("additionalProperties"));
    return text_.emit_value(from);
  }

  NodeId emit_name(NodeId from) {
    if (names_) return emit_(from, *names_, view_.place("propertyNames"));
    if (pattern_) {
      const NodeId open = builder_.emit_literal(from, "\"");
      return builder_.emit_literal(emit_regex(builder_, open, *pattern_, Spelling::kJsonString, Anchoring::kSearch), "\"");
    }
    std::vector<std::string> declared;
    for (const auto& [name, schema] : members_.properties) declared.push_back(name);
    return text_.emit_string_except(from, declared);
  }

  AutomatonBuilder& builder_;
  JsonText& text_;
  const SchemaView& view_;
  const EmitSchema& emit_;
  Members members_;
  std::int64_t min_ = 0;
  std::optional<std::int64_t> max_;
  std::optional<Regex> pattern_;
  const json::value* pattern_schema_ = nullptr;
  const json::value* names_ = nullptr;
  std::vector<std::string> dependent_names_;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> dependencies_;  // bit of a name, bits of those it needs
};

}  // namespace

NodeId emit_object_schema(AutomatonBuilder& builder, JsonText& text, NodeId from, const SchemaView& view, const EmitSchema& emit) {
  ObjectCompiler compiler(builder, text, view, emit);
  return compiler.is_any_object() ? text.emit_object(from) : compiler.emit(from);
}

}  // namespace prl::grammar
