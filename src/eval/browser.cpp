#include "eval/browser.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "eval/outcome.hpp"
#include "eval/results_file.hpp"
#include "text/json_python.hpp"
#include "text/utf8.hpp"

namespace prl::eval {

namespace fs = std::filesystem;
namespace json = boost::json;

namespace {

std::string text_at(const json::object& object, const char* key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && text::is_text(*value) ? std::string(value->get_string()) : std::string();
}

double number_at(const json::object& object, const char* key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr ? text::as_double(*value).value_or(0.0) : 0.0;
}

const json::array* list_at(const json::object& object, const char* key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr ? value->if_array() : nullptr;
}

/// Fit to print: control characters other than line breaks and tabs are shown as "?", so that a model's reply cannot command
/// the terminal.
std::string printable(std::string_view text) {
  std::string safe;
  const std::string valid = text::replace_invalid_utf8(text);
  for (std::size_t at = 0; at < valid.size();) {
    const char32_t point = text::next_code_point(valid, at);
    const bool is_control = (point < 0x20 && point != '\n' && point != '\t') || (point >= 0x7f && point < 0xa0);
    text::append_code_point(safe, is_control ? U'?' : point);
  }
  return safe;
}

/// On one line, at most `width` characters, with "..." where it was cut.
std::string one_line(std::string_view text, std::size_t width) {
  std::string line = printable(text);
  std::replace_if(
      line.begin(), line.end(), [](char c) { return c == '\n' || c == '\t'; }, ' ');
  if (text::count_code_points(line) <= width) return line;
  const std::size_t kept = width > 3 ? width - 3 : 0;
  return line.substr(0, text::byte_of_code_point(line, kept)) + "...";
}

std::string indented(const std::string& text) {
  std::string out = "  ";
  for (const char c : text) {
    out += c;
    if (c == '\n') out += "  ";
  }
  return out;
}

std::string content_of(const json::value& content) {
  if (text::is_text(content)) return std::string(content.get_string());
  return content.is_null() ? std::string() : text::to_json_text(content);
}

void show_message(std::string& out, const json::value& value) {
  const json::object* message = value.if_object();
  if (message == nullptr) return;
  out += fmt::format("[{}]\n", printable(text_at(*message, "role")));
  if (const std::string reasoning = text_at(*message, "reasoning_content"); !reasoning.empty())
    out += "  (reasoning)\n" + indented(printable(reasoning)) + "\n  (end of reasoning)\n";
  if (const json::value* content = message->if_contains("content"))
    if (const std::string text = content_of(*content); !text.empty()) out += indented(printable(text)) + "\n";
  if (const json::array* calls = list_at(*message, "tool_calls"))
    for (const json::value& call : *calls) {
      boost::system::error_code ec;
      const json::value* name = call.find_pointer("/function/name", ec);
      const json::value* arguments = call.find_pointer("/function/arguments", ec);
      out += fmt::format("  -> {}({})\n", name != nullptr ? printable(content_of(*name)) : "?",
                         arguments != nullptr ? printable(content_of(*arguments)) : "");
    }
}

/// The last words of the user before the model speaks.
std::string question_of(const json::object& row) {
  if (const json::array* prompt = list_at(row, "prompt"))
    for (auto it = prompt->rbegin(); it != prompt->rend(); ++it)
      if (const json::object* message = it->if_object(); message != nullptr && text_at(*message, "role") == "user")
        return message->contains("content") ? content_of(message->at("content")) : std::string();
  return text_at(row, "prompt");
}

ResultsFolder read_folder(const fs::path& path) {
  ResultsFolder folder;
  folder.path = path;
  Outcomes outcomes;
  std::int64_t next = 0;
  for (const json::object& row : read_result_rows(path / "results.jsonl")) {
    if (folder.env_name.empty()) folder.env_name = text_at(row, "task");
    outcomes[{static_cast<std::int64_t>(number_at(row, "example_id")), next++}] = outcome_of_row(row);
  }
  folder.num_rows = next;
  if (fs::exists(path / "metadata.json")) {
    const json::value parsed = text::parse_json(read_file(path / "metadata.json"));
    if (const json::object* metadata = parsed.if_object()) {
      if (folder.env_name.empty()) folder.env_name = text_at(*metadata, "env_id");
      folder.model = text_at(*metadata, "model");
      folder.ckpt_step = static_cast<std::int64_t>(number_at(*metadata, "ckpt_step"));
      folder.num_examples = static_cast<std::int64_t>(number_at(*metadata, "num_examples"));
      folder.rollouts_per_example = std::max<std::int64_t>(1, static_cast<std::int64_t>(number_at(*metadata, "rollouts_per_example")));
      if (const json::value* complete = metadata->if_contains("is_complete"))
        folder.is_complete = !complete->is_bool() || complete->get_bool();
    }
  }
  const EvalResult result = summarize(outcomes, folder.rollouts_per_example);
  folder.avg_reward = result.avg_reward;
  for (const auto& [k, value] : result.pass_at_k)
    folder.pass_at_k += fmt::format("{}pass@{} {:.3f}", folder.pass_at_k.empty() ? "" : " ", k, value);
  return folder;
}

constexpr const char* kHelp = "number: open   n/p: next/previous   s: order by reward   b: back   q: quit";

}  // namespace

std::vector<ResultsFolder> find_results(const fs::path& root) {
  if (!fs::exists(root)) fail(ErrorCode::kNotFound, "{}: there is no such folder; give one with results of `prl eval`", root.string());
  std::vector<fs::path> paths;
  if (root.filename() == "results.jsonl") paths.push_back(root.parent_path().empty() ? fs::path(".") : root.parent_path());
  if (fs::is_directory(root)) {
    if (fs::exists(root / "results.jsonl")) paths.push_back(root);
    for (const auto& entry : fs::recursive_directory_iterator(root, fs::directory_options::skip_permission_denied))
      if (entry.is_directory() && fs::exists(entry.path() / "results.jsonl")) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<ResultsFolder> folders;
  for (const fs::path& path : paths) {
    try {
      folders.push_back(read_folder(path));
    } catch (const Error& error) {
      log::warning("{}", error.what());
    }
  }
  return folders;
}

std::vector<json::object> select_rows(std::vector<json::object> rows, RowOrder order, std::optional<double> min_reward,
                                      std::optional<double> max_reward) {
  std::erase_if(rows, [&](const json::object& row) {
    const double reward = number_at(row, "reward");
    return (min_reward && reward < *min_reward) || (max_reward && reward > *max_reward);
  });
  if (order != RowOrder::kFile)
    std::stable_sort(rows.begin(), rows.end(), [&](const json::object& a, const json::object& b) {
      const double x = number_at(a, "reward"), y = number_at(b, "reward");
      return order == RowOrder::kRewardUp ? x < y : x > y;
    });
  return rows;
}

std::string list_folders(const std::vector<ResultsFolder>& folders) {
  if (folders.empty()) return "no results\n";
  std::string out =
      fmt::format("{:>4}  {:<16} {:<24} {:>5} {:>9} {:>7}  {}\n", "", "environment", "model", "step", "rollouts", "reward", "folder");
  for (std::size_t i = 0; i < folders.size(); ++i) {
    const ResultsFolder& folder = folders[i];
    const std::string note = folder.is_complete ? folder.pass_at_k : "interrupted";
    // Of a long model name the end tells more; a path is printed whole, to be copied.
    std::string model = one_line(folder.model, 1000);
    if (const std::size_t count = text::count_code_points(model); count > 24)
      model = "..." + model.substr(text::byte_of_code_point(model, count - 21));
    out += fmt::format("{:>4}  {:<16} {:<24} {:>5} {:>9} {:>7.4f}  {}{}{}\n", i + 1, one_line(folder.env_name, 16), model, folder.ckpt_step,
                       folder.num_rows, folder.avg_reward, printable(folder.path.string()), note.empty() ? "" : "  ", note);
  }
  return out;
}

std::string list_rows(const std::vector<json::object>& rows, std::size_t width) {
  if (rows.empty()) return "no rollouts\n";
  std::string out =
      fmt::format("{:>5}  {:>7} {:>7} {:>7} {:>5} {:>7}  {}\n", "", "example", "rollout", "reward", "turns", "tokens", "question");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const json::object& row = rows[i];
    const json::value* error = row.if_contains("error");
    const bool has_error = error != nullptr && !error->is_null();
    out +=
        fmt::format("{:>5}  {:>7} {:>7} {:>7.4f} {:>5} {:>7}  {}{}\n", i + 1, number_at(row, "example_id"), number_at(row, "rollout_idx"),
                    number_at(row, "reward"), number_at(row, "num_turns"), number_at(row, "completion_len"), has_error ? "(failed) " : "",
                    one_line(question_of(row), std::max<std::size_t>(width, 80) - 46));
  }
  return out;
}

std::string show_row(const json::object& row) {
  std::string out;
  for (const char* key : {"prompt", "completion"}) {
    if (const json::array* messages = list_at(row, key))
      for (const json::value& message : *messages) show_message(out, message);
    else if (const std::string text = text_at(row, key); !text.empty())
      out += fmt::format("[{}]\n", key) + indented(printable(text)) + "\n";
  }
  out += fmt::format("\nexample {}, rollout {}: reward {:.4f}", number_at(row, "example_id"), number_at(row, "rollout_idx"),
                     number_at(row, "reward"));
  if (const std::string stop = text_at(row, "stop_condition"); !stop.empty()) out += ", stopped by " + printable(stop);
  out += '\n';
  if (const std::string answer = text_at(row, "answer"); !answer.empty()) out += "answer: " + printable(answer) + "\n";
  if (const json::value* metrics = row.if_contains("metrics"); metrics != nullptr && metrics->is_object())
    for (const auto& metric : metrics->get_object())
      out += fmt::format("  {} = {}\n", printable(std::string(metric.key())),
                         metric.value().is_number() ? number_at(metrics->get_object(), std::string(metric.key()).c_str()) : 0.0);
  if (const json::value* error = row.if_contains("error"); error != nullptr && error->is_object())
    out += fmt::format("failed: {}: {}\n", printable(text_at(error->get_object(), "error")),
                       printable(text_at(error->get_object(), "message")));
  return out;
}

Browser::Browser(std::vector<ResultsFolder> folders, std::size_t width) : folders_(std::move(folders)), width_(width) {
  if (folders_.size() == 1) open_folder(0);
}

void Browser::open_folder(std::size_t index) {
  all_rows_ = read_result_rows(folders_[index].path / "results.jsonl");
  order_ = RowOrder::kFile;
  rows_ = all_rows_;
  folder_ = index;
  row_.reset();
}

std::string Browser::screen() const {
  std::string out;
  if (row_)
    out = show_row(rows_[*row_]);
  else if (folder_)
    out = folders_[*folder_].path.string() + "\n" + list_rows(rows_, width_);
  else
    out = list_folders(folders_);
  if (!notice_.empty()) out += notice_ + "\n";
  return out + kHelp + "\n";
}

bool Browser::feed(const std::string& line) {
  notice_.clear();
  std::string word = line;
  std::erase_if(word, [](char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; });
  if (word == "q") return false;
  if (word == "b") {
    if (row_)
      row_.reset();
    else if (folder_ && folders_.size() > 1)
      folder_.reset();
    else
      return false;
    return true;
  }
  if (word == "n" || word == "p" || word.empty()) {
    if (!row_) {
      notice_ = "n and p go through rollouts; open one by its number first";
    } else if (word == "p" ? *row_ == 0 : *row_ + 1 == rows_.size()) {
      notice_ = word == "p" ? "this is the first" : "this is the last";
    } else {
      row_ = word == "p" ? *row_ - 1 : *row_ + 1;
    }
    return true;
  }
  if (word == "s" && folder_) {
    order_ = order_ == RowOrder::kFile ? RowOrder::kRewardUp : order_ == RowOrder::kRewardUp ? RowOrder::kRewardDown : RowOrder::kFile;
    rows_ = select_rows(all_rows_, order_, std::nullopt, std::nullopt);
    row_.reset();
    return true;
  }
  std::size_t number = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  const std::size_t count = folder_ ? rows_.size() : folders_.size();
  if (error != std::errc() || end != word.data() + word.size() || number == 0 || number > count) {
    notice_ = fmt::format("'{}' is nothing to open; type a number from 1 to {}", printable(line), count);
  } else if (folder_) {
    row_ = number - 1;
  } else {
    open_folder(number - 1);
  }
  return true;
}

}  // namespace prl::eval
