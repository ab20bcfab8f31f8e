#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace prl::io {

/// Compressions of Parquet pages, by the numbers of the format: 0 none, 1 Snappy, 2 gzip, 6 Zstandard.
/// Appends exactly `size` bytes to `out`. Error{kCorrupt} if the data are damaged or give another size; Error{kNotImplemented}
/// naming the codec for the others. `subject` stands in messages.
void decompress_page(int codec, std::span<const std::byte> data, std::size_t size, std::string& out, std::string_view subject);

}  // namespace prl::io
