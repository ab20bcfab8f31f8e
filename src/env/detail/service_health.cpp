#include "env/detail/service_health.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/waiting.hpp"
#include "net/deadline.hpp"
#include "net/service.hpp"

namespace prl::env::detail {

using namespace std::chrono_literals;

asio::awaitable<void> wait_for_service(std::shared_ptr<net::HttpClient> client, std::string root, std::string model,
                                       net::TimePoint deadline) {
  std::string problem;
  Waiting waiting({.who = "this process",
                   .what = fmt::format("the inference server {} to be ready", root),
                   .limit = deadline - net::Clock::now(),
                   .detail = [&problem] { return problem; }});
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - net::Clock::now());
    auto trying = net::probe_health(client, root, std::clamp(left, 1ms, 5000ms));
    problem = co_await std::move(trying);
    if (problem.empty()) break;
    if (waiting.is_expired()) waiting.fail_expired();
    waiting.check();
    co_await net::sleep_until(std::min(deadline, net::Clock::now() + 500ms));
  }
  if (model.empty()) co_return;
  net::HttpCall call;
  call.url = root + "/v1/models";
  call.deadline = deadline;
  auto calling = client->call(std::move(call));
  const net::HttpReply reply = co_await std::move(calling);
  reply.raise_for_status(root + "/v1/models");
  const boost::json::value body = reply.json();
  std::vector<std::string> names;
  if (const auto* object = body.if_object())
    if (const auto* data = object->if_contains("data"); data != nullptr && data->is_array())
      for (const auto& entry : data->get_array())
        if (entry.is_object() && entry.get_object().contains("id") && entry.at("id").is_string())
          names.emplace_back(entry.at("id").get_string());
  if (std::find(names.begin(), names.end(), model) == names.end())
    fail(ErrorCode::kNotFound, "{} does not serve the model {}; it serves {}", root, model,
         names.empty() ? std::string("none") : fmt::format("{}", fmt::join(names, ", ")));
}

}  // namespace prl::env::detail
