#include "config/secrets.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <functional>
#include <string_view>

namespace prl::config {
namespace {

constexpr std::array<std::string_view, 9> kSecretWords = {"key",           "token", "secret", "password",   "passwd",
                                                          "authorization", "auth",  "cookie", "credentials"};
/// Tables of names that users choose.
constexpr std::array<std::string_view, 4> kNamedTables = {"env_vars", "headers", "prefill_env_vars", "decode_env_vars"};

template <std::size_t N>
bool has(const std::array<std::string_view, N>& list, std::string_view text) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

/// Whether one of the words of "HF_TOKEN" or "X-Api-Key" is secret.
bool has_secret_word(std::string_view name) {
  std::string word;
  for (const char c : name) {
    const auto letter = static_cast<unsigned char>(c);
    if (std::isalnum(letter)) {
      word += static_cast<char>(std::tolower(letter));
    } else if (has(kSecretWords, word)) {
      return true;
    } else {
      word.clear();
    }
  }
  return has(kSecretWords, word);
}

bool is_secret(std::string_view parent, std::string_view key) {
  return key == "api_key" || key.ends_with("_api_key") || (has(kNamedTables, parent) && has_secret_word(key));
}

/// Calls `visit(path, table, key)` for every text at a secret key. `visit` may remove the member.
void for_each_secret(Value& node, const std::string& path, std::string_view name,
                     const std::function<void(const std::string&, Value&, const std::string&)>& visit) {
  const auto below = [&](std::string_view key) { return path.empty() ? std::string(key) : fmt::format("{}.{}", path, key); };
  if (node.is_list()) {
    for (std::size_t i = 0; i < node.items().size(); ++i) for_each_secret(node.items()[i], below(std::to_string(i)), name, visit);
  } else if (node.is_table()) {
    std::vector<std::string> keys;
    for (const Member& member : node.members()) keys.push_back(member.key);
    for (const std::string& key : keys) {
      Value& value = *node.find(key);
      if (value.is_string() && !value.as_string().empty() && is_secret(name, key))
        visit(below(key), node, key);
      else
        for_each_secret(value, below(key), key, visit);
    }
  }
}

}  // namespace

Value mask_secrets(Value& tree) {
  Value secrets = Value::table();
  for_each_secret(tree, {}, {}, [&](const std::string& path, Value& table, const std::string& key) {
    secrets.set(path, *table.find(key));
    table.set(key, Value(kMasked));
  });
  return secrets;
}

std::vector<Member> restore_secrets(Value& tree, const Value& known) {
  std::vector<Member> missing;
  for_each_secret(tree, {}, {}, [&](const std::string& path, Value& table, const std::string& key) {
    const Value written = *table.find(key);
    if (written.as_string() != kMasked) return;
    if (const Value* value = known.find(path); value && value->is_string()) {
      Value restored = *value;
      restored.set_origin(written.origin());
      table.set(key, std::move(restored));
    } else {
      missing.push_back({path, written});
      table.erase(key);
    }
  });
  return missing;
}

}  // namespace prl::config
