#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "env/text_corpus.hpp"

namespace prl::env {

/// A question about the pages, where its answer stands, and what to search for.
struct CorpusQuestion {
  std::string question;
  std::vector<std::string> answers;  ///< any of them is right
  struct Source {
    std::string query;
    std::string page_id;
    std::size_t section = 0;
  };
  std::vector<Source> sources;  ///< to be read in this order; empty: not known
};

struct MadeUpWorld {
  std::vector<CorpusPage> pages;
  std::vector<CorpusQuestion> questions;
};

/// Pages about towns and people that do not exist, so that no model knows the answers, and every question that can be asked
/// about one fact, or about two facts where the first names the page of the second. Pure in its arguments.
MadeUpWorld make_world(std::int64_t num_pages, std::uint64_t seed);

}  // namespace prl::env
