#include "config/provenance.hpp"

#include <fmt/core.h>

#include <vector>

namespace prl::config {
namespace {

class Stripper {
 public:
  explicit Stripper(const Provenance& provenance) : provenance_(provenance) {}

  void strip_table(Value& table, const std::string& prefix) {
    std::vector<std::string> keys;
    for (const Member& member : table.members()) keys.push_back(member.key);
    // Defaults of one type would be unknown keys beside another.
    const bool has_type = table.find("type") != nullptr;
    for (const std::string& key : keys) {
      const std::string path = prefix + key;
      if (is_derived(*table.find(key), path) || (has_type && !is_written(path))) table.erase(key);
    }
  }

 private:
  bool is_written(const std::string& path) const { return find_path(provenance_.written, path) != nullptr; }

  /// Takes what is derived out of the value; true if nothing is left of it.
  bool is_derived(Value& value, const std::string& path) {
    if (value.is_table() && !value.members().empty()) {
      strip_table(value, path + ".");
      return value.members().empty() && !is_written(path);
    }
    if (is_written(path) && is_list_of_tables(value, path)) {
      for (std::size_t i = 0; i < value.items().size(); ++i)
        if (value.items()[i].is_table()) strip_table(value.items()[i], fmt::format("{}.{}.", path, i));
      return false;
    }
    if (is_written(path)) return false;
    const Value* bound = find_path(provenance_.bound, path);
    return bound == nullptr || !equals(*bound, value) || is_decisive(path);
  }

  /// True also if all of its items were there before anything was derived.
  bool is_list_of_tables(const Value& value, const std::string& path) const {
    const Value* bound = find_path(provenance_.bound, path);
    return value.is_list() && !value.items().empty() && value.items().front().is_table() && bound && bound->is_list() &&
           bound->items().size() == value.items().size();
  }

  /// The key, a section around it that nobody wrote, or a key below it decides
  /// something by being written.
  bool is_decisive(const std::string& path) const {
    if (is_written(path)) return false;
    for (std::size_t end = path.size(); end != std::string::npos && end > 0; end = path.rfind('.', end - 1)) {
      const std::string around = path.substr(0, end);
      if (provenance_.decisive.contains(around) && !is_written(around)) return true;
    }
    const auto below = provenance_.decisive.lower_bound(path + ".");
    return below != provenance_.decisive.end() && below->starts_with(path + ".");
  }

  const Provenance& provenance_;
};

}  // namespace

Value without_derived(Value tree, const Provenance& provenance) {
  Stripper(provenance).strip_table(tree, {});
  return tree;
}

}  // namespace prl::config
