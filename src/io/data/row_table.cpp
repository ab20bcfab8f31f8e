#include "io/data/row_table.hpp"

#include <algorithm>
#include <boost/json.hpp>
#include <set>

#include "base/error.hpp"
#include "io/data/json_rows.hpp"
#include "io/data/spool.hpp"
#include "io/json_text.hpp"
#include "io/parquet/parquet_file.hpp"

namespace prl::io {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

struct Format {
  std::string_view extension, format;
};
constexpr Format kFormats[] = {{".jsonl", "json"}, {".ndjson", "json"}, {".json", "json"},
                               {".csv", "csv"},    {".tsv", "csv"},     {".parquet", "parquet"}};
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

/// The name without .gz or .zst.
std::string_view unpacked_name(std::string_view name) {
  for (const std::string_view extension : {".gz", ".zst"})
    if (name.ends_with(extension)) return name.substr(0, name.size() - extension.size());
  return name;
}

std::string_view text_of(const MappedFile& file) { return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()}; }

std::string_view without_mark(std::string_view text) {
  return text.starts_with(kByteOrderMark) ? text.substr(kByteOrderMark.size()) : text;
}

}  // namespace

std::string_view data_format(std::string_view name) noexcept {
  const std::string_view plain = unpacked_name(name);
  for (const Format& format : kFormats)
    if (plain.ends_with(format.extension)) return format.format == "parquet" && plain != name ? std::string_view() : format.format;
  return {};
}

bool is_data_file(std::string_view name) noexcept { return !data_format(name).empty(); }

std::string RowTable::row(std::size_t index) const {
  const Row& row = rows_[index];
  std::string text(row.text);
  maps_[row.map]->check_whole();
  return text;
}

void RowTable::add_row(std::string_view text, std::int64_t number) {
  rows_.push_back({text, static_cast<std::uint32_t>(files_.size() - 1), static_cast<std::uint32_t>(maps_.size() - 1), number});
}

std::string RowTable::where(std::size_t index) const {
  const Row& row = rows_[index];
  const File& file = files_[row.file];
  if (file.unit.empty()) return fmt::format("{}:{}", file.path.string(), row.number);
  return fmt::format("{}, {} {}", file.path.string(), file.unit, row.number);
}

void RowTable::add_file(const fs::path& path) {
  const std::string name = path.filename().string();
  const std::string_view format = data_format(name);
  if (format.empty())
    fail(ErrorCode::kNotImplemented,
         "{}: not a kind of data file that this build reads: .jsonl, .json, .csv, .tsv (also .gz and .zst) or .parquet", path.string());
  files_.push_back({path, {}});
  if (format == "parquet") return add_parquet();
  const std::string_view plain = unpacked_name(name);
  maps_.push_back(plain == name ? MappedFile::open(path) : decompress_file(path));
  const std::string_view text = without_mark(text_of(*maps_.back()));
  if (plain.ends_with(".csv") || plain.ends_with(".tsv")) return add_csv(text, plain.ends_with(".tsv") ? '\t' : ',');
  plain.ends_with(".json") ? add_json(text) : add_lines(text);
}

void RowTable::add_lines(std::string_view rest) {
  for (std::int64_t line = 1; !rest.empty(); ++line) {
    const std::size_t end = rest.find('\n');
    const std::string_view text = rest.substr(0, end);
    rest = end == std::string_view::npos ? std::string_view{} : rest.substr(end + 1);
    if (text.find_first_not_of(" \t\r") != std::string_view::npos) add_row(text, line);
  }
}

