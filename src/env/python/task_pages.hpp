#pragma once

#include <boost/json/object.hpp>

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "env/task.hpp"
#include "net/async_result.hpp"

namespace prl::env::python {

namespace asio = boost::asio;

/// The rows of a data set that lies in another process: read in pages, the pages used last are kept. Any thread.
class TaskPages {
 public:
  using Page = std::shared_ptr<const std::vector<TaskRow>>;  ///< in order
  struct Options {
    std::int64_t page_rows = 64;
    std::size_t max_bytes = std::size_t{64} << 20;  ///< of the pages that are kept, about
  };
  /// Reads `limit` rows from `offset` on, fewer only at the end of the data set.
  using Read = std::function<asio::awaitable<std::vector<boost::json::object>>(Split split, std::int64_t offset, std::int64_t limit)>;

  TaskPages(Options options, Read read) : options_(options), read_(std::move(read)) {}
  /// Error{kNotFound} if the data set ends before `index`; whatever Read throws. Callers that want the same page share one reading.
  /// The text of a row is the `task` of its rollouts.
  asio::awaitable<std::shared_ptr<const TaskRow>> row(Split split, std::int64_t index);
  std::int64_t num_reads() const;

 private:
  using Key = std::pair<Split, std::int64_t>;
  struct Kept {
    Key key;
    Page page;
    std::size_t num_bytes = 0;
  };
  Page find(const Key& key);
  void keep(const Key& key, Page page);
  asio::awaitable<Page> read_page(Key key);

  Options options_;
  Read read_;
  mutable std::mutex mutex_;
  std::list<Kept> kept_;  ///< used last first
  std::size_t num_bytes_ = 0;
  std::map<Key, std::vector<net::AsyncResult<Page>>> reading_;  ///< who waits for a page that is being read
  std::int64_t num_reads_ = 0;
};

}  // namespace prl::env::python
