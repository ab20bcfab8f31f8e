#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace prl::dashboard {

/// Serves the page of one or several runs and the JSON it is made of, read-only, from the files that the runs write.
///
///   GET /                 the page; its scripts and styles are part of the program
///   GET /api/runs         the runs
///   GET /api/...?run=N    series, metrics, timeline, rollouts, rollout, raw, tokens, evals, config, logs, proofs (docs/dashboard.md)
///   GET /api/events       server-sent events: rows of metrics as they come
///
/// Files are read only while somebody looks: after kIdle without a request the runs are left alone. Requests of web pages of other origins
/// and for other host names are refused as the API server does. Any thread.
class PageServer {
 public:
  struct Options {
    std::string host = "127.0.0.1";
    int port = 0;  ///< 0: a free one
    std::vector<std::filesystem::path> runs;
  };
  explicit PageServer(Options options);
  ~PageServer();
  PageServer(const PageServer&) = delete;
  PageServer& operator=(const PageServer&) = delete;

  /// Error{kIo} if the port is taken.
  void start();
  int port() const noexcept;
  /// "http://127.0.0.1:7007/"
  std::string url() const;
  void stop();

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace prl::dashboard
