#pragma once

#include <memory>
#include <string>

#include "env/generate_client.hpp"
#include "net/http_client.hpp"

namespace prl::env {

struct HttpGenerateOptions {
  std::string base_url;      ///< root of the server, with or without a trailing "/v1"
  std::string model;         ///< name the server serves
  std::string adapter = {};  ///< of the model, which requests name instead; empty: none
  int max_retries = -1;      ///< of a request; -1: the client's own
};

/// Tokens in, tokens out over POST <root>/inference/v1/generate (our server, or vLLM with that route). The client's bearer key,
/// headers and retries are used; check_health polls GET /health and then asks /v1/models for the model.
std::shared_ptr<GenerateClient> make_http_generate_client(std::shared_ptr<net::HttpClient> client, HttpGenerateOptions options);

}  // namespace prl::env
