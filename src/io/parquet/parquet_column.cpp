#include "io/parquet/parquet_column.hpp"

#include <algorithm>
#include <bit>

#include "base/error.hpp"
#include "io/parquet/parquet_codec.hpp"
#include "io/parquet/thrift_reader.hpp"

namespace prl::io {
namespace {

constexpr std::int64_t kMaxPageBytes = std::int64_t{1} << 29;
enum PageType : std::int64_t { kDataPage = 0, kIndexPage = 1, kDictionaryPage = 2, kDataPageV2 = 3 };
constexpr int kPlain = 0, kPlainDictionary = 2, kRle = 3, kRleDictionary = 8;

struct PageHeader {
  std::int64_t type = -1, num_bytes = -1, num_stored_bytes = -1;
  std::int64_t num_values = -1;
  int encoding = -1, def_encoding = kRle, rep_encoding = kRle;
  std::int64_t num_def_bytes = 0, num_rep_bytes = 0;  // version 2
  bool is_compressed = true;
};

PageHeader read_header(ThriftReader& r) {
  PageHeader page;
  using Field = ThriftReader::Field;
  r.read_struct([&](Field f) {
    switch (f.id) {
      case 1: page.type = r.integer(f.type); return;
      case 2: page.num_bytes = r.integer(f.type); return;
      case 3: page.num_stored_bytes = r.integer(f.type); return;
      case 5:
      case 7:
        return r.read_struct([&](Field d) {
          switch (d.id) {
            case 1: page.num_values = r.integer(d.type); return;
            case 2: page.encoding = static_cast<int>(r.integer(d.type)); return;
            case 3:
              if (f.id == 5)
                page.def_encoding = static_cast<int>(r.integer(d.type));
              else
                r.skip(d.type);
              return;
            case 4:
              if (f.id == 5)
                page.rep_encoding = static_cast<int>(r.integer(d.type));
              else
                r.skip(d.type);
              return;
            default: return r.skip(d.type);
          }
        });
      case 8:
        return r.read_struct([&](Field d) {
          switch (d.id) {
            case 1: page.num_values = r.integer(d.type); return;
            case 4: page.encoding = static_cast<int>(r.integer(d.type)); return;
            case 5: page.num_def_bytes = r.integer(d.type); return;
            case 6: page.num_rep_bytes = r.integer(d.type); return;
            case 7: page.is_compressed = r.boolean(d.type); return;
            default: return r.skip(d.type);
          }
        });
      default: return r.skip(f.type);
    }
  });
  if (page.num_bytes < 0 || page.num_bytes > kMaxPageBytes || page.num_stored_bytes < 0)
    r.bad(fmt::format("a page of {} bytes, stored in {}; the limit is {}", page.num_bytes, page.num_stored_bytes, kMaxPageBytes));
  return page;
}

/// Reads the pages of one chunk in order.
class ColumnReader {
 public:
  ColumnReader(const ParquetChunk& chunk, const ParquetNode& leaf, std::string_view subject)
      : chunk_(chunk), leaf_(leaf), subject_(subject) {}

  ParquetColumn read(std::span<const std::byte> bytes) {
    std::size_t at = 0;
    while (static_cast<std::int64_t>(column_.num_entries) < chunk_.num_values) {
      if (at >= bytes.size()) bad(fmt::format("its pages hold {} values, {} were promised", column_.num_entries, chunk_.num_values));
      ThriftReader r(bytes.subspan(at), subject_);
      const PageHeader page = read_header(r);
      at += r.position();
      if (static_cast<std::uint64_t>(page.num_stored_bytes) > bytes.size() - at)
        bad(fmt::format("a page of {} bytes, but {} are left", page.num_stored_bytes, bytes.size() - at));
      const auto body = bytes.subspan(at, static_cast<std::size_t>(page.num_stored_bytes));
      at += body.size();
      if (page.type == kDictionaryPage) {
        dictionary_page(page, body);
      } else if (page.type == kDataPage || page.type == kDataPageV2) {
        if (page.num_values < 0 || page.num_values > chunk_.num_values - static_cast<std::int64_t>(column_.num_entries))
          bad(fmt::format("a page of {} values after {} of {}", page.num_values, column_.num_entries, chunk_.num_values));
        page.type == kDataPage ? data_page(page, body) : data_page_v2(page, body);
        column_.num_entries += static_cast<std::size_t>(page.num_values);
      } else if (page.type != kIndexPage) {
        bad(fmt::format("a page of unknown type {}", page.type));
      }
    }
    return std::move(column_);
  }

 private:
  [[noreturn]] void bad(std::string_view what) const { fail(ErrorCode::kCorrupt, "{}: {}", subject_, what); }

  std::string& new_storage() { return *column_.storage.emplace_back(std::make_unique<std::string>()); }

  std::span<const std::byte> unpack(int codec, std::span<const std::byte> body, std::int64_t size) {
    if (codec == 0) {
      if (body.size() != static_cast<std::size_t>(size)) bad(fmt::format("a page of {} bytes, {} promised", body.size(), size));
      return body;  // values may point into the file itself
    }
    std::string& out = new_storage();
    decompress_page(codec, body, static_cast<std::size_t>(size), out, subject_);
    return std::as_bytes(std::span<const char>(out));
  }

