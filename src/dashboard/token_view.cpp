#include "dashboard/token_view.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <span>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/regular_file.hpp"
#include "dashboard/inside.hpp"
#include "dashboard/line_reader.hpp"
#include "dashboard/query.hpp"
#include "dashboard/rollout_text.hpp"
#include "text/tokenizer.hpp"

namespace prl::dashboard {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

/// Of one file of tokens; further lines are not looked at.
constexpr std::uint64_t kMaxFileBytes = std::uint64_t{1} << 30;
constexpr std::size_t kMaxRanks = 256;
/// Of one answer; samples beyond it are left out.
constexpr std::size_t kMaxNumbers = std::size_t{16} << 20;

/// Calls `on_line` with each line whose first bytes `wants` accepts; lines that are too long are skipped.
void for_lines(const fs::path& path, const std::function<bool(std::string_view begin)>& wants,
               const std::function<void(const std::string& line)>& on_line) {
  constexpr std::size_t kEnoughBytes = 256;
  std::string line;
  bool is_skipped = false;
  LineReader reader(path);
  LineReader::Sink sink;
  sink.restart = [] {};
  sink.piece = [&](std::string_view piece) {
    if (is_skipped) return;
    line += piece;
    is_skipped = line.size() > kMaxRolloutBytes || (line.size() >= kEnoughBytes && !wants(line));
  };
  sink.end_line = [&](std::uint64_t, std::uint64_t) {
    if (!is_skipped && wants(line)) on_line(line);
    line.clear();
    is_skipped = false;
  };
  reader.read(sink, kMaxFileBytes);
}

std::optional<TokenSample> parse_sample(const std::string& line) {
  json::error_code ec;
  const json::value value = json::parse(line, ec);
  if (ec || !value.is_object()) return std::nullopt;
  TokenSample sample;
  const json::object& object = value.get_object();
  if (const json::value* number = object.if_contains("sample"); number && number->is_int64()) sample.sample = number->get_int64();
  const json::value* const ids = object.if_contains("token_ids");
  if (ids == nullptr || !ids->is_array()) return std::nullopt;
  for (const json::value& id : ids->get_array()) sample.token_ids.push_back(id.is_int64() ? id.get_int64() : -1);
  for (const auto& member : object) {
    if (!member.value().is_array() || member.key() == "token_ids" || member.value().get_array().size() != sample.token_ids.size()) continue;
    std::vector<double> numbers;
    numbers.reserve(sample.token_ids.size());
    for (const json::value& one : member.value().get_array())
      numbers.push_back(one.is_number() ? one.to_number<double>()
                        : one.is_bool() ? (one.get_bool() ? 1.0 : 0.0)
                                        : std::numeric_limits<double>::quiet_NaN());
    sample.streams.emplace_back(std::string(member.key()), std::move(numbers));
  }
  return sample;
}

/// Adds the streams that `to` lacks.
void merge(TokenSample& to, TokenSample from, const std::string& file) {
  bool is_used = false;
  for (auto& stream : from.streams) {
    const bool is_known = std::any_of(to.streams.begin(), to.streams.end(), [&](const auto& known) { return known.first == stream.first; });
    if (is_known) continue;
    to.streams.push_back(std::move(stream));
    is_used = true;
  }
  if (is_used) to.files.push_back(file);
}

void add_exports(const fs::path& run, std::int64_t step, std::vector<TokenSample>& samples) {
  const fs::path folder = fs::path("token_exports") / fmt::format("step_{}", step);
  for (std::size_t rank = 0; rank < kMaxRanks; ++rank) {
    const fs::path name = folder / fmt::format("rank_{}.jsonl", rank);
    std::error_code ec;
    if (!fs::is_regular_file(run / name, ec) || !is_inside(run, run / name)) break;
    std::vector<std::string> wanted;
    for (const TokenSample& sample : samples) {
      wanted.push_back(fmt::format("[{}]", fmt::join(sample.token_ids, ",")));
      wanted.push_back(fmt::format("[{}]", fmt::join(sample.token_ids, ", ")));
    }
    const auto any = [](std::string_view) { return true; };
    for_lines(run / name, any, [&](const std::string& line) {
      if (std::none_of(wanted.begin(), wanted.end(), [&](const std::string& ids) { return line.find(ids) != std::string::npos; })) return;
      auto found = parse_sample(line);
      if (!found) return;
      for (TokenSample& sample : samples)
        if (sample.token_ids == found->token_ids) merge(sample, *found, name.string());
    });
  }
}

}  // namespace

