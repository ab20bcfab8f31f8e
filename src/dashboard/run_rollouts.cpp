#include <fmt/core.h>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/regular_file.hpp"
#include "dashboard/inside.hpp"
#include "dashboard/rollout_text.hpp"
#include "dashboard/run_view.hpp"
#include "dashboard/token_view.hpp"
#include "text/tokenizer.hpp"

/// The part of RunView that is about rollouts and evaluations.
namespace prl::dashboard {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::int64_t kBig = std::int64_t{1} << 53;
/// A search that takes longer answers with what it has and where to go on.
constexpr auto kSearchTime = std::chrono::milliseconds(1500);
constexpr std::size_t kPreviewBytes = 240;
/// Of rollouts longer than it no preview is made.
constexpr std::uint64_t kMaxPreviewLine = std::uint64_t{1} << 20;
constexpr std::size_t kMaxTextBytes = std::size_t{256} << 10, kMaxTotalBytes = std::size_t{2} << 20;

std::optional<RolloutKind> parse_kind(const Query& query) {
  const auto kind = query.text("kind", 8);
  if (!kind || kind->empty()) return std::nullopt;
  if (*kind == "train") return RolloutKind::kTrain;
  if (*kind == "eval") return RolloutKind::kEval;
  net::fail_param("kind", "kind must be train or eval" + found_text(*kind));
}

RolloutQuery::Order parse_order(const Query& query) {
  using Order = RolloutQuery::Order;
  constexpr std::pair<std::string_view, Order> kOrders[] = {{"newest", Order::kNewest},
                                                            {"oldest", Order::kOldest},
                                                            {"reward_up", Order::kRewardUp},
                                                            {"reward_down", Order::kRewardDown},
                                                            {"longest", Order::kLongest},
                                                            {"advantage_up", Order::kAdvantageUp},
                                                            {"advantage_down", Order::kAdvantageDown}};
  const auto name = query.text("order", 32);
  if (!name || name->empty()) return Order::kNewest;
  for (const auto& [known, order] : kOrders)
    if (*name == known) return order;
  net::fail_param("order",
                  "order must be newest, oldest, reward_up, reward_down, longest, advantage_up or advantage_down" + found_text(*name));
}

RolloutQuery parse_query(const Query& query) {
  RolloutQuery wanted;
  wanted.kind = parse_kind(query);
  wanted.step_from = query.integer("from", 0, kBig);
  wanted.step_to = query.integer("to", 0, kBig);
  wanted.group = query.integer("group", -kBig, kBig);
  wanted.example = query.integer("example", -kBig, kBig);
  wanted.reward_min = query.number("reward_min");
  wanted.reward_max = query.number("reward_max");
  wanted.env = query.text("env");
  wanted.stop = query.text("stop");
  wanted.error = query.text("error");
  wanted.is_truncated = query.flag("truncated");
  wanted.order = parse_order(query);
  return wanted;
}

/// The line as JSON, or why not: a list goes on past a rollout that cannot be read.
std::pair<json::value, std::string> try_load(const fs::path& path, const RolloutEntry& entry) {
  try {
    return {load_rollout(path, entry), {}};
  } catch (const Error& error) {
    return {nullptr, error.what()};
  }
}

struct Found {
  RolloutEntry entry;
  std::string preview;
};

}  // namespace

void RunView::put_entry(std::string& out, const RolloutEntry& e, std::string_view preview) const {
  fmt::format_to(std::back_inserter(out),
                 "{{\"kind\":\"{}\",\"step\":{},\"row\":{},\"group\":{},\"example\":{},\"reward\":", kind_name(e.kind), e.step, e.row,
                 e.group, e.example);
  put(out, e.has_reward ? e.reward : std::nan(""));
  out += ",\"advantage\":";
  put(out, e.has_advantage ? e.advantage : std::nan(""));
  fmt::format_to(std::back_inserter(out),
                 ",\"tokens\":{},\"turns\":{},\"bytes\":{},\"is_truncated\":{},\"is_damaged\":{},\"env\":", e.output_tokens, e.turns,
                 e.num_bytes, e.is_truncated, e.is_damaged);
  put(out, std::string_view(rollouts_.name(e.env)));
  out += ",\"stop\":";
  put(out, std::string_view(rollouts_.name(e.stop)));
  out += ",\"error\":";
  put(out, std::string_view(rollouts_.name(e.error)));
  out += ",\"preview\":";
  put(out, preview);
  out += '}';
}

