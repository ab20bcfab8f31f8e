#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <cstdint>
#include <string>

namespace prl::env {

/// Which part of a data set.
enum class Split { kTrain, kEval };

/// One row of a data set: what an episode starts from.
struct Task {
  std::int64_t example_id = 0;  ///< index in its split; unique there
  std::string env_name;
  boost::json::array prompt;  ///< OpenAI messages
  std::string answer;
  boost::json::object info;  ///< whatever the environment needs besides
  /// Stable hash of prompt, answer and info: the same row in another order or another run has the same key.
  std::uint64_t key() const;
};

}  // namespace prl::env
