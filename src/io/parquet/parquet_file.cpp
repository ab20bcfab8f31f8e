#include "io/parquet/parquet_file.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>

#include "base/base64.hpp"
#include "base/error.hpp"
#include "io/json_text.hpp"
#include "io/parquet/parquet_column.hpp"
#include "io/safetensors.hpp"

namespace prl::io {
namespace {

/// Puts rows together again from the columns' levels (the record assembly of Dremel).
///
/// All leaves below a node tell of its nulls and repetitions; they are held against each other, so a damaged file cannot shift
/// one column against another unseen.
class RowBuilder {
 public:
  RowBuilder(const std::vector<std::string>& leaf_names, std::string subject) : leaf_names_(leaf_names), subject_(std::move(subject)) {}

  void set_column(int leaf, ParquetColumn column) {
    if (cursors_.size() <= static_cast<std::size_t>(leaf)) cursors_.resize(static_cast<std::size_t>(leaf) + 1);
    cursors_[static_cast<std::size_t>(leaf)] = Cursor{std::move(column), 0, 0};
  }

  /// Appends one value of a top-level column.
  void append(const ParquetNode& node, std::string& out) {
    for (int leaf = node.first_leaf; leaf < node.first_leaf + node.num_leaves; ++leaf)
      if (peek_rep(leaf) != 0) bad(leaf, "a row begins inside a list");
    write(node, out);
    for (int leaf = node.first_leaf; leaf < node.first_leaf + node.num_leaves; ++leaf)
      if (!at_end(leaf) && peek_rep(leaf) != 0) bad(leaf, "a list goes on after its row");
  }
  void check_ends(const ParquetNode& node) const {
    for (int leaf = node.first_leaf; leaf < node.first_leaf + node.num_leaves; ++leaf)
      if (!at_end(leaf)) bad(leaf, "more values than rows");
  }

 private:
  struct Cursor {
    ParquetColumn column;
    std::size_t entry = 0, value = 0;
  };

  [[noreturn]] void bad(int leaf, std::string_view what) const {
    fail(ErrorCode::kCorrupt, "{}, column '{}': {}", subject_, leaf_names_[static_cast<std::size_t>(leaf)], what);
  }
  Cursor& cursor(int leaf) { return cursors_[static_cast<std::size_t>(leaf)]; }
  const Cursor& cursor(int leaf) const { return cursors_[static_cast<std::size_t>(leaf)]; }
  bool at_end(int leaf) const { return cursor(leaf).entry >= cursor(leaf).column.num_entries; }
  int peek_rep(int leaf) const {
    const Cursor& c = cursor(leaf);
    if (at_end(leaf)) bad(leaf, "fewer values than rows");
    return c.column.rep.empty() ? 0 : c.column.rep[c.entry];
  }
  int peek_def(int leaf, const ParquetNode& node) const {
    const Cursor& c = cursor(leaf);
    if (at_end(leaf)) bad(leaf, "fewer values than rows");
    return c.column.def.empty() ? node.max_def : c.column.def[c.entry];  // no levels: always there
  }
  /// Whether all leaves of `node` say that it is there; they must agree.
  bool is_there(const ParquetNode& node) const {
    const bool first = peek_def(node.first_leaf, node) >= node.max_def;
    for (int leaf = node.first_leaf + 1; leaf < node.first_leaf + node.num_leaves; ++leaf)
      if ((peek_def(leaf, node) >= node.max_def) != first) bad(leaf, "it disagrees with its neighbour on a null");
    return first;
  }
  /// Passes the entry that stands for a null or an empty list in every leaf.
  void pass(const ParquetNode& node) {
    for (int leaf = node.first_leaf; leaf < node.first_leaf + node.num_leaves; ++leaf) ++cursor(leaf).entry;
  }
  /// After an element: whether another one follows in the same list.
  bool goes_on(const ParquetNode& node) const {
    const auto here = [&](int leaf) { return !at_end(leaf) && peek_rep(leaf) == node.max_rep; };
    const bool first = here(node.first_leaf);
    for (int leaf = node.first_leaf + 1; leaf < node.first_leaf + node.num_leaves; ++leaf)
      if (here(leaf) != first) bad(leaf, "it disagrees with its neighbour on the length of a list");
    return first;
  }