  void dictionary_page(const PageHeader& page, std::span<const std::byte> body) {
    if (has_dictionary_) bad("two dictionaries");
    has_dictionary_ = true;
    if (page.encoding != kPlain && page.encoding != kPlainDictionary) bad(fmt::format("a dictionary with encoding {}", page.encoding));
    ParquetBytes in(unpack(chunk_.codec, body, page.num_bytes), subject_);
    // Every entry but booleans and empty fixed bytes takes room, and those have no use for a dictionary.
    if (page.num_values < 0 || static_cast<std::uint64_t>(page.num_values) > in.left())
      bad(fmt::format("a dictionary of {} values", page.num_values));
    std::string unused;
    decode_values(in, kPlain, leaf_, static_cast<std::size_t>(page.num_values), dictionary_, unused);
  }

  void levels(ParquetBytes in, int max, std::size_t count, std::vector<std::uint8_t>& out) {
    scratch_.clear();
    decode_rle(in, std::bit_width(static_cast<unsigned>(max)), count, scratch_);
    for (const std::uint32_t level : scratch_) {
      if (level > static_cast<std::uint32_t>(max)) bad(fmt::format("a level of {}, the most is {}", level, max));
      out.push_back(static_cast<std::uint8_t>(level));
    }
  }

  void data_page(const PageHeader& page, std::span<const std::byte> body) {
    const auto count = static_cast<std::size_t>(page.num_values);
    ParquetBytes in(unpack(chunk_.codec, body, page.num_bytes), subject_);
    const auto level_part = [&](int encoding) {
      if (encoding != kRle)
        fail(ErrorCode::kNotImplemented, "{}: its levels are stored with encoding {}; this build reads RLE", subject_, encoding);
      return ParquetBytes(in.take(in.take_number<std::uint32_t>()), subject_);
    };
    if (leaf_.max_rep > 0) levels(level_part(page.rep_encoding), leaf_.max_rep, count, column_.rep);
    if (leaf_.max_def > 0) levels(level_part(page.def_encoding), leaf_.max_def, count, column_.def);
    values(page, in, count);
  }

  void data_page_v2(const PageHeader& page, std::span<const std::byte> body) {
    const auto count = static_cast<std::size_t>(page.num_values);
    const std::int64_t num_level_bytes = page.num_rep_bytes + page.num_def_bytes;
    if (page.num_rep_bytes < 0 || page.num_def_bytes < 0 || page.num_rep_bytes > kMaxPageBytes || page.num_def_bytes > kMaxPageBytes ||
        num_level_bytes > page.num_stored_bytes || num_level_bytes > page.num_bytes)
      bad(fmt::format("levels of {} and {} bytes in a page of {}", page.num_rep_bytes, page.num_def_bytes, page.num_stored_bytes));
    ParquetBytes front(body, subject_);
    const ParquetBytes rep(front.take(static_cast<std::size_t>(page.num_rep_bytes)), subject_);
    const ParquetBytes def(front.take(static_cast<std::size_t>(page.num_def_bytes)), subject_);
    if (leaf_.max_rep > 0) levels(rep, leaf_.max_rep, count, column_.rep);
    if (leaf_.max_def > 0) levels(def, leaf_.max_def, count, column_.def);
    const auto rest = front.take(front.left());
    ParquetBytes in(unpack(page.is_compressed ? chunk_.codec : 0, rest, page.num_bytes - num_level_bytes), subject_);
    values(page, in, count);
  }

  void values(const PageHeader& page, ParquetBytes& in, std::size_t count) {
    if (leaf_.max_def > 0) {
      const auto first = column_.def.end() - static_cast<std::ptrdiff_t>(count);
      count = static_cast<std::size_t>(std::count(first, column_.def.end(), static_cast<std::uint8_t>(leaf_.max_def)));
    }
    if (count == 0) return;
    if (page.encoding != kPlainDictionary && page.encoding != kRleDictionary) {
      decode_values(in, page.encoding, leaf_, count, column_.values, new_storage());
      return;
    }
    if (!has_dictionary_) bad("a page refers to a dictionary that there is not");
    const int bit_width = in.take_number<std::uint8_t>();
    scratch_.clear();
    decode_rle(in, bit_width, count, scratch_);
    for (const std::uint32_t index : scratch_) {
      if (index >= dictionary_.size()) bad(fmt::format("entry {} of a dictionary of {}", index, dictionary_.size()));
      column_.values.push_back(dictionary_[index]);
    }
  }

  const ParquetChunk& chunk_;
  const ParquetNode& leaf_;
  std::string_view subject_;
  ParquetColumn column_;
  std::vector<ParquetValue> dictionary_;
  std::vector<std::uint32_t> scratch_;
  bool has_dictionary_ = false;
};

}  // namespace

ParquetColumn read_parquet_column(std::span<const std::byte> file, const ParquetChunk& chunk, const ParquetNode& leaf,
                                  std::string_view subject) {
  return ColumnReader(chunk, leaf, subject).read(file.subspan(chunk.begin, chunk.num_bytes));
}

}  // namespace prl::io
