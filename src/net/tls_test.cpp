// The client against a server that speaks TLS, with a certificate made for the occasion.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read_until.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/write.hpp>

#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/error.hpp"
#include "net/http_client.hpp"

namespace prl::net {
namespace {
namespace fs = std::filesystem;
namespace ssl = boost::asio::ssl;
using ::testing::HasSubstr;

std::string pem_of(const std::function<int(BIO*)>& write) {
  BIO* bio = BIO_new(BIO_s_mem());
  EXPECT_EQ(write(bio), 1);
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  std::string text(data, static_cast<std::size_t>(size));
  BIO_free(bio);
  return text;
}

/// A self-signed certificate for "localhost" and its key, as PEM.
std::pair<std::string, std::string> make_certificate() {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = X509_new();
  X509_set_version(certificate, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
  X509_gmtime_adj(X509_getm_notBefore(certificate), -3600);
  X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
  X509_set_pubkey(certificate, key);
  X509_NAME* name = X509_get_subject_name(certificate);
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>("localhost"), -1, -1, 0);
  X509_set_issuer_name(certificate, name);
  X509_EXTENSION* names = X509V3_EXT_conf_nid(nullptr, nullptr, NID_subject_alt_name, "DNS:localhost");
  X509_add_ext(certificate, names, -1);
  X509_EXTENSION_free(names);
  X509_sign(certificate, key, EVP_sha256());
  std::pair<std::string, std::string> pem{pem_of([&](BIO* bio) { return PEM_write_bio_X509(bio, certificate); }), pem_of([&](BIO* bio) {
                                            return PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr);
                                          })};
  X509_free(certificate);
  EVP_PKEY_free(key);
  return pem;
}

/// Answers every connection with one reply, on a thread of its own, until it is destroyed.
class TlsServer {
 public:
  TlsServer(const std::string& certificate, const std::string& key) : context_(ssl::context::tls_server) {
    context_.use_certificate(asio::buffer(certificate), ssl::context::pem);
    context_.use_private_key(asio::buffer(key), ssl::context::pem);
    thread_ = std::thread([this] { serve(); });
  }
  ~TlsServer() {
    is_ending_ = true;
    boost::system::error_code ignored;
    asio::ip::tcp::socket wake(io_);
    wake.connect(acceptor_.local_endpoint(), ignored);
    thread_.join();
  }
  int port() const { return acceptor_.local_endpoint().port(); }

 private:
  void serve() {
    for (;;) {
      boost::system::error_code error;
      asio::ip::tcp::socket socket(io_);
      acceptor_.accept(socket, error);
      if (is_ending_ || error) return;
      ssl::stream<asio::ip::tcp::socket> stream(std::move(socket), context_);
      stream.handshake(ssl::stream_base::server, error);
      if (error) continue;
      std::string request;
      asio::read_until(stream, asio::dynamic_buffer(request), "\r\n\r\n", error);
      const std::string body(200'000, 's');
      const std::string reply =
          "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
      asio::write(stream, asio::buffer(reply), error);
      stream.shutdown(error);
    }
  }

  asio::io_context io_;
  asio::ip::tcp::acceptor acceptor_{io_, asio::ip::tcp::endpoint(asio::ip::address_v4::loopback(), 0)};
  ssl::context context_;
  std::atomic<bool> is_ending_{false};
  std::thread thread_;
};

TEST(Tls, TrustsKnownCertificatesOfTheRightHostOnly) {
  const auto [certificate, key] = make_certificate();
  const fs::path file = fs::temp_directory_path() / ("prl-tls-" + std::to_string(::getpid()) + ".pem");
  std::ofstream(file) << certificate;
  TlsServer server(certificate, key);
  const auto call = [&](const std::string& host) {
    HttpClient::Options options;
    options.max_retries = 0;
    options.timeout = std::chrono::seconds(10);
    BlockingHttpClient client(options);
    HttpCall request;
    request.url = "https://" + host + ":" + std::to_string(server.port()) + "/x";
    return client.call(std::move(request)).body;
  };
  const auto expect_refused = [&](const std::string& host) {
    try {
      call(host);
      ADD_FAILURE() << "connected to " << host;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
      EXPECT_THAT(error.what(), HasSubstr("TLS handshake"));
      EXPECT_THAT(error.what(), HasSubstr("certificate verify failed"));
    }
  };
  // OpenSSL reads this variable when a client makes its trust store.
  ::setenv("SSL_CERT_FILE", file.c_str(), 1);
  EXPECT_EQ(call("localhost").size(), 200'000u);
  expect_refused("127.0.0.1");
  ::unsetenv("SSL_CERT_FILE");
  expect_refused("localhost");
  fs::remove(file);
}

}  // namespace
}  // namespace prl::net
