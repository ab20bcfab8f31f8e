#include "dashboard/report.hpp"

#include <fmt/core.h>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <iterator>
#include <limits>

#include "base/error.hpp"
#include "dashboard/log_view.hpp"
#include "dashboard/plot.hpp"
#include "dashboard/rollout_text.hpp"
#include "dashboard/run_view.hpp"
#include "dashboard/svg_chart.hpp"

namespace prl::dashboard {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

constexpr std::size_t kMaxReportPoints = 800;
constexpr std::size_t kMaxRolloutText = 20'000;

constexpr std::string_view kStyle =
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#111;background:#fff}"
    "h1{font-size:1.5em}h2{font-size:1.2em;margin-top:2em;border-bottom:1px solid #ccc}table{border-collapse:collapse}"
    "td,th{padding:.15em .8em;border:1px solid #ccc;text-align:left}td.n{text-align:right;font-variant-numeric:tabular-nums}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f5f5f5;padding:.6em;border-left:3px solid #888}"
    "svg{max-width:100%;height:auto}summary{cursor:pointer}.role{font-weight:600}";

void put_charts(std::string& out, const SeriesStore& store) {
  out += "<h2>Curves</h2>\n";
  for (const char* const name : kFirstMetrics)
    for (const SeriesStore::Key& key : find_metric(store, name)) {
      Curve curve = sample_curve(*store.find(key.role, key.name), 0, std::numeric_limits<std::int64_t>::max(), kMaxReportPoints);
      Chart chart{.title = fmt::format("{} ({})", key.name, key.role), .width = 960, .height = 260};
      chart.lines.push_back({key.name, std::move(curve.steps), std::move(curve.mean)});
      out += draw_chart(chart) + "\n";
    }
}

void put_last_step(std::string& out, const SeriesStore& store) {
  out +=
      "<h2>Last values</h2>\n<details><summary>all "
      "metrics</summary><table><tr><th>metric</th><th>role</th><th>step</th><th>value</th></tr>\n";
  for (const auto& [key, series] : store.all())
    fmt::format_to(std::back_inserter(out), "<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{:.6g}</td></tr>\n",
                   escape_markup(key.name), escape_markup(key.role), series.steps().back(), series.values().back());
  out += "</table></details>\n";
}

void put_messages(std::string& out, const json::value* messages) {
  if (messages == nullptr) return;
  if (messages->is_string()) {
    out += "<pre>" + escape_markup(std::string_view(messages->get_string().data(), messages->get_string().size())) + "</pre>\n";
    return;
  }
  if (!messages->is_array()) return;
  for (const json::value& message : messages->get_array()) {
    if (!message.is_object()) continue;
    for (const auto& member : message.get_object()) {
      const std::string_view key(member.key().data(), member.key().size());
      if (member.value().is_null()) continue;
      const std::string text = member.value().is_string() ? std::string(member.value().get_string()) : json::serialize(member.value());
      if (key == "role")
        out += "<div class=\"role\">" + escape_markup(text) + "</div>\n";
      else if (!text.empty() && text != "[]")
        out += (key == "content" ? "" : "<div>" + escape_markup(key) + "</div>") + "<pre>" + escape_markup(text) + "</pre>\n";
    }
  }
}

void put_rollout(std::string& out, const RolloutIndex& index, const RolloutEntry& entry) {
  fmt::format_to(std::back_inserter(out), "<details><summary>{} {}, row {}: reward {}{}, {} tokens{}</summary>\n",
                 escape_markup(index.name(entry.env)), kind_name(entry.kind), entry.row,
                 entry.has_reward ? fmt::format("{:.4g}", entry.reward) : "none",
                 entry.has_advantage ? fmt::format(", advantage {:.4g}", entry.advantage) : "", entry.output_tokens,
                 entry.error != 0 ? ", error " + escape_markup(index.name(entry.error)) : "");
  try {
    json::value value = load_rollout(index.path_of(entry), entry);
    cut_texts(value, kMaxRolloutText, 4 * kMaxRolloutText);
    put_messages(out, value.as_object().if_contains("prompt"));
    put_messages(out, value.as_object().if_contains("completion"));
    if (const json::value* answer = value.as_object().if_contains("answer"); answer && answer->is_string())
      out += "<div class=\"role\">answer</div><pre>" + escape_markup(std::string(answer->get_string())) + "</pre>\n";
  } catch (const Error& error) {
    out += "<p>" + escape_markup(error.what()) + "</p>\n";
  }
  out += "</details>\n";
}

void put_rollouts(std::string& out, const RolloutIndex& index, int num_rollouts) {
  const RolloutIndex::Facets facets = index.facets();
  if (num_rollouts == 0 || facets.num_train == 0) return;
  RolloutQuery query{.kind = RolloutKind::kTrain, .order = RolloutQuery::Order::kRewardDown};
  query.step_from = query.step_to = facets.last_step;
  const std::vector<RolloutEntry> entries = index.select(query);
  fmt::format_to(std::back_inserter(out), "<h2>Rollouts of step {}</h2>\n<p>{} in all; the best and the worst by reward.</p>\n",
                 facets.last_step, entries.size());
  const auto wanted = static_cast<std::size_t>(num_rollouts);
  for (std::size_t i = 0; i < entries.size(); ++i)
    if (entries.size() <= wanted || i < (wanted + 1) / 2 || i >= entries.size() - wanted / 2) put_rollout(out, index, entries[i]);
}

void put_evals(std::string& out, const RolloutIndex& index) {
  const auto points = index.eval_points();
  if (points.empty()) return;
  out +=
      "<h2>Evaluations</h2>\n<table><tr><th>step</th><th>environment</th><th>mean reward</th><th>95% interval</th><th>rollouts</th></tr>\n";
  for (const auto& point : points)
    fmt::format_to(std::back_inserter(out),
                   "<tr><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{:.4f}</td><td class=\"n\">&plusmn;{:.4f}</td><td "
                   "class=\"n\">{}</td></tr>\n",
                   point.step, escape_markup(index.name(point.env)), point.mean, point.half_width, point.count);
  out += "</table>\n";
}

void put_warnings(std::string& out, const fs::path& run) {
  std::string rows;
  for (const fs::path& file : list_logs(run / "logs")) {
    LogQuery query;
    query.min_level = 3;
    query.max_lines = 50;
    for (const LogLine& line : read_log(run / "logs" / file, query).lines)
      rows += "<tr><td>" + escape_markup(file.string()) + "</td><td>" + escape_markup(line.time) + "</td><td>" +
              std::string(level_name(line.level)) + "</td><td>" + escape_markup(line.text) + "</td></tr>\n";
  }
  if (!rows.empty()) out += "<h2>Warnings and errors</h2>\n<table>\n" + rows + "</table>\n";
}

}  // namespace

std::string make_report(const fs::path& folder, int num_rollouts) {
  RunView run(folder, folder.lexically_normal().filename().string());
  while (run.refresh()) {
  }
  const std::string name = escape_markup(fs::absolute(folder).lexically_normal().string());
  const SeriesStore& store = run.series_store();
  std::string out = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"><title>{0}</title><style>{1}"
      "</style></head><body>\n<h1>{0}</h1>\n<p>{2} rows of metrics up to step {3}, {4} rollouts.</p>\n",
      name, kStyle, store.num_rows(), std::max<std::int64_t>(store.last_step(), 0), run.rollout_index().size());
  put_charts(out, store);
  put_evals(out, run.rollout_index());
  put_rollouts(out, run.rollout_index(), num_rollouts);
  put_last_step(out, store);
  put_warnings(out, folder);
  out += "<h2>Configuration</h2>\n<details><summary>all keys</summary><pre>" + escape_markup(run.config()) + "</pre></details>\n";
  return out + "</body></html>\n";
}

}  // namespace prl::dashboard
