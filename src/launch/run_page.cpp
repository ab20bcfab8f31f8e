#include "launch/run_page.hpp"

#include "base/error.hpp"
#include "base/log.hpp"

namespace prl::launch {

std::unique_ptr<dashboard::PageServer> serve_run_page(const std::optional<config::DashboardConfig>& config,
                                                      const std::filesystem::path& output_dir) {
  if (!config) return nullptr;
  std::string why;
  for (const int port : {config->port, 0}) {
    try {
      auto page =
          std::make_unique<dashboard::PageServer>(dashboard::PageServer::Options{.host = config->host, .port = port, .runs = {output_dir}});
      page->start();
      if (why.empty())
        log::info("page: {}", page->url());
      else
        log::info("page: {} (port {} is taken)", page->url(), config->port);
      return page;
    } catch (const Error& error) {
      why = error.what();
    }
  }
  log::warning("the run has no page: {}", why);
  return nullptr;
}

}  // namespace prl::launch
