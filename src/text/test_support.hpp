#pragma once

#include <gtest/gtest.h>
#include <boost/json/parse.hpp>
#include <boost/json/value.hpp>

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/core.h>

#include "base/files.hpp"
#include "base/testing/source_dir.hpp"
#include "text/tokenizer.hpp"

/// Shared by the tests of text/ only.
namespace prl::text::test {

inline std::filesystem::path fixture_path(const std::string& name) { return test_source_dir() / "tests" / "fixtures" / "text" / name; }
inline std::string fixture_text(const std::string& name) { return read_file(fixture_path(name)); }
inline boost::json::value fixture_json(const std::string& name) { return boost::json::parse(fixture_text(name)); }
inline Tokenizer fixture_tokenizer(const std::string& family, std::string_view config = {}) {
  return Tokenizer::parse(fixture_text(family + ".tokenizer.json"), config);
}
inline std::string str(const boost::json::value& value) { return {value.as_string().data(), value.as_string().size()}; }
inline std::vector<std::int32_t> ids_of(const boost::json::value& value) {
  std::vector<std::int32_t> out;
  for (const auto& id : value.as_array()) out.push_back(static_cast<std::int32_t>(id.as_int64()));
  return out;
}
/// Offsets belong to the ids of the text, rise and lie within it.
inline void expect_rising_offsets(const Tokenizer& tokenizer, const std::string& text) {
  const Encoding encoding = tokenizer.encode_with_offsets(text);
  EXPECT_EQ(encoding.ids, tokenizer.encode(text));
  ASSERT_EQ(encoding.ids.size(), encoding.offsets.size());
  std::uint32_t last = 0;
  for (const auto& [begin, end] : encoding.offsets) {
    EXPECT_LE(begin, end);
    EXPECT_LE(last, begin) << text;
    EXPECT_LE(end, text.size());
    last = begin;
  }
}
/// FNV-1a, 64 bits, as hex: what the fixtures hold in place of long lists.
inline std::string fnv(std::string_view bytes) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return fmt::format("{:016x}", hash);
}
inline std::string fnv(std::span<const std::int32_t> ids) {
  std::string bytes;
  for (std::int32_t id : ids)
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(id >> shift & 0xFF));
  return fnv(bytes);
}

}  // namespace prl::text::test
