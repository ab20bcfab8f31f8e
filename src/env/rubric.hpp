#pragma once

#include <functional>
#include <string>
#include <vector>

#include "env/episode.hpp"
#include "env/task.hpp"

namespace prl::env {

/// Weighted reward functions and unweighted metrics. reward = sum of weight * score.
class Rubric {
 public:
  using Score = std::function<double(const Task& task, const Episode& episode)>;

  /// Adds a reward function; its score is also a metric of that name. Weight 0 makes it a metric only.
  Rubric& reward(std::string name, double weight, Score score);
  Rubric& metric(std::string name, Score score) { return reward(std::move(name), 0.0, std::move(score)); }
  /// Sets episode.reward and episode.metrics. A function that throws, or answers a number that is not finite, is logged
  /// and counts 0.
  void score(const Task& task, Episode& episode) const;

 private:
  struct Entry {
    std::string name;
    double weight;
    Score score;
  };
  std::vector<Entry> entries_;
};

/// The content of the last assistant message as text ("" if there is none).
std::string last_assistant_text(const boost::json::array& messages);
/// The contents of all assistant messages, in order.
std::vector<std::string> assistant_texts(const boost::json::array& messages);
/// The first <tag>...</tag> of `text`, white space at both ends removed; "" if there is none.
std::string extract_tag(const std::string& text, const std::string& tag);
/// Every <tag>...</tag> of `text`, contents as they stand.
std::vector<std::string> extract_tags(const std::string& text, const std::string& tag);
/// Text without the white space at both ends (Python's str.strip for ASCII and Unicode spaces).
std::string strip(const std::string& text);

}  // namespace prl::env
