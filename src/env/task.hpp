#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <cstdint>
#include <memory>
#include <string>

namespace prl::env {

/// Which part of a data set.
enum class Split { kTrain, kEval };

/// A row of a data set that lies in another process.
struct TaskRow {
  boost::json::object values;
  std::string text;  ///< what that process is told of it again, JSON
};

/// One row of a data set: what an episode starts from.
struct Task {
  std::int64_t example_id = 0;  ///< index in its split; unique there
  std::string env_name;
  boost::json::array prompt;  ///< OpenAI messages
  std::string answer;
  boost::json::object info;                      ///< whatever the environment needs besides
  std::shared_ptr<const TaskRow> row = nullptr;  ///< that an environment in Python made it of; null elsewhere
  /// Stable hash of prompt, answer, info and row: the same row in another order or another run has the same key.
  std::uint64_t key() const;
};

}  // namespace prl::env