std::string RunView::rollouts(const Query& query) const {
  constexpr std::int64_t kMaxLimit = 200, kLimit = 50;
  const RolloutQuery wanted = parse_query(query);
  const auto offset = static_cast<std::size_t>(query.integer("offset", 0, kBig).value_or(0));
  const auto limit = static_cast<std::size_t>(query.integer("limit", 1, kMaxLimit).value_or(kLimit));
  const std::string text = query.text("q").value_or("");
  std::vector<RolloutEntry> entries;
  std::size_t total = 0;
  std::vector<fs::path> paths;
  RolloutIndex::Facets facets;
  std::vector<std::string> names;
  {
    std::lock_guard lock(mutex_);
    // A search may have to look at all of them, a list at those it shows.
    auto selection = rollouts_.select_first(wanted, text.empty() ? offset + limit : rollouts_.size());
    entries = std::move(selection.entries);
    total = selection.total;
    facets = rollouts_.facets();
    names = rollouts_.names();
    paths.resize(rollouts_.num_files());
    for (const RolloutEntry& entry : entries)
      if (paths[entry.file].empty()) paths[entry.file] = rollouts_.path_of(entry);
  }
  // From here without the lock: files are read, and nobody waits for them.
  const TextSearch search(text);
  const auto deadline = Clock::now() + kSearchTime;
  std::vector<Found> found;
  std::size_t at = std::min(offset, entries.size());
  bool is_late = false;
  for (; at < entries.size() && found.size() < limit && !is_late; ++at) {
    const RolloutEntry& entry = entries[at];
    const fs::path& path = paths[entry.file];
    if (text.empty()) {
      auto [value, why] = entry.num_bytes <= kMaxPreviewLine ? try_load(path, entry) : std::pair<json::value, std::string>();
      found.push_back({entry, value.is_object() ? preview_of(value, kPreviewBytes) : why});
      continue;
    }
    is_late = Clock::now() > deadline;
    if (entry.num_bytes > kMaxRolloutBytes) continue;
    try {
      if (!search.may_hold(read_range(path, entry.offset, entry.num_bytes))) continue;
    } catch (const Error&) {
      continue;  // its step was removed meanwhile
    }
    const auto [value, why] = try_load(path, entry);
    if (std::string hit = search.hit_in(value); !hit.empty()) found.push_back({entry, std::move(hit)});
  }
  std::string out = fmt::format("{{\"total\":{},\"next\":{},\"is_searched\":{},\"rollouts\":[", total,
                                at < total ? static_cast<std::int64_t>(at) : -1, !text.empty());
  {
    std::lock_guard lock(mutex_);
    for (const Found& one : found) {
      if (out.back() != '[') out += ',';
      put_entry(out, one.entry, one.preview);
    }
  }
  out += "],\"facets\":{";
  const auto put_names = [&](std::string_view key, const std::vector<std::uint16_t>& ids) {
    put_key(out, key);
    out += '[';
    for (const std::uint16_t id : ids) {
      if (out.back() != '[') out += ',';
      put(out, std::string_view(names[id]));
    }
    out += "],";
  };
  put_names("envs", facets.envs);
  put_names("stops", facets.stops);
  put_names("errors", facets.errors);
  fmt::format_to(std::back_inserter(out), "\"first_step\":{},\"last_step\":{},\"train\":{},\"eval\":{},\"failed\":{},\"damaged\":{}}}}}",
                 facets.first_step, facets.last_step, facets.num_train, facets.num_eval, facets.num_failed, facets.num_damaged);
  return out;
}

RolloutEntry RunView::entry_of(const Query& query) const {
  const auto kind = parse_kind(query);
  const auto step = query.integer("step", 0, kBig), row = query.integer("row", 0, std::numeric_limits<std::uint32_t>::max());
  if (!kind || !step || !row) net::fail_param("row", "kind, step and row name a rollout");
  const auto entry = rollouts_.find(*kind, *step, static_cast<std::uint32_t>(*row));
  if (!entry) fail(ErrorCode::kNotFound, "step {} has no {} rollout {}", *step, kind_name(*kind), *row);
  return *entry;
}