std::vector<TokenSample> load_tokens(const fs::path& run, const RolloutEntry& entry) {
  std::vector<TokenSample> samples;
  if (entry.kind != RolloutKind::kTrain) return samples;
  const fs::path name = fs::path("rollouts") / fmt::format("step_{}", entry.step) / "train_tokens.jsonl";
  const std::string begin = fmt::format("{{\"row\":{},", entry.row);
  if (!is_inside(run, run / name)) return samples;
  constexpr std::size_t kMaxSamples = 64;
  std::size_t num_numbers = 0;
  for_lines(
      run / name, [&](std::string_view line) { return line.starts_with(begin); },
      [&](const std::string& line) {
        auto sample = parse_sample(line);
        if (!sample || samples.size() >= kMaxSamples || num_numbers > kMaxNumbers) return;
        num_numbers += sample->token_ids.size() * (sample->streams.size() + 1);
        sample->files.push_back(name.string());
        samples.push_back(std::move(*sample));
      });
  if (!samples.empty()) add_exports(run, entry.step, samples);
  return samples;
}

std::string tokens_json(const std::vector<TokenSample>& samples, const text::Tokenizer* tokenizer, std::size_t first, std::size_t count) {
  std::string out = "[";
  for (const TokenSample& sample : samples) {
    const std::size_t begin = std::min(first, sample.token_ids.size()), end = begin + std::min(count, sample.token_ids.size() - begin);
    if (out.size() > 1) out += ',';
    fmt::format_to(std::back_inserter(out), "{{\"sample\":{},\"num_tokens\":{},\"first\":{},", sample.sample, sample.token_ids.size(),
                   begin);
    put_key(out, "files");
    out += '[';
    for (std::size_t i = 0; i < sample.files.size(); ++i) {
      if (i > 0) out += ',';
      put(out, std::string_view(sample.files[i]));
    }
    out += "],";
    put_key(out, "token_ids");
    put_list(out, std::vector<std::int64_t>(sample.token_ids.begin() + static_cast<std::ptrdiff_t>(begin),
                                            sample.token_ids.begin() + static_cast<std::ptrdiff_t>(end)));
    if (tokenizer != nullptr) {
      out += ",\"pieces\":[";
      for (std::size_t i = begin; i < end; ++i) {
        if (i > begin) out += ',';
        const std::int64_t id = sample.token_ids[i];
        const bool is_known = id >= 0 && id < tokenizer->vocab_size();
        const auto known = static_cast<std::int32_t>(is_known ? id : 0);
        put(out, !is_known ? std::string_view() : tokenizer->is_added(known) ? tokenizer->token_of(known) : tokenizer->bytes_of(known));
      }
      out += ']';
    }
    out += ",\"streams\":{";
    for (std::size_t i = 0; i < sample.streams.size(); ++i) {
      if (i > 0) out += ',';
      put_key(out, sample.streams[i].first);
      const std::vector<double>& numbers = sample.streams[i].second;
      put_list(out, std::vector<double>(numbers.begin() + static_cast<std::ptrdiff_t>(begin),
                                        numbers.begin() + static_cast<std::ptrdiff_t>(end)));
    }
    out += "}}";
  }
  return out + "]";
}

fs::path tokenizer_folder(const fs::path& run) {
  std::error_code ec;
  fs::path best;
  std::int64_t best_step = -1;
  for (fs::directory_iterator it(run / "weights", ec), end; !ec && it != end; it.increment(ec)) {
    const std::int64_t step = parse_step_dir(it->path().filename().string());
    if (step <= best_step || !text::has_tokenizer(it->path())) continue;
    best_step = step;
    best = it->path();
  }
  if (best_step >= 0) return best;
  for (const char* const file : {"trainer.json", "sft.json", "orchestrator.json"}) {
    json::error_code parse_error;
    json::value config;
    try {
      constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{4} << 20;
      config = json::parse(read_regular_file(run / "configs" / file, kMaxConfigBytes), parse_error);
    } catch (const Error&) {
      continue;
    }
    for (const char* const section : {"tokenizer", "model"}) {
      if (parse_error) break;
      const json::value* const name = config.find_pointer(fmt::format("/{}/name", section), parse_error);
      if (parse_error || name == nullptr || !name->is_string()) {
        parse_error = {};
        continue;
      }
      const fs::path folder(std::string(name->get_string()));
      if (text::has_tokenizer(folder)) return folder;
    }
  }
  return {};
}

}  // namespace prl::dashboard
