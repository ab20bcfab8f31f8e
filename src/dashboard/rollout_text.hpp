#pragma once

#include <boost/json/value.hpp>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "dashboard/rollout_index.hpp"

namespace prl::dashboard {

/// Longest line of a rollout file that is parsed; longer ones are listed and can be downloaded as they are.
inline constexpr std::uint64_t kMaxRolloutBytes = std::uint64_t{64} << 20;

/// The line as JSON, repaired if it must be. Error{kCorrupt} if it is none, {kInvalidArgument} if it is too long, {kNotFound} if the file
/// changed.
boost::json::value load_rollout(const std::filesystem::path& path, const RolloutEntry& entry);

/// Cuts texts of more than `max_text` bytes (at the end of a character), and further ones once `max_total` is reached; each ends with a
/// note of how much is left out. Returns how many were cut.
std::size_t cut_texts(boost::json::value& value, std::size_t max_text, std::size_t max_total);

/// The beginning of the last thing the model wrote, in one line.
std::string preview_of(const boost::json::value& rollout, std::size_t max_bytes);

/// What people look for: the texts of all messages (content, reasoning, calls), the answer and the error. Compares ASCII letters without
/// case.
class TextSearch {
 public:
  explicit TextSearch(std::string_view wanted);
  /// False if the line cannot hold the text; cheap, and without parsing.
  bool may_hold(std::string_view line) const;
  /// A piece of the text around the first hit, in one line; empty if there is none.
  std::string hit_in(const boost::json::value& rollout) const;

 private:
  bool search(const boost::json::value& value, std::string_view key, std::string& hit, int depth) const;
  std::string wanted_;  ///< in lower case
  std::string needle_;  ///< the longest run of letters and digits in it: stands in a line as it is, however that was escaped
};

}  // namespace prl::dashboard
