#pragma once

namespace prl::io {

/// Key in the metadata of safetensors files that this program writes: the hash of the whole file (io/chunked_hash.hpp) in 16 hexadecimal
/// digits, taken with '0' in their place. SafetensorsFile::open checks it and leaves it out of metadata(); a file without it is taken as it
/// is.
inline constexpr const char* kChecksumKey = "prl_xxh3_16m";
/// The same of files of former versions, which have XXH3 of the whole there.
inline constexpr const char* kPlainChecksumKey = "prl_xxh3";

}  // namespace prl::io
