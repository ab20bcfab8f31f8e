#include "launch/run_page.hpp"

#include <sys/stat.h>

#include <random>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/run_orders.hpp"

namespace prl::launch {
namespace {

/// Trainer and engine come first: the page takes what they leave of the processors.
constexpr int kPageNiceness = 10;

std::string new_key() {
  std::random_device device;
  std::string key;
  for (int i = 0; i < 4; ++i) key += fmt::format("{:08x}", device());
  return key;
}

/// The key of the configuration, or one of this run that is told where only its user can read.
std::string control_key(const config::DashboardConfig& config, const std::filesystem::path& output_dir) {
  const std::filesystem::path path = output_dir / "control.key";
  if (config.control_api_key && !config.control_api_key->empty()) return *config.control_api_key;
  const std::string key = new_key();
  const mode_t before = ::umask(0177);
  try {
    std::filesystem::remove(path);
    write_file_atomic(path, key + "\n");
  } catch (...) {
    ::umask(before);
    throw;
  }
  ::umask(before);
  log::info("page: its controls ask for the key in {}", path.string());
  return key;
}

dashboard::PageServer::Control make_control(std::string key, const std::filesystem::path& output_dir, const RunPageControl& control) {
  const RunOrders orders = RunOrders::open(output_dir);
  return {.key = std::move(key),
          .is_paused = [orders] { return orders.is_paused(); },
          .set_paused = [orders](bool is_paused) { orders.set_paused(is_paused); },
          .save =
              [orders, has_checkpoints = control.has_checkpoints] {
                if (!has_checkpoints) fail(ErrorCode::kInvalidArgument, "checkpoints are off: start the run with --ckpt");
                orders.ask_for_checkpoint();
              },
          .stop =
              [stop = control.stop, orders] {
                stop();
                orders.set_paused(false);
              }};
}

}  // namespace

std::unique_ptr<dashboard::PageServer> serve_run_page(const std::optional<config::DashboardConfig>& config,
                                                      const std::filesystem::path& output_dir, const RunPageControl& control) {
  RunOrders::close(output_dir);  // of a run that was killed
  if (!config) return nullptr;
  std::string why;
  std::optional<dashboard::PageServer::Control> controls;
  if (config->control) controls = make_control(control_key(*config, output_dir), output_dir, control);
  for (const int port : {config->port, 0}) {
    try {
      auto page = std::make_unique<dashboard::PageServer>(dashboard::PageServer::Options{
          .host = config->host, .port = port, .runs = {output_dir}, .control = controls, .niceness = kPageNiceness});
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
