#pragma once

#include <boost/json/object.hpp>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace prl::env {

struct CorpusSection {
  std::string title;
  std::string text;
};
struct CorpusPage {
  std::string id;  ///< unique; without ':'
  std::string title;
  std::vector<CorpusSection> sections;  ///< at least one
};

/// Pages of text in sections, with a search over them. Immutable after construction; any thread.
class TextCorpus {
 public:
  /// Error{kInvalidArgument} for two pages of one id.
  explicit TextCorpus(std::vector<CorpusPage> pages);
  /// A JSONL, Parquet or CSV file with a page per row {title, text (or content), id?} or a folder of .md and .txt files (title: the first
  /// heading, else the file's name). Lines that begin with '#' open sections. Error{kNotFound}, {kCorrupt}, {kInvalidArgument}
  /// naming the file.
  static TextCorpus load(const std::filesystem::path& path);
  /// A page per row {title, text (or content), id?}; `source` is named in errors.
  static TextCorpus from_rows(const std::vector<boost::json::object>& rows, const std::string& source);

  const std::vector<CorpusPage>& pages() const noexcept { return pages_; }
  /// nullptr if there is none.
  const CorpusPage* find(std::string_view id) const noexcept;
  /// The pages that fit `query` best, best first, at most `limit`: BM25 (k1 1.2, b 0.75) over lower-cased words of title and
  /// text, the title counted three times; ties in order of the pages. Pages without any of the words are left out.
  std::vector<const CorpusPage*> search(std::string_view query, std::size_t limit) const;

 private:
  struct Posting {
    std::uint32_t page;
    std::uint32_t count;
  };
  std::vector<CorpusPage> pages_;
  std::unordered_map<std::string, std::size_t> by_id_;
  std::unordered_map<std::string, std::vector<Posting>> postings_;
  std::vector<double> lengths_;  ///< words per page
  double mean_length_ = 0;
};

/// Words of a text for searching and comparing: runs of letters and digits, lower case.
std::vector<std::string> words_of(std::string_view text);
/// "The History" to "the_history": how section ids are made of titles.
std::string slug(std::string_view title);

}  // namespace prl::env