  void write(const ParquetNode& node, std::string& out) {
    if (node.repetition == ParquetNode::Repetition::kRepeated) return write_elements(node, out, false);
    if (node.repetition == ParquetNode::Repetition::kOptional && !is_there(node)) {
      pass(node);
      out += "null";
      return;
    }
    write_present(node, out);
  }

  void write_present(const ParquetNode& node, std::string& out) {
    const bool wraps_list = node.children.size() == 1 && node.children[0].repetition == ParquetNode::Repetition::kRepeated;
    if (node.is_leaf()) return write_leaf(node, out);
    if (node.meaning == ParquetMeaning::kList && wraps_list)
      return write_elements(node.children[0], out, is_wrapper(node, node.children[0]));
    if (node.meaning == ParquetMeaning::kMap && wraps_list && node.children[0].children.size() == 2 &&
        node.children[0].children[0].is_leaf())
      return write_map(node.children[0], out);
    out += '{';
    for (std::size_t i = 0; i < node.children.size(); ++i) {
      if (i > 0) out += ',';
      append_json_text(out, node.children[i].name);
      out += ':';
      write(node.children[i], out);
    }
    out += '}';
  }

  /// Whether the repeated child of a list only holds its element, by the format's rules for older files.
  static bool is_wrapper(const ParquetNode& list, const ParquetNode& repeated) {
    return repeated.children.size() == 1 && repeated.name != "array" && repeated.name != list.name + "_tuple";
  }

  void write_elements(const ParquetNode& repeated, std::string& out, bool is_wrapper) {
    out += '[';
    if (is_there(repeated)) {
      bool is_first = true;
      do {
        if (!is_first) {
          out += ',';
          if (!is_there(repeated)) bad(repeated.first_leaf, "a list goes on with nothing");
        }
        is_first = false;
        is_wrapper ? write(repeated.children[0], out) : write_present(repeated, out);
      } while (goes_on(repeated));
    } else {
      pass(repeated);
    }
    out += ']';
  }

  void write_map(const ParquetNode& pairs, std::string& out) {
    const ParquetNode &key = pairs.children[0], &value = pairs.children[1];
    out += '{';
    if (is_there(pairs)) {
      bool is_first = true;
      do {
        if (!is_first) {
          out += ',';
          if (!is_there(pairs)) bad(pairs.first_leaf, "a map goes on with nothing");
        }
        is_first = false;
        std::string name;
        write(key, name);
        if (name.starts_with('"'))
          out += name;
        else
          append_json_text(out, name);
        out += ':';
        write(value, out);
      } while (goes_on(pairs));
    } else {
      pass(pairs);
    }
    out += '}';
  }

  void write_leaf(const ParquetNode& leaf, std::string& out) {
    Cursor& c = cursor(leaf.first_leaf);
    if (at_end(leaf.first_leaf)) bad(leaf.first_leaf, "fewer values than rows");
    if (!c.column.def.empty() && c.column.def[c.entry] != leaf.max_def) bad(leaf.first_leaf, "a required value is null");
    if (c.value >= c.column.values.size()) bad(leaf.first_leaf, "fewer values than levels");
    const ParquetValue& value = c.column.values[c.value++];
    ++c.entry;
    write_value(leaf, value, out);
  }