void RowTable::add_json(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return;
  std::int64_t number = 0;
  if (text[first] == '[') {
    files_.back().unit = "element";
    const std::string problem = split_json_list(text, [&](std::string_view element) { add_row(element, ++number); });
    if (!problem.empty()) fail(ErrorCode::kCorrupt, "{}: {}", path_text(), problem);
    return;
  }
  // One object per line, unless the first line alone is no object.
  const std::string_view line = text.substr(first, text.find('\n', first) - first);
  boost::system::error_code not_a_line;
  json::parse(json::string_view(line.data(), line.size()), not_a_line);
  if (!not_a_line) return add_lines(text);
  json::parse_options options;
  options.max_depth = 128;
  boost::system::error_code error;
  const json::value value = json::parse(json::string_view(text.data(), text.size()), error, {}, options);
  if (error || !value.is_object())
    fail(ErrorCode::kCorrupt, "{}: neither a list of objects, nor one object per line, nor an object of columns: {}", path_text(),
         error ? error.message() : std::string("no object"));
  std::size_t length = 0;
  for (const auto& member : value.get_object()) {
    const json::array* column = member.value().if_array();
    if (column == nullptr || (length != 0 && column->size() != length))
      fail(ErrorCode::kCorrupt,
           "{}: one object, whose member '{}' is no column as long as the others; wanted a list of objects, or one object per line",
           path_text(), std::string_view(member.key()));
    length = column->size();
  }
  files_.back().unit = "row";
  // Cells go on as they are written: a value has no form for numbers beyond doubles.
  std::vector<std::pair<std::string_view, std::vector<std::string_view>>> columns;
  const std::string problem = split_json_object(text, [&](std::string_view key, std::string_view column) {
    std::vector<std::string_view>& cells = columns.emplace_back(key, std::vector<std::string_view>()).second;
    split_json_list(column, [&](std::string_view cell) { cells.push_back(cell); });
  });
  if (!problem.empty()) fail(ErrorCode::kCorrupt, "{}: {}", path_text(), problem);
  Spool spool;
  std::vector<std::uint64_t> ends;
  for (std::size_t i = 0; i < length; ++i) {
    std::string row;
    for (const auto& [key, cells] : columns) {
      if (i >= cells.size()) continue;  // of a key that comes twice, whose last column counts
      row += row.empty() ? '{' : ',';
      row.append(key).append(":").append(cells[i]);
    }
    spool.append(row + '}');
    ends.push_back(spool.size());
  }
  maps_.push_back(spool.map());
  const std::string_view all = text_of(*maps_.back());
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const std::uint64_t begin = i == 0 ? 0 : ends[i - 1];
    add_row(all.substr(begin, ends[i] - begin), ++number);
  }
}

std::function<bool(std::string_view)> RowTable::wanted_of(const std::vector<std::string>& present) const {
  const auto is_wanted = [this](std::string_view name) { return std::find(columns_.begin(), columns_.end(), name) != columns_.end(); };
  const bool has_any = std::any_of(present.begin(), present.end(), is_wanted);
  return [is_wanted, keeps_all = columns_.empty() || !has_any](std::string_view name) { return keeps_all || is_wanted(name); };
}

void RowTable::add_csv(std::string_view text, char separator) {
  files_.back().unit = "line";
  std::vector<std::string> header;
  std::function<bool(std::string_view)> wanted;
  Spool spool;
  std::vector<std::pair<std::uint64_t, std::int64_t>> ends;  // and the line
  std::string row;
  const std::string problem = split_csv(text, separator, [&](const std::vector<CsvCell>& cells, std::int64_t line) {
    if (header.empty()) {
      std::set<std::string> seen;
      for (const CsvCell& cell : cells) {
        if (!seen.insert(cell.text).second) fail(ErrorCode::kCorrupt, "{}: two columns are called '{}'", path_text(), cell.text);
        header.push_back(cell.text);
      }
      wanted = wanted_of(header);
      return;
    }
    if (cells.size() > header.size())
      fail(ErrorCode::kCorrupt, "{}:{}: {} cells, the header has {}", path_text(), line, cells.size(), header.size());
    row.clear();  // assigning a literal makes GCC 12 warn of its own memcpy
    row += '{';
    for (std::size_t i = 0; i < cells.size(); ++i) {
      if (!wanted(header[i])) continue;
      if (row.size() > 1) row += ',';
      append_json_text(row, header[i]);
      row += ':';
      if (cells[i].text.empty() && !cells[i].was_quoted)
        row += "null";
      else
        append_json_text(row, cells[i].text);
    }
    row += '}';
    spool.append(row);
    ends.emplace_back(spool.size(), line);
  });
  if (!problem.empty()) fail(ErrorCode::kCorrupt, "{}: {}", path_text(), problem);
  maps_.back() = spool.map();  // the text itself is no longer needed
  const std::string_view all = text_of(*maps_.back());
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const std::uint64_t begin = i == 0 ? 0 : ends[i - 1].first;
    add_row(all.substr(begin, ends[i].first - begin), ends[i].second);
  }
}

void RowTable::add_parquet() {
  files_.back().unit = "row";
  const auto parquet = ParquetFile::open(files_.back().path);
  Spool spool;
  std::vector<std::uint64_t> ends;
  ends.reserve(static_cast<std::size_t>(parquet->num_rows()));
  parquet->for_each_row(wanted_of(parquet->columns()), [&](std::string_view row) {
    spool.append(row);
    ends.push_back(spool.size());
  });
  maps_.push_back(spool.map());
  const std::string_view all = text_of(*maps_.back());
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const std::uint64_t begin = i == 0 ? 0 : ends[i - 1];
    add_row(all.substr(begin, ends[i] - begin), static_cast<std::int64_t>(i) + 1);
  }
}

}  // namespace prl::io
