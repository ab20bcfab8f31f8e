#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace prl::dashboard {

/// Serves the page of one or several runs and the JSON it is made of, from the files that the runs write.
///
///   GET /                 the page; its scripts and styles are part of the program
///   GET /api/runs         the runs
///   GET /api/...?run=N    series, metrics, timeline, rollouts, rollout, raw, tokens, evals, config, logs, proofs (docs/dashboard.md)
///   GET /api/events       server-sent events: rows of metrics as they come
///   GET /api/control      whether the run can be controlled, and is paused
///   POST /api/control/... pause, resume, checkpoint, stop; with the key, and only where there is one
///
/// Files are read only while somebody looks: after kIdle without a request the runs are left alone. Requests of web pages of other origins
/// and for other host names are refused as the API server does. Any thread.
class PageServer {
 public:
  /// What the page may do to the run that it shows, for who sends the key as "Authorization: Bearer KEY". Called by one thread at a time;
  /// an error is the answer of the request.
  struct Control {
    std::string key;  ///< not empty
    std::function<bool()> is_paused;
    std::function<void(bool is_paused)> set_paused;
    std::function<void()> save;  ///< a checkpoint, as soon as can be
    std::function<void()> stop;
  };
  struct Options {
    std::string host = "127.0.0.1";
    int port = 0;  ///< 0: a free one
    std::vector<std::filesystem::path> runs = {};
    std::optional<Control> control = {};  ///< none: read-only
    int niceness = 0;                     ///< above 0: the page's threads give way to others of the machine, as nice(1) does it
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
