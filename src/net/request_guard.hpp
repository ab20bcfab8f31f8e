#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "net/http_server.hpp"

namespace prl::net {

/// Compares in time that does not depend on where the keys differ.
bool is_same_key(std::string_view a, std::string_view b) noexcept;
/// Whether the request has the key, as a bearer or as x-api-key. `key` is not empty.
bool has_key(const HttpRequest& request, std::string_view key) noexcept;
/// Whether `key` may be that of one run of a server with these keys: fail_param("api_key") saying why not.
void check_run_key(std::string_view key, std::string_view api_key, std::string_view admin_api_key);

/// Who may use a route.
enum class Access {
  kOpen,
  kApiKey,
  kAdminKey,
  kWeights,  ///< as kAdminKey, and of a server that belongs to a run only by that run
};

/// Decides about requests by their header alone: keys, and what web pages may ask for. Immutable once the server has started.
///
/// A browser on this machine reaches a server that listens here, whatever page it shows, so where no key is asked for a request must
/// not come from a page of another origin: its Origin must be this server or one of cors_origins, and a server on a loopback address must
/// be called by an address, by `localhost` or by one of allowed_hosts (a page could give its own host name this machine's address). Bodies
/// of the three content types that a page may send without asking are refused. A request with the right key needs none of this.
class RequestGuard {
 public:
  struct Options {
    std::string api_key = {};
    std::string admin_api_key = {};               ///< empty: api_key
    std::vector<std::string> cors_origins = {};   ///< "https://host:port", or "*" for all
    std::vector<std::string> allowed_hosts = {};  ///< names of this server besides addresses and localhost; "*" for any
    std::string host = {};                        ///< where it listens
    std::string run_id = {};                      ///< the run it belongs to; empty: none
    /// Ends of the messages that refuse an origin or a host.
    std::string origin_advice = "; list the origin in server.cors_origins";
    std::string host_advice = "; list the name in server.allowed_hosts, or set server.api_key";
  };
  explicit RequestGuard(Options options);

  /// Other keys of the routes of Access::kApiKey, for instance those of single runs. It may be called from any thread.
  void accept_keys(std::function<bool(const HttpRequest&)> has_other_key) { has_other_key_ = std::move(has_other_key); }
  /// Paths as those of HttpServer::route.
  void add_route(const std::string& method, const std::string& path, Access access) { routes_[path][method] = access; }
  HttpServer::Verdict operator()(const HttpRequest& request) const;

 private:
  using Methods = std::map<std::string, Access>;
  bool is_listed(std::string_view origin) const;
  [[noreturn]] void forbid_page(std::string_view origin) const;
  bool is_known_host(std::string_view host) const;
  HttpResponse answer_options(const HttpRequest& request, const Methods* methods, bool is_allowed) const;
  /// Throws 401 without the key of the route, 403 where the request has the API key and the route wants the other; true if there is one.
  bool check_key(const HttpRequest& request, Access access) const;
  /// Throws 421 if the request is meant for the server of another run, or would change the weights of a run's server from outside.
  void check_run(const HttpRequest& request, Access access) const;
  /// Throws 403.
  void check_page(const HttpRequest& request, bool is_allowed) const;

  Options options_;
  std::function<bool(const HttpRequest&)> has_other_key_;
  bool is_loopback_;
  std::map<std::string, Methods> routes_;
};

}  // namespace prl::net