std::string RunView::rollout(const Query& query) const {
  RolloutEntry entry;
  fs::path path;
  std::string out;
  {
    std::lock_guard lock(mutex_);
    entry = entry_of(query);
    path = rollouts_.path_of(entry);
    out = "{\"head\":";
    put_entry(out, entry, {});
  }
  auto [value, why] = try_load(path, entry);
  const std::size_t num_cut = value.is_object() ? cut_texts(value, kMaxTextBytes, kMaxTotalBytes) : 0;
  fmt::format_to(std::back_inserter(out), ",\"cut\":{},\"problem\":", num_cut);
  put(out, std::string_view(why));
  out += ",\"file\":";
  put(out, std::string_view(path.lexically_relative(folder_).string()));
  return out + ",\"rollout\":" + json::serialize(value) + "}";
}

RunView::RawLine RunView::raw_line(const Query& query) const {
  std::lock_guard lock(mutex_);
  const RolloutEntry entry = entry_of(query);
  return {rollouts_.path_of(entry), entry.offset, entry.num_bytes};
}

std::shared_ptr<const text::Tokenizer> RunView::tokenizer() const {
  std::lock_guard lock(tokenizer_mutex_);
  if (tokenizer_ || has_no_tokenizer_) return tokenizer_;
  const fs::path folder = tokenizer_folder(folder_);
  if (folder.empty()) return nullptr;  // weights may come later
  try {
    tokenizer_ = std::make_shared<const text::Tokenizer>(text::Tokenizer::load(folder));
  } catch (const Error& error) {
    has_no_tokenizer_ = true;
    log::warning("the page shows token ids without their text: {}", error.what());
  }
  return tokenizer_;
}

std::string RunView::tokens(const Query& query) const {
  constexpr std::int64_t kMaxCount = 16384, kCount = 4096;
  const auto first = static_cast<std::size_t>(query.integer("first", 0, kBig).value_or(0));
  const auto count = static_cast<std::size_t>(query.integer("count", 1, kMaxCount).value_or(kCount));
  RolloutEntry entry;
  {
    std::lock_guard lock(mutex_);
    entry = entry_of(query);
  }
  const std::vector<TokenSample> samples = load_tokens(folder_, entry);
  const auto words = samples.empty() ? nullptr : tokenizer();
  return "{\"samples\":" + tokens_json(samples, words.get(), first, count) + "}";
}

std::string RunView::evals() const {
  constexpr std::uint64_t kMaxMetadataBytes = std::uint64_t{1} << 20, kMaxEvalsBytes = std::uint64_t{16} << 20;
  constexpr std::size_t kMaxFolders = 200;
  std::string out = "{\"points\":[";
  {
    std::lock_guard lock(mutex_);
    for (const RolloutIndex::EvalPoint& point : rollouts_.eval_points()) {
      if (out.back() != '[') out += ',';
      fmt::format_to(std::back_inserter(out), "{{\"step\":{},\"count\":{},\"truncated\":{},\"failed\":{},\"env\":", point.step, point.count,
                     point.num_truncated, point.num_failed);
      put(out, std::string_view(rollouts_.name(point.env)));
      out += ",\"mean\":";
      put(out, point.mean);
      out += ",\"half_width\":";
      put(out, point.half_width);
      out += '}';
    }
  }
  out += "],\"results\":[";
  std::size_t num_folders = 0;
  std::error_code ec;
  for (fs::directory_iterator env(folder_ / "evals", ec), end; !ec && env != end; env.increment(ec)) {
    std::error_code inner;
    for (fs::directory_iterator one(env->path(), inner); !inner && one != end && num_folders < kMaxFolders; one.increment(inner)) {
      json::error_code parse_error;
      json::value metadata;
      const fs::path file = one->path() / "metadata.json";
      if (!is_inside(folder_, file) || out.size() > kMaxEvalsBytes) continue;
      try {
        metadata = json::parse(read_regular_file(file, kMaxMetadataBytes), parse_error);
      } catch (const Error&) {
        continue;
      }
      if (parse_error) continue;
      if (num_folders++ > 0) out += ',';
      out += "{\"folder\":";
      put(out, std::string_view(one->path().lexically_relative(folder_).string()));
      out += ",\"metadata\":" + json::serialize(metadata) + "}";
    }
  }
  return out + "]}";
}

}  // namespace prl::dashboard
