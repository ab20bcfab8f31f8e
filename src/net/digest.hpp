#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace prl::net {

enum class DigestKind { kSha1, kSha256 };

/// A cryptographic hash of bytes that come in pieces. Not for several threads at once.
class Digest {
 public:
  explicit Digest(DigestKind kind);
  ~Digest();
  Digest(const Digest&) = delete;
  Digest& operator=(const Digest&) = delete;
  void update(std::string_view bytes);
  /// Lower-case hex. Ends the hash: nothing may follow.
  std::string finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace prl::net
