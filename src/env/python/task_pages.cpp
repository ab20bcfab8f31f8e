#include "env/python/task_pages.hpp"

#include <exception>
#include <optional>

#include "base/error.hpp"
#include "net/errors.hpp"
#include "text/json_python.hpp"

namespace prl::env::python {

namespace json = boost::json;

namespace {

/// What `run` tells of a row as its `task`.
std::string task_text(const json::object& row) {
  std::string out;
  for (const char* key : {"index", "id", "hash", "data"})
    if (const json::value* value = row.if_contains(key))
      out += fmt::format("{}\"{}\":{}", out.empty() ? '{' : ',', key, text::to_json_text(*value));
  return out.empty() ? "{}" : out + "}";
}

}  // namespace

TaskPages::Page TaskPages::find(const Key& key) {
  for (auto it = kept_.begin(); it != kept_.end(); ++it)
    if (it->key == key) {
      kept_.splice(kept_.begin(), kept_, it);
      return kept_.front().page;
    }
  return nullptr;
}

void TaskPages::keep(const Key& key, Page page) {
  std::size_t size = 0;
  for (const TaskRow& row : *page) size += 2 * text::to_json_text(row.values).size() + row.text.size();
  kept_.push_front({key, std::move(page), size});
  num_bytes_ += kept_.front().num_bytes;
  while (num_bytes_ > options_.max_bytes && kept_.size() > 1) {
    num_bytes_ -= kept_.back().num_bytes;
    kept_.pop_back();
  }
}

asio::awaitable<TaskPages::Page> TaskPages::read_page(Key key) {
  Page page;
  std::exception_ptr failure;
  try {
    auto reading = read_(key.first, key.second * options_.page_rows, options_.page_rows);
    std::vector<TaskRow> rows;
    for (json::object& row : co_await std::move(reading)) {
      std::string text = task_text(row);
      rows.push_back({std::move(row), std::move(text)});
    }
    page = std::make_shared<const std::vector<TaskRow>>(std::move(rows));
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  std::vector<net::AsyncResult<Page>> waiters;
  {
    std::lock_guard lock(mutex_);
    if (page) keep(key, page);
    if (const auto it = reading_.find(key); it != reading_.end()) {
      waiters = std::move(it->second);
      reading_.erase(it);
    }
  }
  // The one who read may have been cancelled: the others then read themselves.
  for (const auto& waiter : waiters) waiter.set_value(page);
  if (failure) std::rethrow_exception(failure);
  co_return page;
}

asio::awaitable<std::shared_ptr<const TaskRow>> TaskPages::row(Split split, std::int64_t index) {
  const Key key{split, index / options_.page_rows};
  Page page;
  for (int attempt = 0; !page; ++attempt) {
    std::optional<net::AsyncResult<Page>> waiting;
    {
      std::lock_guard lock(mutex_);
      page = find(key);
      const auto it = reading_.find(key);
      if (!page && it != reading_.end() && attempt < 8) waiting = it->second.emplace_back();
      if (!page && !waiting) {
        reading_.try_emplace(key);
        ++num_reads_;
      }
    }
    if (page) break;
    if (waiting) {
      auto shared = waiting->wait(net::Clock::now() + std::chrono::minutes(10), "a page of tasks");
      page = co_await std::move(shared);
    } else {
      auto reading = read_page(key);
      page = co_await std::move(reading);
    }
  }
  const auto place = static_cast<std::size_t>(index % options_.page_rows);
  if (place >= page->size()) fail(ErrorCode::kNotFound, "task {}: the data set ends before it", index);
  co_return std::shared_ptr<const TaskRow>(page, &(*page)[place]);
}

std::int64_t TaskPages::num_reads() const {
  std::lock_guard lock(mutex_);
  return num_reads_;
}

}  // namespace prl::env::python
