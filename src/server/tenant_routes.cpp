#include <utility>

#include "base/log.hpp"
#include "server/json_fields.hpp"
#include "server/json_writer.hpp"
#include "server/routes.hpp"

/// Runs that share the server: how much of it each gets.
namespace prl::server {
namespace {

std::string run_name(const JsonFields& fields) {
  const auto name = fields.string("name");
  if (!name || name->empty() || name->size() > kMaxAdapterNameBytes || name->find('\0') != std::string::npos)
    net::fail_param("name", fmt::format("name: wanted the name of the run's adapter, of 1 to {} bytes", kMaxAdapterNameBytes));
  return *name;
}

std::string_view to_string(engine::TenantState state) noexcept {
  switch (state) {
    case engine::TenantState::kOpen: return "open";
    case engine::TenantState::kPaused: return "paused";
    case engine::TenantState::kDraining: return "draining";
  }
  return "";
}

Reply change_state(Context context, HttpRequest request, engine::TenantState state) {
  const boost::json::object body = parse_body(request.body);
  const std::string name = run_name(JsonFields(body));
  auto work = [context, name, state]() -> std::string {
    TenantBook::Change change;
    change.state = state;
    context->tenants.change(name, change, /*must_exist=*/true, [&](const std::string& run, const engine::TenantOptions& options) {
      context->backend->set_tenant(run, options);
    });
    log::info("run '{}' is {}", name, to_string(state));
    return fmt::format(R"({{"status":"{}"}})", to_string(state));
  };
  return on_admin(std::move(context), std::move(work), "the run's state to be changed");
}

}  // namespace

Reply list_runs(Context context, HttpRequest) {
  auto work = [context]() -> std::string {
    JsonWriter out;
    out.begin_object().key("object").string("list").key("data").begin_array();
    for (const engine::TenantStats& run : context->backend->tenants()) {
      out.begin_object().key("name").string(run.name).key("state").string(to_string(run.options.state));
      out.key("weight").number(run.options.weight).key("max_tokens_in_flight").integer(run.options.max_tokens_in_flight);
      out.key("has_api_key").boolean(context->tenants.has_key(run.name));
      out.key("num_requests_running").integer(run.num_running).key("num_requests_waiting").integer(run.num_waiting);
      out.key("num_tokens_in_flight").integer(run.num_tokens_in_flight).key("num_tokens").integer(run.num_tokens);
      out.key("num_generation_tokens").integer(run.num_generation_tokens).end_object();
    }
    return out.end_array().end_object().take();
  };
  return on_admin(std::move(context), std::move(work), "the engine to list its runs");
}

Reply put_run(Context context, HttpRequest request) {
  const boost::json::object body = parse_body(request.body);
  const JsonFields fields(body);
  const std::string name = run_name(fields);
  TenantBook::Change change;
  change.weight = fields.number("weight", 1e-6, 1e6);
  change.max_tokens_in_flight = fields.integer("max_tokens_in_flight", 0, std::numeric_limits<std::int64_t>::max());
  change.api_key = fields.string("api_key");
  if (change.api_key && !change.api_key->empty())
    net::check_run_key(*change.api_key, context->options.api_key, context->options.admin_api_key);
  auto work = [context, name, change]() -> std::string {
    context->tenants.change(name, change, /*must_exist=*/false, [&](const std::string& run, const engine::TenantOptions& options) {
      context->backend->set_tenant(run, options);
    });
    log::debug("run '{}' has another share of the engine", name);
    return R"({"status":"ok"})";
  };
  return on_admin(std::move(context), std::move(work), "the run's share to be set");
}

Reply pause_run(Context context, HttpRequest request) {
  return change_state(std::move(context), std::move(request), engine::TenantState::kPaused);
}
Reply resume_run(Context context, HttpRequest request) {
  return change_state(std::move(context), std::move(request), engine::TenantState::kOpen);
}
Reply drain_run(Context context, HttpRequest request) {
  return change_state(std::move(context), std::move(request), engine::TenantState::kDraining);
}

Reply cancel_run(Context context, HttpRequest request) {
  const boost::json::object body = parse_body(request.body);
  const std::string name = run_name(JsonFields(body));
  auto work = [context, name]() -> std::string {
    context->tenants.require(name);
    const std::int64_t count = context->backend->cancel_tenant(name);
    log::info("{} requests of run '{}' were cancelled", count, name);
    return fmt::format(R"({{"status":"cancelled","num_requests":{}}})", count);
  };
  return on_admin(std::move(context), std::move(work), "the run's requests to be cancelled");
}

Reply remove_run(Context context, HttpRequest request) {
  const boost::json::object body = parse_body(request.body);
  const std::string name = run_name(JsonFields(body));
  auto work = [context, name]() -> std::string {
    context->tenants.remove(name, [&](const std::string& run) { context->backend->remove_tenant(run); });
    return R"({"status":"removed"})";
  };
  return on_admin(std::move(context), std::move(work), "the run to be forgotten");
}

}  // namespace prl::server
