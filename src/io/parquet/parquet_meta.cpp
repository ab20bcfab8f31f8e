#include "io/parquet/parquet_meta.hpp"

#include <cstring>

#include "base/error.hpp"
#include "io/parquet/thrift_reader.hpp"

namespace prl::io {
namespace {

constexpr std::size_t kMaxSchemaElements = 20'000;
constexpr int kMaxColumnDepth = 32;
constexpr std::int64_t kMaxRows = std::int64_t{1} << 28;
constexpr std::int64_t kMaxEntries = std::int64_t{1} << 26;  // of one column of one row group
constexpr int kMaxFixedBytes = 1 << 20;

using Reader = ThriftReader;
using Field = ThriftReader::Field;

/// An entry of the flat list that the footer holds.
struct Element {
  ParquetNode node;
  bool has_type = false;
  std::int64_t num_children = 0;
};

void read_time(Reader& r, ParquetNode& node) {
  r.read_struct([&](Field f) {
    if (f.id == 1) {
      node.is_utc = r.boolean(f.type);
    } else if (f.id == 2) {
      r.read_struct([&](Field unit) {
        node.units_per_second = unit.id == 1 ? 1'000 : unit.id == 2 ? 1'000'000 : 1'000'000'000;
        r.skip(unit.type);
      });
    } else {
      r.skip(f.type);
    }
  });
}

void read_logical_type(Reader& r, ParquetNode& node) {
  r.read_struct([&](Field f) {
    switch (f.id) {
      case 1:   // string
      case 4:   // enum
      case 12:  // JSON
        node.meaning = ParquetMeaning::kText;
        return r.skip(f.type);
      case 2: node.meaning = ParquetMeaning::kMap; return r.skip(f.type);
      case 3: node.meaning = ParquetMeaning::kList; return r.skip(f.type);
      case 5:
        node.meaning = ParquetMeaning::kDecimal;
        return r.read_struct(
            [&](Field d) { d.id == 1 ? static_cast<void>(node.scale = static_cast<int>(r.integer(d.type))) : r.skip(d.type); });
      case 6: node.meaning = ParquetMeaning::kDate; return r.skip(f.type);
      case 7: node.meaning = ParquetMeaning::kTime; return read_time(r, node);
      case 8: node.meaning = ParquetMeaning::kTimestamp; return read_time(r, node);
      case 10:
        return r.read_struct([&](Field i) {
          if (i.id == 2) {
            if (!r.boolean(i.type)) node.meaning = ParquetMeaning::kUnsigned;
          } else {
            r.skip(i.type);
          }
        });
      case 14: node.meaning = ParquetMeaning::kUuid; return r.skip(f.type);
      case 15: node.meaning = ParquetMeaning::kFloat16; return r.skip(f.type);
      default: return r.skip(f.type);
    }
  });
}

/// The older annotation, which files without a logical type have.
void apply_converted_type(std::int64_t converted, ParquetNode& node) {
  const auto time = [&](ParquetMeaning meaning, std::int64_t units) {
    node.meaning = meaning;
    node.units_per_second = units;
    node.is_utc = true;
  };
  switch (converted) {
    case 0:
    case 4:
    case 19: node.meaning = ParquetMeaning::kText; return;
    case 1:
    case 2: node.meaning = ParquetMeaning::kMap; return;
    case 3: node.meaning = ParquetMeaning::kList; return;
    case 5: node.meaning = ParquetMeaning::kDecimal; return;
    case 6: node.meaning = ParquetMeaning::kDate; return;
    case 7: return time(ParquetMeaning::kTime, 1'000);
    case 8: return time(ParquetMeaning::kTime, 1'000'000);
    case 9: return time(ParquetMeaning::kTimestamp, 1'000);
    case 10: return time(ParquetMeaning::kTimestamp, 1'000'000);
    case 11:
    case 12:
    case 13:
    case 14: node.meaning = ParquetMeaning::kUnsigned; return;
    default: return;
  }
}

Element read_element(Reader& r) {
  Element element;
  ParquetNode& node = element.node;
  std::int64_t converted = -1;
  bool has_logical = false;
  r.read_struct([&](Field f) {
    switch (f.id) {
      case 1: {
        const std::int64_t type = r.integer(f.type);
        if (type < 0 || type > 7) r.bad(fmt::format("unknown type {} of a column", type));
        node.type = static_cast<ParquetType>(type);
        element.has_type = true;
        return;
      }
      case 2: {
        const std::int64_t length = r.integer(f.type);
        if (length < 0 || length > kMaxFixedBytes) r.bad(fmt::format("a fixed length of {} bytes", length));
        node.type_length = static_cast<int>(length);
        return;
      }
      case 3: {
        const std::int64_t repetition = r.integer(f.type);
        if (repetition < 0 || repetition > 2) r.bad(fmt::format("unknown repetition {}", repetition));
        node.repetition = static_cast<ParquetNode::Repetition>(repetition);
        return;
      }
      case 4: node.name = std::string(r.binary(f.type)); return;
      case 5: element.num_children = r.integer(f.type); return;
      case 6: converted = r.integer(f.type); return;
      case 7: node.scale = static_cast<int>(r.integer(f.type)); return;
      case 10: has_logical = true; return read_logical_type(r, node);
      default: return r.skip(f.type);
    }
  });
  if (!has_logical) apply_converted_type(converted, node);
  if (node.scale < 0 || node.scale > 40) r.bad(fmt::format("a decimal scale of {}", node.scale));
  if (element.num_children < 0) r.bad("a group with a negative number of children");
  return element;
}

/// Turns the flat list into a tree and works out levels.
class TreeBuilder {
 public:
  TreeBuilder(Reader& reader, std::vector<Element>& elements, ParquetMeta& meta) : r_(reader), elements_(elements), meta_(meta) {}

  void build() {
    if (elements_.empty()) r_.bad("the schema is empty");
    meta_.root = take(0, 0, 0, "");
    if (next_ != elements_.size()) r_.bad("the schema has elements outside its tree");
    collect(meta_.root);
  }

 private:
  ParquetNode take(int def, int rep, int depth, const std::string& path) {
    if (next_ >= elements_.size()) r_.bad("the schema ends too early");
    if (depth > kMaxColumnDepth) r_.bad("columns nested too deeply");
    Element& element = elements_[next_++];
    ParquetNode node = std::move(element.node);
    const bool is_root = depth == 0;
    if (!is_root && node.repetition != ParquetNode::Repetition::kRequired) ++def;
    if (!is_root && node.repetition == ParquetNode::Repetition::kRepeated) ++rep;
    node.max_def = def;
    node.max_rep = rep;
    node.first_leaf = num_leaves_;
    const std::string name = is_root ? "" : path.empty() ? node.name : path + "." + node.name;
    if (element.num_children == 0) {
      if (!element.has_type && !is_root) r_.bad(fmt::format("column '{}' has no type", name));
      if (!is_root) {
        ++num_leaves_;
        meta_.leaf_names.push_back(name);
      }
    }
    for (std::int64_t i = 0; i < element.num_children; ++i) node.children.push_back(take(def, rep, depth + 1, name));
    node.num_leaves = num_leaves_ - node.first_leaf;
    return node;
  }
  void collect(const ParquetNode& node) {
    if (node.is_leaf() && &node != &meta_.root) meta_.leaves.push_back(&node);
    for (const ParquetNode& child : node.children) collect(child);
  }

  Reader& r_;
  std::vector<Element>& elements_;
  ParquetMeta& meta_;
  std::size_t next_ = 0;
  int num_leaves_ = 0;
};

ParquetChunk read_chunk(Reader& r, std::string_view name, std::size_t leaf, std::uint64_t data_end) {
  ParquetChunk chunk;
  std::int64_t data_page = -1, dictionary_page = -1, num_bytes = -1;
  bool has_meta = false;
  const auto unbuilt = [&](std::string_view what) { fail(ErrorCode::kNotImplemented, "{}: column {}: {}", name, leaf, what); };
  r.read_struct([&](Field f) {
    if (f.id == 1) unbuilt("its data lie in another file, which this build does not read");
    if (f.id == 8 || f.id == 9) unbuilt("it is encrypted");
    if (f.id != 3) return r.skip(f.type);
    has_meta = true;
    r.read_struct([&](Field m) {
      switch (m.id) {
        case 4: chunk.codec = static_cast<int>(r.integer(m.type)); return;
        case 5: chunk.num_values = r.integer(m.type); return;
        case 7: num_bytes = r.integer(m.type); return;
        case 9: data_page = r.integer(m.type); return;
        case 11: dictionary_page = r.integer(m.type); return;
        default: return r.skip(m.type);
      }
    });
  });
  if (!has_meta) r.bad(fmt::format("column {} has no metadata", leaf));
  if (chunk.num_values < 0 || chunk.num_values > kMaxEntries)
    r.bad(fmt::format("column {} claims {} values, the limit is {} per row group", leaf, chunk.num_values, kMaxEntries));
  // Arrow writes row groups without rows, whose columns name no page.
  if (chunk.num_values == 0) return chunk;
  const std::int64_t begin = dictionary_page > 0 && dictionary_page < data_page ? dictionary_page : data_page;
  if (begin < 4 || num_bytes < 0 || static_cast<std::uint64_t>(begin) > data_end ||
      static_cast<std::uint64_t>(num_bytes) > data_end - static_cast<std::uint64_t>(begin))
    r.bad(fmt::format("column {} lies at byte {} with {} bytes, outside the file's data", leaf, begin, num_bytes));
  chunk.begin = static_cast<std::uint64_t>(begin);
  chunk.num_bytes = static_cast<std::uint64_t>(num_bytes);
  return chunk;
}

}  // namespace

void read_parquet_meta(std::span<const std::byte> bytes, std::string_view name, ParquetMeta& meta) {
  const auto bad = [&](std::string_view what) { fail(ErrorCode::kCorrupt, "{}: {}", name, what); };
  constexpr std::size_t kFrame = 4 + 4 + 4;  // magic, footer length, magic
  if (bytes.size() < kFrame) bad(fmt::format("{} bytes are too few for a Parquet file", bytes.size()));
  const auto* data = reinterpret_cast<const char*>(bytes.data());
  const std::string_view head(data, 4), tail(data + bytes.size() - 4, 4);
  if (tail == "PARE") fail(ErrorCode::kNotImplemented, "{}: the footer is encrypted; this build reads plain Parquet files", name);
  if (head != "PAR1" || tail != "PAR1") bad("it does not begin and end with 'PAR1': no Parquet file, or a truncated one");
  std::uint32_t footer_size = 0;
  std::memcpy(&footer_size, data + bytes.size() - 8, 4);
  if (footer_size > bytes.size() - kFrame) bad(fmt::format("the footer claims {} bytes, the file has {}", footer_size, bytes.size()));
  const std::uint64_t data_end = bytes.size() - 8 - footer_size;
  const std::string subject = fmt::format("{}: footer", name);
  Reader r(bytes.subspan(data_end, footer_size), subject);

  std::vector<Element> elements;
  bool has_tree = false;
  r.read_struct([&](Field f) {
    switch (f.id) {
      case 2:
        r.read_list(Reader::kStruct, [&] {
          if (elements.size() >= kMaxSchemaElements) r.bad(fmt::format("more than {} columns", kMaxSchemaElements));
          elements.push_back(read_element(r));
        });
        TreeBuilder(r, elements, meta).build();
        has_tree = true;
        return;
      case 3:
        meta.num_rows = r.integer(f.type);
        if (meta.num_rows < 0 || meta.num_rows > kMaxRows) r.bad(fmt::format("{} rows, the limit is {}", meta.num_rows, kMaxRows));
        return;
      case 4:
        if (!has_tree) r.bad("row groups before the schema");
        r.read_list(Reader::kStruct, [&] {
          ParquetRowGroup group;
          r.read_struct([&](Field g) {
            if (g.id == 1) {
              r.read_list(Reader::kStruct, [&] { group.chunks.push_back(read_chunk(r, name, group.chunks.size(), data_end)); });
            } else if (g.id == 3) {
              group.num_rows = r.integer(g.type);
            } else {
              r.skip(g.type);
            }
          });
          if (group.chunks.size() != meta.leaves.size())
            r.bad(
                fmt::format("row group {} has {} columns, the schema {}", meta.row_groups.size(), group.chunks.size(), meta.leaves.size()));
          if (group.num_rows < 0 || group.num_rows > kMaxEntries)
            r.bad(fmt::format("row group {} has {} rows", meta.row_groups.size(), group.num_rows));
          meta.row_groups.push_back(std::move(group));
        });
        return;
      case 8: fail(ErrorCode::kNotImplemented, "{}: its columns are encrypted", name);
      default: return r.skip(f.type);
    }
  });
  if (!has_tree) bad("the footer has no schema");
  std::int64_t total = 0;
  for (const ParquetRowGroup& group : meta.row_groups) total += group.num_rows;
  if (total != meta.num_rows) bad(fmt::format("the row groups hold {} rows, the footer says {}", total, meta.num_rows));
}

}  // namespace prl::io
