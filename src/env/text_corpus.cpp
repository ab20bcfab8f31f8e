#include "env/text_corpus.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/files.hpp"
#include "env/rubric.hpp"
#include "env/task_data.hpp"
#include "text/json_python.hpp"
#include "text/utf8.hpp"

namespace prl::env {

namespace fs = std::filesystem;

std::vector<std::string> words_of(std::string_view text) {
  const std::string lower = text::to_lower(text::replace_invalid_utf8(text));
  std::vector<std::string> words;
  std::string word;
  for (std::size_t at = 0; at < lower.size();) {
    const std::size_t start = at;
    const char32_t point = text::next_code_point(lower, at);
    if (text::is_word_character(point) && point != '_') {
      word.append(lower, start, at - start);
    } else if (!word.empty()) {
      words.push_back(std::move(word));
      word.clear();
    }
  }
  if (!word.empty()) words.push_back(std::move(word));
  return words;
}

std::string slug(std::string_view title) {
  std::string text;
  for (const std::string& word : words_of(title)) text += (text.empty() ? "" : "_") + word;
  return text.empty() ? "page" : text;
}

TextCorpus::TextCorpus(std::vector<CorpusPage> pages) : pages_(std::move(pages)) {
  constexpr std::uint32_t kTitleWeight = 3;
  for (std::size_t i = 0; i < pages_.size(); ++i) {
    const CorpusPage& page = pages_[i];
    if (!by_id_.emplace(page.id, i).second)
      fail(ErrorCode::kInvalidArgument, "corpus: two pages have the id '{}'; give each its own title or id", page.id);
    std::unordered_map<std::string, std::uint32_t> counts;
    double length = 0;
    for (std::string& word : words_of(page.title)) counts[std::move(word)] += kTitleWeight;
    for (const CorpusSection& section : page.sections)
      for (const std::string& text : {section.title, section.text})
        for (std::string& word : words_of(text)) ++counts[std::move(word)];
    for (const auto& [word, count] : counts) {
      postings_[word].push_back({static_cast<std::uint32_t>(i), count});
      length += count;
    }
    lengths_.push_back(length);
    mean_length_ += length;
  }
  if (!pages_.empty()) mean_length_ /= static_cast<double>(pages_.size());
}

const CorpusPage* TextCorpus::find(std::string_view id) const noexcept {
  const auto it = by_id_.find(std::string(id));
  return it == by_id_.end() ? nullptr : &pages_[it->second];
}

std::vector<const CorpusPage*> TextCorpus::search(std::string_view query, std::size_t limit) const {
  constexpr double kK1 = 1.2;
  constexpr double kB = 0.75;
  std::vector<double> scores(pages_.size(), 0.0);
  std::vector<std::string> words = words_of(query);
  std::sort(words.begin(), words.end());
  words.erase(std::unique(words.begin(), words.end()), words.end());
  const auto num_pages = static_cast<double>(pages_.size());
  for (const std::string& word : words) {
    const auto it = postings_.find(word);
    if (it == postings_.end()) continue;
    const auto num_hits = static_cast<double>(it->second.size());
    const double idf = std::log(1.0 + (num_pages - num_hits + 0.5) / (num_hits + 0.5));
    for (const Posting& posting : it->second) {
      const double count = posting.count;
      scores[posting.page] += idf * count * (kK1 + 1) / (count + kK1 * (1 - kB + kB * lengths_[posting.page] / mean_length_));
    }
  }
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < scores.size(); ++i)
    if (scores[i] > 0) order.push_back(i);
  const auto better = [&](std::size_t a, std::size_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; };
  const std::size_t count = std::min(limit, order.size());
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), order.end(), better);
  std::vector<const CorpusPage*> found;
  for (std::size_t i = 0; i < count; ++i) found.push_back(&pages_[order[i]]);
  return found;
}

namespace {

/// Sections by their headings; text before the first one is "Introduction". `title` becomes the first heading if empty.
std::vector<CorpusSection> split_sections(const std::string& text, std::string& title) {
  std::vector<CorpusSection> sections{{"Introduction", ""}};
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    at = end + 1;
    const std::size_t level = line.find_first_not_of('#');
    if (level == 0 || level == std::string::npos || line[level] != ' ') {
      sections.back().text += line + "\n";
      continue;
    }
    const std::string heading = strip(line.substr(level));
    if (title.empty())
      title = heading;
    else
      sections.push_back({heading, ""});
  }
  for (CorpusSection& section : sections) section.text = strip(section.text);
  if (sections.size() > 1 && sections.front().text.empty()) sections.erase(sections.begin());
  return sections;
}

CorpusPage read_page(const boost::json::object& row, const std::string& where) {
  const auto text_at = [&](std::initializer_list<const char*> keys) -> std::string {
    for (const char* key : keys)
      if (const auto* value = row.if_contains(key); value != nullptr && text::is_text(*value)) return std::string(value->get_string());
    return {};
  };
  CorpusPage page;
  page.title = text_at({"title"});
  std::string text = text_at({"text", "content"});
  if (page.title.empty() || text.empty()) fail(ErrorCode::kInvalidArgument, "{}: wanted texts in 'title' and 'text' (or 'content')", where);
  page.id = text_at({"id"});
  if (page.id.empty()) page.id = slug(page.title);
  std::replace(page.id.begin(), page.id.end(), ':', '_');
  page.sections = split_sections(text, page.title);
  return page;
}

}  // namespace

TextCorpus TextCorpus::from_rows(const std::vector<boost::json::object>& rows, const std::string& source) {
  std::vector<CorpusPage> pages;
  for (const auto& row : rows) pages.push_back(read_page(row, fmt::format("{}: row {}", source, pages.size() + 1)));
  if (pages.empty()) fail(ErrorCode::kInvalidArgument, "{}: no pages", source);
  return TextCorpus(std::move(pages));
}

TextCorpus TextCorpus::load(const fs::path& path) {
  std::vector<CorpusPage> pages;
  if (fs::is_directory(path)) {
    std::vector<fs::path> files;
    for (const auto& entry : fs::recursive_directory_iterator(path))
      if (entry.is_regular_file() && (entry.path().extension() == ".md" || entry.path().extension() == ".txt"))
        files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    for (const fs::path& file : files) {
      CorpusPage page;
      page.sections = split_sections(text::replace_invalid_utf8(read_file(file)), page.title);
      if (page.title.empty()) page.title = file.stem().string();
      page.id = slug(fs::relative(file, path).replace_extension().string());
      pages.push_back(std::move(page));
    }
  } else {
    return from_rows(read_task_rows(path), path.string());
  }
  if (pages.empty())
    fail(ErrorCode::kInvalidArgument, "{}: no pages; wanted a JSONL file or a folder of .md and .txt files", path.string());
  return TextCorpus(std::move(pages));
}

}  // namespace prl::env
