#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "engine/tenant.hpp"
#include "net/http_message.hpp"

namespace prl::server {

/// What the server knows of the runs that share it: how much of the engine each gets, and the key that each has. A run is named as its
/// adapter is. Any thread.
class TenantBook {
 public:
  using Apply = std::function<void(const std::string& name, const engine::TenantOptions& options)>;

  /// What a request changes; what is not set stays.
  struct Change {
    std::optional<double> weight;
    std::optional<std::int64_t> max_tokens_in_flight;
    std::optional<engine::TenantState> state;
    std::optional<std::string> api_key;  ///< of requests of this run alone; empty: none
  };
  /// `apply` is called with what the run then has, and nothing is changed if it throws. Error{kAlreadyExists} if another run has the key,
  /// {kNotFound} if the run must exist and does not.
  void change(const std::string& name, const Change& change, bool must_exist, const Apply& apply);
  /// `apply` first. Error{kNotFound}.
  void remove(const std::string& name, const std::function<void(const std::string& name)>& apply);
  void require(const std::string& name) const;

  bool has_key(const std::string& name) const;
  /// The run whose key the request carries; nullopt: none.
  std::optional<std::string> run_of(const net::HttpRequest& request) const;

 private:
  struct Entry {
    engine::TenantOptions options;
    std::string api_key;
  };
  [[noreturn]] void fail_unknown(const std::string& name) const;

  mutable std::mutex mutex_;
  std::map<std::string, Entry, std::less<>> entries_;  ///< guarded
};

}  // namespace prl::server
