#include "config/detail/urls.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace prl::config::detail {

int url_port(const std::string& url) {
  const std::size_t scheme = url.find("://");
  const std::size_t begin = scheme == std::string::npos ? 0 : scheme + 3;
  const std::size_t end = std::min(url.find('/', begin), url.size());
  const std::size_t colon = url.rfind(':', end);
  if (colon == std::string::npos || colon < begin) return url.starts_with("https") ? 443 : 80;
  int port = 0;
  std::from_chars(url.data() + colon + 1, url.data() + end, port);
  return port;
}

std::string local_url(const std::string& host, int port) {
  const bool is_any = host.empty() || host == "0.0.0.0" || host == "::";
  return fmt::format("http://{}:{}/v1", is_any ? "127.0.0.1" : host, port);
}

}  // namespace prl::config::detail