  void write_value(const ParquetNode& leaf, const ParquetValue& value, std::string& out) const {
    switch (leaf.type) {
      case ParquetType::kBoolean: out += value.integer != 0 ? "true" : "false"; return;
      case ParquetType::kFloat: return write_number(value.number, true, out);
      case ParquetType::kDouble: return write_number(value.number, false, out);
      case ParquetType::kInt96: return write_time(ParquetMeaning::kTimestamp, value.integer, 1'000'000, false, out);
      case ParquetType::kInt32:
      case ParquetType::kInt64: return write_integer(leaf, value.integer, out);
      case ParquetType::kByteArray:
      case ParquetType::kFixedBytes: return write_bytes(leaf, value.bytes, out);
    }
  }

  static void write_number(double number, bool is_float, std::string& out) {
    if (!std::isfinite(number)) {
      out += "null";
    } else if (is_float) {
      out += fmt::format("{}", static_cast<float>(number));
    } else {
      out += fmt::format("{}", number);
    }
  }

  void write_integer(const ParquetNode& leaf, std::int64_t integer, std::string& out) const {
    switch (leaf.meaning) {
      case ParquetMeaning::kUnsigned: out += fmt::format("{}", static_cast<std::uint64_t>(integer)); return;
      case ParquetMeaning::kDecimal: return write_decimal(fmt::format("{}", integer), leaf.scale, out);
      case ParquetMeaning::kDate: return write_time(ParquetMeaning::kDate, integer, 1, false, out);
      case ParquetMeaning::kTime:
      case ParquetMeaning::kTimestamp: return write_time(leaf.meaning, integer, leaf.units_per_second, leaf.is_utc, out);
      default: out += fmt::format("{}", integer); return;
    }
  }

  static void write_decimal(std::string digits, int scale, std::string& out) {
    const bool is_negative = digits.starts_with('-');
    if (is_negative) digits.erase(0, 1);
    if (scale > 0) {
      if (digits.size() <= static_cast<std::size_t>(scale)) digits.insert(0, static_cast<std::size_t>(scale) + 1 - digits.size(), '0');
      digits.insert(digits.size() - static_cast<std::size_t>(scale), ".");
    }
    out += (is_negative ? "-" : "") + digits;
  }

