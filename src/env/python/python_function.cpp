#include "env/python/python_function.hpp"

#include <mutex>
#include <utility>

#include "base/error.hpp"
#include "env/python/setup.hpp"
#include "env/python/worker_pool.hpp"

namespace prl::env::python {

namespace json = boost::json;
using namespace std::chrono_literals;

struct PythonFunction::Impl {
  PoolOptions options;
  json::array paths;
  std::mutex mutex;
  std::unique_ptr<WorkerPool> pool;  ///< guarded by mutex

  WorkerPool& workers() {
    std::lock_guard lock(mutex);
    if (!pool) pool = std::make_unique<WorkerPool>(options);
    return *pool;
  }
};

PythonFunction::PythonFunction(std::string key, const std::string& path, json::object kwargs, const PythonSettings& settings)
    : function_(path), kwargs_(std::move(kwargs)), impl_(std::make_unique<Impl>()) {
  const std::size_t dot = function_.rfind('.');
  if (dot == std::string::npos || dot == 0 || dot + 1 == function_.size())
    fail(ErrorCode::kInvalidArgument, "{} = {}: wanted module.name of a Python function", key, path);
  function_[dot] = ':';
  PythonSettings own = settings;
  own.path = {};
  own.kind = "fake";  // a worker without an environment: it is loaded at once
  own.num_workers = 1;
  PythonOptions planned = plan_environment(function_.substr(0, dot), key, {}, own);
  impl_->options = std::move(planned.pool);
  impl_->options.load["env_key"] = "function";
  for (const std::filesystem::path& folder : folders_of(settings.path, key)) impl_->paths.emplace_back(folder.string());
}

PythonFunction::~PythonFunction() = default;

net::asio::awaitable<json::value> PythonFunction::call(json::array args, std::chrono::milliseconds limit) const {
  json::object request;
  request["t"] = "call";
  request["function"] = function_;
  request["args"] = std::move(args);
  request["kwargs"] = kwargs_;
  if (!impl_->paths.empty()) request["paths"] = impl_->paths;
  request["deadline_s"] = std::chrono::duration<double>(limit).count();
  // The worker keeps the deadline itself, and says what it was doing; its start is added.
  auto asking = impl_->workers().request(std::move(request), net::Clock::now() + limit + 60s);
  const json::object reply = co_await std::move(asking);
  const json::value* value = reply.if_contains("value");
  co_return value != nullptr ? *value : json::value(nullptr);
}

json::value PythonFunction::call_now(json::array args, std::chrono::milliseconds limit) const {
  auto calling = call(std::move(args), limit);
  return impl_->workers().runtime().run_blocking(std::move(calling), limit + 90s);
}

}  // namespace prl::env::python
