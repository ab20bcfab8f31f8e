#include "net/digest.hpp"

#include <openssl/evp.h>

#include "base/error.hpp"

namespace prl::net {

struct Digest::Impl {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~Impl() { EVP_MD_CTX_free(context); }
};

Digest::Digest(DigestKind kind) : impl_(std::make_unique<Impl>()) {
  if (impl_->context == nullptr || EVP_DigestInit_ex(impl_->context, kind == DigestKind::kSha1 ? EVP_sha1() : EVP_sha256(), nullptr) != 1)
    fail(ErrorCode::kInternal, "the hash function is not available in this OpenSSL");
}

Digest::~Digest() = default;

void Digest::update(std::string_view bytes) {
  PRL_CHECK(EVP_DigestUpdate(impl_->context, bytes.data(), bytes.size()) == 1, "digest update");
}

std::string Digest::finish() {
  unsigned char value[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  PRL_CHECK(EVP_DigestFinal_ex(impl_->context, value, &size) == 1, "digest finish");
  std::string hex;
  for (unsigned i = 0; i < size; ++i) hex += fmt::format("{:02x}", value[i]);
  return hex;
}

}  // namespace prl::net