  static void write_time(ParquetMeaning meaning, std::int64_t units, std::int64_t per_second, bool is_utc, std::string& out) {
    const auto floor_div = [](std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); };
    std::int64_t days = meaning == ParquetMeaning::kDate ? units : 0, rest = 0, fraction = 0;
    if (meaning != ParquetMeaning::kDate) {
      const std::int64_t seconds = floor_div(units, per_second);
      fraction = units - seconds * per_second;
      if (meaning == ParquetMeaning::kTimestamp) days = floor_div(seconds, 86'400);
      rest = seconds - days * 86'400;
    }
    out += '"';
    if (meaning != ParquetMeaning::kTime) {
      constexpr std::int64_t kMostDays = 3'000'000;  // what calendars of this library can name
      const std::chrono::year_month_day date{std::chrono::sys_days(std::chrono::days(std::clamp(days, -kMostDays, kMostDays)))};
      out += fmt::format("{:04}-{:02}-{:02}", static_cast<int>(date.year()), static_cast<unsigned>(date.month()),
                         static_cast<unsigned>(date.day()));
    }
    if (meaning == ParquetMeaning::kTimestamp) out += 'T';
    if (meaning != ParquetMeaning::kDate) {
      out += fmt::format("{:02}:{:02}:{:02}", rest / 3600, rest / 60 % 60, rest % 60);
      if (fraction != 0 && per_second == 1'000'000'000) out += fmt::format(".{:09}", fraction);
      if (fraction != 0 && per_second <= 1'000'000) out += fmt::format(".{:06}", fraction * (1'000'000 / per_second));
      if (is_utc && meaning == ParquetMeaning::kTimestamp) out += 'Z';
    }
    out += '"';
  }

  void write_bytes(const ParquetNode& leaf, std::string_view bytes, std::string& out) const {
    if (leaf.meaning == ParquetMeaning::kDecimal) {
      // Big-endian two's complement.
      if (bytes.size() > 16) unbuilt(leaf, "decimals of more than 16 bytes");
      __extension__ using Wide = unsigned __int128;
      Wide value = !bytes.empty() && (bytes[0] & 0x80) != 0 ? ~Wide{0} : Wide{0};
      for (const char b : bytes) value = (value << 8) | static_cast<unsigned char>(b);
      const bool is_negative = (value >> 127) != 0;
      if (is_negative) value = ~value + 1;
      std::string digits;
      do digits.insert(digits.begin(), static_cast<char>('0' + static_cast<int>(value % 10)));
      while ((value /= 10) != 0);
      return write_decimal((is_negative ? "-" : "") + digits, leaf.scale, out);
    }
    if (leaf.meaning == ParquetMeaning::kUuid && bytes.size() == 16) {
      out += '"';
      for (std::size_t i = 0; i < 16; ++i) {
        if (i == 4 || i == 6 || i == 8 || i == 10) out += '-';
        out += fmt::format("{:02x}", static_cast<unsigned char>(bytes[i]));
      }
      out += '"';
      return;
    }
    if (leaf.meaning == ParquetMeaning::kFloat16 && bytes.size() == 2) {
      std::uint16_t half;
      std::memcpy(&half, bytes.data(), 2);
      return write_number(f16_to_f32(half), true, out);
    }
    if (leaf.meaning != ParquetMeaning::kText && !is_utf8(bytes)) return append_json_text(out, to_base64(bytes));
    append_json_text(out, bytes);
  }
  [[noreturn]] void unbuilt(const ParquetNode& leaf, std::string_view what) const {
    fail(ErrorCode::kNotImplemented, "{}, column '{}': it holds {}, which have no place in JSON", subject_,
         leaf_names_[static_cast<std::size_t>(leaf.first_leaf)], what);
  }

  const std::vector<std::string>& leaf_names_;
  std::string subject_;
  std::vector<Cursor> cursors_;
};

}  // namespace

std::shared_ptr<const ParquetFile> ParquetFile::open(const std::filesystem::path& path) {
  std::shared_ptr<ParquetFile> file(new ParquetFile());
  file->file_ = MappedFile::open(path);
  read_parquet_meta(file->file_->bytes(), path.string(), file->meta_);
  return file;
}

std::vector<std::string> ParquetFile::columns() const {
  std::vector<std::string> names;
  for (const ParquetNode& node : meta_.root.children) names.push_back(node.name);
  return names;
}

void ParquetFile::for_each_row(const std::function<bool(std::string_view column)>& wanted,
                               const std::function<void(std::string_view json)>& sink) const {
  std::vector<const ParquetNode*> chosen;
  for (const ParquetNode& node : meta_.root.children)
    if (wanted(node.name)) chosen.push_back(&node);
  std::string row;
  for (std::size_t g = 0; g < meta_.row_groups.size(); ++g) {
    const ParquetRowGroup& group = meta_.row_groups[g];
    const std::string subject = fmt::format("{}, row group {}", file_->path().string(), g);
    RowBuilder builder(meta_.leaf_names, subject);
    for (const ParquetNode* node : chosen)
      for (int leaf = node->first_leaf; leaf < node->first_leaf + node->num_leaves; ++leaf) {
        const auto i = static_cast<std::size_t>(leaf);
        const std::string column = fmt::format("{}, column '{}'", subject, meta_.leaf_names[i]);
        builder.set_column(leaf, read_parquet_column(file_->bytes(), group.chunks[i], *meta_.leaves[i], column));
      }
    file_->check_whole();
    for (std::int64_t r = 0; r < group.num_rows; ++r) {
      row = "{";
      for (const ParquetNode* node : chosen) {
        if (row.size() > 1) row += ',';
        append_json_text(row, node->name);
        row += ':';
        builder.append(*node, row);
      }
      row += '}';
      sink(row);
    }
    for (const ParquetNode* node : chosen) builder.check_ends(*node);
  }
}

}  // namespace prl::io
